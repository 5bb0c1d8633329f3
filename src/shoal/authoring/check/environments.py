"""Rules for the stub and execution environment of a Python model: their place, versions, and imported modules."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from shoal.authoring.check.findings import Findings, Place, Rule, Severity
from shoal.authoring.check.models import Model, Repository, entries, is_file
from shoal.authoring.check.python.source import PB, SourceFile, examine
from shoal.authoring.environment.embedded import STUB
from shoal.authoring.environment.fit import Misfit, find_misfits
from shoal.authoring.environment.imports import find_imports
from shoal.authoring.environment.inspection import Environment, glance
from shoal.authoring.environment.stub import Stub, read_stub
from shoal.authoring.environment.targets import EMBEDDED, Target
from shoal.authoring.repository.devices import PYTHON_BASED_BACKENDS
from shoal.errors import ArtifactError, SetupError

PARAMETER = "EXECUTION_ENV_PATH"
REQUIRES = "requires"  # parameter: modules that the model's code imports later, separated by spaces
VARIABLE = "$$TRITON_MODEL_DIRECTORY"

MISSING = Rule("environment-missing", Severity.ERROR, is_core=True)
RELATIVE = Rule("environment-relative", Severity.WARNING)
DOLLAR = Rule("environment-dollar", Severity.ERROR, is_core=True)
OUTSIDE = Rule("environment-outside", Severity.WARNING)
MISFIT = Rule("environment-misfit", Severity.ERROR, is_core=True)
NOT_EXECUTABLE = Rule("stub-not-executable", Severity.WARNING)
IMPORT = Rule("import-not-in-environment", Severity.ERROR, is_core=True)

# C++ backends; `runtime` selects a Python backend of the same name, which Triton also uses if the library is missing.
_NATIVE = {"onnxruntime", "tensorrt", "tensorflow", "openvino", "dali", "tensorrtllm", "pytorch", "fil"}
_REMOTE = ("s3", "gs", "as")  # core, src/filesystem: from where Triton fetches a file
_ANY_RELEASE = (99, 12)
_ON_GPU = frozenset({"cupy", "pylibcudf"})  # without rmm, which components do not need
# Modules of the Python backend itself, and of the standard libraries of older Pythons.
_KNOWN = frozenset({PB, "c_python_backend_utils", "asynchat", "asyncore", "distutils", "imp", "smtpd"})
_KNOWN |= sys.stdlib_module_names
# A line that adds the folder of model.py to sys.path, where it already is; any other change may add any folder.
_OWN_FOLDER = re.compile(
    r"sys\.path\.\w+\((0, *)?(os\.path\.dirname\((os\.path\.\w+\()?__file__\)+|(str\()?Path\(__file__\)\.parent\)+) *$"
)


@dataclass(frozen=True)
class _File:
    """Archive of an environment, equal to its links: ``shoal compose`` links one archive into several models."""

    identity: tuple[int, ...]
    path: Path = field(compare=False)


def find(model: Model, repository: Repository) -> Findings:
    """Find mistakes in a model's environment and its stub."""
    if model.message is None or not _runs_python(model, repository):
        return
    stub = model.folder / STUB
    if is_file(stub) and not stub.stat().st_mode & 0o111:
        yield NOT_EXECUTABLE.at(Place(stub), "It is not executable.", f"chmod +x {model.folder.name}/{STUB}")
    value = model.parameters.get(PARAMETER, "")
    place = model.at_entry("parameters", key=PARAMETER)
    scheme, separator, _ = value.partition("://")
    if separator and scheme not in _REMOTE:
        yield MISSING.at(place, f"Failed to get the canonical path for {value}.", "Write a path without the scheme.")
    elif value and not separator:
        yield from _find_environment(model, value, place, repository)


def _runs_python(model: Model, repository: Repository) -> bool:
    """Whether a Python stub runs the model; an unknown backend is assumed to be written in Python."""
    if model.is_ensemble or model.message.runtime.endswith(".py") or model.backend not in _NATIVE:
        return not model.is_ensemble
    return model.backend in PYTHON_BASED_BACKENDS and repository.target is not None and repository.target.is_embedded


def _find_environment(model: Model, value: str, place: Place, repository: Repository) -> Findings:
    rest = value.removeprefix(VARIABLE)
    is_in_model = rest != value
    if "TRITON_MODEL_DIRECTORY" in rest:
        where = "not at the start" if VARIABLE in rest else "not spelt with two dollars and no braces"
        name = value.rpartition("/")[2]
        yield DOLLAR.at(place, f"{value}: the model's folder is {where}.", f"Write {VARIABLE}/{name}")
        return
    if value.startswith("~"):
        fix = f"Write the whole path, or {VARIABLE}/{value.rpartition('/')[2]}"
        yield MISSING.at(place, f"{value} does not exist: Triton does not expand ~.", fix)
        return
    if not is_in_model and not value.startswith("/"):
        what = f"{value} is a relative path, found only if the server was started in the right folder."
        yield RELATIVE.at(place, what, f"Write {VARIABLE}/{value.removeprefix('./')}")
        return
    path = Path(os.path.normpath(f"{model.folder}{rest}" if is_in_model else value))
    is_inside = path.is_relative_to(model.folder)
    if not (is_in_model and is_inside) and not repository.manifest:  # compose puts it where the user says
        what = "is an absolute path" if is_inside else "is outside of the model's folder"
        name = str(path.relative_to(model.folder)) if is_inside else path.name
        yield OUTSIDE.at(place, f"{value} {what}.", f"Put it into the model's folder, and write {VARIABLE}/{name}")
    is_here = is_in_model or (repository.target is not None and repository.target.is_embedded)
    try:
        exists = path.exists()
    except (OSError, ValueError):  # a name that is too long, or holds a NUL
        exists = False
    if exists:
        yield from _examine(model, path, place, repository.target)
    elif is_here:  # a container's own paths are not visible here
        yield MISSING.at(
            place, f"{path} does not exist.", f"Put the environment there, or write {VARIABLE}/ and its file's name."
        )


