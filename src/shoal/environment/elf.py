"""Read a binary's requirements from its ELF sections: shared libraries, and versions of their symbols."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO

from shoal.errors import ArtifactError, needs

MAGIC = b"\x7fELF"
Version = tuple[int, ...]  # (2, 34); empty where there is none
_MACHINES = {"x64": "x86_64", "AArch64": "aarch64"}  # pyelftools's names -> platform.machine()'s


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
