"""Files that belong together say so: an artifact carries the sha256 of those it was made with.

A forest's columns mean nothing under another ``preprocess.json``, an encoder's ids nothing under another ``vocab.txt``.
Nothing else would notice: shapes and dtypes fit. What can carry ties is read here whole, without the library that runs
it: torch leaves an archive's checksums unread, and Treelite ends the process over a damaged checkpoint.
"""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.component.bundle import GREATEST, MAKE_AGAIN, check_file, describe_bytes, refusal, sha256
from shoal.component.spec import ModelSpec
from shoal.errors import ArtifactError

METADATA = "shoal.json"  # the entry of a TorchScript archive that carries the ties
_ARCHIVE, _FOREST = "TorchScript file", "Treelite checkpoint"
_CHUNK = 2**20
_DIRECTORY = 0x10  # of a zip entry's attributes
# What zipfile raises over damaged archives; RuntimeError: they seem encrypted, or compressed in an unknown way.
_UNREADABLE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, ValueError, RuntimeError)

_Array = npt.NDArray[Any]


def dump_ties(ties: Mapping[str, str]) -> str:
    """The text that an artifact carries: file name -> sha256."""
    return json.dumps({"shoal_ties": dict(ties)}, sort_keys=True)


def read_ties(artifact: Path) -> dict[str, str]:
    """The ties that a file carries; none where it is of no kind that could carry any.

    Raises:
        ArtifactError: it is a TorchScript archive or a Treelite checkpoint by its name, and not by its content.
    """
    if artifact.suffix == ".pt":
        return read_archive(artifact)
    return dict(read_forest(artifact).ties) if artifact.suffix == ".tl" else {}


def check_ties(ties: Mapping[str, str], artifact: Path) -> None:
    """Check an artifact that lies in a model repository, ``REPOSITORY/MODEL/VERSION/FILE``.

    For each tie, a file of that name anywhere in the repository must be the one it was made with. Where there is none,
    nothing is said: a client may hold it.

    Raises:
        ArtifactError: the repository holds another one.
    """
    repository = artifact.parents[2]
    for name in ties:
        check_tie(ties, artifact, sorted(repository.glob(f"*/[0-9]*/{name}")))


def check_tie(ties: Mapping[str, str], artifact: Path, neighbours: Iterable[Path]) -> None:
    """Check that an artifact was made with one of ``neighbours``, files of one name, if there are any.

    Raises:
        ArtifactError: it was made with another file of that name.
    """
    found = {path: sha256(path) for path in neighbours if path.is_file()}
    for path, digest in found.items():
        wanted = ties.get(path.name)
        if wanted and wanted not in found.values():
            raise ArtifactError(
                f"{artifact.name} was made with another {path.name} than {path}"
                f" (expected sha256 {wanted[:12]}, found {digest[:12]}).",
                f"Take both from one artifact folder. {MAKE_AGAIN}",
            )


def parse_ties(text: bytes) -> dict[str, str]:
    """The ties in what ``dump_ties`` gave, among an artifact's other attributes.

    Raises:
        ValueError: it is something else.
    """
    attributes = json.loads(text or b"{}")
    ties = attributes.get("shoal_ties", {}) if isinstance(attributes, dict) else None
    if not isinstance(ties, dict) or not all(isinstance(digest, str) for digest in ties.values()):
        raise ValueError("its ties to other files are damaged")
    return ties


# --- TorchScript archives ----------------------------------------------------------------------------------------


def read_archive(path: Path) -> dict[str, str]:
    """The ties of a TorchScript archive, after all of it was read and compared with its checksums.

    Raises:
        ArtifactError: it is no such archive, or damaged.
    """
    begins = check_file(path, _ARCHIVE)
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if not all(any(part in name for name in names) for part in ("/data.pkl", "/constants.pkl", "/code/")):
                raise refusal(
                    path, _ARCHIVE, "it is a zip archive without code; torch.jit.save writes it, not torch.save"
                )
            for entry in archive.infolist():
                _read_entry(archive, entry)
            ties = [name for name in names if name.endswith(f"/extra/{METADATA}")]
            return parse_ties(archive.read(ties[0])) if ties else {}
    except _UNREADABLE as error:
        is_zip = begins.startswith(b"PK")
        raise refusal(path, _ARCHIVE, (not is_zip and describe_bytes(begins)) or f"it is damaged: {error}") from error


