"""Requests for trying a model, and the comparison of its answers with its declaration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from shoal.authoring.repository.config import ModelConfig
from shoal.authoring.repository.warmup_request import TEXT, requested
from shoal.clients.client.calls import dtype_name
from shoal.errors import ShoalError
from shoal.kit.component.spec import Array, ModelSpec
from shoal.serving.gateway.control.canary import read_parameter, read_warmup

# Made-up requests: the size of dimensions that are -1, the number, 0 or 1, and the text. If one fails, the next one is
# sent: a convolution needs a size, a divisor a number, and code may read JSON or images.
_IMAGE = b"P6 32 32 255\n" + bytes(3 * 32 * 32)
_VARIANTS = ((8, 0, TEXT.encode()), (1, 1, b"1"), (256, 1, b"{}"), (64, 1, _IMAGE))


def make_requests(config: ModelConfig) -> tuple[list[dict[str, Array]], bool]:
    """Return requests for a model, the next to be sent if one is refused, and whether they are the model's own.

    Its own one is its canary or warm-up. Others are made from its declaration; there are none if an input has a size or
    dtype that cannot be made.
    """
    for read in (read_parameter, read_warmup):
        with suppress(ShoalError):
            if own := read(config):
                return [own], True
    return list(_make_up(config.spec)), False


def _make_up(spec: ModelSpec) -> Iterator[dict[str, Array]]:
    if all(tensor.is_optional for tensor in spec.inputs):  # some are needed, or there is no request
        spec = replace(spec, inputs=tuple(replace(tensor, is_optional=False) for tensor in spec.inputs[:1]))
    for size, number, text in _VARIANTS:
        sized = (replace(t, dims=tuple(size if dim == -1 else dim for dim in t.dims)) for t in spec.inputs)
        single = (replace(t, dims=tuple(1 if dim == -1 else dim for dim in t.dims)) for t in spec.inputs)
        inputs = tuple(b if b.dtype == "TYPE_STRING" else a for a, b in zip(sized, single, strict=True))
        found = requested(replace(spec, inputs=inputs))
        if any(not tensor.is_optional and tensor.name not in found for tensor in spec.inputs):
            return
        yield {name: _change(value, number, text) for name, value in found.items()}


def _change(value: Array, number: int, text: bytes) -> Array:
    if value.dtype == np.object_:
        return np.full_like(value, text)
    return np.ones_like(value) if number else value


def repeat(value: Array, rows: int) -> Array:
    """Repeat an input's rows up to a number of rows.

    Of made-up texts, each second one is shorter. Rows of zeros have a 1 in another column each: of scores, each is once
    the greatest.
    """
    many = np.resize(value, (rows, *value.shape[1:]))
    if many.dtype == np.object_:
        others = many[1::2]
        others[others == TEXT.encode()] = TEXT.partition(" ")[0].encode()
    elif many.dtype.kind == "f" and many.ndim == 2 and many.shape[1] and not many.any():
        many[np.arange(rows), np.arange(rows) % many.shape[1]] = 1
    return many


def find_misfit(spec: ModelSpec, answers: Sequence[Any], rows: int, *, is_streamed: bool, is_exact: bool) -> str:
    """Describe how answers to requests of ``rows`` rows differ from a model's declaration; empty if they fit.

    Answers in pieces (``is_streamed``) may each have any number of rows, and some of the outputs; others have to hold
    all outputs if ``is_exact``.
    """
    declared = {tensor.name: tensor for tensor in spec.outputs}
    given: set[str] = set()
    for answer in answers:
        for output in answer.outputs:
            tensor, shape = declared[output.name], list(output.shape)
            sizes = shape[1:] if spec.is_batched else shape
            found, wanted = dtype_name(output.datatype).removeprefix("TYPE_"), tensor.dtype.removeprefix("TYPE_")
            is_fit = len(sizes) == len(tensor.dims) and all(
                d in (-1, s) for d, s in zip(tensor.dims, sizes, strict=True)
            )
            if tensor.dims == (-1,) and (shape == [rows] or (is_streamed and len(shape) == 1)):
                is_fit = True  # as NVIDIA's models for TensorRT-LLM answer: a text for each row
            if found != wanted or not is_fit:
                rank = ["rows"] if spec.is_batched else []
                expected = f"{wanted} [{', '.join(map(str, [*rank, *tensor.dims]))}]"
                return f"output {tensor.name} is {found} {shape}, and config.pbtxt declares {expected}"
            if spec.is_batched and not is_streamed and shape[0] != rows:
                return f"output {tensor.name} has {shape[0]} rows for a request of {rows}"
            given.add(output.name)
    missing = sorted(declared.keys() - given)
    if missing and answers and is_exact and not (is_streamed and given):
        return f"the answer has no output {missing[0]}"
    return ""
