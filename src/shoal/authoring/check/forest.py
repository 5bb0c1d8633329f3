"""Rules for forests on Triton's FIL backend. It checks few of them at load; a model that breaks one answers wrongly.

Forest files are read without the libraries that wrote them, in each format that FIL reads. A value that is absent, or
beyond the bytes read, is None, and rules that need it are skipped.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.authoring.check.boosters import read_fields, read_lightgbm_head, read_xgboost_head
from shoal.authoring.check.findings import Findings, Place, Rule, Severity
from shoal.authoring.check.models import Model, Repository
from shoal.authoring.environment.targets import Target
from shoal.authoring.repository.parameters import read_alone
from shoal.errors import ArtifactError
from shoal.kit.component.files import describe_bytes
from shoal.kit.forests.checkpoints import Task, parse_forest
from shoal.system.files import open_regular, parse_json, read_bytes

BACKEND = "fil"
_PARAMETER = 'parameters {{ key: "{}" value {{ string_value: "{}" }} }}'

TENSORS = Rule("fil-tensors", Severity.ERROR)
FEATURES = Rule("fil-features", Severity.ERROR)
MODEL_TYPE = Rule("fil-model-type", Severity.ERROR)
TASK = Rule("fil-task", Severity.ERROR)
VERSION = Rule("treelite-version", Severity.ERROR)
UNREADABLE = Rule("forest-unreadable", Severity.ERROR)

_FIRST_UBJSON = (24, 10)
_FIRST_CLASSIFIER = (25, 9)  # is_classifier replaces output_class, which is still accepted
_BACKEND_IN_PYTHON = (((4, 0), (5, 0)),)  # shoal's own, in place of FIL: shoal.kit.forests.checkpoints

# By `model_type`: the file that FIL reads. Source: fil_backend, src/model.h: model_file.
FILES: Mapping[str, str] = {
    "xgboost": "xgboost.model",
    "xgboost_json": "xgboost.json",
    "xgboost_ubj": "xgboost.ubj",
    "lightgbm": "model.txt",
    "treelite_checkpoint": "checkpoint.tl",
}
_MAX_JSON, _MAX_CHECKPOINT = 32 * 2**20, 512 * 2**20  # bytes; smaller files are read whole, in a second at most
_HEAD, _TAIL = 2**16, 2**20
_READER = 4  # major version of Treelite whose checkpoints are read here; of others, only the version is read


def find(model: Model, repository: Repository) -> Findings:
    """Find settings of a forest that FIL does not support, or that do not fit the forest's file."""
    if model.message is None or model.backend != BACKEND:
        return
    target = repository.target
    yield from _find_tensors(model)
    yield from _find_settings(model, target)
    model_type = model.parameters.get("model_type", "xgboost")
    if model_type not in FILES:
        yield MODEL_TYPE.at(_at(model, "model_type"), f"Unknown model_type {model_type}.", _known())
        return
    if model_type == "xgboost_ubj" and target and target.release < _FIRST_UBJSON and not _is_in_python(model, target):
        what = f"xgboost_ubj is supported from 24.10 on; the target is {target.version}."
        yield MODEL_TYPE.at(_at(model, "model_type"), what, "Save the model as xgboost.json, model_type xgboost_json.")
    if model.is_model_folder:
        return  # compose adds its file
    for version in model.served_versions:
        yield from _find_file(model, model.folder / str(version), model_type, target)


def _known() -> str:
    return f"Known: {', '.join(FILES)}."


def _at(model: Model, parameter: str) -> Place:
    is_there = parameter in model.parameters
    return model.at_entry("parameters", key=parameter) if is_there else model.at("backend")


def _is_in_python(model: Model, target: Target | None) -> bool:
    """Whether shoal's own backend, which is written in Python, serves the forest in place of FIL."""
    return model.message.runtime.endswith(".py") or (target is not None and target.is_embedded)


def _find_tensors(model: Model) -> Findings:
    explanation = [spec for spec in model.outputs if spec.name == "treeshap_output"]
    outputs = [spec for spec in model.outputs if spec not in explanation]
    for kind, tensors, wanted in (("input", list(model.inputs), "input__0"), ("output", outputs, "output__0")):
        if len(tensors) != 1:
            place = model.at(kind) if tensors else model.at("backend")
            yield TENSORS.at(place, f"Declared {kind}s: {len(tensors)}.", f"Declare one, {wanted}.")
            continue
        index = list(model.inputs if kind == "input" else model.outputs).index(tensors[0])
        if tensors[0].name != wanted:
            what = f"The {kind} is called {tensors[0].name}."
            yield TENSORS.at(model.at(kind, index, "name"), what, f"Call it {wanted}.")
        if tensors[0].dtype != "TYPE_FP32":
            what = f"{tensors[0].name} is declared {tensors[0].dtype}."
            yield TENSORS.at(model.at(kind, index, "data_type"), what, "Declare it TYPE_FP32.")