# --- do they fit? ------------------------------------------------------------------------------------------------


def _examine(model: Model, path: Path, place: Place, target: Target | None) -> Findings:
    try:
        environment = _read(path)
    except ArtifactError as error:
        yield MISFIT.at(place, error.what, error.fix)
        return
    except (SetupError, OSError):
        return
    if environment is None or not environment.python:
        return
    yield from _find_misfits(model, environment, path.name, place, target)
    if not environment.is_open:
        yield from _find_imports(model, environment, path.name)


def _find_misfits(model: Model, environment: Environment, name: str, place: Place, target: Target | None) -> Findings:
    path = model.folder / STUB
    try:
        stub = read_stub(path) if is_file(path) else None
    except ArtifactError as error:
        yield MISFIT.at(Place(path), error.what, error.fix)
        return
    except (SetupError, OSError):
        return  # the libraries that read binaries belong to shoal's extra `env`
    for misfit in _compare(environment, stub, target):
        yield MISFIT.at(place, f"{name}: {misfit.what}", misfit.fix)


def _compare(environment: Environment, stub: Stub | None, target: Target | None) -> Iterator[Misfit]:
    environment = replace(environment, leaks=[], editable=[])  # the packages may be on the server's machine
    if stub and any(name.startswith("libstdc++.so") for name in environment.own_libraries):
        environment = replace(environment, own_glibcxx=stub.glibcxx)  # the version of that library was not read
    if target:
        yield from find_misfits(environment, stub, target)
        return
    release = _ANY_RELEASE
    if stub and re.fullmatch(r"\d\d\.\d\d", stub.release):
        release = (int(stub.release[:2]), int(stub.release[3:]))
    machine = stub.machine if stub else "x86_64"
    whatever = Target(EMBEDDED, release, "", machine, environment.python_minor, (), ())  # without limits of its own
    for misfit in find_misfits(environment, stub, whatever):
        yield Misfit(misfit.what, misfit.fix.replace(f"--target {EMBEDDED}", "--target RELEASE"))


def _read(path: Path) -> Environment | None:
    """Read an environment; return None if ``path`` is neither a folder nor a regular file."""
    if path.is_dir():
        return glance(path)
    if not path.is_file():
        return None
    status = path.stat()
    return _read_archive(_File((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns), path))


@lru_cache(maxsize=32)
def _read_archive(file: _File) -> Environment:
    return glance(file.path)


# --- does it have what model.py imports? -------------------------------------------------------------------------


def _find_imports(model: Model, environment: Environment, name: str) -> Findings:
    """Find top-level imports of modules that are neither in the environment ``name`` nor beside ``model.py``."""

    def look(source: SourceFile) -> Findings:
        lines = source.path.read_text(encoding="utf-8", errors="replace").splitlines()
        if any("sys.path" in line and not _OWN_FOLDER.search(line) for line in lines):
            return
        paths = [*entries(source.path.parent), *entries(model.folder)]
        beside = {path.name.partition(".")[0] for path in paths}
        for node, module in _imports(source.tree):
            if module not in _KNOWN and module not in environment.modules and module not in beside:
                yield IMPORT.at(
                    source.at(node),
                    f"ModuleNotFoundError: No module named '{module}': {name} does not contain it.",
                    "Add its package to the environment, or put the module beside model.py.",
                )

    yield from examine(model, look)
    for module in model.config.requires if model.config else ():
        if module not in environment.modules:
            yield IMPORT.at(
                model.at_entry("parameters", key=REQUIRES),
                f"ModuleNotFoundError: No module named '{module}': {name} does not contain it.",
                f"Add its package to the environment, or make one: shoal env build --for {model.name}",
            )
    if any(group.kind == group.KIND_GPU for group in model.message.instance_group):
        found = [find_imports(path.parent) for path, text in model.sources if "shoal" in text]
        needed = {module for imports in found if imports.uses_cupy for module in imports.later & _ON_GPU}
        for module in sorted(needed - {*environment.modules}):
            yield IMPORT.at(
                model.at("instance_group"),
                f"No module named '{module}', with which {model.name} computes on a GPU: {name} does not contain it.",
                "Add its package to the environment, or make one: shoal env build --gpu; or compose it for the host.",
            )


def _imports(tree: ast.Module) -> Iterator[tuple[ast.stmt, str]]:
    """Yield the modules that top-level statements import: the statement, and the first part of the module's name."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from ((node, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node, (node.module or "").partition(".")[0]
