"""Trial runs of a model on generated rows, to find its output shapes and to check that rows are independent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import ArtifactError, InputError, ShoalError
from shoal.kit.component.spec import STRING, ModelSpec, TensorSpec
from shoal.kit.encoders.length_bucketing import ATTENTION_MASK, find_mask

ROWS, WIDTHS = (2, 3), (8, 13)  # two of each, to see which output sizes change with them
_TOKENS = 5  # per row of the first width; the other columns are padding
_TOLERANCE = 1e-3  # of the greatest value: another batch size may change only the last bits
_TINY = 1e-6
_MAX_RANK, _MAX_VALUES = 32, 2**26  # NumPy's own limit of dimensions; the values of a generated tensor
BERT_INPUTS = {"input_ids", "attention_mask"}  # of transformers' models

Arrays = list[NDArray[Any]]
Call = Callable[[Arrays], Sequence[NDArray[Any]]]


class TrialError(ValueError):
    """Error of a trial run; the message is a clause such as "it fails on TEXT [2, 1]", without a full stop."""


class Trial:
    """Trial runs of a model: ``call`` runs it on generated arrays, in the order of ``inputs``.

    The arrays have shape ``[rows, *dims]`` if ``is_batched``, else ``dims``. Floats are normally distributed. Integers
    are 0 or 1, and the first along the last dimension is always 1. The random generator is seeded again for each run.
    ``path`` is the model's file, which errors name.
    """

    def __init__(self, path: Path, inputs: Sequence[TensorSpec], call: Call, *, is_batched: bool) -> None:
        self.path, self.inputs, self._call, self.is_batched = path, tuple(inputs), call, is_batched
        self._is_zero = False

    def observe(self) -> list[tuple[np.dtype[Any], tuple[int, ...]]]:
        """Run the model with several numbers of rows and widths; return dtype and dims of each output, without rows.

        A width is the size of the inputs' dimensions of -1. A size that changes with the width becomes -1 in the dims.

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
        """Find out whether the model accepts random integers, or only zeros: its vocabulary may have a single token.

        All later runs use what it accepts.

        Raises:
            ArtifactError: the model accepts only a single row.
            TrialError: the model accepts neither random integers nor zeros.
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
        """Merge the shapes of output ``index`` into its dims; a size that changes with the width becomes -1.

        ``shapes`` has the output's shape in each run, by number of rows and width.
        """
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
        """Check that columns in which the input ``mask`` is 0 do not change the answer.

        Raises:
            TrialError: they change the answer, or the model fails.
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
        if len(shape) > _MAX_RANK or min(sizes, default=0) < 0 or prod(shape) > _MAX_VALUES:
            shown = f"{sizes[:_MAX_RANK]}{'...' if len(sizes) > _MAX_RANK else ''}"
            raise TrialError(f"no row of {tensor.name} {shown} can be made: it is too large, or not a shape")
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
    """Return the last line of another library's error message, because it is the most specific one."""
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
    """Choose the attention mask that length bucketing uses: rows of similar length are run together.

    Return the parameter for ``config.pbtxt``, empty if no input is chosen, and notes for the user. ``wanted`` is the
    input that the caller names. If it is None, ``attention_mask`` is chosen if the inputs are exactly ``input_ids`` and
    ``attention_mask`` and the mask passes the checks. ``trial`` is None for a model that failed in trial runs.

    Raises:
        InputError: ``wanted`` is given, but the model has no batches, or columns where it is 0 change the answer.
        ArtifactError: ``wanted`` is not a required input of one dimension, or an output has a dimension of -1.
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
