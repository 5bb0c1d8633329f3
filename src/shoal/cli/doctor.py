"""``shoal doctor``: checks that this machine can serve a repository; each reports what it found, and the way out."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import site
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from shoal.authoring.environment.engines import CONDAS, RATTLER, VENV
from shoal.authoring.environment.stub import read_stub
from shoal.cli.console import OUT, Json, plain, print_json
from shoal.errors import ShoalError
from shoal.serving.gateway.callers.key_file import KeyFile, default_file, show_time
from shoal.serving.server.checks import check_glibc, check_shared_memory, checks
from shoal.serving.server.launch import find_ports
from shoal.serving.server.runtime import STUB_VARIABLE, check_numpy, find_runtime
from shoal.system.paths import check_path_supported

OK, WARNING, FAULT = "ok", "warning", "fault"
SHARED_MEMORY_MIB = 256  # containers get 64 by default, too little for one batch of 512 rows of 256 tokens
DISK_GIB = 2
EXPIRY_DAYS = 14  # before which a key should be rotated
PORTS = (8000, 8001, 8002)


@dataclass(frozen=True)
class Finding:
    """Result of one check; ``fix`` is empty if there is nothing to do."""

    check: str
    level: str
    found: str
    fix: str = ""


def examine(repository: Path | None = None, keys: Path | None = None) -> list[Finding]:
    """Run all checks of the machine, in the order of a server's start, then those of ``repository``, if given.

    The file of ``keys`` is checked too; by default that of ``shoal keys``, if there is one.
    """
    found: list[Finding] = []
    for finding in (each for check in _CHECKS for each in check()):
        if finding.level != FAULT or finding.found not in [
            other.found for other in found
        ]:  # NumPy's faults, found for Triton too
            found.append(finding)
    if keys is not None or default_file().exists():
        found += _keys(keys or default_file())
    if repository is not None:
        for name, check in checks(repository.resolve()):
            found += _passes(f"{repository.name}: {name}", "fit", check)
            if found[-1].check.endswith(": repository") and found[-1].level == FAULT:
                return found  # the others have nothing to look at
        found += _mistakes(repository)
    return found


def _mistakes(repository: Path) -> Iterator[Finding]:
    """Yield the errors that ``shoal check`` finds, for which ``shoal serve`` starts nothing."""
    from shoal.cli.check import find_mistakes

    try:
        errors = find_mistakes(repository)
    except ShoalError:
        return  # not a repository: the other checks report this
    for error in errors:
        yield Finding(f"{repository.name}: check", FAULT, f"{error.place}: {error.what}", error.fix)


def _keys(path: Path) -> Iterator[Finding]:
    """Check the file of a service's keys: its mode, owner and content, and when the keys expire."""
    try:
        keys = KeyFile(path).read()
    except ShoalError as error:
        yield Finding("keys", FAULT, error.what, error.fix)
        return
    if (owner := path.stat().st_uid) != os.getuid():
        found = f"{path} belongs to the user {owner}, and this is the user {os.getuid()}"
        yield Finding("keys", WARNING, found, "Run the service as the owner of the file, or change the owner: chown")
    soon = datetime.now(UTC) + timedelta(days=EXPIRY_DAYS)
    for key in keys:
        expires = key.secrets[-1].expires
        if expires is not None and expires < soon:
            fix = f"Make another: shoal keys rotate {key.name} --file {path}"
            yield Finding("keys", WARNING, f"the key {key.name} of {path} expires at {show_time(expires)}", fix)
    yield Finding("keys", OK, f"{path} has {len(keys)}")


def _python() -> Iterator[Finding]:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    is_fit = sys.version_info[:2] in ((3, 11), (3, 12)) and platform.machine() == "x86_64"
    yield Finding(
        "Python", OK if is_fit else WARNING, found, "" if is_fit else "Use Python 3.11 or 3.12 on Linux x86-64."
    )


def _glibc() -> Iterator[Finding]:
    yield from _passes("C library", " ".join(platform.libc_ver()), check_glibc)


def _numpy() -> Iterator[Finding]:
    if os.environ.get(STUB_VARIABLE):  # the check of the stub covers NumPy
        yield Finding("NumPy", OK, np.__version__)
        return
    yield from _passes("NumPy", np.__version__, lambda: check_numpy(np.__version__))


def _server() -> Iterator[Finding]:
    try:
        runtime = find_runtime()
    except ShoalError as error:
        yield Finding("Triton", FAULT, error.what, error.fix)
        return
    yield Finding("Triton", OK, str(runtime.binary))
    yield from _stub(runtime.stub)