def _read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    size = 0
    if entry.external_attr & _DIRECTORY:
        raise ValueError(f"{entry.filename} is marked as a folder")  # torch would leave a weight uninitialised
    with archive.open(entry) as content:
        while chunk := content.read(_CHUNK):  # the last one compares the checksum
            size += len(chunk)
    is_stored = entry.compress_type == zipfile.ZIP_STORED  # then torch goes by the other size
    if size != entry.file_size or (is_stored and size != entry.compress_size):
        raise EOFError(f"{entry.filename} has {size:,} bytes, expected {max(entry.file_size, entry.compress_size):,}")


# --- Treelite checkpoints ----------------------------------------------------------------------------------------
# Treelite's documentation, "Treelite Serialization Format v4"

_MAJOR, _LAST_VERSION = 4, 255
_REGRESSOR = 1  # TaskType
_LEAF, _NUMERICAL, _CATEGORICAL = range(3)  # TreeNodeType
_FLOATS: Mapping[int, np.dtype[Any]] = {2: np.dtype("<f4"), 3: np.dtype("<f8")}  # TypeInfo
_NUM_COMPARISONS = 5  # Operator, from 1
_POSTPROCESSORS = (
    b"identity", b"signed_square", b"hinge", b"sigmoid", b"exponential", b"exponential_standard_ratio",
    b"logarithm_one_plus_exp", b"identity_multiclass", b"softmax", b"multiclass_ova",
)  # fmt: skip


@dataclass(frozen=True)
class Forest:
    """What a Treelite checkpoint says of itself."""

    num_features: int
    is_regressor: bool  # with one score a row
    ties: Mapping[str, str]

    def check(self, spec: ModelSpec, path: Path, *, needs_regressor: bool) -> None:
        """Check that the forest at ``path`` takes what a model declares; with ``needs_regressor``, that it gives it.

        Raises:
            ArtifactError: it does not.
        """
        gives = "1 score" if self.is_regressor else "classes or several scores"
        takes_fit = [tensor.dims for tensor in spec.inputs] == [(self.num_features,)]
        gives_fit = self.is_regressor and [tensor.dims for tensor in spec.outputs] == [(1,)]
        if not takes_fit or (needs_regressor and not gives_fit):
            declared = ", ".join(f"{tensor.name} {list(tensor.dims)}" for tensor in (*spec.inputs, *spec.outputs))
            raise ArtifactError(
                f"{path} takes {self.num_features} features and gives {gives}; the config of {spec.name} declares"
                f" {declared}.",
                f"Export a regressor of that many features, or mend the dims. {MAKE_AGAIN}",
            )


