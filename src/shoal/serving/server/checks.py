"""Checks of the repository and the machine, made before a Triton server is started."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

from shoal.authoring.repository.manifest import check_manifest, read_composed, read_manifest
from shoal.authoring.repository.model_folders import read_configs
from shoal.errors import InputError, SetupError
from shoal.serving.server.orphans import SHARED_MEMORY
from shoal.serving.server.runtime import SERVER_VARIABLE, Runtime, find_runtime
from shoal.system.machine import VISIBLE, describe_machine
from shoal.system.paths import check_path_supported

GLIBC = (2, 35)  # what the wheel nvidia-pytriton 0.7.0 is built for
_MIB = 2**20
_LEAST_MIB = 16  # of shared memory, for a repository whose manifest does not give its needs


def check_start(repository: Path) -> Runtime:
    """Run all checks that are possible before the server starts, and return the server to start.

    Raises:
        InputError: Triton does not support the path, there is no repository, or the repository cannot be read.
        ArtifactError: a file of the repository is missing or changed.
        SetupError: this machine lacks something that the server needs.
    """
    for _, passes in checks(repository):
        passes()
    check_glibc()
    return find_runtime()


def checks(repository: Path) -> list[tuple[str, Callable[[], None]]]:
    """Return the names and the checks for ``repository``. A check that fails raises a ``ShoalError`` that says why."""
    return [
        ("repository", lambda: check_repository(repository)),
        ("files", lambda: check_files(repository)),
        ("GPUs", lambda: check_gpus(repository)),
        ("shared memory", lambda: check_shared_memory(find_needed_memory(repository))),
    ]


def check_repository(path: Path) -> None:
    """Check that ``path`` is a model repository that Triton can load.

    Raises:
        InputError: Triton cannot load ``path``; the message says why.
    """
    check_path_supported(path)
    if not path.exists():
        from shoal.authoring.repository.made import suggest_repository

        fix = suggest_repository(path) or "Make one: shoal compose ENSEMBLE REPOSITORY"
        raise InputError(f"{path} does not exist.", fix)
    if (path / "config.pbtxt").is_file():
        raise InputError(f"{path} is the folder of one model.", f"Name the repository that holds it: {path.parent}")
    if not any(path.glob("*/config.pbtxt")):
        raise InputError(
            f"{path} is not a model repository: it holds no MODEL/config.pbtxt.",
            f"Make one of it, and serve that: shoal serve {path}"
            if path.is_file()
            else "Make one: shoal compose ENSEMBLE REPOSITORY",
        )
    stray = sorted(p.name for p in path.iterdir() if p.is_dir() and not (p / "config.pbtxt").is_file())
    if stray:
        raise InputError(
            f"{path} holds folders that are not models: {', '.join(stray)}.",
            "Triton would refuse to start: move them out.",
        )


def check_files(repository: Path) -> None:
    """Check the files of a composed repository against the digests in its manifest.

    Raises:
        ArtifactError: a file is missing or changed.
        InputError: a file cannot be read.
    """
    try:
        check_manifest(repository)
    except PermissionError as error:
        raise InputError(
            f"{error.filename} cannot be read by this user.", f"Type: chmod -R a+rX {repository}"
        ) from None


def check_glibc() -> None:
    """Check that the C library is new enough for Triton from the PyPI wheel.

    Raises:
        SetupError: the C library is too old, or is not glibc.
    """
    name, version = platform.libc_ver()
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not os.environ.get(SERVER_VARIABLE) and (name != "glibc" or numbers < GLIBC):
        raise SetupError(
            f"The embedded Triton needs glibc {'.'.join(map(str, GLIBC))} or newer, and this is {name} {version}.",
            "Use Debian 12, Ubuntu 22.04 or newer, or NVIDIA's container: shoal serve REPOSITORY --print",
        )


def check_gpus(repository: Path) -> None:
    """Check that this machine has the GPUs for which a repository was composed.

    Raises:
        SetupError: a GPU is missing.
    """
    wanted = [int(gpu) for gpu in read_manifest(repository).get("gpus", [])]
    number = int(describe_machine().get("num_gpus", 0))
    if wanted and max(wanted) >= number:
        names = " ".join(read_composed(repository)) or "ENSEMBLE"
        files = " --artifacts DIR" if any(each.artifacts for each in read_configs(repository).values()) else ""
        shown = f" (CUDA_VISIBLE_DEVICES is {os.environ[VISIBLE]!r})" if VISIBLE in os.environ else ""
        raise SetupError(
            f"{repository} was composed for GPU {max(wanted)}, and this machine has {number or 'none'}{shown}.",
            f"Compose it for the host: shoal compose {names} {repository}-cpu{files} --placement cpu",
        )


def find_needed_memory(repository: Path) -> int:
    """Return the shared memory, in MiB, that the largest request needs, from the manifest of a composed repository."""
    return -(-int(read_manifest(repository).get("launch", {}).get("shared_memory", _LEAST_MIB * _MIB)) // _MIB)


def check_shared_memory(needed: int) -> None:
    """Check that shared memory can be written, and has ``needed`` MiB free.

    Raises:
        SetupError: shared memory cannot be written, or has less than ``needed`` MiB free.
    """
    if not SHARED_MEMORY.is_dir() or not os.access(SHARED_MEMORY, os.W_OK):
        raise SetupError(f"{SHARED_MEMORY} cannot be written.", "Mount a tmpfs there, writable for this user.")
    free = shutil.disk_usage(SHARED_MEMORY).free // _MIB
    if free < needed:
        raise SetupError(
            f"{SHARED_MEMORY} has {free} MiB free, and the largest requests need {needed} MiB.",
            f"Give it more: docker run --shm-size={needed}m, or mount -o remount,size={needed}m {SHARED_MEMORY}",
        )
