"""Mistakes about what a target has: backends, Python, GPU libraries."""

from __future__ import annotations

from tests.support.planted import Plant, change

CONFIG, CODE = "first/config.pbtxt", "first/1/model.py"
BACKEND = 'backend: "python"'
OURS = ("import numpy", "from shoal import Component\nimport numpy")
VLLM = (BACKEND, 'backend: "vllm"\nmodel_transaction_policy { decoupled: true }')


def plant(name: str, backend: str, target: str, core: str = "") -> Plant:
    edit = {CONFIG: (BACKEND, f'backend: "{backend}"')}
    return Plant(name, "backend-not-in-target", CONFIG, "backend", edit, core=core, model="first", target=target)


PLANTS = (
    plant(
        "a backend that the embedded server lacks",
        "tensorrtllm",
        "embedded",
        "unable to find backend library for backend 'tensorrtllm'",
    ),
    plant("a backend that no image has any more", "tensorrtllm", "26.10"),
    plant("a backend that no image has yet", "vllm", "23.09"),
    plant("TensorFlow after its end", "tensorflow", "25.03"),
    plant("FasterTransformer", "fastertransformer", "24.11"),
    Plant(
        "backends of two images",
        "backend-not-in-target",
        CONFIG,
        "backend",
        {CONFIG: VLLM, "left/config.pbtxt": (BACKEND, 'backend: "onnxruntime"')},
        target="26.06",
    ),
    change(
        CONFIG,
        "agent-not-in-target",
        "an agent that the embedded server lacks",
        "max_batch",
        'model_repository_agents { agents [ { name: "checksum" } ] }\nmax_batch',
        "failed to load 'first'",
        model="first",
        target="embedded",
    ),
    Plant("a component for Python 3.10", "python-too-old", CONFIG, "backend", {CODE: OURS}, target="24.10"),
    Plant(
        "a component on a GPU of the embedded server",
        "cupy-on-embedded",
        CONFIG,
        "KIND_GPU",
        {CODE: OURS, CONFIG: ("KIND_CPU", "KIND_GPU")},
        target="embedded",
    ),
)
