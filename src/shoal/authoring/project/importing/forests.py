"""Import of forests as model folders for Triton's FIL backend: a Treelite checkpoint and its configuration."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.authoring.project.importing.boosters import read_lightgbm, read_xgboost
from shoal.authoring.project.importing.estimators import import_estimator, read_lightgbm_object, read_xgboost_object
from shoal.authoring.project.importing.imported import MAX_BATCH_SIZE, Imported, make_config, write_labels
from shoal.authoring.project.importing.isolated_reader import CHECKPOINT, load_checkpoint, read_apart, refuse
from shoal.authoring.project.importing.verify_forest import Found, write_proven
from shoal.errors import InputError, needs
from shoal.kit.component.spec import TensorSpec
from shoal.kit.forests.checkpoints import Forest, Task
from shoal.system.files import MAX_BINARY, read_bytes

_MOST_LABELS = 10  # that a note for the user lists


def draft_forest(
    source: Any, name: str, *, labels: Sequence[str] | None = None, max_batch_size: int = MAX_BATCH_SIZE
) -> Imported:
    """Draft the model folder of a forest, which takes ``input__0``, FP32 ``[features]``.

    It returns ``output__0``, FP32: ``[1]`` for a regressor, which answers like its library's ``predict``, or
    ``[classes]`` for a classifier, which answers like ``predict_proba``. The answers differ by at most 1e-5 (relative
    for scores beyond 1) from the library's answers to the same rows in FP32. This is checked first if ``source`` is a
    skops file or an object of scikit-learn, XGBoost or LightGBM.

    ``source`` is a file (XGBoost ``.json`` or ``.ubj``, LightGBM ``.txt``, Treelite ``.tl``, scikit-learn ``.skops``)
    or an object of one of these libraries. ``labels`` are the class names, in order; they become the parameter
    ``labels``, a JSON list, and the file of ``label_filename``. Their default is the estimator's own class names; files
    of XGBoost and LightGBM have none.

    Raises:
        InputError: an option does not fit the model, or ``source`` is not a forest.
        ArtifactError: the forest is damaged or lacks information needed to serve it, or its answers would differ from
            the library's because of its objective, linear leaves, several targets, or categories that are not whole
            numbers.
        SetupError: a library that reads the forest is not installed.
    """
    with needs("serve"):
        import treelite  # noqa: F401
    found = _find_forest(source)
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        path = Path(folder) / CHECKPOINT
        forest, proven = write_proven(found, path)
        content = path.read_bytes()
    _check_forest(forest, found)
    width = _width(forest, found)
    chosen = _choose_labels(labels, found, width)
    parameters = {"model_type": "treelite_checkpoint", "storage_type": "AUTO", "output_class": "false"}
    if found.is_classifier:
        parameters |= {"output_class": "true", "predict_proba": "true", "threshold": "0.5"}
    message = make_config(
        name,
        "fil",
        [TensorSpec("input__0", "TYPE_FP32", (forest.num_features,))],
        [TensorSpec("output__0", "TYPE_FP32", (width,))],
        artifact=CHECKPOINT,
        max_batch_size=max_batch_size,
        parameters=parameters,
    )
    said = (found.what, *_describe(forest, found, width, chosen), *found.said, *proven)
    beside = {} if chosen is None else write_labels(message, chosen)
    return Imported(message, {f"1/{CHECKPOINT}": content, **beside}, said)


def _find_forest(source: Any) -> Found:
    """Read the forest from a file or an object."""
    if isinstance(source, str | Path):
        return _read_file(Path(source))
    packages = {parent.__module__.partition(".")[0] for parent in type(source).__mro__}
    if "treelite" in packages:
        return _read_checkpoint(source.serialize_bytes(), "the Treelite model")
    if "lightgbm" in packages:
        return read_lightgbm_object(source)
    if "xgboost" in packages:
        return read_xgboost_object(source)
    return import_estimator(source)


def _read_bytes(path: Path) -> bytes:
    try:
        return read_bytes(path, MAX_BINARY)
    except OSError as error:
        raise refuse(str(path), f"{error.strerror}") from error


def _read_file(path: Path) -> Found:
    suffix, name, content = path.suffix.lower(), str(path), _read_bytes(path)
    if not content:
        raise refuse(name, "it is empty")
    if content.startswith(b"\x80"):
        raise InputError(
            f"{path} is a pickle, which runs code when it is read.",
            "If you trust it, read it yourself, and give the object: shoal.add_model(model, NAME); or save it with"
            " skops.io.dump.",
        )
    if suffix == ".tl":
        return _read_checkpoint(content, name)
    if suffix == ".skops":
        model, learnt = read_apart("skops", content, name)
        labels = learnt["labels"] and tuple(learnt["labels"])
        return Found(name, model, learnt["what"], labels is not None, tuple(learnt["said"]), labels)
    return read_lightgbm(content, name) if suffix == ".txt" else read_xgboost(content, name)


def _read_checkpoint(content: bytes, name: str) -> Found:
    """Read a Treelite checkpoint. It has no objective; its task and postprocessor decide whether it is a classifier."""
    model, forest = load_checkpoint(content, name)
    is_chance = forest.postprocessor in ("sigmoid", "hinge") or forest.is_mean
    is_classifier = forest.task == Task.MULTICLASS or (forest.task == Task.BINARY and is_chance)
    task = forest.task.name.lower()
    what = f"Treelite, task {task}, postprocessor {forest.postprocessor}, {model.num_tree:,} trees"
    return Found(name, model, what, is_classifier)


def _check_forest(forest: Forest, found: Found) -> None:
    if forest.num_targets > 1:
        raise refuse(
            found.name, f"it predicts {forest.num_targets} targets, and FIL supports one", "Train a forest for each."
        )
    if forest.task == Task.MULTICLASS and forest.num_classes < 2:
        raise refuse(found.name, "it has only one class", "Train it on rows of two classes.")


def _width(forest: Forest, found: Found) -> int:
    return max(2, forest.num_classes) if found.is_classifier else 1


def _choose_labels(given: Sequence[str] | None, found: Found, width: int) -> list[str] | None:
    if given is None:
        return None if found.labels is None else list(found.labels)
    if not found.is_classifier:
        raise InputError(f"labels are given; {found.name} has no classes.", "Leave them out.")
    if len(given) != width:
        raise InputError(
            f"{len(given)} labels are given; {found.name} has {width} classes.", "Name each class, in their order."
        )
    return list(given)


def _describe(forest: Forest, found: Found, width: int, labels: Sequence[str] | None) -> tuple[str, ...]:
    takes = f"input__0 FP32 [{forest.num_features}]: its number of features"
    if not found.is_classifier:
        is_isolation = forest.postprocessor == "exponential_standard_ratio"
        score = "-score_samples: higher is more unusual" if is_isolation else "as in predict"
        return takes, f"output__0 FP32 [1]: its score, {score}"
    gives = f"output__0 FP32 [{width}]: the probabilities of its {width} classes, as in predict_proba"
    if labels is None:
        return takes, gives, "the file does not name the classes: give labels, or use their numbers"
    return takes, gives, f"labels: {', '.join(labels[:_MOST_LABELS])}{', …' if len(labels) > _MOST_LABELS else ''}"
