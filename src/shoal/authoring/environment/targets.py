"""Table of the servers that repositories and environments are made for: what each release of Triton has."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeAlias

from shoal.authoring.environment.embedded import NAME
from shoal.authoring.environment.stub import Version, parse_version, read_binary
from shoal.errors import InputError

Release: TypeAlias = tuple[int, int]  # (26, 6) is 26.06
Versions: TypeAlias = tuple[tuple[Version, Version], ...]  # ranges: from, and up to

EMBEDDED = NAME
EMBEDDED_RELEASE = (24, 10)  # release in the wheel nvidia-pytriton 0.7.0
FIRST_SIDE_BY_SIDE = (26, 5)  # first release that survives a failure of one of several parallel ensemble steps
FIRST_FOLDER = (23, 7)  # python_backend's pull request 266: EXECUTION_ENV_PATH may be a folder
NEWEST = (26, 11)  # the newest release that is known; a later one is assumed to be like it
OLDEST_PYTHON = (3, 11)  # the oldest Python on which shoal's components run
LATEST = f"{NEWEST[0]}.{NEWEST[1]:02}"  # its name, for advice

_TREELITE_3: Versions = (((2, 4), (2, 5)), ((3, 0), (4, 0)))
_TREELITE_4: Versions = (((3, 9), (3, 10)), ((4, 0), (5, 0)))


class Row(NamedTuple):
    """Contents of NVIDIA's images, from a release up to the next row's.

    ``cuda`` is the major version. ``numpy_2``: whether the stub of the Python backend is right for NumPy 2; its
    pybind11 went from 2.10 to 2.12 (pull request 384). ``treelite`` are the versions whose checkpoints FIL reads,
    ``opset`` and ``ir`` the newest of ONNX that the image's ONNX Runtime loads.
    """

    ubuntu: str
    python: str
    cuda: int
    numpy_2: bool
    treelite: Versions
    opset: int
    ir: int


# Python, Ubuntu, CUDA and images: build.py and docs/introduction/compatibility.md of the server's release branches up
# to 26.08, and the release notes up to 26.11. Treelite: docs/model_support.md of fil_backend up to 26.06. ONNX: tried
# with the ONNX Runtime of each release up to 26.08; 1.15 names opset 19 as supported, without all of its operators.
TABLE: dict[Release, Row] = {
    (22, 11): Row("20.04", "3.8", 11, False, _TREELITE_3, 17, 8),  # ONNX Runtime 1.13
    (23, 1): Row("20.04", "3.8", 12, False, _TREELITE_3, 17, 8),
    (23, 3): Row("20.04", "3.8", 12, False, _TREELITE_3, 18, 8),  # 1.14
    (23, 5): Row("22.04", "3.10", 12, False, _TREELITE_3, 19, 9),  # 1.15
    (24, 3): Row("22.04", "3.10", 12, False, _TREELITE_4, 20, 9),  # 1.17
    (24, 5): Row("22.04", "3.10", 12, False, _TREELITE_4, 21, 10),  # 1.18
    (24, 11): Row("24.04", "3.12", 12, True, _TREELITE_4, 21, 10),
    (25, 3): Row("24.04", "3.12", 12, True, _TREELITE_4, 22, 10),  # 1.21
    (25, 8): Row("24.04", "3.12", 13, True, _TREELITE_4, 23, 11),  # 1.23
    (26, 2): Row("24.04", "3.12", 13, True, _TREELITE_4, 25, 13),  # 1.24
    (26, 7): Row("24.04", "3.12", 13, True, _TREELITE_4, 26, 13),  # 1.27
}
# By version of Ubuntu: its glibc and its libstdc++.
_SYSTEMS: dict[str, tuple[Version, Version]] = {
    "20.04": ((2, 31), (3, 4, 28)),
    "22.04": ((2, 35), (3, 4, 30)),
    "24.04": ((2, 39), (3, 4, 33)),
}
_LIBSTDCXX = ("/usr/lib/x86_64-linux-gnu/libstdc++.so.6", "/usr/lib64/libstdc++.so.6", "/usr/lib/libstdc++.so.6")


@dataclass(frozen=True)
class Image:
    """A kind of NVIDIA's images, whose tag is the release and ``suffix``, in the releases from ``first`` to ``last``.

    ``backends`` are the backends in it, and ``modules`` its Python modules beside NumPy. Its Python and CUDA are those
    of the release ``like``, if that is given.
    """

    suffix: str
    first: Release
    last: Release
    backends: frozenset[str]
    modules: frozenset[str] = frozenset()
    like: Release | None = None

    def row(self, release: Release) -> Row:
        """Return what the image has in a release."""
        return find_row(self.like or release)


_EVER = (99, 12)
LLMAPI = "llmapi"  # NVIDIA's Python model on TensorRT-LLM's LLM API: /app/all_models/llmapi, of images since June 2025
_NATIVE = frozenset("dali fil identity onnxruntime openvino python pytorch repeat square tensorrt".split())
_LLM = frozenset({"jinja2", "tokenizers", "torch", "transformers"})
_VLLM = (frozenset({"python", "vllm"}), _LLM | {"vllm"})
_TRTLLM = (frozenset({"python", "tensorrtllm"}), _LLM | {"PIL", "tensorrt_llm"})
_LLMAPI = (frozenset({*_TRTLLM[0], LLMAPI}), _TRTLLM[1])
# The release notes of 26.08 and later list no image of TensorRT-LLM.
IMAGES = (
    Image("py3", min(TABLE), (25, 2), _NATIVE | {"tensorflow", "tensorflow1", "tensorflow2"}),
    Image("py3", (25, 3), _EVER, _NATIVE),
    Image("vllm-python-py3", (23, 10), _EVER, *_VLLM),
    Image("trtllm-python-py3", (23, 10), (24, 10), *_TRTLLM),
    Image("trtllm-python-py3", (24, 11), (24, 11), *_TRTLLM, like=(24, 10)),
    Image("trtllm-python-py3", (24, 12), (25, 5), *_TRTLLM),
    Image("trtllm-python-py3", (25, 6), (25, 7), *_LLMAPI),
    Image("trtllm-python-py3", (25, 8), (25, 10), *_LLMAPI, like=(25, 7)),
    Image("trtllm-python-py3", (25, 11), (26, 7), *_LLMAPI),
)
# Backends of NVIDIA; fastertransformer was never in an image of Triton itself. Others may be in an image of one's own.
BACKENDS = frozenset({"fastertransformer"}).union(*(image.backends for image in IMAGES))


@dataclass(frozen=True)
class Target:
    """A server: NVIDIA's container of a release, or the embedded server, which runs on this machine.

    ``python`` is the version that the server's own stub is for. The embedded server has several stubs, and uses the one
    for the Python that starts the server. ``glibc`` and ``glibcxx`` are the versions of the server's system libraries,
    empty if unknown.
    """

    name: str
    release: Release
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
        return show_release(self.release)

    @property
    def supports_numpy_2(self) -> bool:
        """Whether the server's own stub handles tensors of NumPy 2 correctly."""
        return self.row.numpy_2

    @property
    def is_embedded(self) -> bool:
        """Whether the server is the Triton of the wheel ``nvidia-pytriton``, on this machine."""
        return self.name == EMBEDDED

    @property
    def row(self) -> Row:
        """Contents of NVIDIA's images of the release."""
        return find_row(self.release)

    def find_image(self, backends: Collection[str], modules: Collection[str] = ()) -> Image | None:
        """Return the image of the release that has all ``backends``, and if possible vLLM if ``modules`` name it."""
        images = [i for i in IMAGES if i.first <= self.release <= i.last and i.backends.issuperset(backends)]
        special = {"vllm", "tensorrt_llm"}.intersection(modules)
        return next((image for image in images if special <= image.modules), images[0] if images else None)


