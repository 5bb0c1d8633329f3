"""Rules for what a target has: the backends of its images, the Python of its stub, and GPU libraries."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Collection, Iterable

from shoal.authoring.check.config.scheduling import KIND_UNSUPPORTED
from shoal.authoring.check.findings import Findings, Rule, Severity
from shoal.authoring.check.models import Model, Repository, is_file
from shoal.authoring.environment.imports import find_imports
from shoal.authoring.environment.stub import parse_version
from shoal.authoring.environment.targets import (
    BACKENDS,
    IMAGES,
    LATEST,
    LLMAPI,
    NEWEST,
    OLDEST_PYTHON,
    Target,
    explain_backend,
    find_target,
    show_release,
)
from shoal.authoring.repository.config import ModelConfig
from shoal.authoring.repository.devices import PYTHON_BASED_BACKENDS
from shoal.errors import InputError

BACKEND = Rule("backend-not-in-target", Severity.ERROR, is_core=True)
AGENT = Rule("agent-not-in-target", Severity.ERROR, is_core=True)
CUPY = Rule("cupy-on-embedded", Severity.ERROR)
PYTHON = Rule("python-too-old", Severity.ERROR)

_OWN = frozenset({"python", *PYTHON_BASED_BACKENDS})  # backends of the embedded server


def find(model: Model, repository: Repository) -> Findings:
    """Find models that the target cannot run."""
    target = repository.target
    if target is None or model.message is None:
        return
    agents = model.message.model_repository_agents.agents
    if agents and target.is_embedded:
        yield AGENT.at(
            model.at("model_repository_agents"),
            f"unable to find libtritonrepoagent_{agents[0].name}.so: the embedded server has no repository agents.",
            f"Remove model_repository_agents, or serve it in NVIDIA's container: --target {LATEST}.",
        )
    if model.is_ensemble:
        return
    served = [] if model.is_model_folder else repository.models  # a project may have models of several pipelines
    backends = {model.backend, *(each.backend for each in served if not each.is_ensemble)}
    if (fault := _describe_backend(model.backend, backends, target)) and not _brings_backend(model):
        what = f"unable to find backend library for backend '{model.backend}': {fault[0]}"
        yield BACKEND.at(model.at("backend" if model.message.backend else "platform"), what, fault[1])
    if model.may_bring_python:
        return
    is_ours = model.is_python and any("shoal" in text for _, text in model.sources)
    found = [find_imports(model.folder / str(version)) for version in model.served_versions if is_ours]
    if target.is_embedded:
        is_used = model.backend == "fil" or any(imports.uses_cupy for imports in found)
        is_on_gpu = any(group.kind == group.KIND_GPU for group in model.message.instance_group)
        if is_used and is_on_gpu and (fault := explain_cupy(model.name)):
            yield CUPY.at(model.at("instance_group"), *fault)
    elif any(imports.is_ours for imports in found):
        modules = frozenset(model.config.requires if model.config else ())
        image = target.find_image(backends & BACKENDS, modules)
        if image and parse_version(python := image.row(target.release).python) < OLDEST_PYTHON:
            oldest = ".".join(map(str, OLDEST_PYTHON))
            yield PYTHON.at(
                model.at("backend"),
                f"{model.name} needs Python {oldest} or newer; the image of Triton {target.version} has {python}.",
                "Use --target 24.12 or newer; or an environment with a stub for its Python (docs/environments.md):"
                f" shoal env build --target {target.version} --stub compile --stub-builder PROGRAM",
            )
        for index, group in enumerate(model.message.instance_group):
            if "vllm" in modules and group.kind == group.KIND_CPU:
                yield KIND_UNSUPPORTED.at(
                    model.at("instance_group", index),
                    f"{model.name} is placed on the host, and the vLLM of NVIDIA's image computes on GPUs only.",
                    f"Compose with --placement gpu; or with an environment for the host: --env {model.name}=PATH",
                )


def check_backends(models: Iterable[ModelConfig], name: str) -> None:
    """Check that a target has the backends of all models.

    Raises:
        InputError: it lacks one, or no image of its release has all of them.
    """
    target, members = find_target(name), [model for model in models if not model.is_ensemble]
    needed = {model.name: _find_backend(model) for model in members}
    for model, backend in needed.items():
        if fault := _describe_backend(backend, {*needed.values()}, target):
            raise InputError(f"Model {model} needs the backend {backend}: {fault[0]}", fault[1])


def _find_backend(model: ModelConfig) -> str:
    """Return a model's backend; that of a model whose code is in NVIDIA's image is the code."""
    return LLMAPI if "tensorrt_llm" in model.requires else model.backend


def explain_cupy(name: str) -> tuple[str, str] | None:
    """Return why a model cannot run on a GPU of the embedded server, and what to do; None if CuPy is installed."""
    if "cupy" in sys.modules or importlib.util.find_spec("cupy"):
        return None
    return (
        f"{name} needs CuPy on a GPU, which is not installed here: it needs NumPy 2, with which the embedded server's"
        " own stub corrupts tensors.",
        f"Compose it for NVIDIA's container (--target {LATEST}); or install CuPy here, and name a stub compiled for"
        " NumPy 2 (SHOAL_STUB). A component may have both in an environment (--env PATH). See docs/environments.md.",
    )


def _describe_backend(backend: str, others: Collection[str], target: Target) -> tuple[str, str] | None:
    """Return why a target cannot run a model of a backend beside the ``others``, and the fix; None if it can."""
    if target.is_embedded:
        if not backend or backend in _OWN:
            return None
        images = [image.last for image in IMAGES if backend in image.backends]
        latest = show_release(min(max(images), NEWEST)) if images else LATEST
        swap = "; or replace it: --swap MODEL=llm-hf" if backend == "tensorrtllm" else ""
        fix = f"Compose it for NVIDIA's container, with --target {latest}{swap}."
        return "the embedded server does not have it.", fix
    if backend not in BACKENDS:
        return None
    if target.find_image({backend}) is None:
        return f"no image of Triton {target.version} has it.", explain_backend(backend)
    beside = sorted({other for other in others if other in BACKENDS and target.find_image({other})} - {"python"})
    if backend != "python" and target.find_image(beside) is None:
        what = f"no image of Triton {target.version} has all of {', '.join(beside)}."
        return what, "Divide the models into repositories, and serve each from an image of its own."
    return None


def _brings_backend(model: Model) -> bool:
    name = model.message.runtime or f"libtriton_{model.backend}.so"
    return any(is_file(path / name) for path in (model.folder, *(model.folder / str(v) for v in model.versions)))
