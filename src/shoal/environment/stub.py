"""Identify a Python backend stub by the contents and requirements of the binary, not by its name."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.component.artifact_files import sha256
from shoal.environment.elf import Version, read_binary, soname_python
from shoal.errors import ArtifactError

STUB = "triton_python_backend_stub"  # the file name that Triton looks for, in the backend's folder or in the model's
RECORD = "env.json"  # what `shoal env build` writes beside a stub
_WHEEL_LIBRARY, _WHEEL_RELEASE = "libcudart-", "24.10"  # auditwheel puts a hash into a library's name


@dataclass(frozen=True)
class Stub:
    """A stub's version and requirements.

    ``python`` is the version whose shared library it is linked to, such as ``3.12``. ``bears_numpy_2`` is whether its
    pybind11 knows NumPy 2's module names (2.12 and newer do; with an older one tensors are corrupted silently).
    ``release`` is that of the server it was made for, such as ``24.10``; empty where unknown.
    """

    path: Path
    python: str
    machine: str
    glibc: Version
    glibcxx: Version
    libraries: tuple[str, ...]
    bears_numpy_2: bool
    release: str

    @property
    def is_of_wheel(self) -> bool:
        """Whether it is one of nvidia-pytriton's, linked to libraries that the wheel brings."""
        return any(name.startswith(_WHEEL_LIBRARY) for name in self.libraries)


def served_model(arguments: Sequence[str]) -> str:
    """Return the model that a process serves, from its command line; empty where it is not a stub.

    Triton starts it as STUB model.py REGION ... INSTANCE RUNTIME-FOLDER; an instance is MODEL_GROUP_NUMBER. A backend
    written in Python is elsewhere than its model, so the path of ``model.py`` does not identify the model.
    """
    if len(arguments) < 3 or not arguments[0].endswith(STUB):
        return ""
    return re.sub(r"(_\d+){1,2}$", "", arguments[-2])


def read_stub(path: Path) -> Stub:
    """Read a stub.

    Raises:
        ArtifactError: there is none, or the file is not a Python backend stub.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"The stub {path} cannot be read: {error.strerror}.", f"Name a {STUB} file.") from None
    fix = "Take the file `triton_python_backend_stub` of a Python backend, or let `shoal env build` make one."
    binary = read_binary(io.BytesIO(content), str(path))
    python = soname_python(binary.needed)
    if not python or b"triton_python_backend_utils" not in content:
        raise ArtifactError(f"{path} is an ELF file, but not a Python backend stub.", fix)
    stub = Stub(
        path=path,
        python=python,
        machine=binary.machine,
        glibc=binary.requires.get("GLIBC", ()),
        glibcxx=binary.requires.get("GLIBCXX", ()),
        libraries=binary.needed,
        bears_numpy_2=b"numpy._core" in content,
        release=_recorded_release(path),
    )
    return replace(stub, release=_WHEEL_RELEASE) if stub.is_of_wheel else stub


def _recorded_release(path: Path) -> str:
    """Return the release that the record beside a stub gives for it, unless the file is another one since."""
    try:
        record = json.loads((path.parent / RECORD).read_text(encoding="utf-8"))
        return str(record["stub"]["release"] or "") if record["files"][path.name] == sha256(path) else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""