def read_forest(path: Path) -> Forest:
    """Read a whole Treelite checkpoint and check that every walk through its trees ends at a finite leaf.

    Raises:
        ArtifactError: it is no such file, or damaged.
    """
    begins = check_file(path, _FOREST)
    try:
        return _read_forest(_Fields(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise refusal(path, _FOREST, describe_bytes(begins) or f"{error}") from error


class _Fields:
    """The fields of a checkpoint, one behind the other; a ``ValueError`` where they do not fit the file."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, dtype: npt.DTypeLike, count: int) -> _Array:
        """The next ``count`` numbers."""
        size = np.dtype(dtype).itemsize * count
        if size > len(self._data) - self._at:
            raise ValueError(f"it is cut off, or damaged: a field of {size:,} bytes begins at byte {self._at:,}")
        self._at += size
        return np.frombuffer(self._data, dtype, count, self._at - size) if count else np.empty(0, dtype)

    def scalar(self, dtype: npt.DTypeLike, known: Iterable[int] | None = None) -> int:
        """The next number, one of ``known``."""
        value = int(self.take(dtype, 1)[0])
        if known is not None and value not in known:
            raise ValueError(f"it is damaged: {value} before byte {self._at:,} means nothing")
        return value

    def array(self, dtype: npt.DTypeLike, *lengths: int) -> _Array:
        """The next array, of one of these lengths if any are given."""
        return self.take(dtype, self.scalar("<u8", lengths or None))

    def text(self) -> bytes:
        """The next string."""
        return bytes(self.array("u1"))

    def check(self, is_met: bool | np.bool_, what: str) -> None:
        """What was read last must meet a condition."""
        if not is_met:
            raise ValueError(f"it is damaged: {what} before byte {self._at:,}")

    def end(self) -> None:
        """No byte may be left."""
        self.check(self._at == len(self._data), f"{len(self._data) - self._at:,} bytes too many")


def _read_forest(fields: _Fields) -> Forest:
    version = fields.take("<i4", 3)
    if version[0] != _MAJOR or version.min() < 0 or version.max() > _LAST_VERSION:
        raise ValueError(f"it is of no Treelite {_MAJOR}")
    number = fields.scalar("u1", _FLOATS)
    fields.scalar("u1", (number,))  # thresholds and leaves are of one type
    num_trees, num_features, task = fields.scalar("<u8"), fields.scalar("<i4"), fields.scalar("u1", range(5))
    fields.scalar("u1", range(2))  # whether the trees' outputs are averaged
    num_targets = fields.scalar("<i4", range(1, 2**20))
    classes, shape = fields.array("<i4", num_targets), fields.array("<i4", 2)
    most = int(classes.max())
    fields.check(min(num_trees, num_features, int(classes.min())) > 0, "no trees, features or classes")
    fields.check(shape[0] in (1, num_targets) and shape[1] in (1, most), "an unknown shape of leaves")
    for size, width in ((num_targets, shape[0]), (most, shape[1])):  # which target and which class a tree is for
        index = fields.array("<i4", num_trees)
        lowest = -1 if shape.prod() > 1 and width == size else 0  # -1: for all of them, one leaf value each
        fields.check(index.min() >= lowest and index.max() < size, "a tree for a target or class that is none")
    fields.check(fields.text() in _POSTPROCESSORS, "an unknown postprocessor")
    fields.check(np.isfinite(fields.take("<f4", 2)).all(), "a parameter that is no finite number")
    fields.check(np.isfinite(fields.array("<f8", num_targets * most)).all(), "a base score that is no finite number")
    ties = parse_ties(fields.text())
    fields.scalar("<i4", (0,))  # fields of later versions
    for _ in range(num_trees):
        _read_tree(fields, _FLOATS[number], num_features, int(shape.prod()))
    fields.end()
    return Forest(num_features, (task, num_targets, most) == (_REGRESSOR, 1, 1), ties)


def _read_tree(fields: _Fields, number: np.dtype[Any], num_features: int, leaf_size: int) -> None:
    num_nodes, has_categories = fields.scalar("<i4", range(1, 2**31)), fields.scalar("u1", range(2))
    kind, left, right, split = (fields.array(dtype, num_nodes) for dtype in ("i1", "<i4", "<i4", "<i4"))
    is_leaf, is_numerical = kind == _LEAF, kind == _NUMERICAL
    children = np.concatenate([left[~is_leaf], right[~is_leaf]])
    fields.check(kind.min() >= 0 and kind.max() <= _CATEGORICAL, "an unknown kind of node")
    fields.check(has_categories == (kind == _CATEGORICAL).any(), "categories")
    fields.check((left[is_leaf] == -1).all() and (right[is_leaf] == -1).all(), "a leaf with children")
    fields.check(((children > 0) & (children < num_nodes)).all(), "a child that is none")
    fields.check(len(np.unique(children)) == len(children), "a node with two parents")  # so a walk never turns back
    fields.check(((split[~is_leaf] >= 0) & (split[~is_leaf] < num_features)).all(), "a feature that is none")
    fields.check((fields.array("u1", num_nodes) <= 1).all(), "where a missing value goes")
    values, thresholds, comparison = (fields.array(dtype, num_nodes) for dtype in (number, number, "i1"))
    fields.check(not np.isnan(thresholds[is_numerical]).any(), "a threshold that is no number")
    known = (comparison[is_numerical] > 0) & (comparison[is_numerical] <= _NUM_COMPARISONS)
    fields.check(known.all(), "an unknown comparison")
    fields.check((fields.array("u1", num_nodes) <= 1).all(), "where a category goes")
    vectors, sizes = _read_slices(fields, number, num_nodes)
    fields.check(np.isin(sizes[is_leaf], (leaf_size, 0 if leaf_size == 1 else leaf_size)).all(), "a leaf's size")
    for leaves in (vectors, values[is_leaf & (sizes == 0)]):
        fields.check((np.abs(leaves) <= GREATEST).all(), "a leaf that is no finite number")
    _read_slices(fields, "<u4", num_nodes)
    for dtype in ("<u8", "<f8", "<f8"):  # counts, Hessians and gains of training, each with whether it is known
        fields.array(dtype, 0, num_nodes)
        fields.array("u1", 0, num_nodes)
    fields.check((fields.take("<i4", 2) == 0).all(), "fields of a later version")


def _read_slices(fields: _Fields, dtype: npt.DTypeLike, num_nodes: int) -> tuple[_Array, _Array]:
    """The values of all nodes, and how many each node has."""
    values, begins, ends = fields.array(dtype), fields.array("<u8", num_nodes), fields.array("<u8", num_nodes)
    fields.check(((begins <= ends) & (ends <= len(values))).all(), "a list that ends beyond its end")
    return values, ends - begins
