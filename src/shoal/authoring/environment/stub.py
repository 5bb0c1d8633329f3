"""Read Python backend stubs, which are recognized by their content and not by their name, and ELF files in general.

An ELF file lists the shared libraries that it loads and the versions of their symbols, such as ``GLIBC_2.34``.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from shoal.authoring.environment.embedded import STUB
from shoal.errors import ArtifactError, needs
from shoal.kit.component.files import sha256
from shoal.system.files import MAX_BINARY, read_bytes, read_json

RECORD = "env.json"  # what `shoal env build` writes beside a stub
_WHEEL_LIBRARY, _WHEEL_RELEASE = "libcudart-", "24.10"  # auditwheel puts a hash into a library's name
MAGIC = b"\x7fELF"
Version = tuple[int, ...]  # such as (2, 34); empty if there is no version
_MACHINES = {"x64": "x86_64", "AArch64": "aarch64"}  # pyelftools's names -> platform.machine()'s


@dataclass(frozen=True)
class Stub:
    """A stub's version and requirements.

    ``python`` is the version whose shared library it is linked to, such as ``3.12``. ``supports_numpy_2`` is whether
    its pybind11 knows NumPy 2's module names (2.12 and newer do; with an older pybind11, tensors are corrupted
    silently). ``release`` is the Triton release that the stub was made for, such as ``24.10``; empty if unknown.
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
        """Whether the stub is from the wheel ``nvidia-pytriton``: it is linked to libraries of that wheel."""
        return any(name.startswith(_WHEEL_LIBRARY) for name in self.libraries)


def read_stub(path: Path) -> Stub:
    """Read the version and requirements of a stub.

    Raises:
        ArtifactError: the file cannot be read, or is not a Python backend stub.
    """
    try:
        content = read_bytes(path, MAX_BINARY)
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
    """Return the release of a stub from the file ``env.json`` beside it; empty if that file is about another stub."""
    try:
        record = read_json(path.parent / RECORD)
        return str(record["stub"]["release"] or "") if record["files"][path.name] == sha256(path) else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


# --- ELF files ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Binary:
    """Requirements of an ELF file.

    ``needed`` are the shared libraries that it loads. ``requires`` maps each family of symbol versions, such as
    ``GLIBC`` or ``GLIBCXX``, to the highest version that the file needs; ``provides`` maps each family to the highest
    version that the file defines.
    """

    machine: str
    needed: tuple[str, ...]
    requires: Mapping[str, Version]
    provides: Mapping[str, Version]


def read_binary(file: IO[bytes], name: str) -> Binary:
    """Read the requirements of an ELF file; ``file`` must be seekable, and ``name`` is its name in an error.

    Raises:
        ArtifactError: the file is not a complete ELF file.
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
    # All exceptions that the parser raises on malformed bytes; it validates little itself.
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
    """Return the numbers at the beginning of a version: (3, 4, 30) for ``3.4.30`` and for ``3.4.30rc1``."""
    numbers = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else ()


def show_version(version: Version) -> str:
    """Format a version as ``3.4.30``."""
    return ".".join(map(str, version))


def soname_python(needed: tuple[str, ...]) -> str:
    """Return the Python version, such as ``3.12``, whose shared library is in ``needed``; empty if there is none.

    In wheels, the name of that library contains a hash: ``libpython3-419a3a08.13.so.1.0``.
    """
    for name in needed:
        found = re.match(r"libpython(\d)(?:-[0-9a-f]+)?\.(\d+)", name)
        if found:
            return f"{found[1]}.{found[2]}"
    return ""