def _find_settings(model: Model, target: Target | None) -> Findings:
    """Find wrong or missing parameters with which FIL does not load; shoal's own backend requires no parameter."""
    given = model.parameters
    for name in ("output_class", "is_classifier", "predict_proba", "xgboost_allow_unknown_field"):
        if given.get(name, "true") not in ("true", "false"):
            yield TASK.at(_at(model, name), f"{name} is {given[name]!r}.", "Write true or false, in lower case.")
    assert model.config is not None
    try:
        read_alone(model.config.spec, "threshold").number("threshold", 0.5)
    except ArtifactError as error:
        yield TASK.at(_at(model, "threshold"), error.what, error.fix)
    if _is_in_python(model, target):
        return
    is_new = target is not None and target.release >= _FIRST_CLASSIFIER
    if "output_class" not in given and ("is_classifier" not in given or (target is not None and not is_new)):
        name = "is_classifier" if is_new else "output_class"
        what = f"The parameter {name} is missing; FIL does not load without it."
        if "is_classifier" in given:
            what = (
                f"is_classifier is supported from 25.09 on; FIL of {target and target.version} requires output_class."
            )
        yield TASK.at(_at(model, "is_classifier"), what, f"Add {_PARAMETER.format(name, 'true')}, or false.")
    name = "output_class" if "output_class" in given else "is_classifier"
    if given.get(name) == "true" and "threshold" not in given:
        what = f"With {name}, FIL does not load without a threshold, though its documentation calls it optional."
        yield TASK.at(_at(model, name), what, f"Add {_PARAMETER.format('threshold', '0.5')}.")


def _find_file(model: Model, folder: Path, model_type: str, target: Target | None) -> Findings:
    name = model.message.default_model_filename or FILES[model_type]
    path = folder / name
    try:
        if not path.is_file():
            yield from _find_other(model, path, model_type)
            return
        trees = read_trees(path, model_type)
    except UnreadableError as error:
        yield UNREADABLE.at(Place(path), f"For model_type {model_type}, {error}.", "Export the forest again.")
        return
    except OSError as error:
        yield UNREADABLE.at(Place(path), f"It cannot be read: {error.strerror}.", "Let the server's user read it.")
        return
    yield from _find_version(model, path, trees, target)
    yield from _find_width(model, path, trees)
    yield from _find_task(model, path, trees, target)


def _find_other(model: Model, path: Path, model_type: str) -> Findings:
    other = next((kind for kind, name in FILES.items() if (path.parent / name).is_file()), "")
    said = "" if "model_type" in model.parameters else " (the default)"
    there = f"; {FILES[other]} is" if other else ""
    fix = f"Write model_type {other}." if other else f"Put {path.name} there, or name another model_type. {_known()}"
    what = f"model_type {model_type}{said} reads {path.name}, which is not in {path.parent.name}/{there}."
    yield MODEL_TYPE.at(_at(model, "model_type"), what, fix)


def _find_version(model: Model, path: Path, trees: Trees, target: Target | None) -> Findings:
    if trees.version is None:
        return
    is_ours = _is_in_python(model, target)
    if target is None and not is_ours:
        return
    readable: Any = _BACKEND_IN_PYTHON if is_ours or target is None else target.row.treelite
    if any(low <= trees.version[:2] < high for low, high in readable):
        return
    known = ", ".join(f"{low[0]}.{low[1]} to below {high[0]}.{high[1]}" for low, high in readable)
    who = "shoal's backend" if is_ours else f"FIL of {target.version}" if target else ""
    version = ".".join(map(str, trees.version))
    what = f"It was written by Treelite {version}; {who} reads {known}."
    yield VERSION.at(Place(path), what, "Import the model again with such a Treelite, and serialize it.")


def _find_width(model: Model, path: Path, trees: Trees) -> Findings:
    if not trees.num_features or len(model.inputs) != 1:
        return
    width = _width(model, "input", 0)
    if width is not None and width != trees.num_features:
        what = f"{model.inputs[0].name} has {width} values per row; {path.name} has {trees.num_features} features."
        yield FEATURES.at(model.at("input", 0, "dims"), what, f"Write dims: [ {trees.num_features} ].")


def _width(model: Model, kind: str, index: int) -> int | None:
    """Return the number of values per row in a tensor; None if it varies, or if ``reshape`` changes the shape."""
    tensor = getattr(model.message, kind)[index]
    if tensor.HasField("reshape") or not tensor.dims or min(tensor.dims) < 0:
        return None
    width = 1
    for dim in tensor.dims:
        width *= int(dim)
    return width


