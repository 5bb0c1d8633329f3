"""Mistakes in the tensors that a model declares."""

from __future__ import annotations

from tests.support.planted import MODEL, ON_PAGE, Plant

FIRST = "first/config.pbtxt"
X = 'name: "X" data_type: TYPE_FP32 dims: [ 4 ]'
BATCH = 'batch_input { kind: BATCH_ELEMENT_COUNT target_name: "N" data_type: TYPE_FP32 source_input: "X" }\ndynamic'
SCATTER = 'batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "Y" source_input: "X" }\ndynamic'

PLANTS = (
    Plant("an input without a name", "tensor-name", FIRST, "input", {FIRST: ON_PAGE}, core="must specify 'name'"),
    Plant("an input without a type", "tensor-dtype", FIRST, "input", {FIRST: ON_PAGE}, core="must specify 'data_type'"),
    Plant(
        "an input without dims",
        "tensor-dims",
        FIRST,
        "input",
        {FIRST: (X, 'name: "X" data_type: TYPE_FP32')},
        core="must specify 'dims'",
    ),
    Plant(
        "a dimension of 0",
        "tensor-dims",
        FIRST,
        "dims: [ 0 ]",
        {FIRST: ("dims: [ 4 ]", "dims: [ 0 ]")},
        core="dimension must be integer >= 1",
    ),
    Plant(
        "a dimension of -2",
        "tensor-dims",
        FIRST,
        "dims: [ -2 ]",
        {FIRST: ("dims: [ 4 ]", "dims: [ -2 ]")},
        core="dimension must be integer >= 1",
    ),
    Plant(
        "a reshape of other size",
        "reshape-size",
        FIRST,
        "shape: [ 2, 3 ]",
        {FIRST: ON_PAGE},
        {FIRST: (X, X + " reshape { shape: [ 2, 2 ] }")},
        core="has different size for dims and reshape",
    ),
    Plant(
        "a reshape with 0",
        "reshape-size",
        FIRST,
        "shape: [ 0 ]",
        {FIRST: ("[ 2, 2 ]", "[ 0 ]")},
        {FIRST: (X, X + " reshape { shape: [ 2, 2 ] }")},
        core="reshape dimensions must be integer >= 1",
    ),
    Plant(
        "an empty reshape without batches",
        "reshape-size",
        "alone/config.pbtxt",
        "reshape",
        {"alone/config.pbtxt": ("shape: [ 1 ]", "shape: [ ]")},
        {
            "alone/config.pbtxt": 'backend: "python"\n'
            'input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ 1 ] } }\n'
            'output { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }\ninstance_group [ { kind: KIND_CPU } ]\n',
            "alone/1/model.py": MODEL,
        },
        core="cannot have empty reshape for non-batching model",
        model="alone",
    ),
    Plant(
        "an image of two dimensions",
        "image-format",
        FIRST,
        "FORMAT_NCHW",
        {FIRST: (X, X + " format: FORMAT_NCHW")},
        core="NHWC/NCHW require 3 dims",
    ),
    Plant(
        "a shape tensor of Python's",
        "tensorrt-only",
        FIRST,
        "is_shape_tensor",
        {FIRST: (X, X + " is_shape_tensor: true")},
        core="shape tensors are only supported for TensorRT platform",
    ),
    Plant(
        "an output twice",
        "tensor-twice",
        FIRST,
        'output { name: "Y"',
        {FIRST: ("dynamic", 'output { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] }\ndynamic')},
    ),
    Plant(
        "an optional input twice",
        "tensor-twice",
        FIRST,
        'input { name: "X"',
        {FIRST: ("dynamic", 'input { name: "X" data_type: TYPE_FP32 dims: [ 4 ] optional: true }\ndynamic')},
    ),
    Plant(
        "a batch input of nothing known",
        "batch-tensor",
        FIRST,
        "NOPE",
        {FIRST: ON_PAGE},
        {FIRST: ("dynamic", BATCH)},
        core="unknown source input name 'NOPE'",
    ),
    Plant(
        "a batch input of two",
        "batch-tensor",
        FIRST,
        "batch_input",
        {FIRST: ('source_input: "X"', 'source_input: [ "X", "X" ]')},
        {FIRST: ("dynamic", BATCH)},
        core="expects 1 source input, got 2",
    ),
    Plant(
        "a batch input of bytes",
        "batch-tensor",
        FIRST,
        "batch_input",
        {FIRST: ("TYPE_FP32 source", "TYPE_UINT8 source")},
        {FIRST: ("dynamic", BATCH)},
        core="batch input data type must be TYPE_INT32 or TYPE_FP32",
    ),
    Plant(
        "a batch output to one twice",
        "batch-tensor",
        FIRST,
        "batch_output",
        {FIRST: ('target_name: "Y"', 'target_name: [ "Y", "Y" ]')},
        {FIRST: ("dynamic", SCATTER)},
        core="target output name 'Y' can only be specified once",
    ),
    Plant(
        "a batch output to nothing known",
        "batch-tensor",
        FIRST,
        "NOPE",
        {FIRST: ('target_name: "Y"', 'target_name: "NOPE"')},
        {FIRST: ("dynamic", SCATTER)},
        core="unknown target output name 'NOPE'",
    ),
)
