"""Mistakes about ONNX models; `find` looks for them only where `onnx` is installed."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from tests.support.page_plants import page
from tests.support.planted import Edit, Plant, change

CONFIG = "net/config.pbtxt"
FILE = "net/1/model.onnx"
CONTENT = """name: "net"
backend: "onnxruntime"
max_batch_size: 8
input { name: "ids" data_type: TYPE_INT64 dims: [ 128 ] }
input { name: "mask" data_type: TYPE_INT64 dims: [ 128 ] }
output { name: "score" data_type: TYPE_FP32 dims: [ 1 ] }
dynamic_batching { default_queue_policy { max_queue_size: 64 } }
instance_group [ { kind: KIND_CPU } ]
"""


@cache
def graph(batch: int | str = "batch", opset: int = 21, ir: int = 10, file: str = "", domain: str = "") -> bytes:
    """A graph of the inputs ids and mask and the output score, with a weight among the inputs, or in a ``file``."""
    onnx: Any = import_module("onnx")
    helper = onnx.helper
    integer, single = onnx.TensorProto.INT64, onnx.TensorProto.FLOAT
    describe = helper.make_tensor_value_info
    inputs = [describe(name, integer, [batch, 128]) for name in ("ids", "mask")]
    weight = helper.make_tensor("weight", single, [128, 1], [0.0] * 128)
    if file:
        del weight.float_data[:]
        weight.data_location = onnx.TensorProto.EXTERNAL
        weight.external_data.add(key="location", value=file)
    nodes = [
        helper.make_node("Mul", ["ids", "mask"], ["kept"], domain=domain),
        helper.make_node("Cast", ["kept"], ["floats"], to=single),
        helper.make_node("MatMul", ["floats", "weight"], ["score"]),
    ]
    inputs.append(describe("weight", single, [128, 1]))
    made = helper.make_graph(nodes, "net", inputs, [describe("score", single, [batch, 1])], [weight])
    content: bytes = helper.make_model(
        made, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir
    ).SerializeToString()
    return content


BATCHING = "dynamic_batching { default_queue_policy { max_queue_size: 64 } }"
CONTROL = 'control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }'
GOOD: dict[str, Edit] = {CONFIG: CONTENT, FILE: graph}
SPLIT: dict[str, Edit] = {CONFIG: CONTENT, FILE: lambda: graph(file="w.bin"), "net/1/w.bin": bytes(512)}
INNER: dict[str, Edit] = {CONFIG: CONTENT, f"{FILE}/model.onnx": graph}


def plant(name: str, line: str, old: str, new: str) -> Plant:
    return change(CONFIG, "onnx-tensors", name, old, new, "", line, good=GOOD)


def sequences(name: str, content: str) -> Plant:
    bad: Edit = (BATCHING, f"sequence_batching {{\n{content}\n}}")
    return Plant(name, "sequence-in-own-backend", CONFIG, content.split(" ")[0], {CONFIG: bad}, GOOD, target="embedded")


PLANTS = (
    page("onnx-tensors", CONFIG, GOOD),
    page("sequence-in-own-backend", CONFIG, {**GOOD, CONFIG: CONTENT.replace(BATCHING, "")}, target="embedded"),
    plant("a name that the graph lacks", "input_ids", '"ids"', '"input_ids"'),
    plant("an input of the graph left out", "input", 'input { name: "mask" data_type: TYPE_INT64 dims: [ 128 ] }', ""),
    plant("a dtype of 32 bits", "mask", '"mask" data_type: TYPE_INT64', '"mask" data_type: TYPE_INT32'),
    plant("the batch twice", "ids", "TYPE_INT64 dims: [ 128 ]", "TYPE_INT64 dims: [ -1, 128 ]"),
    plant("a fixed length left open", "ids", "TYPE_INT64 dims: [ 128 ]", "TYPE_INT64 dims: [ -1 ]"),
    plant("an output that the graph lacks", "logits", '"score"', '"logits"'),
    sequences("a control of a sequence", CONTROL),
    Plant("a fixed batch", "onnx-tensors", CONFIG, "ids", {FILE: lambda: graph(1)}, GOOD),
    Plant("a pointer in place of a graph", "onnx-unreadable", FILE, "", {FILE: b"version https://git-lfs"}, GOOD),
    Plant("a newer opset", "onnx-version", FILE, "", {FILE: lambda: graph(opset=22)}, GOOD, target="24.10"),
    Plant("a newer IR version", "onnx-version", FILE, "", {FILE: lambda: graph(ir=11)}, GOOD, target="25.07"),
    Plant("a much newer opset", "onnx-version", FILE, "", {FILE: lambda: graph(opset=99)}, GOOD, target="embedded"),
    Plant("an operator of a library", "onnx-version", FILE, "", {FILE: lambda: graph(domain="my.ops")}, GOOD),
    Plant("weights that are not there", "model-file-missing", FILE, "", {"net/1/w.bin": None}, SPLIT),
    Plant("an empty folder", "model-file-missing", "net/1", "", {f"{FILE}/model.onnx": None, f"{FILE}/": ""}, INNER),
    Plant("half a graph", "onnx-unreadable", FILE, "", {FILE: lambda: graph()[:-40]}, GOOD),
    change(CONFIG, "kind-unsupported", "a graph on a GPU of the embedded server", "KIND_CPU", "KIND_GPU gpus: [ 0 ]",
           "", "instance_group", good=GOOD, target="embedded"),
)  # fmt: skip
