"""Trial runs of a model on generated rows: output shapes, and independence of the rows of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.component.spec import STRING, ModelSpec, TensorSpec
from shoal.encoders.length_bucketing import ATTENTION_MASK, find_mask
from shoal.errors import ArtifactError, InputError, ShoalError

ROWS, WIDTHS = (2, 3), (8, 13)  # two of each, to see which output sizes follow them
_TOKENS = 5  # of the first width; the rest is padding
_TOLERANCE = 1e-3  # of the greatest value: another batch size may change only the last bits
_TINY = 1e-6
BERT_INPUTS = {"input_ids", "attention_mask"}  # of transformers' models

Arrays = list[NDArray[Any]]
Call = Callable[[Arrays], Sequence[NDArray[Any]]]


class TrialError(ValueError):
    """A failed trial; its text is a sentence without the full stop."""


class Trial:
    """Runs the model in the file ``path``, by ``call``, on generated arrays in the order of ``inputs``.

    The arrays are ``[rows, *dims]`` if ``is_batched``, else ``[*dims]``. The random generator is reseeded each time:
    normal floats, and 0 or 1 for integers, the first of each row 1.
    """

    def __init__(self, path: Path, inputs: Sequence[TensorSpec], call: Call, *, is_batched: bool) -> None:
        self.path, self.inputs, self._call, self.is_batched = path, tuple(inputs), call, is_batched
        self._is_zero = False

    def observe(self) -> list[tuple[np.dtype[Any], tuple[int, ...]]]:
        """Return the dtype and dims of each output, without rows; -1 for dims that follow the width of the inputs.

        Raises:
            ArtifactError: the first dimension does not count rows, or a row's answer depends on other rows.
            TrialError: the model fails.
        """
        rows = ROWS if self.is_batched else ROWS[:1]
        widths = WIDTHS if any(-1 in tensor.dims for tensor in self.inputs) else WIDTHS[:1]
        self._settle()
        outputs = {(r, w): self._answer(self._make(r, w)) for r in rows for w in widths}
        if len({tuple(out.ndim for out in some) for some in outputs.values()}) > 1:
            raise TrialError("its outputs have another number of dimensions for another width or number of rows")
        found = []
        for index, out in enumerate(outputs[ROWS[0], WIDTHS[0]]):
            found.append((out.dtype, self._join({at: some[index].shape for at, some in outputs.items()}, index)))
        if self.is_batched:
            self._check_rows()
        return found

    def _settle(self) -> None:
        """Find values that the model accepts: random ids, else zeros, since its vocabulary may have a single token.

        Raises:
            ArtifactError: it accepts only a single row.
            TrialError: it accepts neither random ids nor zeros.
        """
        reasons = []
        for self._is_zero, rows in ((False, ROWS[0]), (True, ROWS[0]), (False, 1)):
            try:
                self._answer(self._make(rows, WIDTHS[0]))
            except TrialError as error:
                reasons.append(error)
                continue
            if rows == 1 and self.is_batched:
                raise self._refuse(f"it takes a single row, and {reasons[0]}")
            return
        raise reasons[0]

    def _join(self, shapes: dict[tuple[int, int], tuple[int, ...]], index: int) -> tuple[int, ...]:
        """Merge the shapes of one output, by rows and width, into dims: -1 for sizes that follow the width."""
        first = 1 if self.is_batched else 0
        for (rows, _), shape in shapes.items():
            if first and (not shape or shape[0] != rows):
                raise self._refuse(f"output {index} has shape {list(shape)} for {rows} rows, expected [{rows}, ...]")
        if not next(iter(shapes.values())):
            raise TrialError(f"output {index} is a scalar, and Triton's tensors have a dimension")
        dims = []
        for axis in range(first, len(next(iter(shapes.values())))):
            sizes = {at: shape[axis] for at, shape in shapes.items()}
            if any(size != sizes[ROWS[0], width] for (_, width), size in sizes.items()):
                raise self._refuse(f"dimension {axis} of output {index} follows the number of rows")
            dims.append(next(iter(sizes.values())) if len(set(sizes.values())) == 1 else -1)
        return tuple(dims)

    def _check_rows(self) -> None:
        given = self._make(max(ROWS), WIDTHS[0])
        together = self._answer(given)
        for row in range(max(ROWS)):
            alone = self._answer([array[row : row + 1] for array in given])
            if not all(_are_same(whole[row : row + 1], own) for whole, own in zip(together, alone, strict=True)):
                raise self._refuse("a row's answer depends on the rows beside it")

    def _refuse(self, why: str) -> ArtifactError:
        return ArtifactError(
            f"The rows of {self.path} cannot be batched: {why}.",
            "Let the first dimension of each tensor count rows; or use --max-batch-size 0, with whole shapes: then the"
            " model gets each request alone.",
        )

    def check_padding(self, mask: str) -> None:
        """Check that columns where the input ``mask`` is 0 do not change the answer.

        Raises:
            TrialError: they change it.
        """
        padded = self._make(ROWS[0], WIDTHS[0])
        cut = []
        for index, tensor in enumerate(self.inputs):
            if tensor.name == mask:
                padded[index] = np.ones_like(padded[index])
                padded[index][:, _TOKENS:] = 0
            follows = tensor.dims[:1] == (-1,)
            cut.append(np.ascontiguousarray(padded[index][:, :_TOKENS]) if follows else padded[index])
        pairs = zip(self._answer(padded), self._answer(cut), strict=True)
        if not all(_are_same(one, other) for one, other in pairs):
            raise TrialError(f"columns where {mask} is 0 change the answer")

    def _answer(self, given: Arrays) -> Sequence[NDArray[Any]]:
        try:
            return self._call(given)
        except ShoalError:
            raise
        except Exception as error:
            shown = ", ".join(f"{t.name} {list(a.shape)}" for t, a in zip(self.inputs, given, strict=True))
            raise TrialError(f"it fails on {shown}: {explain(error)}") from error

    def _make(self, rows: int, width: int) -> Arrays:
        generator = np.random.default_rng(0)
        return [self._draw(tensor, rows, width, generator) for tensor in self.inputs]

    def _draw(self, tensor: TensorSpec, rows: int, width: int, generator: np.random.Generator) -> NDArray[Any]:
        sizes = [width if size == -1 else size for size in tensor.dims]
        shape = [rows, *sizes] if self.is_batched else sizes
        if tensor.dtype == STRING:
            return np.full(shape, b"a", np.object_)
        if self._is_zero:
            return np.zeros(shape, tensor.numpy_dtype)
        if tensor.numpy_dtype.kind == "f":
            return generator.standard_normal(shape).astype(tensor.numpy_dtype)
        drawn = generator.integers(0, 2, shape)
        drawn[..., 0] = 1
        return drawn.astype(tensor.numpy_dtype)


def explain(error: Exception) -> str:
    """Return the last line of another library's message, which is the most specific."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300].rstrip(".")


