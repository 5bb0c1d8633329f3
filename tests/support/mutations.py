"""Hostile requests: valid ones of any model of the repository, spoilt by a generator that can be replayed.

Everything is drawn from a ``random.Random``: hypothesis gives one that it can shrink, a seed one that is fast. What is
left out, because Triton 24.10 itself falls over it, whatever the models are:

* A million chunks of one byte: the server ends of a segmentation fault (fixed in 25.07).
* JSON lists nested 100,000 deep in an input's `data`, or a million deep anywhere: the same (fixed in 25.05 and 26.05).
* Widths whose number of bytes overflows 64 bits, such as INT64 ``[1, 2**61]`` with no data, for an input of variable
  size: core lets them in (until 26.03), and the stub ends of a C++ exception before any Python of the model is run.
* Numbers in a JSON list under a shape of many elements: the server fills memory of that size with zeros before it looks
  at the list, and ends where it gets none (``std::length_error``, or the kernel's hand).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np

MAX_DEPTH = 500  # what Python itself writes
MODELS = ("ensemble_all", "ensemble_all", "ensemble_all", "preprocess", "bert-large", "cuml", "postprocess")
DTYPES = (
    "BYTES", "FP32", "INT64", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "FP16", "FP64",
    "BF16", "bytes", "", "\0", "FP32 ", "TYPE_FP32",
)  # fmt: skip
NAMES = ("", "excerpt", "INPUT0", "SCORE", "bert_input_ids", "\0", "a\n", "é", "x" * 5000, "%s%n", "INPUT__0 ", "..")
ROWS = (-(2**63), -(2**32) + 1, -(2**31), -2, -1, 0, 2, 3, 512, 513, 2**31, 2**32, 2**32 + 1, 2**40, 2**62, 2**63 - 1)
WIDTHS = (-8, -1, 0, 1, 2, 7, 9, 207, 208, 511, 513, 2**20)  # and no more: see above
VERSIONS = ("", "1", "1", "0", "-1", "7", "01", "1.5", "x", str(2**31), str(2**63), str(2**64), "9" * 400, " 1")
TEXTS: tuple[bytes, ...] = (
    b"", b" ", b"\0", b"a\xff", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\xaf", b"\xef\xbb\xbfa", b"'" * 40,
    b"[CLS] [SEP] [MASK]", b"a" * 65536, b"a" * 65537, b"a " * 60, "漢字 🐟 שלום \u202e\u200d".encode(),
    b"\r\n\t\x1b[31m", "e\u0301".encode() * 99, b"%s%n{}$(id)`id`", "\U0010ffff\ufffe\ue000".encode(), b"." * 3000,
    "ﷺ".encode() * 50, b"</script>'\";--",
)  # fmt: skip
FLOATS = (float("nan"), float("inf"), -float("inf"), -1.0, 1.5, 0.0, -0.0, 1.0, 3e38, 1e-45, 0.5)
IDS = (-(2**63), -1, 0, 1, 101, 102, 30521, 30522, 2**31, 2**62, 2**63 - 1)
KEYS = (
    "priority", "timeout", "sequence_id", "sequence_start", "sequence_end", "binary_data_output", "binary_data_size",
    "binary_data", "classification", "triton_enable_empty_final_response", "triton_x", "shared_memory_region",
    "shared_memory_offset", "shared_memory_byte_size", "content_type", "headers", "max_tokens", "", "\0", "x" * 3000,
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    0, 1, -1, 5, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63), True, False, "", "x", "1", "é\0", "y" * 9000, 0.5,
    float("nan"), 1e308, -1e-308,
)  # fmt: skip


@dataclass
class Tensor:
    """An input: ``data`` as it lies in memory, TYPE_STRING elements after their lengths in four bytes."""

    name: str
    dtype: str
    shape: list[int]
    data: bytes
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass
class Request:
    """A request to a model, before it is encoded for either protocol."""

    model: str
    inputs: list[Tensor]
    outputs: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)
    version: str = ""
    id: str = ""


# --- valid requests ----------------------------------------------------------------------------------------------


def with_lengths(*texts: bytes) -> bytes:
    """TYPE_STRING data."""
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def floats(*values: float) -> bytes:
    """TYPE_FP32 data."""
    return np.array(values, np.float32).tobytes()


def integers(*values: int) -> bytes:
    """TYPE_INT64 data."""
    return np.array(values, np.int64).tobytes()


def valid(rng: Random, model: str) -> Request:
    """A request that ``model`` answers."""
    rows, width = rng.choice((1, 1, 1, 2, 3)), rng.choice((2, 8, 9, 16))
    text = Tensor("", "BYTES", [rows, 1], with_lengths(*[b"The cat sat."] * rows))
    score = Tensor("", "FP32", [rows, 1], floats(*[0.25] * rows))
    tokens = Tensor("INPUT__0", "INT64", [rows, width], integers(*[2003] * rows * width))
    mask = replace(tokens, name="INPUT__1", data=integers(*[1] * rows * width))
    weight = [named(score, "BERT_WEIGHT")] if rng.random() < 0.5 else []
    inputs = {
        "ensemble_all": [named(text, "excerpt"), *weight],
        "preprocess": [named(text, "INPUT0")],
        "bert-large": [tokens, mask],
        "cuml": [Tensor("input__0", "FP32", [rows, 207], floats(*[0.5] * rows * 207))],
        "postprocess": [named(score, name) for name in ("BERT_WEIGHT_INPUT", "BERT_LARGE_SCORE", "CUML_SCORE")],
    }
    return Request(model, inputs[model])


def named(tensor: Tensor, name: str) -> Tensor:
    """The same tensor under another name, and nothing shared."""
    return replace(tensor, name=name, shape=list(tensor.shape), parameters={})


# --- what spoils them --------------------------------------------------------------------------------------------


def rename(rng: Random, request: Request) -> None:
    one(rng, request).name = rng.choice(NAMES)


def retype(rng: Random, request: Request) -> None:
    one(rng, request).dtype = rng.choice(DTYPES)


def reshape(rng: Random, request: Request) -> None:
    tensor = one(rng, request)
    for shape in [t.shape for t in request.inputs] if rng.random() < 0.5 else [tensor.shape]:
        if shape and rng.random() < 0.5:
            shape[0] = rng.choice(ROWS)
        elif shape:
            shape[-1] = rng.choice(WIDTHS)
    if rng.random() < 0.2:
        tensor.shape = rng.choice(([], [1], [1, 1, 1], [1] * 40, [0, 0], tensor.shape[:1], [*tensor.shape, 1]))


def resize(rng: Random, request: Request) -> None:
    """More rows or a greater width, honestly: the data has the size that the shape says."""
    rows, width = rng.choice(((1, 0), (1, 1), (2, 5), (9, 8), (1, 512), (1, 513), (1, 4096), (33, 8), (513, 1)))
    for tensor in request.inputs:
        is_ids = tensor.dtype == "INT64"
        columns = width if is_ids else tensor.shape[-1] if tensor.shape and 0 <= tensor.shape[-1] <= 300 else 1
        unit = tensor.data[:8] if is_ids else with_lengths(b"a") if tensor.dtype == "BYTES" else floats(0)
        tensor.shape, tensor.data = [rows, columns], unit * (rows * columns)


def drop(rng: Random, request: Request) -> None:
    request.inputs.remove(one(rng, request))


def double(rng: Random, request: Request) -> None:
    tensor = one(rng, request)
    request.inputs.insert(0, named(tensor, rng.choice((tensor.name, tensor.name, rng.choice(NAMES)))))


def cut_data(rng: Random, request: Request) -> None:
    tensor = one(rng, request)
    tensor.data = tensor.data[: rng.randrange(len(tensor.data) + 1)]


def spoil_data(rng: Random, request: Request) -> None:
    tensor = one(rng, request)
    tensor.data = spoil(rng, tensor.data)


def hostile_values(rng: Random, request: Request) -> None:
    """Values of the right dtype that no model wants; the most telling ones, so drawn most often."""
    tensor = one(rng, request)
    number = len(tensor.data) // (8 if tensor.dtype == "INT64" else 4)
    if tensor.dtype == "BYTES":
        rows = tensor.shape[0] if tensor.shape else 1
        tensor.data = with_lengths(*(rng.choice(TEXTS) for _ in range(max(0, min(rows, 3)))))
    elif tensor.dtype == "INT64":
        tensor.data = integers(*[rng.choice(IDS)] * (number - 1), *[rng.choice(IDS)] * min(number, 1))
    else:
        tensor.data = floats(*[rng.choice(FLOATS)] * (number - 1), *[rng.choice(FLOATS)] * min(number, 1))


def lie_in_length(rng: Random, request: Request) -> None:
    """The length of a string, which is part of the data."""
    tensor = one(rng, request)
    tensor.data = struct.pack("<I", rng.choice((0, 1, 11, 13, 2**16, 2**31, 2**32 - 1))) + tensor.data[4:]


def ask_outputs(rng: Random, request: Request) -> None:
    names = (
        "SCORE",
        "BERT_SCORE",
        "BERT_IDS",
        "TREE_FEATS",
        "OUTPUT__0",
        "output__0",
        "OUTPUT0",
        "bert_input_ids",
        *NAMES,
    )
    for _ in range(rng.choice((1, 1, 2, 3, 30))):
        request.outputs.append((rng.choice(names), any_parameters(rng)))


def add_parameters(rng: Random, request: Request) -> None:
    target = rng.choice((request.parameters, one(rng, request).parameters))
    target.update(any_parameters(rng) or {rng.choice(KEYS): rng.choice(VALUES)})


def readdress(rng: Random, request: Request) -> None:
    if rng.random() < 0.5:
        request.version = rng.choice(VERSIONS)
    else:
        request.model = rng.choice((*MODELS, "nope", "", "..", "ensemble_all/1", "ENSEMBLE_ALL", "é", "a" * 3000, "\0"))


def name_request(rng: Random, request: Request) -> None:
    request.id = rng.choice(("", "1", "é", "\0", "%s%n", "i" * 5000, "a\r\nb: c", str(2**64)))


def one(rng: Random, request: Request) -> Tensor:
    """An input to spoil; a stray one where there is none any more."""
    if not request.inputs:
        request.inputs.append(Tensor(rng.choice(NAMES), "FP32", [1, 1], floats(0.5)))
    return rng.choice(request.inputs)


def any_parameters(rng: Random) -> dict[str, Any]:
    return {rng.choice(KEYS): rng.choice(VALUES) for _ in range(rng.choice((0, 1, 1, 2)))}


MUTATIONS: tuple[Callable[[Random, Request], None], ...] = (
    hostile_values, hostile_values, hostile_values, hostile_values, rename, retype, reshape, reshape, resize, drop,
    double, cut_data, spoil_data, lie_in_length, ask_outputs, ask_outputs, add_parameters, add_parameters, readdress,
    name_request,
)  # fmt: skip


def hostile(rng: Random) -> Request:
    """A valid request of some model, with up to three things wrong."""
    request = valid(rng, rng.choice(MODELS))
    for _ in range(rng.choice((0, 1, 1, 1, 1, 2, 2, 3))):
        rng.choice(MUTATIONS)(rng, request)
    return request


def spoil(rng: Random, data: bytes) -> bytes:
    """Flip, cut, double, overwrite or insert bytes."""
    spoilt = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        start = rng.randrange(len(spoilt) + 1)
        stop = min(len(spoilt), start + rng.choice((1, 1, 2, 8, 64)))
        change = rng.randrange(5)
        if change == 0 and start < len(spoilt):
            spoilt[start] ^= 1 << rng.randrange(8)
        elif change == 1:
            del spoilt[start:stop]
        elif change == 2:
            spoilt[stop:stop] = spoilt[start:stop]
        elif change == 3:
            spoilt[start:stop] = rng.randbytes(stop - start)
        else:
            spoilt[start:start] = rng.choice((b"\0", b"\xff" * 9, b"\r\n", b"\n\n", rng.randbytes(3)))
    return bytes(spoilt)
