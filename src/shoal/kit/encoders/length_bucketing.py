"""Length bucketing: rows of similar length are run together, to save computation on padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import ArtifactError
from shoal.kit.component.spec import Array, Arrays, ModelSpec

ATTENTION_MASK = "attention_mask"  # a model's parameter
MAX_WASTE = 0.02  # greatest share of padding in a group's tokens, padding included
MIN_TOKENS = 512  # tokens per group: for fewer, another call costs more than the padding that it saves
MOST_ROWS, WIDTH_STEP = 8, 8  # of batches in few shapes, a power of two; measured: 16 rows are no faster


def lengths(mask: NDArray[Any]) -> NDArray[np.intp]:
    """Return the length of each row in tokens: up to the last column of ``mask`` [rows, columns] that is not 0."""
    is_token = mask != 0
    return np.where(is_token.any(axis=1), mask.shape[1] - np.argmax(is_token[:, ::-1], axis=1), 0)


def group(num_tokens: NDArray[np.integer[Any]]) -> list[NDArray[np.intp]]:
    """Group rows by length, the longest first; return the row indices of each group.

    ``num_tokens`` [rows] is the number of tokens in each row. The rows of a group will be padded to its longest row.
    The next row joins a group if padding then is at most the share MAX_WASTE of the group's padded size, or if the
    group has fewer than MIN_TOKENS tokens.
    """
    # Greedy over rows sorted by length: open a new group when the next row would push the padding over MAX_WASTE.
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


def group_in_few_shapes(num_tokens: NDArray[np.integer[Any]]) -> list[NDArray[np.intp]]:
    """Group rows by length, the longest first, in groups of 8, 4, 2 or 1 rows; return the rows of each group.

    An engine that prepares itself for each shape then meets few of them, and no row is computed for nothing.
    """
    order, groups = np.argsort(-num_tokens, kind="stable"), []
    while len(order):
        size = min(MOST_ROWS, 1 << (len(order).bit_length() - 1))
        groups.append(order[:size])
        order = order[size:]
    return groups


def find_mask(spec: ModelSpec) -> str:
    """Return the name of a model's attention-mask input, which is the value of its parameter ``attention_mask``.

    The name is empty without the parameter, or if ``max_batch_size`` is 0, because then no dimension counts rows.

    Raises:
        ArtifactError: the parameter does not name a required input of one dimension; or an output has a dimension of
            -1, so that the outputs of groups of different widths cannot be joined.
    """
    name = spec.parameters.get(ATTENTION_MASK, "")
    if not name or not spec.is_batched:
        return ""
    known = [tensor.name for tensor in spec.inputs if len(tensor.dims) == 1 and not tensor.is_optional]
    if name not in known:
        raise ArtifactError(
            f"Model {spec.name} has no required input {name} of one dimension, which its parameter {ATTENTION_MASK}"
            " names.",
            f"Known: {', '.join(known)}." if known else f"Leave {ATTENTION_MASK} out.",
        )
    open_ones = [tensor.name for tensor in spec.outputs if -1 in tensor.dims]
    if open_ones:
        raise ArtifactError(
            f"Output {open_ones[0]} of model {spec.name} has a dimension of -1; rows are computed in"
            f" groups of similar length ({ATTENTION_MASK}), and all groups need outputs of one shape.",
            f"Declare its dims, or leave {ATTENTION_MASK} out.",
        )
    return name


def run_by_length(
    spec: ModelSpec,
    batch: Arrays,
    call: Callable[[Sequence[Array]], Sequence[Array]],
    mask: str,
    *,
    in_few_shapes: bool = False,
) -> Arrays:
    """Run a model's ``call`` on a batch, in groups of rows of similar length; return the outputs by name.

    ``call`` takes and returns arrays in the order of ``spec``. ``mask`` names the attention-mask input (``find_mask``);
    if it is empty, all rows are run at once. For ``in_few_shapes`` see ``run_in_groups``.
    """
    arrays = [batch[tensor.name] for tensor in spec.inputs]
    follows = [tensor.inside.dims[:1] == (-1,) for tensor in spec.inputs]
    outputs = run_in_groups(call, arrays, batch[mask], follows, in_few_shapes) if mask else call(arrays)
    return {
        t.name: out if t.inner is None else out.reshape((*out.shape[: int(spec.is_batched)], *t.dims))
        for t, out in zip(spec.outputs, outputs, strict=True)
    }


def run_in_groups(
    run: Callable[[Sequence[NDArray[Any]]], Sequence[NDArray[Any]]],
    arrays: Sequence[NDArray[Any]],
    mask: NDArray[Any],
    follows: Sequence[bool],
    in_few_shapes: bool = False,
) -> list[NDArray[Any]]:
    """Call ``run`` once per group of rows of similar length; return its outputs with the rows in the original order.

    ``arrays`` are the inputs, [rows, ...] each. ``mask`` [rows, columns] gives the rows' lengths. ``follows`` says for
    each array whether its width may vary; such an array, if it is as wide as the mask, is cut to the longest row of the
    group (at least one column). With ``in_few_shapes``, groups have 8, 4, 2 or 1 rows, and widths are rounded up to
    a multiple of 8, if the mask is as wide.
    """
    num_tokens, width = lengths(mask), mask.shape[1]
    parts = group_in_few_shapes(num_tokens) if in_few_shapes else group(num_tokens)
    if len(parts) < 2 and int(num_tokens.max(initial=0)) >= width:
        return list(run(arrays))
    are_cut = [may and array.shape[1] == width for array, may in zip(arrays, follows, strict=True)]
    outputs: list[NDArray[Any]] = []
    for rows in parts:
        longest = max(1, int(num_tokens[rows[0]]))
        if in_few_shapes:
            longest = min(width, -(-longest // WIDTH_STEP) * WIDTH_STEP)
        given = [a[rows, :longest] if is_cut else a[rows] for a, is_cut in zip(arrays, are_cut, strict=True)]
        for index, part in enumerate(run([*map(np.ascontiguousarray, given)])):
            if index == len(outputs):
                outputs.append(np.empty((len(num_tokens), *part.shape[1:]), part.dtype))
            outputs[index][rows] = part
    return outputs
