"""Servers that environments are built for: the Python, C library and NumPy that each server supports."""

from __future__ import annotations

import platform
import re
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from shoal.environment.stub import Version, parse_version, read_binary
from shoal.errors import InputError

EMBEDDED = "embedded"
EMBEDDED_RELEASE = (24, 10)  # release in the wheel nvidia-pytriton 0.7.0
FIRST_NUMPY_2 = (24, 11)  # python_backend's pybind11 went from 2.10 to 2.12 (pull request 384)
FIRST_SIDE_BY_SIDE = (26, 5)  # first release that survives a failure of one of several parallel ensemble steps
FIRST_FOLDER = (23, 7)  # python_backend's pull request 266: EXECUTION_ENV_PATH may be a folder

# NVIDIA's images by their first release: Ubuntu, its glibc, its libstdc++ and its Python. Taken from `build.py` of the
# server's release branches and the compatibility table of its documentation, up to 26.08; later releases are assumed
# to be like the last known.
_IMAGES: dict[tuple[int, int], tuple[str, Version, Version, str]] = {
    (23, 1): ("20.04", (2, 31), (3, 4, 28), "3.8"),
    (23, 5): ("22.04", (2, 35), (3, 4, 30), "3.10"),
    (24, 11): ("24.04", (2, 39), (3, 4, 33), "3.12"),
}
_LIBSTDCXX = ("/usr/lib/x86_64-linux-gnu/libstdc++.so.6", "/usr/lib64/libstdc++.so.6", "/usr/lib/libstdc++.so.6")


@dataclass(frozen=True)
class Target:
    """A server: NVIDIA's container of a release, or the embedded server, which runs on this machine.

    ``python`` is the version that the server's own stub is for. The embedded server has several stubs, and uses the one
    for the Python that starts the server. ``glibc`` and ``glibcxx`` are the versions of the server's system libraries,
    empty if unknown.
    """

    name: str
    release: tuple[int, int]
    system: str
    machine: str
    python: str
    glibc: Version
    known_glibcxx: Version | None

    @cached_property
    def glibcxx(self) -> Version:
        """GLIBCXX version of the server's libstdc++. For the server from the PyPI wheel, it is read from this machine.

        Reading takes a second, and needs ``pip install 'shoal[env]'``.
        """
        return _system_glibcxx() if self.known_glibcxx is None else self.known_glibcxx

    @property
    def version(self) -> str:
        """Release as text, such as ``24.10``."""
        return f"{self.release[0]:02}.{self.release[1]:02}"

    @property
    def supports_numpy_2(self) -> bool:
        """Whether the server's own stub handles tensors of NumPy 2 correctly."""
        return self.release >= FIRST_NUMPY_2

    @property
    def is_embedded(self) -> bool:
        """Whether the server is the Triton of the wheel ``nvidia-pytriton``, on this machine."""
        return self.name == EMBEDDED


def parse_release(name: str) -> tuple[int, int]:
    """Return the release of a target as numbers: (26, 6) for ``26.06``, (24, 10) for ``embedded``.

    Raises:
        InputError: the target is not known.
    """
    if name == EMBEDDED:
        return EMBEDDED_RELEASE
    found = re.fullmatch(r"([0-9]{2})\.([0-9]{2})", name)
    release = (int(found[1]), int(found[2])) if found else (0, 0)
    if release < min(_IMAGES) or not 1 <= release[1] <= 12:
        raise InputError(f"Unknown target {name!r}.", f"Known: {EMBEDDED}, or a release from 23.01 on, such as 26.06.")
    return release


def find_target(name: str) -> Target:
    """Return the server called ``name``: ``embedded``, or NVIDIA's container of a release ``YY.MM``.

    Raises:
        InputError: the target is not known.
    """
    release = parse_release(name)
    if name == EMBEDDED:
        library, version = platform.libc_ver()
        glibc = parse_version(version) if library == "glibc" else ()
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        return Target(name, release, f"this machine ({library} {version})", "x86_64", python, glibc, None)
    ubuntu, glibc, glibcxx, python = _IMAGES[max(first for first in _IMAGES if first <= release)]
    return Target(name, release, f"Ubuntu {ubuntu}", "x86_64", python, glibc, glibcxx)


def _system_glibcxx() -> Version:
    path = next((path for path in map(Path, _LIBSTDCXX) if path.is_file()), None)
    if path is None:
        return ()
    with path.open("rb") as file:
        return read_binary(file, str(path)).provides.get("GLIBCXX", ())
