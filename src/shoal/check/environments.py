"""A model's execution environment and stub: are they where Triton looks, do they travel, do they fit one another?"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from shoal.check.findings import Findings, Place, Rule, Severity
from shoal.check.models import Model, Repository, entries, is_file
from shoal.check.python import modules
from shoal.environment.archive import read_archive
from shoal.environment.contents import ARCHIVE, CONDA, VENV, Environment
from shoal.environment.fit import Misfit, find_misfits
from shoal.environment.stub import STUB, Stub, read_stub
from shoal.environment.targets import EMBEDDED, Target
from shoal.errors import ArtifactError, SetupError
from shoal.repository.placement import PYTHON_BASED_BACKENDS

PARAMETER = "EXECUTION_ENV_PATH"
REQUIRES = "requires"  # parameter of a model: modules that its code imports later, separated by spaces
VARIABLE = "$$TRITON_MODEL_DIRECTORY"

MISSING = Rule("environment-missing", Severity.ERROR, is_core=True)
RELATIVE = Rule("environment-relative", Severity.WARNING)
DOLLAR = Rule("environment-dollar", Severity.ERROR, is_core=True)
OUTSIDE = Rule("environment-outside", Severity.WARNING)
MISFIT = Rule("environment-misfit", Severity.ERROR, is_core=True)
IGNORED = Rule("environment-ignored", Severity.WARNING)
MISPLACED = Rule("stub-misplaced", Severity.WARNING)
NOT_EXECUTABLE = Rule("stub-not-executable", Severity.WARNING)
RULES = (MISSING, RELATIVE, DOLLAR, OUTSIDE, MISFIT, IGNORED, MISPLACED, NOT_EXECUTABLE, *modules.RULES)

# C++ backends; `runtime` selects a Python one of the same name, which is also used if the library is missing.
_NATIVE = {"onnxruntime", "tensorrt", "tensorflow", "openvino", "dali", "tensorrtllm", "pytorch", "fil"}
_MAX_BYTES = 96 * 2**20  # unpacked, that are read of an archive: a second at most
_ANY_RELEASE = (99, 12)
_KNOWN_PTH = re.compile(r"distutils-precedence|_virtualenv|.*-nspkg")  # others may add folders to sys.path


@dataclass
class _Environment(Environment):
    """``modules`` are the names that can be imported from it; ``is_open`` where others may be too."""

    modules: set[str] = field(default_factory=set)
    is_open: bool = False


def find(model: Model, repository: Repository) -> Findings:
    """Find mistakes in a model's environment and its stub."""
    if model.message is None:
        return
    runs_python = _runs_python(model, repository)
    yield from _find_stubs(model, runs_python=runs_python)
    value = model.parameters.get(PARAMETER, "")
    place = model.at_entry("parameters", key=PARAMETER)
    if value and not runs_python:
        what = "An ensemble" if model.is_ensemble else f"The backend {model.backend}"
        yield IGNORED.at(place, f"{what} does not use {PARAMETER}.", "Give it to the Python models that need it.")
    elif value and "://" not in value:
        yield from _find_environment(model, value, place, repository)


def _runs_python(model: Model, repository: Repository) -> bool:
    """Whether a stub runs it; an unknown backend is assumed to be a Python one."""
    if model.is_ensemble or model.message.runtime.endswith(".py") or model.backend not in _NATIVE:
        return not model.is_ensemble
    return model.backend in PYTHON_BASED_BACKENDS and repository.target is not None and repository.target.is_embedded


def _find_stubs(model: Model, *, runs_python: bool) -> Findings:
    fix = f"Move it to {model.folder.name}/{STUB}." if runs_python else "Remove it."
    for version in model.versions:
        path = model.folder / str(version) / STUB
        if is_file(path):
            yield MISPLACED.at(Place(path), "Triton ignores a stub in a version folder.", fix)
    path = model.folder / STUB
    if not is_file(path):
        return
    if not runs_python:
        what = "an ensemble" if model.is_ensemble else f"the backend {model.backend}"
        yield MISPLACED.at(Place(path), f"A stub does not run {what}.", fix)
    elif not path.stat().st_mode & 0o111:
        yield NOT_EXECUTABLE.at(Place(path), "It is not executable.", f"chmod +x {model.folder.name}/{STUB}")


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
    if not (is_in_model and is_inside) and not repository.manifest:  # compose places them by the user's choice
        what = "is an absolute path" if is_inside else "is outside of the model's folder"
        name = str(path.relative_to(model.folder)) if is_inside else path.name
        yield OUTSIDE.at(place, f"{value} {what}.", f"Put it into the model's folder, and write {VARIABLE}/{name}")
    is_here = is_in_model or (repository.target is not None and repository.target.is_embedded)
    try:
        exists = path.exists()
    except (OSError, ValueError):  # a name that is too long, or holds a NUL
        exists = False
    if exists:
        yield from _find_misfits(model, path, place, repository.target)
        yield from _find_imports(model, path)
    elif is_here:  # a container's own paths are not visible here
        yield MISSING.at(
            place, f"{path} does not exist.", f"Put the environment there, or write {VARIABLE}/ and its file's name."
        )


# --- do they fit? ------------------------------------------------------------------------------------------------