def _are_same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    if one.shape != other.shape:
        return False
    if one.dtype.kind != "f":
        return bool(np.array_equal(one, other))
    scale = float(np.abs(np.nan_to_num(one.astype(np.float64), posinf=0.0, neginf=0.0)).max(initial=0.0))
    return bool(np.allclose(one, other, rtol=0, atol=_TOLERANCE * scale + _TINY, equal_nan=True))


def choose_mask(spec: ModelSpec, wanted: str | None, trial: Trial | None) -> tuple[dict[str, str], list[str]]:
    """Choose the parameter that turns on length bucketing, if applicable, and notes for the user about it.

    ``wanted`` is the input that the caller names. Without it, ``attention_mask`` is taken if the inputs are BERT's.
    ``trial`` is None for a model that could not be tried.

    Raises:
        InputError: the input that the caller names does not give lengths.
        ArtifactError: it is not an input of one dimension, or an output's width is not known.
    """
    is_berts = spec.is_batched and {tensor.name for tensor in spec.inputs} == BERT_INPUTS
    mask = wanted or (ATTENTION_MASK if is_berts else "")
    if not mask:
        return {}, []
    if not spec.is_batched:
        raise InputError(f"Model {spec.name} has no batches: no input gives row lengths.", "Leave mask out.")
    try:
        find_mask(replace(spec, parameters={ATTENTION_MASK: mask}))
        if trial:
            trial.check_padding(mask)
    except (ArtifactError, TrialError) as error:
        if wanted is None:
            return {}, [f"no length bucketing: {error.what if isinstance(error, ArtifactError) else error}"]
        if isinstance(error, ArtifactError):
            raise
        raise InputError(f"{mask} does not give row lengths: {error}.", "Leave mask out.") from error
    why = "as given" if wanted else "since the inputs are BERT's"
    return {ATTENTION_MASK: mask}, [f"{mask} gives row lengths, {why}: parameter {ATTENTION_MASK}"]
