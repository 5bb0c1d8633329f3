"""Validating reader for Treelite checkpoints. It works without Treelite, which aborts the process on a damaged one.

The format: Treelite's documentation, "Treelite Serialization Format v4".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.errors import ArtifactError
from shoal.kit.component.files import GREATEST, MAKE_AGAIN, check_file, describe_bytes, refusal
from shoal.kit.component.provenance import parse_ties
from shoal.kit.component.spec import ModelSpec
from shoal.kit.forests.treelite import FilSettings
from shoal.system.files import MAX_BINARY, read_bytes

_Array = npt.NDArray[Any]
_FOREST = "Treelite checkpoint"
_MAJOR, _LAST_VERSION = 4, 255
_LEAF, _NUMERICAL, _CATEGORICAL = range(3)  # TreeNodeType
_FLOATS: Mapping[int, np.dtype[Any]] = {2: np.dtype("<f4"), 3: np.dtype("<f8")}  # TypeInfo
_NUM_COMPARISONS = 5  # Operator, from 1
_POSTPROCESSORS = b"""identity signed_square hinge sigmoid exponential exponential_standard_ratio
    logarithm_one_plus_exp identity_multiclass softmax multiclass_ova""".split()


class Task(IntEnum):
    """Task that a forest was trained for: Treelite's TaskType."""

    BINARY = 0
    REGRESSION = 1
    MULTICLASS = 2
    RANKING = 3
    ISOLATION = 4


@dataclass(frozen=True)
class Forest:
    """Header of a Treelite checkpoint.

    ``num_classes`` is the number of values per row and target (the maximum over targets). It is 1 if a row gets one
    score, or only the probability of the second of two classes. ``postprocessor`` is Treelite's name of the function
    that converts the sums of a row's leaves to its answer. ``ties`` are the SHA-256 of the files that the forest was
    made with, by name.
    """

    num_features: int
    task: Task
    num_targets: int
    num_classes: int
    postprocessor: str
    is_mean: bool  # whether the answer is the mean of the trees' outputs, instead of their sum
    ties: Mapping[str, str]

    @property
    def is_classifier(self) -> bool:
        """Whether the forest was trained for classification."""
        return self.task in (Task.BINARY, Task.MULTICLASS)

    def check(self, spec: ModelSpec, path: Path) -> None:
        """Check that the forest at ``path`` fits the tensors and settings that a model of the ``fil`` backend declares.

        Raises:
            ArtifactError: the tensors do not fit, or a setting is invalid.
        """
        settings = FilSettings.read(spec)
        num_outputs = self.num_targets * self.num_classes
        widths = settings.widths(num_outputs, is_classifier=self.is_classifier) if self.num_targets == 1 else ()
        takes_fit = [tensor.dims for tensor in spec.inputs] == [(self.num_features,)]
        gives_fit = [tensor.dims for tensor in spec.outputs] in [[(width,)] for width in widths]
        if takes_fit and gives_fit:
            return
        gives = "1 score" if (self.task, num_outputs) == (Task.REGRESSION, 1) else "classes or several scores"
        tensors = [f"{tensor.name} {list(tensor.dims)}" for tensor in (*spec.inputs, *spec.outputs)]
        right = f" (of width {' or '.join(map(str, widths))} under these settings)" if widths else ""
        raise ArtifactError(
            f"{path} takes {self.num_features} features and gives {gives}; the config of {spec.name} declares"
            f" {', '.join([*tensors, *settings.given])}.",
            f"Fix the dims{right} or the settings, or export a forest that fits. {MAKE_AGAIN}",
        )


def read_forest(path: Path) -> Forest:
    """Read a Treelite checkpoint; check the whole file, and that each path through a tree ends at a finite leaf.

    Raises:
        ArtifactError: the file is not a Treelite checkpoint, or is damaged.
    """
    check_file(path, _FOREST)
    try:
        return parse_forest(read_bytes(path, MAX_BINARY))
    except OSError as error:
        raise refusal(path, _FOREST, f"{error.strerror}") from error
    except ValueError as error:
        raise refusal(path, _FOREST, f"{error}") from error


def parse_forest(content: bytes) -> Forest:
    """Parse the content of a Treelite checkpoint, with the checks of ``read_forest``.

    Raises:
        ValueError: the content is not a checkpoint, or is damaged; the message says what it is, or what is wrong.
    """
    try:
        return _read_forest(_Fields(content))
    except ValueError as error:
        raise ValueError(describe_bytes(content[:32]) or str(error)) from error


