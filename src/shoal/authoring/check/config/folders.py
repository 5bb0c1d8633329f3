"""Rules for a model's folder: its name, its versions, and the files that the backend opens."""

from __future__ import annotations

import re
from contextlib import suppress
from math import prod

from shoal.authoring.check.config.checkpoints import DIVIDED, FASTER, PATHS
from shoal.authoring.check.findings import Findings, Place, Rule, Severity
from shoal.authoring.check.models import Model, Repository, entries, exists, is_file
from shoal.authoring.repository.config import CONFIG
from shoal.kit.component.files import describe_place
from shoal.system.files import read_bytes

NAME = Rule("folder-name", Severity.ERROR, is_core=True)
NO_VERSION = Rule("no-version", Severity.ERROR, is_core=True)
IGNORED = Rule("version-folder-ignored", Severity.WARNING)
MISREAD = Rule("version-folder-misread", Severity.ERROR)
POLICY = Rule("version-policy-absent", Severity.WARNING)
FILE = Rule("model-file-missing", Severity.ERROR)
LABELS = Rule("label-file-missing", Severity.ERROR, is_core=True)
COUNT = Rule("label-count", Severity.ERROR)
LINE_ENDS = Rule("label-line-ends", Severity.ERROR)
INCOMPLETE = Rule("config-incomplete", Severity.ERROR)
STRAY = Rule("not-a-model", Severity.ERROR, is_core=True)

# Backend: the file names of which it opens one in a version folder, unless default_model_filename is set.
_FILES = {
    "python": ("model.py",),
    "pytorch": ("model.pt", "model.pt2", "model.py"),
    "onnxruntime": ("model.onnx",),
    "tensorrt": ("model.plan",),
    "openvino": ("model.xml",),
}
_LIKE_A_VERSION = re.compile(r"0[0-9]+|[vV][0-9]+|latest")


def find(model: Model, repository: Repository) -> Findings:
    """Find mistakes in a model's folder."""
    if not model.is_model_folder:
        yield from _name(model)
        if not model.path.exists() and not model.versions:
            yield STRAY.at(
                Place(model.folder),
                f"Poll failed for model directory '{model.name}': it has neither a {CONFIG} nor a version folder.",
                "Move it out of the repository.",
            )
            return
        yield from _completeness(model, is_embedded=repository.target is not None and repository.target.is_embedded)
        yield from _versions(model)
        yield from _labels(model)
    yield from _files(model)


def _completeness(model: Model, *, is_embedded: bool) -> Findings:
    """Find a configuration under another name, and what only a server that completes configurations can load."""
    if not model.path.exists():
        places = [path for folder in (model.folder, *model.version_folders) for path in entries(folder)]
        near = next((path for path in places if path.name.lower().removesuffix(".txt") == CONFIG), None)
        if near:
            what = f"Triton does not read {near.relative_to(model.folder.parent)} as the configuration of {model.name}"
            yield INCOMPLETE.at(Place(near), f"{what}.", f"Rename it: {model.name}/{CONFIG}")
        elif is_embedded or (model.is_python and not model.is_undeclared):
            who = "the embedded Triton" if is_embedded else "its model.py"
            what = f"{model.name} has no {CONFIG}, and {who} completes none"
            yield INCOMPLETE.at(Place(model.folder), f"{what}.", "Write it, with its backend, inputs and outputs.")
    elif is_embedded and model.message is not None and model.is_undeclared:
        what = f"{model.name} does not declare its inputs and outputs, and the embedded Triton completes no {CONFIG}"
        yield INCOMPLETE.at(Place(model.path), f"{what}.", "Write them: input { name: ... data_type: ... dims: ... }")


def _name(model: Model) -> Findings:
    if model.message is not None and model.message.name not in ("", model.folder.name):
        yield NAME.at(
            model.at("name"),
            f"unexpected directory name '{model.folder.name}' for model '{model.message.name}', directory name must"
            " equal model name.",
            f'Write name: "{model.folder.name}", or remove the name.',
        )