def _find_misfits(model: Model, path: Path, place: Place, target: Target | None) -> Findings:
    stub_path = model.folder / STUB
    stub = None
    try:
        stub = read_stub(stub_path) if is_file(stub_path) else None
    except ArtifactError as error:
        yield MISFIT.at(Place(stub_path), error.what, error.fix)
        return
    except (SetupError, OSError):
        return  # the libraries that read binaries belong to shoal's extra `env`
    try:
        environment = _read(path)
    except ArtifactError as error:
        yield MISFIT.at(place, error.what, error.fix)
        return
    except (SetupError, OSError):
        return
    if environment is None:
        return
    for misfit in _compare(environment, stub, target):
        yield MISFIT.at(place, f"{path.name}: {misfit.what}", misfit.fix)


def _find_imports(model: Model, path: Path) -> Findings:
    try:
        environment = _read(path)
    except (ArtifactError, SetupError, OSError):
        return  # reported above
    if environment is None or environment.is_open:
        return
    yield from modules.find_missing(model, environment.modules, path.name)
    for name in model.parameters.get(REQUIRES, "").split():
        if name not in environment.modules:
            yield modules.IMPORT.at(
                model.at_entry("parameters", key=REQUIRES),
                f"ModuleNotFoundError: No module named '{name}': {path.name} does not contain it.",
                f"Add its package to the environment, or make one: shoal env build --for {model.name}",
            )


def _compare(environment: Environment, stub: Stub | None, target: Target | None) -> Iterator[Misfit]:
    if stub and any(name.startswith("libstdc++.so") for name in environment.own_libraries):
        environment = replace(environment, own_glibcxx=stub.glibcxx)  # what it provides was not read
    if target:
        yield from find_misfits(environment, stub, target)
        return
    release = _ANY_RELEASE
    if stub and re.fullmatch(r"\d\d\.\d\d", stub.release):
        release = (int(stub.release[:2]), int(stub.release[3:]))
    machine = stub.machine if stub else "x86_64"
    whatever = Target(EMBEDDED, release, "", machine, environment.python_minor, (), ())  # one without limits of its own
    for misfit in find_misfits(environment, stub, whatever):
        yield Misfit(misfit.what, misfit.fix.replace(f"--target {EMBEDDED}", "--target RELEASE"))


def _read(path: Path) -> _Environment | None:
    """Read the file names of an environment; return None if it does not exist, or if they do not show its Python."""
    if path.is_dir():
        return _read_folder(path)
    if not path.is_file():
        return None
    status = path.stat()
    return _read_archive(path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=32)
def _read_archive(path: Path, *identity: int) -> _Environment | None:
    """Cached by the file's ``identity``: compose links one archive into each model."""
    del identity
    environment = _Environment(path, ARCHIVE)
    num_bytes = 0
    for entry in read_archive(path):
        _note(environment, entry.path)
        num_bytes += entry.size
        if num_bytes > _MAX_BYTES:
            break
    else:
        return _require_python(environment)
    if not environment.python:
        return None
    # What is not at its beginning is assumed to be right.
    environment.is_open = True
    environment.has_activate = environment.has_interpreter = True
    environment.numpy = environment.numpy or "1"
    environment.own_libraries.add(f"libpython{environment.python_minor}.so.1.0")
    return environment


def _read_folder(folder: Path) -> _Environment:
    environment = _Environment(folder, VENV if (folder / "pyvenv.cfg").is_file() else CONDA)
    environment.has_activate = (folder / "bin" / "activate").is_file()
    environment.has_interpreter = os.path.lexists(folder / "bin" / "python3")
    # conda links lib/python3.1 to lib/python3.11
    libraries = [path for path in folder.glob("lib/python3.*") if not path.is_symlink()]
    packages = [library / "site-packages" for library in libraries]
    within = [library / "lib-dynload" for library in libraries]
    names = [path for parent in (*libraries, *packages, *within) for path in entries(parent)]
    for path in (*folder.glob("lib/*.so*"), *packages, *names):
        _note(environment, path.relative_to(folder).as_posix())
    if environment.kind == VENV:
        settings = (folder / "pyvenv.cfg").read_text(encoding="utf-8", errors="replace")
        environment.is_open |= re.search(r"(?im)^include-system-site-packages\s*=\s*true", settings) is not None
    return _require_python(environment)


def _require_python(environment: _Environment) -> _Environment:
    if not environment.python:
        raise ArtifactError(f"{environment.source} contains no lib/python3.X.", "Name what conda-pack or venv made.")
    return environment


def _note(environment: _Environment, path: str) -> None:
    """Read what the name of a file or folder in an environment says about it."""
    path = path.removeprefix("./").rstrip("/")
    folder, _, name = path.rpartition("/")
    environment.has_activate |= path == "bin/activate"
    environment.has_interpreter |= path == "bin/python3"
    if folder == "lib" and ".so" in name:
        environment.own_libraries.add(name)
    found = re.match(r"lib/python(\d\.\d+)/site-packages/(?:numpy-([\d.]+)[^/]*\.dist-info)?", f"{path}/")
    if found:
        environment.python = environment.python or found[1]
        environment.numpy = environment.numpy or found[2] or ""
    module = re.match(r"lib/python\d\.\d+/(?:site-packages/|lib-dynload/)?(\w+)", path)
    if module:
        environment.modules.add(module[1])
        is_pth = folder.endswith("/site-packages") and name.endswith(".pth")
        environment.is_open |= is_pth and not _KNOWN_PTH.match(name)
