"""Mistakes in models on vLLM, beside the usual repository."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.support.page_plants import page
from tests.support.planted import Edit, Plant

CONFIG, ARGS, ENGINE = "llama/config.pbtxt", "llama/1/model.json", "engine/config.pbtxt"
TEXTS = """name: "llama"
backend: "vllm"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
input [ { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]
instance_group [ { count: 1 kind: KIND_MODEL } ]
"""
GOOD: dict[str, Any] = {
    "model": "meta-llama/Llama-2-7b-chat-hf",
    "gpu_memory_utilization": 0.9,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 4096,
    "enforce_eager": True,
}
LLAMA = "/weights/rbln-Llama-2-7b-chat-hf"
NPU = {
    "model": LLAMA,
    "device": "rbln",
    "max_num_seqs": 4,
    "compiled_model_dir": LLAMA,
    "max_num_batched_tokens": 4096,
    "max_model_len": 4096,
    "block_size": 4096,
}
OURS = """name: "engine"
backend: "python"
max_batch_size: 1
input [ { name: "X" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] } ]
instance_group [ { kind: KIND_CPU } ]
parameters { key: "slots" value { string_value: "16" } }
parameters { key: "engine_args" value { string_value: '{"enforce_eager": true}' } }
"""
CODE = "import shoal\n\n\nclass TritonPythonModel:\n    def execute(self, requests):\n        return requests\n"
CAUSAL = OURS.replace("engine_args", "cache_tokens").replace('{"enforce_eager": true}', "")
QUANTIZED = CAUSAL.replace("cache_tokens", "quantize").replace('""', '"none"').replace("''", "'none'")
DECODER: dict[str, Edit] = {
    "engine/1/decoder.onnx": b"onnx",
    "engine/1/config.json": json.dumps(
        {
            "vocab_size": 8,
            "max_position_embeddings": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "hidden_size": 64,
        }
    ),
    "engine/1/tokenizer.json": json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": []}),
}


def dump(**arguments: Any) -> str:
    """Write ``GOOD`` with other arguments, one on each line; None removes one."""
    return json.dumps({name: value for name, value in (GOOD | arguments).items() if value is not None}, indent=4)


VLLM: dict[str, Edit] = {CONFIG: TEXTS, ARGS: dump()}


def plant(
    name: str, rule: str, line: str, bad: Mapping[str, Edit], good: Mapping[str, Edit] | None = None, file: str = ARGS
) -> Plant:
    """A mistake in a model of the vLLM backend, beside the usual repository."""
    return Plant(name, rule, file, line, bad, {**VLLM, **(good or {})})


def argument(rule: str, /, **arguments: Any) -> Plant:
    """A mistake in the last of some engine arguments."""
    (*_, last) = arguments
    return plant(f"{last} {json.dumps(arguments)}", rule, f'"{last}"', {ARGS: dump(**arguments)})


def ours(
    name: str, rule: str, line: str, edit: tuple[str, str], config: str = OURS, more: Mapping[str, Edit] | None = None
) -> Plant:
    """A mistake in a model of shoal's own engines."""
    model: dict[str, Edit] = {ENGINE: config, "engine/1/model.py": CODE, **(more or {})}
    return Plant(name, rule, ENGINE, line, {ENGINE: edit}, model)


PLANTS = (
    *(page(f"engine-args-{rule}", ARGS, VLLM) for rule in ("unknown", "misspelt", "value", "text", "removed", "rbln")),
    page("engine-args-missing", ARGS, VLLM, at="llama/1"),
    *(page(rule, CONFIG, VLLM) for rule in ("vllm-not-decoupled", "vllm-tensors")),
    page("vllm-instances", CONFIG, {**VLLM, ARGS: dump(tensor_parallel_size=2)}),
    page("engine-quantize", ENGINE, {ENGINE: QUANTIZED, "engine/1/model.py": CODE}),
    # The listings of the first tutorials, and of RBLN's.
    plant(
        "generated_text for it", "vllm-tensors", "generated_text", {CONFIG: ("text_output", "generated_text")},
        file=CONFIG,
    ),
    plant("a compiled model that is another", "engine-args-value", "compiled_model_dir",
          {ARGS: json.dumps(NPU | {"model": "/weights/rbln-Llama-2-7b"}, indent=1)}),
    argument("engine-args-removed", device="cuda"),
    # Names and values.
    argument("engine-args-text", enable_prefix_caching="false"),
    argument("engine-args-text", max_num_seqs="4"),
    argument("engine-args-value", max_num_seqs=4.5),
    argument("engine-args-value", max_model_len="long"),
    argument("engine-args-value", trust_remote_code="yes"),
    argument("engine-args-value", speculative_config="{}"),
    argument("engine-args-value", tensor_parallel_size=True),
    argument("engine-args-value", gpu_memory_utilization=90),
    argument("engine-args-value", gpu_memory_utilization=0),
    argument("engine-args-value", max_num_active_seqs=9, max_num_seqs=8),
    plant("arguments in Python", "engine-args-value", "enforce_eager", {ARGS: dump().replace("true", "True")}),
    plant("arguments in a list", "engine-args-value", "", {ARGS: "[]"}),
    plant("no model in the arguments", "engine-args-missing", "", {ARGS: dump(model=None)}),
    plant("adapters without their list", "engine-args-missing", "enable_lora", {"llama/1/multi_lora.json": None},
          {ARGS: dump(enable_lora="true"), "llama/1/multi_lora.json": "{}"}),
    # The configuration.
    plant("pipeline stages on one GPU", "vllm-instances", "instance_group", {CONFIG: ("KIND_MODEL", "KIND_GPU")},
          {ARGS: dump(pipeline_parallel_size=2)}, file=CONFIG),
    plant("two instances on the same GPUs", "vllm-instances", "count: 2", {CONFIG: ("count: 1", "count: 2")},
          file=CONFIG),
    plant("two instances on one GPU", "vllm-instances", "KIND_GPU", {CONFIG: ("count: 1", "count: 2")},
          {CONFIG: TEXTS.replace("KIND_MODEL", "KIND_GPU gpus: [ 1 ]")}, file=CONFIG),
    # shoal's engines on transformers and ONNX Runtime.
    ours("a cache beyond all memory", "engine-memory", "instance_group", ('"16"', '"1000000000000"'), CAUSAL, DECODER),
    # The parameter of shoal's engine.
    ours("two engines on one GPU", "vllm-instances", "KIND", ("kind: KIND_CPU", "count: 2 kind: KIND_GPU gpus: [ 1 ]")),
    ours("two engines with a GPU in common", "vllm-instances", "gpus", ("gpus: [ 0, 2 ]", "gpus: [ 0, 1 ]"),
         OURS.replace("KIND_CPU", "KIND_GPU gpus: [ 0, 2 ]").replace('"enforce_eager": true',
                                                                     '"tensor_parallel_size": 2')),
    ours("an argument of the parameter misspelt", "engine-args-misspelt", "engine_args",
         ("enforce_eager", "enforce_eagr")),
    ours("an old argument in the parameter", "engine-args-removed", "engine_args",
         ('"enforce_eager": true', '"swap_space": 4')),
    ours("the tutorials' argument in the parameter", "engine-args-unknown", "engine_args",
         ('"enforce_eager": true', '"disable_log_requests": true')),
    ours("fewer tokens than slots", "engine-args-value", "engine_args",
         ('"enforce_eager": true', '"max_num_batched_tokens": 8')),
)  # fmt: skip
