"""A small conda channel in a folder, made offline from what is on the machine: a CPython, and installed packages."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from importlib.metadata import distribution
from pathlib import Path

SUBDIR = "linux-64"
SKIPPED = {
    "__pycache__", "test", "tests", "tkinter", "turtledemo", "idlelib", "lib2to3", "ensurepip", "site-packages",
    "dist-packages",
}  # fmt: skip


def build_channel(channel: Path, python: Path, distributions: Sequence[str], work: Path) -> str:
    """Fill ``channel`` with the CPython installed at prefix ``python`` and with distributions of this environment.

    Returns the channel's URL.
    """
    (channel / "noarch").mkdir(parents=True)
    version = _add_python(channel, python, work / "python")
    for name in distributions:
        _add_distribution(channel, name, version, work / name)
    # In a process of its own: rattler's threads may crash an interpreter that is shutting down.
    code = (
        "import asyncio, os, sys; from rattler.index import index_fs;"
        "asyncio.run(index_fs(sys.argv[1], write_zst=False, write_shards=False, force=True)); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, channel], check=True)
    return channel.as_uri()


def _add_python(channel: Path, prefix: Path, tree: Path) -> str:
    """The package ``python``; returns its version as ``3.11``."""
    command: list[str | Path] = [
        prefix / "bin" / "python3",
        "-IS",
        "-c",
        "import platform; print(platform.python_version())",
    ]
    version = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    name = f"python{version.rpartition('.')[0]}"

    def unwanted(_: str, names: list[str]) -> set[str]:
        return {n for n in names if n in SKIPPED or n.startswith("config-") or n.endswith(".a")}

    shutil.copytree(prefix / "lib" / name, tree / "lib" / name, symlinks=True, ignore=unwanted)
    (tree / "lib" / name / "site-packages").mkdir()
    (tree / "bin").mkdir()
    shutil.copy(prefix / "bin" / name, tree / "bin")
    binaries = [tree / "bin" / name]
    for library in (prefix / "lib").glob(f"lib{name}.so.*"):
        shutil.copy(library, tree / "lib")
        (tree / "lib" / f"lib{name}.so").symlink_to(library.name)
        binaries.append(tree / "lib" / library.name)
    for link in ("python3", "python"):
        (tree / "bin" / link).symlink_to(name)
    if shutil.which("strip"):
        subprocess.run(["strip", "--strip-unneeded", *binaries], check=True)
    # A run path to the original's lib/ would find that one's library: make it relative, without moving a byte.
    run_path = os.fsencode(prefix / "lib") + b"\0"
    content = binaries[0].read_bytes()
    binaries[0].write_bytes(content.replace(run_path, b"$ORIGIN/../lib".ljust(len(run_path), b"\0")))
    settings = (tree / "lib" / name).glob("_sysconfigdata*")
    named = {str(path.relative_to(tree)): str(prefix) for path in settings if str(prefix) in path.read_text()}
    write_package(channel, "python", version, [], tree, placeholders=named)
    return name.removeprefix("python")


def _add_distribution(channel: Path, name: str, python: str, tree: Path) -> None:
    site = tree / "lib" / f"python{python}" / "site-packages"
    installed = distribution(name)
    for file in installed.files or []:
        if ".." not in file.parts and not {"__pycache__", "tests"} & set(file.parts):
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(str(file.locate()), site / file)
    write_package(channel, name, installed.version, [f"python {python}.*"], tree)


def write_package(
    channel: Path,
    name: str,
    version: str,
    depends: Sequence[str],
    tree: Path,
    placeholders: Mapping[str, str] | None = None,
) -> Path:
    """Write the files of ``tree`` as one conda package; ``placeholders`` are text files that name their prefix."""
    paths: list[dict[str, str]] = []
    for path in sorted(tree.rglob("*")):
        relative = path.relative_to(tree).as_posix()
        if path.is_symlink() or path.is_file():
            paths.append({"_path": relative, "path_type": "softlink" if path.is_symlink() else "hardlink"})
            if relative in (placeholders or {}):
                paths[-1] |= {"prefix_placeholder": (placeholders or {})[relative], "file_mode": "text"}
    index = {
        "name": name, "version": version, "build": "0", "build_number": 0, "subdir": SUBDIR, "arch": "x86_64",
        "platform": "linux", "depends": list(depends), "timestamp": 1700000000000,
    }  # fmt: skip
    output = channel / SUBDIR / f"{name}-{version}-0.tar.bz2"
    output.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(output, "w:bz2", compresslevel=1) as archive:
        for member, content in [("info/index.json", index), ("info/paths.json", {"paths": paths, "paths_version": 1})]:
            data = json.dumps(content).encode()
            info = tarfile.TarInfo(member)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for entry in paths:
            archive.add(tree / entry["_path"], entry["_path"], recursive=False)
    return output