class _Fields:
    """Cursor over the fields of a checkpoint; raises ``ValueError`` if a field is cut off or invalid."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, dtype: npt.DTypeLike, count: int) -> _Array:
        """Read the next ``count`` numbers."""
        size = np.dtype(dtype).itemsize * count
        if size > len(self._data) - self._at:
            raise ValueError(f"it is cut off, or damaged: a field of {size:,} bytes begins at byte {self._at:,}")
        self._at += size
        return np.frombuffer(self._data, dtype, count, self._at - size) if count else np.empty(0, dtype)

    def scalar(self, dtype: npt.DTypeLike, known: Iterable[int] | None = None) -> int:
        """Read the next number, which must be one of ``known`` if given."""
        value = int(self.take(dtype, 1)[0])
        if known is not None and value not in known:
            raise ValueError(f"it is damaged: {value} before byte {self._at:,} is not a known value")
        return value

    def array(self, dtype: npt.DTypeLike, *lengths: int) -> _Array:
        """Read the next array, whose length must be one of ``lengths`` if any are given."""
        return self.take(dtype, self.scalar("<u8", lengths or None))

    def text(self) -> bytes:
        """Read the next string."""
        return bytes(self.array("u1"))

    def check(self, is_met: bool | np.bool_, what: str) -> None:
        """Raise ``ValueError`` unless ``is_met``; ``what`` names the fault, in the field that was read last."""
        if not is_met:
            raise ValueError(f"it is damaged: {what} before byte {self._at:,}")

    def end(self) -> None:
        """Check that no byte is left after the last field."""
        self.check(self._at == len(self._data), f"{len(self._data) - self._at:,} bytes too many")


def _read_forest(fields: _Fields) -> Forest:
    version = fields.take("<i4", 3)
    if version[0] != _MAJOR or version.min() < 0 or version.max() > _LAST_VERSION:
        raise ValueError(f"it is not of Treelite {_MAJOR}")
    number = fields.scalar("u1", _FLOATS)
    fields.scalar("u1", (number,))  # thresholds and leaves are of one type
    num_trees, num_features, task = fields.scalar("<u8"), fields.scalar("<i4"), fields.scalar("u1", range(5))
    is_mean = fields.scalar("u1", range(2))
    num_targets = fields.scalar("<i4", range(1, 2**20))
    classes, shape = fields.array("<i4", num_targets), fields.array("<i4", 2)
    most = int(classes.max())
    fields.check(min(num_trees, num_features, int(classes.min())) > 0, "no trees, features or classes")
    fields.check(shape[0] in (1, num_targets) and shape[1] in (1, most), "an unknown shape of leaves")
    for size, width in ((num_targets, shape[0]), (most, shape[1])):  # target and class of each tree
        index = fields.array("<i4", num_trees)
        lowest = -1 if shape.prod() > 1 and width == size else 0  # -1: for all of them, one leaf value each
        fields.check(index.min() >= lowest and index.max() < size, "a tree for an unknown target or class")
    postprocessor = fields.text()
    fields.check(postprocessor in _POSTPROCESSORS, "an unknown postprocessor")
    fields.check(np.isfinite(fields.take("<f4", 2)).all(), "a parameter that is not finite")
    fields.check(np.isfinite(fields.array("<f8", num_targets * most)).all(), "a base score that is not finite")
    ties = parse_ties(fields.text())
    fields.scalar("<i4", (0,))  # fields of later versions
    for _ in range(num_trees):
        _read_tree(fields, _FLOATS[number], num_features, int(shape.prod()))
    fields.end()
    return Forest(num_features, Task(task), num_targets, most, postprocessor.decode(), bool(is_mean), ties)


def _read_tree(fields: _Fields, number: np.dtype[Any], num_features: int, leaf_size: int) -> None:
    num_nodes, has_categories = fields.scalar("<i4", range(1, 2**31)), fields.scalar("u1", range(2))
    kind, left, right, split = (fields.array(dtype, num_nodes) for dtype in ("i1", "<i4", "<i4", "<i4"))
    is_leaf, is_numerical = kind == _LEAF, kind == _NUMERICAL
    # Node 0, the root, has no parent and no node has two, so a walk from the root never meets a node twice: it ends,
    # and only at a leaf. No graph search is needed.
    children = np.concatenate([left[~is_leaf], right[~is_leaf]])
    fields.check(kind.min() >= 0 and kind.max() <= _CATEGORICAL, "an unknown kind of node")
    fields.check(has_categories == (kind == _CATEGORICAL).any(), "categories")
    fields.check((left[is_leaf] == -1).all() and (right[is_leaf] == -1).all(), "a leaf with children")
    fields.check(((children > 0) & (children < num_nodes)).all(), "a child out of range")
    fields.check(len(np.unique(children)) == len(children), "a node with two parents")
    fields.check(((split[~is_leaf] >= 0) & (split[~is_leaf] < num_features)).all(), "a feature out of range")
    fields.check((fields.array("u1", num_nodes) <= 1).all(), "the branch for a missing value")
    values, thresholds, comparison = (fields.array(dtype, num_nodes) for dtype in (number, number, "i1"))
    fields.check(not np.isnan(thresholds[is_numerical]).any(), "a threshold that is NaN")
    known = (comparison[is_numerical] > 0) & (comparison[is_numerical] <= _NUM_COMPARISONS)
    fields.check(known.all(), "an unknown comparison")
    fields.check((fields.array("u1", num_nodes) <= 1).all(), "the branch for a category")
    vectors, sizes = _read_slices(fields, number, num_nodes)
    fields.check(np.isin(sizes[is_leaf], (leaf_size, 0 if leaf_size == 1 else leaf_size)).all(), "a leaf's size")
    for leaves in (vectors, values[is_leaf & (sizes == 0)]):
        fields.check((np.abs(leaves) <= GREATEST).all(), "a leaf that is not finite")
    _read_slices(fields, "<u4", num_nodes)
    for dtype in ("<u8", "<f8", "<f8"):  # counts, Hessians and gains of training, each with whether it is known
        fields.array(dtype, 0, num_nodes)
        fields.array("u1", 0, num_nodes)
    fields.check((fields.take("<i4", 2) == 0).all(), "fields of a later version")


def _read_slices(fields: _Fields, dtype: npt.DTypeLike, num_nodes: int) -> tuple[_Array, _Array]:
    """Read the nodes' lists of values; return all values, and the length of each node's list."""
    values, begins, ends = fields.array(dtype), fields.array("<u8", num_nodes), fields.array("<u8", num_nodes)
    fields.check(((begins <= ends) & (ends <= len(values))).all(), "a list that ends beyond the values")
    return values, ends - begins
