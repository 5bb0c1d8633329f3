"""Mistakes in the tensors that a model declares."""

from __future__ import annotations

from tests.support.page_plants import page
from tests.support.planted import MODEL, change, changes

FIRST = "first/config.pbtxt"
X = 'name: "X" data_type: TYPE_FP32 dims: [ 4 ]'
BATCH = 'batch_input { kind: BATCH_ELEMENT_COUNT target_name: "N" data_type: TYPE_FP32 source_input: "X" }\ndynamic'
SCATTER = 'batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "Y" source_input: "X" }\ndynamic'

PLANTS = (
    page("tensor-name", core="must specify 'name'"),
    page("tensor-dtype", core="must specify 'data_type'"),
    page("tensor-dims", core="dimension must be integer >= 1"),
    page("reshape-size", core="has different size for dims and reshape"),
    page("image-format", "alone/config.pbtxt", core="NHWC/NCHW require 3 dims"),
    page("tensor-twice"),
    page("batch-tensor", core="unknown source input name 'NOPE'"),
    *changes(
        FIRST,
        ("tensor-dims", "an input without dims", X, 'name: "X" data_type: TYPE_FP32', "must specify 'dims'", "input"),
        ("tensor-dims", "a dimension of -2", "dims: [ 4 ]", "dims: [ -2 ]", "dimension must be integer >= 1"),
        (
            "tensorrt-only",
            "a shape tensor of Python's",
            X,
            X + " is_shape_tensor: true",
            "shape tensors are only supported for TensorRT platform",
            "is_shape_tensor",
        ),
        (
            "tensor-twice",
            "an optional input twice",
            "dynamic",
            'input { name: "X" data_type: TYPE_FP32 dims: [ 4 ] optional: true }\ndynamic',
        ),
    ),
    change(
        FIRST,
        "reshape-size",
        "a reshape with 0",
        "[ 2, 2 ]",
        "[ 0 ]",
        "reshape dimensions must be integer >= 1",
        "shape: [ 0 ]",
        good={FIRST: (X, X + " reshape { shape: [ 2, 2 ] }")},
    ),
    change(
        "alone/config.pbtxt",
        "reshape-size",
        "an empty reshape without batches",
        "shape: [ 1 ]",
        "shape: [ ]",
        "cannot have empty reshape for non-batching model",
        "reshape",
        good={
            "alone/config.pbtxt": 'backend: "python"\n'
            'input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ 1 ] } }\n'
            'output { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }\ninstance_group [ { kind: KIND_CPU } ]\n',
            "alone/1/model.py": MODEL,
        },
        model="alone",
    ),
    *changes(
        FIRST,
        (
            "batch-tensor",
            "a batch input of two",
            'source_input: "X"',
            'source_input: [ "X", "X" ]',
            "expects 1 source input, got 2",
            "batch_input",
        ),
        (
            "batch-tensor",
            "a batch input of bytes",
            "TYPE_FP32 source",
            "TYPE_UINT8 source",
            "batch input data type must be TYPE_INT32 or TYPE_FP32",
            "batch_input",
        ),
        good={FIRST: ("dynamic", BATCH)},
    ),
    *changes(
        FIRST,
        (
            "batch-tensor",
            "a batch output to one twice",
            'target_name: "Y"',
            'target_name: [ "Y", "Y" ]',
            "target output name 'Y' can only be specified once",
            "batch_output",
        ),
        (
            "batch-tensor",
            "a batch output to nothing known",
            'target_name: "Y"',
            'target_name: "NOPE"',
            "unknown target output name 'NOPE'",
        ),
        good={FIRST: ("dynamic", SCATTER)},
    ),
)
