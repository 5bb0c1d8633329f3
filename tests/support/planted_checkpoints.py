"""Paths of weights, and FasterTransformer's folders of them, in a layout as its converters write it."""

from __future__ import annotations

from tests.support.page_plants import page
from tests.support.planted import Edit, Plant

CONFIG, INI = "gpt3_1.3b/config.pbtxt", "gpt3_1.3b/1-gpu/config.ini"


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


FASTER = (
    'name: "gpt3_1.3b"\nbackend: "fastertransformer"\nmax_batch_size: 256\n'
    'input [ { name: "input_ids" data_type: TYPE_UINT32 dims: [ -1 ] } ]\n'
    'output [ { name: "output_ids" data_type: TYPE_UINT32 dims: [ -1, -1 ] } ]\n'
    "dynamic_batching { default_queue_policy { max_queue_size: 64 } }\ninstance_group [ { count: 1 kind: KIND_CPU } ]\n"
    + parameter("tensor_para_size", "1")
    + parameter("data_type", "fp16")
    + parameter("model_checkpoint_path", "/model_repository/gpt3_1.3b/1-gpu/")
)
GOOD: dict[str, Edit] = {
    CONFIG: FASTER,
    INI: "[gpt]\nmodel_name = gpt\nhead_num=16 ;heads\nweight_data_type = fp16\ntensor_para_size = 1\n[task_0]\nx=1\n",
    "gpt3_1.3b/1-gpu/model.final_layernorm.bias.bin": b"\0\0",
}
TRT = FASTER.replace("gpt3_1.3b", "engine", 1).replace("fastertransformer", "tensorrtllm") + parameter(
    "gpt_model_path", "/engines/1"
)


def faster(name: str, rule: str, line: str, bad: dict[str, Edit]) -> Plant:
    return Plant(name, rule, CONFIG, line, bad, GOOD)


PLANTS = (
    *(page(f"checkpoint-{part}", CONFIG, GOOD) for part in ("parallel", "dtype")),
    page("weights-path-relative", "engine/config.pbtxt", {"engine/config.pbtxt": TRT, "engine/1/.gitkeep": ""}),
    faster("a config.ini for two GPUs", "checkpoint-parallel", "tensor_para_size",
           {INI: ("tensor_para_size = 1", "tensor_para_size = 2")}),
    faster("weights beside the server", "weights-path-relative", "model_checkpoint_path",
           {CONFIG: ('"/model_repository/', '"./')}),

)  # fmt: skip
