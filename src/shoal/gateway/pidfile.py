"""Pid file of the service."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.errors import InputError, SetupError
from shoal.gateway.logs import log


@contextmanager
def hold_pid_file(path: Path) -> Iterator[None]:
    """Write this process's id to ``path``, and remove it at the end; the file is in use while it is locked.

    Raises:
        InputError: the file cannot be written, or is not a pid file.
        SetupError: another service holds it.
    """
    try:
        file = path.open("a+", encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"The pid file {path} cannot be written: {error.strerror}.", "Name another file.") from None
    with file:
        file.seek(0)
        found = file.read(100).strip()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            fix = f"Stop it: kill {found}" if found else "Name another --pid-file."
            raise SetupError(f"Another service holds the pid file {path}: process {found or 'unknown'}.", fix) from None
        if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            raise SetupError(f"Another service has just removed the pid file {path}.", "Start again.")
        if found and not found.isdecimal():
            raise InputError(f"{path} is not a pid file: it begins with {found[:20]!r}.", "Name another --pid-file.")
        if found:
            log.warning("The pid file %s was left by process %s, which has ended.", path, found)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
