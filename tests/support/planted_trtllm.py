"""Mistakes in repositories of NVIDIA's forms for TensorRT-LLM: four models around an engine, and ``model.yaml``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.support.page_plants import page
from tests.support.planted import Edit, Plant, change
from tests.support.planted_checkpoints import parameter

PRE, POST, LLM, BLS = (
    f"{name}/config.pbtxt" for name in ("preprocessing", "postprocessing", "tensorrt_llm", "tensorrt_llm_bls")
)
ABOUT, TEXTS, YAML = "tensorrt_llm/1/config.json", "texts/config.pbtxt", "texts/1/model.yaml"
BATCHING = "dynamic_batching { default_queue_policy { max_queue_size: 64 } }"
CODE = """import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("none")) for _ in requests]
"""


def model(name: str, inputs: str, outputs: str, *parameters: str, backend: str = "python", more: str = "") -> str:
    """A configuration; a tensor is a name, a data type and dims."""
    tensors = {"input": inputs, "output": outputs}
    lines = [
        f'{kind} {{ name: "{name}" data_type: TYPE_{dtype} dims: [ {dims} ] }}'
        for kind, text in tensors.items()
        for name, dtype, dims in (part.split(None, 2) for part in text.split("; "))
    ]
    head = [f'name: "{name}"', f'backend: "{backend}"', "max_batch_size: 8", BATCHING]
    group = "instance_group [ { count: 1 kind: KIND_CPU } ]"
    return (
        "\n".join([*head, *lines, group, more, *(parameter(*each.split("=", 1)).strip() for each in parameters)]) + "\n"
    )


def about(**built: Any) -> str:
    """The description of an engine for two GPUs."""
    mapping = {"world_size": 2, "tp_size": 2, "pp_size": 1}
    sizes = {"max_batch_size": 8, "max_seq_len": 2048, "max_beam_width": 1}
    return json.dumps({"pretrained_config": {"mapping": mapping}, "build_config": sizes | built})


DECOUPLED = "model_transaction_policy { decoupled: true }"
ENGINE: Mapping[str, Edit] = {
    PRE: model("preprocessing", "QUERY STRING 1", "INPUT_ID INT32 -1", "tokenizer_dir=/weights/llama",
               "add_special_tokens=${add_special_tokens}"),
    POST: model("postprocessing", "TOKENS_BATCH INT32 -1, -1", "OUTPUT STRING -1", "tokenizer_dir=/weights/llama"),
    LLM: model(
        "tensorrt_llm", "input_ids INT32 -1", "output_ids INT32 -1, -1", "gpt_model_type=inflight_fused_batching",
        "gpt_model_path=/models/tensorrt_llm/1", "max_beam_width=", "max_attention_window_size=2048",
        "gpu_device_ids=0,1", "kv_cache_free_gpu_mem_fraction=0.9", "encoder_model_path=${encoder_engine_dir}",
        backend="tensorrtllm", more=DECOUPLED,
    ),
    BLS: model("tensorrt_llm_bls", "text_input STRING 1", "text_output STRING -1",
               "accumulate_tokens=${accumulate_tokens}",
               "tensorrt_llm_model_name=${tensorrt_llm_model_name}", more=DECOUPLED),
    **{f"{name}/1/model.py": CODE for name in ("preprocessing", "postprocessing", "tensorrt_llm_bls")},
    ABOUT: about(),
    **{f"tensorrt_llm/1/rank{rank}.engine": "" for rank in range(2)},
}  # fmt: skip
READS = (
    CODE
    + '''

def auto_complete(config, triton_config):
    """The current implementation only supports text_input being a 1D tensor."""
    config.set_max_batch_size(triton_config["max_batch_size"])
'''
)
FIELDS = "model: meta-llama/Llama-3.1-8B  # or a folder\ntensor_parallel_size: 2\ntriton_config:\n  max_batch_size: 0\n"
YAML_GOOD: Mapping[str, Edit] = {
    TEXTS: model("texts", "text_input STRING -1", "text_output STRING -1")
    .replace(f"max_batch_size: 8\n{BATCHING}\n", ""),
    "texts/1/model.py": READS,
    YAML: f"{FIELDS}  decoupled: true\n",
}  # fmt: skip


def engine(name: str, rule: str, file: str, line: str, *edit: str, **bad: Edit) -> Plant:
    """A mistake beside an engine; ``edit`` are a text of the file, and what takes its place."""
    edits: dict[str, Edit] = {file: (edit[0], edit[1])} if edit else {}
    return Plant(name, rule, file, line, {**edits, **bad}, ENGINE)


def texts(name: str, rule: str, line: str, old: str, new: str, file: str = YAML) -> Plant:
    """A mistake in ``model.yaml``, or beside it."""
    return change(file, rule, name, old, new, "", line, good=YAML_GOOD)


PLANTS = (
    *(page(f"trtllm-{part}", LLM, ENGINE) for part in ("value", "engine-limit")),
    *(page(f"trtllm-{part}", BLS, ENGINE) for part in ("batch-size", "decoupled")),
    *(page(f"trtllm-{part}", PRE, ENGINE) for part in ("swapped", "queue-delay", "tokenizer", "tokenizer-type")),
    *(page(f"llmapi-{part}", YAML, YAML_GOOD) for part in ("config", "misspelt")),
    engine("a batching strategy that is none", "trtllm-value", LLM, "gpt_model_type", "fused_batching", "batch"),
    engine("an address for a folder", "trtllm-value", PRE, "tokenizer_dir", '"/weights/llama"', '"hf://meta/llama"'),
    engine("a path left out", "template-leftover-in-text", PRE, "tokenizer_dir", '"/weights/llama"',
           '"${tokenizer_dir}"'),
    engine("an engine left out", "template-leftover-in-text", LLM, "gpt_model_path", '"/models/tensorrt_llm/1"',
           '"${engine_dir}"'),
    engine("an engine without its second rank", "trtllm-engine", LLM, "gpt_model_path",
           **{"tensorrt_llm/1/rank1.engine": None}),
    engine("a folder without an engine", "trtllm-engine", LLM, "gpt_model_path", **{ABOUT: None}),
    engine("ranks that do not multiply", "trtllm-engine", ABOUT, "", '"tp_size": 2', '"tp_size": 4'),
    engine("more beams than were built", "trtllm-engine", LLM, "beam_width",
           *('"max_beam_width" value { string_value: "' + beams for beams in ("", "4"))),
    engine("an engine for a shorter sequence", "trtllm-engine-limit", LLM, "window_size",
           **{ABOUT: about(max_seq_len=512)}),
    engine("an engine for fewer rows", "trtllm-engine-limit", LLM, "max_batch_size",
           **{ABOUT: about(max_batch_size=1)}),
    engine("an engine that is not there", "calls-unknown", BLS, "tensorrt_llm_model_name",
           "${tensorrt_llm_model_name}", "tensorrt"),
    engine("an engine that does not stream", "trtllm-decoupled", BLS, "decoupled", **{LLM: (DECOUPLED, "")}),
    engine("a folder without a tokenizer", "trtllm-tokenizer", POST, "tokenizer_dir", "/weights/llama", "/usr",
           **{PRE: ("/weights/llama", "/usr")}),
    texts("a misspelt field of Triton", "llmapi-config", "triton_config", "  decoupled", "  decoupld"),
    texts("a word for a size", "llmapi-config", "parallel", "size: 2", "size: two"),
    texts("an address for a model", "llmapi-config", "model:", "meta-llama", "hf://meta-llama"),
    texts("rows that its code does not take", "llmapi-config", "max_batch", "size: 0", "size: 4"),
    texts("a file that is not YAML", "llmapi-config", "tensor", "tensor_parallel_size: 2", "tensor_parallel_size: : 2"),
    texts("rows in both files", "llmapi-config", "max_batch", "instance_group",
          "max_batch_size: 8\ninstance_group", TEXTS),
    texts("another policy in both files", "llmapi-config", "model_tr", "instance_group",
          "model_transaction_policy { decoupled: false }\ninstance_group", TEXTS),
)  # fmt: skip
