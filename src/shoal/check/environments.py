"""A model's execution environment and stub: are they where Triton looks, do they travel, do they fit one another?"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from shoal.check.findings import Findings, Place, Rule, Severity
from shoal.check.models import Model, Repository
from shoal.environment.archive import read_archive
from shoal.environment.contents import ARCHIVE, CONDA, VENV, Environment
from shoal.environment.fit import Misfit, find_misfits
from shoal.environment.inspection import inspect
from shoal.environment.stub import STUB, Stub, read_stub
from shoal.environment.targets import EMBEDDED, Target
from shoal.errors import ArtifactError, SetupError
from shoal.repository.placement import PYTHON_BASED_BACKENDS

PARAMETER = "EXECUTION_ENV_PATH"
VARIABLE = "$$TRITON_MODEL_DIRECTORY"
_BAD = 'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{}" }} }}'
_GOOD = _BAD.format("$$TRITON_MODEL_DIRECTORY/custom_env.tar.gz")

MISSING = Rule(
    "environment-missing",
    Severity.ERROR,
    "An execution environment must be where the configuration says",
    "The model does not load: `Failed to get the canonical path for ...`. Often the archive was left out of a copy, or"
    " the path is one of the machine that it was packed on.",
    "python_backend, src/pb_env.cc: ExtractIfNotExtracted.",
    _BAD.format("/home/me/custom_env.tar.gz"),
    _GOOD,
    is_core=True,
)
RELATIVE = Rule(
    "environment-relative",
    Severity.ERROR,
    "An execution environment is named by an absolute path",
    "A relative path counts from the folder that the server was started in, and the server itself changes that folder"
    " while it unpacks another archive: whether the model loads depends on chance. `~` and variables are not expanded.",
    "python_backend, src/pb_env.cc: ExtractTarFile calls chdir, ExtractIfNotExtracted calls realpath.",
    _BAD.format("custom_env.tar.gz"),
    _GOOD,
    is_core=True,
)
DOLLAR = Rule(
    "environment-dollar",
    Severity.ERROR,
    "The model's folder is `$$TRITON_MODEL_DIRECTORY`, with two dollars, at the start",
    "With one dollar or in braces it is part of a file's name that no file has. Behind other text, Triton replaces as"
    " many more characters as stand before it, and eats into the path. Templates filled by Python's string.Template,"
    " such as TensorRT-LLM's fill_template.py, turn two dollars into one.",
    "core, src/model_config_utils.cc: LocalizePythonBackendExecutionEnvironmentPath; python_backend,"
    " src/python_be.cc: ModelState.",
    _BAD.format("$TRITON_MODEL_DIRECTORY/custom_env.tar.gz"),
    _GOOD,
    is_core=True,
)
OUTSIDE = Rule(
    "environment-outside",
    Severity.WARNING,
    "An execution environment should lie in its model's folder",
    "It does not travel with the repository: copied, or mounted at another path, the model fails to load. From a bucket"
    " Triton fetches the model's folder only.",
    "server issue 5933; python_backend's README, Creating Custom Execution Environments: notes 4 and 5.",
    _BAD.format("/opt/envs/custom_env.tar.gz"),
    _GOOD,
)
MISFIT = Rule(
    "environment-misfit",
    Severity.ERROR,
    "Environment, stub and server must fit",
    "Where they do not, Triton says something else (`No module named 'numpy'`, `not healthy`), or, with NumPy 2 under a"
    " stub of 24.10 or older, computes wrong values without a word.",
    "docs/environments.md; `shoal env fit` asks the same.",
    "preprocess/custom_env.tar.gz  # Python 3.12, beside a stub for Python 3.10",
    "shoal env build --target 26.06  # makes both for one Python",
    is_core=True,
)
IGNORED = Rule(
    "environment-ignored",
    Severity.WARNING,
    "Only a model that runs in a Python stub has an execution environment",
    "An ensemble runs no code, and a backend of C++ reads no such parameter: what the environment was meant to bring"
    " is not there.",
    "python_backend, src/python_be.cc: it alone reads the parameter.",
    'platform: "ensemble"\n' + _GOOD,
    'backend: "python"\n' + _GOOD,
)
MISPLACED = Rule(
    "stub-misplaced",
    Severity.WARNING,
    "A stub lies beside config.pbtxt of the model that it runs",
    "Triton looks for it there and nowhere else: a stub in a version folder is passed over, and the server's own runs"
    " the model, which often is for another Python.",
    "python_backend, src/stub_launcher.cc: StubLauncher::Launch.",
    "preprocess/1/triton_python_backend_stub",
    "preprocess/triton_python_backend_stub",
)
NOT_EXECUTABLE = Rule(
    "stub-not-executable",
    Severity.WARNING,
    "A stub is a program, and must be executable",
    "Triton mends it with chmod where it may: not on a read-only mount, nor where another user owns the file. Then the"
    " model does not load: `Failed to give execute permission to triton_python_backend_stub`.",
    "python_backend, src/stub_launcher.cc: StubLauncher::Launch.",
    "-rw-r--r-- preprocess/triton_python_backend_stub",
    "-rwxr-xr-x preprocess/triton_python_backend_stub",
)
RULES = (MISSING, RELATIVE, DOLLAR, OUTSIDE, MISFIT, IGNORED, MISPLACED, NOT_EXECUTABLE)

# C++ backends; `runtime` selects a Python one of the same name, which is also used if the library is missing.
_NATIVE = {"onnxruntime", "tensorrt", "tensorflow", "openvino", "dali", "tensorrtllm", "pytorch", "fil"}
_WHOLE_BYTES = 24 * 2**20  # an archive up to this size is read whole, which takes a second at most
_PEEK_BYTES = 96 * 2**20  # unpacked bytes read of a larger archive
_ANY_RELEASE = (99, 12)


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
        yield IGNORED.at(place, f"{what} has no use for {PARAMETER}.", "Give it to the Python models that need it.")
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
        if _is_file(path):
            yield MISPLACED.at(Place(path), "Triton looks for no stub in a version folder.", fix)
    path = model.folder / STUB
    if not _is_file(path):
        return
    if not runs_python:
        what = "an ensemble" if model.is_ensemble else f"the backend {model.backend}"
        yield MISPLACED.at(Place(path), f"No stub runs {what}.", fix)
    elif not path.stat().st_mode & 0o111:
        yield NOT_EXECUTABLE.at(Place(path), "It is not executable.", f"chmod +x {model.folder.name}/{STUB}")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def _find_environment(model: Model, value: str, place: Place, repository: Repository) -> Findings:
    rest = value.removeprefix(VARIABLE)
    is_in_model = rest != value
    if "TRITON_MODEL_DIRECTORY" in rest:
        where = "not at the start" if VARIABLE in rest else "not spelt with two dollars and no braces"
        name = value.rpartition("/")[2]
        yield DOLLAR.at(place, f"{value}: the model's folder is {where}.", f"Write {VARIABLE}/{name}")
        return
    if not is_in_model and not value.startswith("/"):
        name = value.removeprefix("./").removeprefix("~/")
        yield RELATIVE.at(place, f"{value} is a relative path.", f"Write {VARIABLE}/{name}")
        return
    path = Path(os.path.normpath(f"{model.folder}{rest}" if is_in_model else value))
    is_inside = path.is_relative_to(model.folder)
    if not (is_in_model and is_inside) and not repository.manifest:  # compose places them by the user's choice
        what = "is bound to this path" if is_inside else "lies outside of the model's folder"
        name = str(path.relative_to(model.folder)) if is_inside else path.name
        yield OUTSIDE.at(place, f"{value} {what}.", f"Put it into the model's folder, and write {VARIABLE}/{name}")
    is_here = is_in_model or (repository.target is not None and repository.target.is_embedded)
    try:
        exists = path.exists()
    except (OSError, ValueError):  # a name that is too long, or holds a NUL
        exists = False
    if exists:
        yield from _find_misfits(model, path, place, repository.target)
    elif is_here:  # a container's own paths are not visible here
        yield MISSING.at(
            place, f"{path} is not there.", f"Put the environment there, or write {VARIABLE}/ and its file's name."
        )


# --- do they fit? ------------------------------------------------------------------------------------------------


def _find_misfits(model: Model, path: Path, place: Place, target: Target | None) -> Findings:
    stub_path = model.folder / STUB
    stub = None
    try:
        stub = read_stub(stub_path) if _is_file(stub_path) else None
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


def _read(path: Path) -> Environment | None:
    """Read an environment as far as a second allows: of a folder and of a large archive, its names."""
    if path.is_dir():
        return _peek_folder(path)
    if not path.is_file():
        return None
    status = path.stat()
    return _read_archive(path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=32)
def _read_archive(path: Path, device: int, inode: int, size: int, mtime: int) -> Environment | None:
    """Cached: compose links one archive into each model."""
    del device, inode, mtime
    if size <= _WHOLE_BYTES:
        return inspect(path, reads_binaries=False)
    # What is not at its beginning is assumed to be right.
    environment = Environment(path, ARCHIVE, numpy="1", has_interpreter=True, has_activate=True)
    num_bytes = 0
    for entry in read_archive(path):
        num_bytes += entry.size
        _note(environment, entry.path)
        if num_bytes > _PEEK_BYTES:
            break
    environment.own_libraries.add(f"libpython{environment.python_minor}.so.1.0")
    return environment if environment.python else None


def _peek_folder(folder: Path) -> Environment:
    environment = Environment(folder, VENV if (folder / "pyvenv.cfg").is_file() else CONDA)
    environment.has_activate = (folder / "bin" / "activate").is_file()
    environment.has_interpreter = os.path.lexists(folder / "bin" / "python3")
    for place in (
        *folder.glob("lib/*.so*"),
        *folder.glob("lib/python3.*"),
        *folder.glob("lib/python3.*/site-packages/numpy-*"),
    ):
        if ".so" in place.name or not place.is_symlink():  # conda links lib/python3.1 to python3.11
            _note(environment, place.relative_to(folder).as_posix())
    if not environment.python:
        raise ArtifactError(f"{folder} holds no lib/python3.X.", "Name what conda-pack or venv made.")
    return environment


def _note(environment: Environment, path: str) -> None:
    """Read what the name of a file or folder in an environment says about it."""
    path = path.removeprefix("./").rstrip("/")
    with suppress(ValueError):
        folder, name = path.rsplit("/", 1)
        found = re.match(r"lib/python(\d\.\d\d?)(?:/|$)", path)
        if found and not environment.python:
            environment.python = found[1]
        if folder == "lib" and ".so" in name:
            environment.own_libraries.add(name)
        numpy = re.match(r"lib/python[\d.]+/site-packages/numpy-([\d.]+)[^/]*\.dist-info", path)
        if numpy:
            environment.numpy = numpy[1]
