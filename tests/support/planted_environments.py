"""Mistakes about execution environments and stubs."""

from __future__ import annotations

import gzip
import io
import sys
import tarfile

from shoal.errors import SetupError
from tests.support.page_plants import page
from tests.support.planted import Edit, Plant

FIRST = "first/config.pbtxt"
ARCHIVE = "first/custom_env.tar.gz"
STUB = "triton_python_backend_stub"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
NOT_THERE = "Failed to get the canonical path for"


def environment(*, python: str = PYTHON, numpy: str = "1.26.4", without: str = "") -> bytes:
    """A packed environment, as far as names and records go."""
    site = f"lib/python{python}/site-packages/numpy-{numpy}.dist-info"
    files = {
        "bin/activate": "",
        "bin/python3": "",
        f"{site}/METADATA": f"Metadata-Version: 2.1\nName: numpy\nVersion: {numpy}\n",
        f"{site}/RECORD": "",
    }
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as file, tarfile.open(fileobj=file, mode="w") as archive:
        for name, text in files.items():
            if name != without:
                member = tarfile.TarInfo(name)
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))
    return packed.getvalue()


def stub() -> bytes:
    """The embedded server's own, where it is installed."""
    from shoal.serving.server.runtime import find_runtime

    try:
        return find_runtime().stub.read_bytes()
    except SetupError:
        return b"\x7fELF"


def path(value: str, where: str = "dynamic") -> dict[str, Edit]:
    """The edit that names an environment."""
    parameter = f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{value}" }} }}'
    return {FIRST: (where, f"{parameter}\n{where}")}


def instead(value: str) -> dict[str, Edit]:
    return {FIRST: ("$$TRITON_MODEL_DIRECTORY/custom_env.tar.gz", value)}


GOOD: dict[str, Edit] = {**path("$$TRITON_MODEL_DIRECTORY/custom_env.tar.gz"), ARCHIVE: environment}

PLANTS = (
    page("environment-missing", good=GOOD, core=NOT_THERE, target="embedded"),
    page("environment-relative", good=GOOD),
    page("environment-dollar", good=GOOD, core=NOT_THERE),
    page("environment-outside", good={**GOOD, ARCHIVE: lambda: environment(python="3.12")}, target="24.11"),
    Plant(
        "an environment left out",
        "environment-missing",
        FIRST,
        "EXECUTION_ENV_PATH",
        {ARCHIVE: None},
        GOOD,
        core=NOT_THERE,
    ),
    Plant(
        "an environment at an address",
        "environment-missing",
        FIRST,
        "EXECUTION_ENV_PATH",
        instead("file:///opt/custom_env.tar.gz"),
        GOOD,
        core=NOT_THERE,
    ),
    Plant(
        "an environment in a home",
        "environment-missing",
        FIRST,
        "EXECUTION_ENV_PATH",
        instead("~/custom_env.tar.gz"),
        GOOD,
        core=NOT_THERE,
    ),
    Plant(
        "braces",
        "environment-dollar",
        FIRST,
        "EXECUTION_ENV_PATH",
        instead("${TRITON_MODEL_DIRECTORY}/custom_env.tar.gz"),
        GOOD,
        core=NOT_THERE,
    ),
    Plant(
        "two dollars too late",
        "environment-dollar",
        FIRST,
        "EXECUTION_ENV_PATH",
        instead("/$$TRITON_MODEL_DIRECTORY/custom_env.tar.gz"),
        GOOD,
        core=NOT_THERE,
    ),
    Plant(
        "an environment beside its model",
        "environment-outside",
        FIRST,
        "EXECUTION_ENV_PATH",
        {**instead("$$TRITON_MODEL_DIRECTORY/../custom_env.tar.gz"), "custom_env.tar.gz": environment},
        GOOD,
    ),
    Plant(
        "NumPy 2 under an old stub",
        "environment-misfit",
        FIRST,
        "EXECUTION_ENV_PATH",
        {ARCHIVE: lambda: environment(numpy="2.1.0")},
        GOOD,
        target="embedded",
    ),
    Plant(
        "an environment without activate",
        "environment-misfit",
        FIRST,
        "EXECUTION_ENV_PATH",
        {ARCHIVE: lambda: environment(without="bin/activate")},
        GOOD,
        core="activate",
    ),
    Plant(
        "half an archive",
        "environment-misfit",
        FIRST,
        "EXECUTION_ENV_PATH",
        {ARCHIVE: lambda: environment()[:-40]},
        GOOD,
        core="archive_read",
    ),
    Plant(
        "an archive of another kind",
        "environment-misfit",
        FIRST,
        "EXECUTION_ENV_PATH",
        {ARCHIVE: b"PK\x03\x04" + bytes(60)},
        GOOD,
        core="archive_read",
    ),
    Plant("a stub that is not executable", "stub-not-executable", f"first/{STUB}", "", {f"first/{STUB}": stub}),
)