def _versions(model: Model) -> Findings:
    for path in entries(model.folder):
        if path.is_dir() and _LIKE_A_VERSION.fullmatch(path.name):
            fix = f"Rename it to {re.sub(r'[^0-9]', '', path.name).lstrip('0') or '1'}."
            yield IGNORED.at(Place(path), f"ignore version directory '{path.name}' of {model.name}.", fix)
    latest = max([*model.versions, *(number for _, number in model.misread)], default=0)
    for name, number in model.misread:
        if model.backend == FASTER and DIVIDED.fullmatch(name):
            continue  # its weights; the backend opens nothing in a version folder
        if number == latest and number not in model.versions:
            yield MISREAD.at(
                Place(model.folder / name),
                f"Triton takes '{name}' for version {number} of {model.name}, and looks for {model.name}/{number}/.",
                "Move it out of the model's folder, or rename it: the name must not begin with a digit.",
            )
    if not model.served_versions and not model.misread and not _has_agents(model):
        place = model.at("version_policy") if model.versions else Place(model.folder)
        missing = f"it takes none of {list(model.versions)}" if model.versions else "it has no numbered folder"
        wanted = min(model.message.version_policy.specific.versions, default=1) if model.message is not None else 1
        yield NO_VERSION.at(
            place,
            f"at least one version must be available under the version policy of model '{model.name}': {missing}.",
            "Remove version_policy: by default it is the latest."
            if model.versions
            else f"Make {model.name}/{wanted}/ with {'a file .gitkeep in it' if model.is_ensemble else 'its file'}.",
        )
        return
    for version in model.message.version_policy.specific.versions if model.message is not None else ():
        if version not in model.versions:
            yield POLICY.at(
                model.at("version_policy"),
                f"version {version} is specified for model '{model.name}', but the version directory is not present.",
                f"Remove {version}, or add {model.name}/{version}/.",
            )


def _labels(model: Model) -> Findings:
    for index, tensor in enumerate(model.message.output if model.message is not None else ()):
        name = tensor.label_filename
        if name and not is_file(model.folder / name):
            yield LABELS.at(
                model.at("output", index, "label_filename"),
                f"failed to open text file for read: {model.name}/{name} does not exist.",
                f"Put {name} next to {CONFIG}, or remove label_filename.",
            )
        elif name:
            with suppress(OSError):
                text = read_bytes(model.folder / name)
                if b"\r" in text:
                    what = f"Lines of {model.name}/{name} end with a carriage return, which becomes part of the labels."
                    fix = f"sed -i 's/\\r$//' {model.folder / name}"
                    yield LINE_ENDS.at(Place(model.folder / name), what, fix)
                number, classes = len(text.splitlines()), prod(tensor.dims)
                if number < classes:
                    what = f"{model.name}/{name} has {number} lines, and {tensor.name} has {classes} classes."
                    yield COUNT.at(Place(model.folder / name), what, "Write one label per line, from class 0 on.")


def _files(model: Model) -> Findings:
    for version in model.versions:
        folder = model.folder / str(version)
        names = {path.name for path in entries(folder)}
        expected = _expected(model) if version in model.served_versions else ()
        if expected == ("model.onnx",) and (folder / expected[0]).is_dir():
            expected = ("model.onnx/model.onnx",)  # the backend opens the file in the folder
        for path in (folder / name for name in expected):
            if exists(path) and not is_file(path) and (path.suffix in (".py", ".pt") or not path.is_dir()):
                what = f"{model.name}/{version}/{path.name} is {describe_place(path)}"
                yield FILE.at(Place(path), f"{what}, and backend {model.backend} opens a file.", "Put the file there.")
        if "model.xml" in names and expected == ("model.xml",) and not exists(folder / "model.bin"):
            what = f"{model.name}/{version}/ does not contain model.bin, the weights of model.xml."
            yield FILE.at(Place(folder), what, "Put both files there.")
        if expected and not any(exists(folder / name) for name in expected):
            yield FILE.at(
                Place(folder),
                f"{model.name}/{version}/ does not contain {' or '.join(expected)}, which backend {model.backend} opens"
                f"{_found(names)}.",
                f"Put {expected[0]} there, or name the file in default_model_filename.",
            )


def _expected(model: Model) -> tuple[str, ...]:
    """Return file names, one of which must be in a version folder for the backend to open.

    The result is empty for an unknown backend, and if the file comes from elsewhere: from ``shoal compose``, from a
    repository agent, or from a path in a parameter.
    """
    message = model.message
    if model.backend not in _FILES and PATHS & model.parameters.keys():
        return ()
    is_brought = model.is_model_folder and "artifacts" in model.parameters and not model.is_python
    if message is None or is_brought or _has_agents(model):
        return ()
    if message.cc_model_filenames:
        return (*sorted(message.cc_model_filenames.values()), *_FILES.get(model.backend, ()))
    chosen = str(message.default_model_filename)
    return (chosen,) if chosen and chosen != "model.py" else _FILES.get(model.backend, ())


def _has_agents(model: Model) -> bool:
    return model.message is not None and bool(model.message.model_repository_agents.agents)


def _found(names: set[str]) -> str:
    shown = sorted(name for name in names if not name.startswith("."))[:5]
    return f"; it contains {', '.join(shown)}" if shown else ""
