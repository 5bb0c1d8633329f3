"""Headers of forest files, in each format that Triton's FIL backend reads, without the libraries that wrote them.

Values that are absent, or beyond the bytes read, are None: nothing is concluded from them.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.component.artifact_files import describe_bytes
from shoal.errors import ArtifactError
from shoal.forests.boosters import read_fields, read_lightgbm_head, read_xgboost_head
from shoal.forests.checkpoints import Task, read_forest

# By `model_type`, the file that it reads: fil_backend, src/model.h: model_file.
FILES: Mapping[str, str] = {
    "xgboost": "xgboost.model",
    "xgboost_json": "xgboost.json",
    "xgboost_ubj": "xgboost.ubj",
    "lightgbm": "model.txt",
    "treelite_checkpoint": "checkpoint.tl",
}
_MAX_JSON, _MAX_CHECKPOINT = 32 * 2**20, 512 * 2**20  # bytes of files that are read whole, in a second at most
_HEAD, _TAIL = 2**16, 2**20
_READER = 4  # the Treelite whose checkpoints are understood here; of others the version alone is read


class UnreadableError(ValueError):
    """Error for a file that is damaged or of another kind. Its text begins with "it", such as "it is empty"."""


@dataclass(frozen=True)
class Trees:
    """``num_classes`` is 1 for a binary classifier and for a regressor."""

    num_features: int | None = None
    task: Task | None = None
    num_classes: int | None = None
    num_targets: int = 1
    version: tuple[int, int, int] | None = None  # of the Treelite that wrote it


def read_trees(path: Path, model_type: str) -> Trees:
    """Read a file of trees.

    Raises:
        UnreadableError: it is of another kind, or damaged.
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_HEAD)
        file.seek(max(0, size - _TAIL))
        tail = file.read(_TAIL)
    if not head:
        raise UnreadableError("it is empty")
    odd = describe_bytes(head[:32])
    if odd and model_type != "xgboost":
        raise UnreadableError(odd)
    if model_type == "treelite_checkpoint":
        return _read_checkpoint(path, head, size)
    if model_type == "xgboost_json":
        return _read_json(path, head, tail, size)
    if model_type == "xgboost_ubj" and not head.startswith(b"{"):
        raise UnreadableError("it is not UBJSON")
    if model_type == "lightgbm":
        return _read_text(head)
    return Trees()


def _read_checkpoint(path: Path, head: bytes, size: int) -> Trees:
    if len(head) < 12:
        raise UnreadableError(f"it has {len(head)} bytes, and a checkpoint begins with a version of 12")
    major, minor, patch = struct.unpack_from("<3i", head)
    if not (0 < major < 100 and 0 <= minor < 1000 and 0 <= patch < 1000):
        raise UnreadableError("it is not a Treelite checkpoint: it does not begin with a version")
    version = (major, minor, patch)
    if major != _READER or size > _MAX_CHECKPOINT:
        return Trees(version=version)
    try:
        forest = read_forest(path)
    except ArtifactError as error:
        raise UnreadableError(error.what.partition(": ")[2].rstrip(".") or error.what) from None
    return Trees(forest.num_features, forest.task, forest.num_classes, forest.num_targets, version)


def _read_json(path: Path, head: bytes, tail: bytes, size: int) -> Trees:
    if not head.lstrip().startswith(b"{") or head.startswith((b"{L", b"{i", b"{U", b"{l")):
        is_ubjson = head.startswith(b"{")
        raise UnreadableError("it is UBJSON, which is model_type xgboost_ubj" if is_ubjson else "it is not JSON")
    if size > _MAX_JSON:  # XGBoost writes this parameter after the trees
        found = re.search(rb'"learner_model_param"\s*:\s*\{[^{}]*"num_feature"\s*:\s*"?(\d{1,9})', tail)
        return Trees(int(found[1])) if found else Trees()
    try:
        learner = json.loads(path.read_bytes())["learner"]
        num_features = int(learner["learner_model_param"]["num_feature"])
    except json.JSONDecodeError as error:
        raise UnreadableError(f"it is not JSON, or cut off: {error.msg} at character {error.pos:,}") from None
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise UnreadableError("it is JSON, but not an XGBoost model") from error
    try:
        about = read_xgboost_head(learner)
    except (LookupError, TypeError, ValueError):
        return Trees(num_features or None)
    return Trees(num_features or None, _task(about.objective), about.num_classes, about.num_targets)


def _read_text(head: bytes) -> Trees:
    if not head.startswith(b"tree"):
        raise UnreadableError("it is not a LightGBM text model: it does not begin with 'tree'")
    try:
        about = read_lightgbm_head(read_fields(head.decode("utf-8", "replace").partition("\nTree=")[0]))
    except (LookupError, ValueError):
        return Trees()
    return Trees(about.num_features, _task(about.objective.split(" ")[0]), about.num_classes)


def _task(objective: str) -> Task | None:
    """The task of an XGBoost or LightGBM objective, where its name shows it."""
    if objective in ("multi:softmax", "multi:softprob", "multiclass"):
        return Task.MULTICLASS
    if objective in ("binary:logistic", "binary"):
        return Task.BINARY
    is_regressor = objective.startswith(("reg:", "regression", "count:", "survival:")) and objective != "reg:logistic"
    return Task.REGRESSION if is_regressor else None