def show_release(release: Release) -> str:
    """Return a release as text, such as ``24.10``."""
    return f"{release[0]:02}.{release[1]:02}"


def explain_backend(name: str) -> str:
    """Return in which releases NVIDIA's images have a backend, as a sentence."""
    images = [image for image in IMAGES if name in image.backends]
    if not images:
        return f"No image of NVIDIA's Triton has {name}."
    first, last = min(image.first for image in images), max(image.last for image in images)
    upto = f" to {show_release(last)}" if last != _EVER else " on"
    return f"{name} is in the images RELEASE-{images[0].suffix} from {show_release(first)}{upto}."


def parse_release(name: str) -> Release:
    """Return the release of a target as numbers: (26, 6) for ``26.06``, (24, 10) for ``embedded``.

    A release after the newest known one is accepted.

    Raises:
        InputError: the target is not known.
    """
    if name == EMBEDDED:
        return EMBEDDED_RELEASE
    found = re.fullmatch(r"([0-9]{2})\.([0-9]{2})", name)
    release = (int(found[1]), int(found[2])) if found else (0, 0)
    if release < min(TABLE) or not 1 <= release[1] <= 12:
        first = show_release(min(TABLE))
        raise InputError(
            f"Unknown target {name!r}.", f"Known: {EMBEDDED}, or a release from {first} on, such as 26.06."
        )
    return release


def find_target(name: str) -> Target:
    """Return the server called ``name``: ``embedded``, or NVIDIA's container of a release ``YY.MM``.

    A release after the newest known one is taken to be like it.

    Raises:
        InputError: the target is not known.
    """
    release = parse_release(name)
    if name == EMBEDDED:
        library, version = platform.libc_ver()
        glibc = parse_version(version) if library == "glibc" else ()
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        return Target(name, release, f"this machine ({library} {version})", "x86_64", python, glibc, None)
    row = find_row(release)
    return Target(name, release, f"Ubuntu {row.ubuntu}", "x86_64", row.python, *_SYSTEMS[row.ubuntu])


def find_row(release: Release) -> Row:
    """Return what NVIDIA's images of a release have; those of a later release than is known, what the newest has."""
    return TABLE[max(first for first in TABLE if first <= release)]


def _system_glibcxx() -> Version:
    path = next((path for path in map(Path, _LIBSTDCXX) if path.is_file()), None)
    if path is None:
        return ()
    with path.open("rb") as file:
        return read_binary(file, str(path)).provides.get("GLIBCXX", ())
