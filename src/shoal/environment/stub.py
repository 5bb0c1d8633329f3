"""Python backend stubs, identified by the binary and not by its name; and what ELF files in general need.

An ELF file lists the shared libraries that it loads and the versions of their symbols, such as ``GLIBC_2.34``.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from shoal.component.artifact_files import sha256
from shoal.errors import ArtifactError, needs

STUB = "triton_python_backend_stub"  # the file name that Triton looks for, in the backend's folder or in the model's
RECORD = "env.json"  # what `shoal env build` writes beside a stub
_WHEEL_LIBRARY, _WHEEL_RELEASE = "libcudart-", "24.10"  # auditwheel puts a hash into a library's name
MAGIC = b"\x7fELF"
Version = tuple[int, ...]  # (2, 34); empty where there is none
_MACHINES = {"x64": "x86_64", "AArch64": "aarch64"}  # pyelftools's names -> platform.machine()'s


@dataclass(frozen=True)
class Stub:
    """A stub's version and requirements.

    ``python`` is the version whose shared library it is linked to, such as ``3.12``. ``supports_numpy_2`` is whether
    its pybind11 knows NumPy 2's module names (2.12 and newer do; with an older one tensors are corrupted silently).
    ``release`` is that of the server it was made for, such as ``24.10``; empty where unknown.
    """

    path: Path
    python: str
    machine: str
    glibc: Version
    glibcxx: Version
    libraries: tuple[str, ...]
    supports_numpy_2: bool
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
        supports_numpy_2=b"numpy._core" in content,
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


# --- ELF files ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Binary:
    """An ELF file's needs.

    ``requires`` maps a family of symbol versions, such as ``GLIBC`` or ``GLIBCXX``, to the highest that it needs;
    ``provides`` to the highest that it defines itself.
    """

    machine: str
    needed: tuple[str, ...]
    requires: Mapping[str, Version]
    provides: Mapping[str, Version]


def read_binary(file: IO[bytes], name: str) -> Binary:
    """Read the dynamic section of an ELF file; ``file`` must be seekable.

    Raises:
        ArtifactError: it is not a whole ELF file.
    """
    with needs("env"):
        from elftools.common.exceptions import ELFError
        from elftools.elf.elffile import ELFFile
        from elftools.elf.gnuversions import GNUVerDefSection, GNUVerNeedSection
    try:
        elf = ELFFile(file)
        dynamic = elf.get_section_by_name(".dynamic")
        tags = dynamic.iter_tags() if dynamic is not None and hasattr(dynamic, "iter_tags") else ()
        needed = tuple(tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED")
        required, provided = [], []
        for section in elf.iter_sections():
            if isinstance(section, GNUVerNeedSection):
                for _, versions in section.iter_versions():
                    required += [version.name for version in versions]
            elif isinstance(section, GNUVerDefSection):
                provided += [next(names).name for _, names in section.iter_versions()]
        machine = elf.get_machine_arch()
    # All that the parser raises on malformed bytes, of which it checks few itself.
    except (ELFError, AttributeError, AssertionError, LookupError, OSError, OverflowError, TypeError, ValueError) as e:
        raise ArtifactError(f"{name} is not a whole ELF file: {type(e).__name__} {e}".rstrip(), "Make it again.") from e
    return Binary(_MACHINES.get(machine, machine), needed, _highest(required), _highest(provided))


def _highest(names: list[str]) -> dict[str, Version]:
    """Return the highest version of each family, from names such as ``GLIBC_2.34`` and ``GLIBCXX_3.4.30``."""
    highest: dict[str, Version] = {}
    for name in names:
        found = re.fullmatch(r"([A-Z]+)_(\d+(?:\.\d+)*)", name)
        if found:
            highest[found[1]] = max(highest.get(found[1], ()), parse_version(found[2]))
    return highest


def parse_version(text: str) -> Version:
    """Parse ``3.4.30`` to numbers, up to the first part that is not one."""
    numbers = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else ()


def show_version(version: Version) -> str:
    """Format a version as ``3.4.30``."""
    return ".".join(map(str, version))


def soname_python(needed: tuple[str, ...]) -> str:
    """Return the Python, such as ``3.12``, whose shared library a binary needs; empty if it needs none.

    In wheels, the name of that library contains a hash: ``libpython3-419a3a08.13.so.1.0``.
    """
    for name in needed:
        found = re.match(r"libpython(\d)(?:-[0-9a-f]+)?\.(\d+)", name)
        if found:
            return f"{found[1]}.{found[2]}"
    return ""