def _stub(path: Path) -> Iterator[Finding]:
    if importlib.util.find_spec("elftools") is None:  # reads the stub
        yield Finding("stub", OK, f"{path} (not read: pip install 'shoal[env]')")
        return
    try:
        stub = read_stub(path)
    except ShoalError as error:
        yield Finding("stub", FAULT, error.what, error.fix)
        return
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    if stub.python != running:
        fix = f"Name a stub for Python {running}, or run shoal with Python {stub.python}."
        yield Finding("stub", FAULT, f"{path} is for Python {stub.python}, this is {running}", fix)
    elif int(np.__version__.split(".")[0]) >= 2 and not stub.supports_numpy_2:
        yield Finding("stub", FAULT, f"{path} corrupts tensors under NumPy 2", "Type: pip install 'numpy<2'")
    else:
        yield Finding("stub", OK, f"{path} for Python {stub.python}")


def _user_site() -> Iterator[Finding]:
    folder = Path(site.getusersitepackages())
    packages = sorted(path.name.split("-")[0] for path in folder.glob("*.dist-info"))
    if packages and not os.environ.get("PYTHONNOUSERSITE"):
        found = f"{folder} holds {', '.join(packages[:5])}{', ...' if len(packages) > 5 else ''}"
        fix = "From Triton 24.11 on these come before an environment's own: start the server with PYTHONNOUSERSITE=1."
        yield Finding("this user's own packages", WARNING, found, fix)
    else:
        yield Finding("this user's own packages", OK, "none")


def _tools() -> Iterator[Finding]:
    libraries = {"rattler": "py-rattler", "conda_pack": "conda-pack", "elftools": "pyelftools"}
    absent = [package for module, package in libraries.items() if importlib.util.find_spec(module) is None]
    if absent:
        yield Finding("environments", WARNING, f"not installed: {', '.join(absent)}", "Type: pip install 'shoal[env]'")
        return
    condas = [tool for tool in CONDAS if shutil.which(tool)]
    yield Finding("environments", OK, f"can be built with {', '.join([RATTLER, VENV, *condas])}")


def _libraries() -> Iterator[Finding]:
    for name in ("torch", "treelite"):
        is_there = importlib.util.find_spec(name) is not None
        fix = "" if is_there else "Type: pip install 'shoal[serve]'"
        yield Finding(name, OK if is_there else FAULT, "installed" if is_there else "not installed", fix)


def _paths() -> Iterator[Finding]:
    for name, path in (("temporary folder", Path(tempfile.gettempdir())), ("Python's folder", Path(sys.prefix))):
        yield from _passes(name, str(path), partial(check_path_supported, path))


def _ports() -> Iterator[Finding]:
    for port in PORTS:
        try:
            find_ports(*(port if port == each else 0 for each in PORTS))
        except ShoalError as error:
            yield Finding(f"port {port}", WARNING, error.what, error.fix)
        else:
            yield Finding(f"port {port}", OK, "free")


def _shared_memory() -> Iterator[Finding]:
    for needed, level in ((0, FAULT), (SHARED_MEMORY_MIB, WARNING)):
        try:
            check_shared_memory(needed)
        except ShoalError as error:
            yield Finding("shared memory", level, error.what, error.fix)
            return
    yield Finding("shared memory", OK, f"at least {SHARED_MEMORY_MIB} MiB free")


def _disk() -> Iterator[Finding]:
    free = shutil.disk_usage(tempfile.gettempdir()).free // 2**30
    is_fit = free >= DISK_GIB
    yield Finding("disk", OK if is_fit else WARNING, f"{free} GiB free", "" if is_fit else f"Free {DISK_GIB} GiB.")


def _passes(name: str, found: str, check: Callable[[], None]) -> Iterator[Finding]:
    try:
        check()
    except ShoalError as error:
        yield Finding(name, FAULT, error.what, error.fix)
    else:
        yield Finding(name, OK, found)


_CHECKS = (_python, _glibc, _numpy, _server, _libraries, _user_site, _tools, _paths, _ports, _shared_memory, _disk)


def doctor(
    repository: Annotated[Path | None, typer.Argument(help="The model repository to serve.")] = None,
    keys: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file of keys. Default: ~/.config/shoal/keys.json, if any.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check whether this machine can run Triton and serve a repository; exit code 1 if it cannot."""
    findings = examine(repository, keys)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            colour = {"ok": "green", "optional": "cyan", "warning": "yellow"}.get(finding.level, "red")
            OUT.print(f"[{colour}]{finding.level:8}[/] {plain(finding.check)}: {plain(finding.found)}", soft_wrap=True)
            if finding.level != OK:
                OUT.print(f"         {plain(finding.fix)}", soft_wrap=True)
    if any(finding.level == FAULT for finding in findings):
        raise typer.Exit(1)