def _find_task(model: Model, path: Path, trees: Trees, target: Target | None) -> Findings:
    if trees.num_targets > 1:
        what = f"{path.name} predicts {trees.num_targets} targets; FIL supports one."
        yield TASK.at(Place(path), what, "Train a forest for each target.")
        return
    given = model.parameters
    is_class = given.get("is_classifier", given.get("output_class")) == "true"
    gives_chances = given.get("predict_proba") == "true"
    if trees.task == Task.REGRESSION and (is_class or gives_chances):
        for name in ("output_class", "is_classifier", "predict_proba"):
            if given.get(name) == "true":
                yield TASK.at(_at(model, name), f"{path.name} is a regressor, and {name} is true.", "Write false.")
        return
    index = next((i for i, spec in enumerate(model.outputs) if spec.name == "output__0"), None)
    width = _width(model, "output", index) if index is not None else None
    widths = sorted(_widths(trees, target, is_class=is_class, gives_chances=gives_chances))
    if index is not None and width is not None and widths and width not in widths:
        kinds = {
            Task.BINARY: "two classes",
            Task.MULTICLASS: f"{trees.num_classes} classes",
            Task.REGRESSION: "one score",
        }
        kind = kinds[trees.task or Task.BINARY]
        what = f"output__0 has {width} values per row; {path.name} has {kind}, and gives {widths[0]} as configured."
        yield TASK.at(model.at("output", index, "dims"), what, f"Write dims: [ {widths[0]} ].")


def _widths(trees: Trees, target: Target | None, *, is_class: bool, gives_chances: bool) -> Iterator[int]:
    """Yield the possible numbers of values per row in the output, for a forest's task and these settings."""
    if trees.task == Task.REGRESSION or (
        trees.task in (Task.BINARY, Task.MULTICLASS) and is_class and not gives_chances
    ):
        yield 1
    elif trees.task == Task.MULTICLASS and trees.num_classes:
        yield trees.num_classes
    elif trees.task == Task.BINARY:
        is_new = target is None or target.release >= _FIRST_CLASSIFIER  # earlier releases always wrote both classes
        if not gives_chances or is_new:
            yield 1
        if gives_chances:
            yield 2


# --- headers of forest files ----------------------------------------------------------------------------------------


class UnreadableError(ValueError):
    """Error for a file that is damaged or of another kind. Its message begins with "it", as in "it is empty"."""


@dataclass(frozen=True)
class Trees:
    """Header of a forest's file; None means unknown. ``num_classes`` is 1 for a binary classifier and a regressor."""

    num_features: int | None = None
    task: Task | None = None
    num_classes: int | None = None
    num_targets: int = 1
    version: tuple[int, int, int] | None = None  # of the Treelite that wrote it


def read_trees(path: Path, model_type: str) -> Trees:
    """Read the header of a forest's file, which has the format of FIL's ``model_type``.

    Raises:
        UnreadableError: the file is of another format, or damaged.
        OSError: the file cannot be read.
    """
    size = path.stat().st_size
    with open_regular(path) as file:
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
        forest = parse_forest(read_bytes(path, _MAX_CHECKPOINT))
    except ValueError as error:
        raise UnreadableError(str(error)) from None
    return Trees(forest.num_features, forest.task, forest.num_classes, forest.num_targets, version)


def _read_json(path: Path, head: bytes, tail: bytes, size: int) -> Trees:
    if not head.lstrip().startswith(b"{") or head.startswith((b"{L", b"{i", b"{U", b"{l")):
        is_ubjson = head.startswith(b"{")
        raise UnreadableError("it is UBJSON, which is model_type xgboost_ubj" if is_ubjson else "it is not JSON")
    if size > _MAX_JSON:  # XGBoost writes this parameter after the trees
        found = re.search(rb'"learner_model_param"\s*:\s*\{[^{}]*"num_feature"\s*:\s*"?(\d{1,9})', tail)
        return Trees(int(found[1])) if found else Trees()
    try:
        learner = parse_json(read_bytes(path, _MAX_JSON))["learner"]
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
    """Return the task of an XGBoost or LightGBM objective; None if the objective's name does not show the task."""
    if objective in ("multi:softmax", "multi:softprob", "multiclass"):
        return Task.MULTICLASS
    if objective in ("binary:logistic", "binary"):
        return Task.BINARY
    is_regressor = objective.startswith(("reg:", "regression", "count:", "survival:")) and objective != "reg:logistic"
    return Task.REGRESSION if is_regressor else None
