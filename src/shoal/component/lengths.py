"""Rows of like length together, so that little is computed for padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.component.spec import ModelSpec
from shoal.component.tensors import Array, Arrays

MAX_WASTE = 0.02  # of what is computed for a group, for padding
MIN_TOKENS = 512  # below that a call of its own costs more than the padding it saves


def lengths(mask: NDArray[Any]) -> NDArray[np.intp]:
    """The tokens of each row of ``mask`` [rows, columns], up to the last that is not 0."""
    is_token = mask != 0
    return np.where(is_token.any(axis=1), mask.shape[1] - np.argmax(is_token[:, ::-1], axis=1), 0)


def group(num_tokens: NDArray[np.integer[Any]]) -> list[NDArray[np.intp]]:
    """Indices of rows in groups, the longest first.

    A group is padded to its longest row; ``num_tokens`` [rows] counts tokens. Padding is at most MAX_WASTE of a group's
    padded tokens, but for groups of fewer than MIN_TOKENS.
    """
    order = np.argsort(-num_tokens, kind="stable")
    groups, start, used = [], 0, 0
    for position, row in enumerate(order):
        longest, number = int(num_tokens[order[start]]), position - start
        padded = longest * (number + 1)
        if number and padded - used - int(num_tokens[row]) > MAX_WASTE * padded and used >= MIN_TOKENS:
            groups.append(order[start:position])
            start, used = position, 0
        used += int(num_tokens[row])
    return [*groups, order[start:]] if len(order) else []


def run_by_length(
    spec: ModelSpec, batch: Arrays, call: Callable[[Sequence[Array]], Sequence[Array]], mask: str
) -> Arrays:
    """The outputs of ``call``, which takes and gives arrays in the order of ``spec``, rows of like length together.

    ``mask`` names the input that tells how long a row is; without one all rows are run at once.
    """
    arrays = [batch[tensor.name] for tensor in spec.inputs]
    outputs = run_in_groups(call, arrays, lengths(batch[mask])) if mask else call(arrays)
    return {tensor.name: out for tensor, out in zip(spec.outputs, outputs, strict=True)}


def run_in_groups(
    run: Callable[[Sequence[NDArray[Any]]], Sequence[NDArray[Any]]],
    arrays: Sequence[NDArray[Any]],
    num_tokens: NDArray[np.integer[Any]],
) -> list[NDArray[Any]]:
    """What ``run`` gives for ``arrays``, group by group, in the order of the rows.

    ``arrays`` are [rows, columns], padded at the right; of those as wide as the widest, ``run`` gets no column beyond
    its group's longest row (at least one).
    """
    width = max(array.shape[1] for array in arrays)
    parts = group(num_tokens)
    if len(parts) < 2 and int(num_tokens.max(initial=0)) >= width:
        return list(run(arrays))
    outputs: list[NDArray[Any]] = []
    for rows in parts:
        longest = max(1, int(num_tokens[rows[0]]))
        given = [np.ascontiguousarray(a[rows, :longest] if a.shape[1] == width else a[rows]) for a in arrays]
        for index, part in enumerate(run(given)):
            if index == len(outputs):
                outputs.append(np.empty((len(num_tokens), *part.shape[1:]), part.dtype))
            outputs[index][rows] = part
    return outputs
