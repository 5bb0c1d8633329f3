"""Check artifacts before they are composed: each file is complete and of the right kind, and all were made together.

No check needs torch or Treelite. For a user's own models, only the files that Triton's own backends read are checked;
all other files are left to the user's component.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from shoal.authoring.check.torchscript import Script, has_trunk
from shoal.authoring.repository.config import ModelConfig
from shoal.authoring.repository.devices import gpus_of
from shoal.authoring.repository.model_code import read_code
from shoal.authoring.repository.plan import AUTO, INT8, Plan, Precision
from shoal.authoring.repository.precision import choose_precision, is_dtype_chosen
from shoal.authoring.repository.versions import list_made
from shoal.errors import ArtifactError, InputError, ShoalError
from shoal.kit.component.files import MAKE_AGAIN, check_file, describe_bytes, describe_place, read_json, refusal
from shoal.kit.component.provenance import METADATA, check_tie, parse_ties, read_archive
from shoal.kit.forests.checkpoints import read_forest
from shoal.system.files import MAX_BINARY, read_bytes
from shoal.system.paths import shipped_root

REPORT = "report.json"
# Entry point group: functions of applications that check their own artifacts, given as paths by file name.
APPLICATIONS = "shoal.artifacts"


def check_artifacts(models: Sequence[ModelConfig], artifacts: Path | None, *, is_embedded: bool) -> None:
    """Check every artifact of ``models``, alone and together with the other artifacts.

    ``is_embedded`` is True if shoal's own backends will serve the models; these check more than the native backends.

    Raises:
        ArtifactError: an artifact is missing, damaged, of the wrong kind, or was made with another version of a file.
    """
    found = [(model, path) for model in models for path in find_artifacts(model, artifacts)]
    ties = {path: _read(model, path, is_embedded=is_embedded) for model, path in found}
    ours = {path.name: path for model, path in found if _is_ours(model)}
    for application in entry_points(group=APPLICATIONS):
        application.load()(ours)
    for path, wanted in ties.items():
        for name in wanted:
            check_tie(wanted, path, [other for other in ties if other.name == name])


def _places(model: ModelConfig, artifacts: Path | None, *, is_served: bool = False) -> list[list[Path]]:
    """Return the folders searched for the artifacts of each version: its own folder, then the artifact folder.

    A model folder with a ``model.pt`` of its own therefore keeps it, even if the artifact folder has a ``model.pt``,
    too.
    """
    return [[version, *([] if artifacts is None else [artifacts])] for version in list_made(model, is_served=is_served)]


def find_artifacts(model: ModelConfig, artifacts: Path | None) -> Iterator[Path]:
    """Yield the path of each artifact that a model has: in its version folders, else in the folder ``artifacts``."""
    found = (artifact.find(places) for places in _places(model, artifacts) for artifact in model.artifacts)
    yield from dict.fromkeys(path for paths in found for path in paths)


def check_present(models: Sequence[ModelConfig], artifacts: Path | None) -> None:
    """Check that each required artifact exists.

    Raises:
        InputError: ``artifacts`` is not a folder.
        ArtifactError: required artifacts are missing; the error names them.
    """
    if artifacts is not None and not artifacts.is_dir():
        raise InputError(f"{artifacts}, given for artifacts, is not a folder.", "Name the folder that holds them.")
    missing = {
        str(artifact): model
        for model in models
        for artifact in model.artifacts
        if artifact.is_required
        and not all(artifact.find(places) for places in _places(model, artifacts, is_served=True))
    }
    if missing:
        shown = ", ".join(f"{name} of {model.name}" for name, model in sorted(missing.items()))
        raise ArtifactError(
            f"Artifacts are missing: {shown}.",
            "Name the folder that holds them, --artifacts FOLDER, or put each into each version folder of its model.",
        )


def find_host_reasons(models: Sequence[ModelConfig], artifacts: Path | None) -> dict[str, str]:
    """Return why models compute on the host only, by name, for models whose artifacts give a reason (a clause)."""
    reasons = {}
    for model in models:
        code = read_code(model) if model.backend == "python" else ""
        for application in entry_points(group=APPLICATIONS) if code else ():
            if application.module.rpartition(".")[0] in code:
                with suppress(ShoalError):  # `check_artifacts` reports it
                    found = {path.name: path for path in find_artifacts(model, artifacts)}
                    reasons[model.name] = application.load()(found) or ""
    return reasons


def _is_ours(model: ModelConfig) -> bool:
    return model.folder.is_relative_to(shipped_root())


def _is_encoder(model: ModelConfig, path: Path) -> bool:
    return path.suffix == ".pt" and "pytorch" in (model.backend, model.platform.removesuffix("_libtorch"))


def find_scripts(model: ModelConfig, artifacts: Path | None) -> list[Path]:
    """Return the TorchScript files of an encoder, one for each version; empty for other models."""
    return [path for path in find_artifacts(model, artifacts) if _is_encoder(model, path)]


def _read(model: ModelConfig, path: Path, *, is_embedded: bool) -> Mapping[str, str]:
    """Check an artifact by reading all of it; returns the name and SHA-256 of each file that it was made with."""
    if _is_encoder(model, path):
        return read_archive(path)
    if path.suffix == ".onnx" and (
        model.backend in ("onnxruntime", "openvino") or model.platform == "onnxruntime_onnx"
    ):
        return read_onnx(path)
    if path.suffix == ".tl" and model.backend == "fil":
        forest = read_forest(path)
        if is_embedded:
            forest.check(model.spec, path)
        return forest.ties
    if not path.is_file():
        raise ArtifactError(f"{path} is not a file: it is {describe_place(path)}.", MAKE_AGAIN)
    return {}


def read_onnx(path: Path) -> dict[str, str]:
    """Return the name and SHA-256 of each file that an ONNX model was made with; empty if it does not list any.

    The result is also empty if the package onnx is not installed.

    Raises:
        ArtifactError: the file is not an ONNX model, or its list of files is damaged.
    """
    kind = "valid ONNX model"
    begins = check_file(path, kind)
    if find_spec("onnx") is None:
        return {}
    import onnx
    from google.protobuf.message import DecodeError

    try:
        entries = onnx.load_model_from_string(read_bytes(path, MAX_BINARY)).metadata_props
        return parse_ties(next((entry.value for entry in entries if entry.key == METADATA), ""))
    except OSError as error:
        raise refusal(path, kind, f"it cannot be read: {error.strerror}") from error
    except DecodeError as error:
        raise refusal(path, kind, describe_bytes(begins) or "it is cut off, or another kind of file") from error
    except (ValueError, RecursionError) as error:
        raise refusal(path, kind, str(error)) from error


def choose_precisions(models: Sequence[ModelConfig], artifacts: Path | None, plan: Plan) -> dict[str, Precision]:
    """Choose the dtype of each TorchScript encoder and, if the plan gives one, of each engine, by model name.

    The plan's precision of a single model comes first.

    Raises:
        InputError: the plan asks for BF16 or FP16, and there is no model that can compute in it.
    """
    found = {}
    for model in models:
        if plan.dtype not in (AUTO, INT8) and is_dtype_chosen(model):
            found[model.name] = Precision(plan.dtype, f"--dtype {plan.dtype}")
        for path in find_artifacts(model, artifacts):
            if _is_encoder(model, path):
                chosen = choose_precision(
                    plan, is_imported=path.parent != artifacts, has_trunk=partial(converts, path), gpus=gpus_of(model)
                )
                if model.name not in found or chosen.dtype == "fp32":  # which suits every version
                    found[model.name] = chosen
    if plan.dtype not in (AUTO, "fp32", INT8) and not found:
        raise InputError(
            f"No model can run in dtype {plan.dtype}: only models of shoal's pytorch backend can, and engines with the"
            " parameter dtype; there is none.",
            "Leave the dtype out.",
        )
    return found | {name: own.precision for name, own in plan.tuning.items() if own.precision}


def converts(path: Path) -> bool:
    """Whether an encoder can be converted to BF16: whether its code declares ``trunk``, a submodule of the root."""
    with closing(Script(path)) as script:
        root = script.find_class(script.main)
    return root is not None and has_trunk(root)


def read_contents(artifacts: Path | None) -> Mapping[str, str]:
    """Read the description of each model's content from the training report in ``artifacts``; empty without a report.

    Raises:
        ArtifactError: the report is damaged.
    """
    path = (artifacts or Path()) / REPORT
    report = read_json(path, "training report") if artifacts and os.path.lexists(path) else {}
    contents = report.get("contents", {})
    if not isinstance(contents, dict) or not all(isinstance(text, str) for text in contents.values()):
        raise refusal(path, "training report", "its contents are not texts by name")
    return contents
