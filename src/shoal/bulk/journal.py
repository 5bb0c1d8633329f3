"""``OUTPUT.partial``: what a run has answered so far, so that the same command goes on where it was stopped.

A header line, then frames: a line of JSON with the payload's size and SHA-256, and the payload. What was being written
when the process or the machine went down fails its hash and is cut off.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from shoal.errors import InputError, SetupError
from shoal.tables import shorten

_FORMAT = 1
_BEGIN_ANEW = "Begin anew: --fresh"


@dataclass
class Journal:
    """An open journal, held by this process alone.

    ``num_rows`` rows have been answered, ``num_failed`` of them with an error; ``digest`` is that of all their inputs.
    """

    path: Path
    file: BinaryIO
    num_rows: int = 0
    num_failed: int = 0
    digest: str = ""

    def append(self, payload: bytes, *, num_rows: int, num_failed: int, digest: str) -> None:
        """Keep the answers of the next rows."""
        entry = {
            "rows": num_rows, "failed": num_failed, "input": digest,
            "bytes": len(payload), "sha256": hashlib.sha256(payload).hexdigest(),
        }  # fmt: skip
        with written(self.path):
            self.file.write(json.dumps(entry).encode() + b"\n" + payload)
            self.file.flush()
        self._count(entry)

    def _count(self, entry: Mapping[str, Any]) -> None:
        self.num_rows += entry["rows"]
        self.num_failed += entry["failed"]
        self.digest = entry["input"]

    def payloads(self) -> Iterator[bytes]:
        """What was kept, from the beginning."""
        self.file.seek(0)
        self.file.readline()
        while line := self.file.readline():
            yield self.file.read(json.loads(line)["bytes"])

    def read_back(self) -> None:
        """Count the frames from here on that are whole, and cut off what follows them."""
        end = self.file.tell()
        while entry := self._read_frame():
            self._count(entry)
            end = self.file.tell()
        self.file.seek(end)
        self.file.truncate()

    def _read_frame(self) -> dict[str, Any] | None:
        try:
            entry = json.loads(self.file.readline())
            payload = self.file.read(entry["bytes"])
            is_whole = hashlib.sha256(payload).hexdigest() == entry["sha256"]
        except (ValueError, KeyError, TypeError):
            return None
        return dict(entry) if is_whole else None


def partial_path(output: Path) -> Path:
    """Where the journal of an output lies."""
    return output.with_name(f"{output.name}.partial")


@contextmanager
def open_journal(output: Path, settings: Mapping[str, Any], *, is_fresh: bool) -> Iterator[Journal]:
    """The journal of ``output``, begun or gone on with. It stays: whoever has written the output removes it.

    Raises:
        InputError: it was begun with other settings, which are named.
        SetupError: another process writes it, or the folder cannot be written.
    """
    path = partial_path(output)
    with written(path), ExitStack() as held:
        file = held.enter_context(path.open("a+b"))
        _lock(file, path)
        journal = Journal(path, file)
        _begin(journal, {"shoal infer": _FORMAT, **json.loads(json.dumps(dict(settings)))}, is_fresh=is_fresh)
        keep_open = held.pop_all()
    with keep_open:
        yield journal


def _begin(journal: Journal, header: Mapping[str, Any], *, is_fresh: bool) -> None:
    file, wanted = journal.file, json.dumps(header).encode() + b"\n"
    file.seek(0)
    line = file.readline()
    if line == wanted and not is_fresh:
        file.seek(len(line))
        journal.read_back()
    elif is_fresh or wanted.startswith(line):  # none, or one that was being written
        file.truncate(0)
        file.write(wanted)
        file.flush()
    else:
        _check_header(line, header, journal.path)


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SetupError(f"Another process is writing {path}.", "Wait for it, or name another output.") from None


def _check_header(line: bytes, header: Mapping[str, Any], path: Path) -> None:
    try:
        begun = dict(json.loads(line))
    except (ValueError, TypeError):
        begun = {}
    if "shoal infer" not in begun:
        raise InputError(f"{path} is none of shoal's.", "Move it away, or name another output.")
    for name in (*header, *begun):
        if header.get(name) != begun.get(name):
            raise InputError(
                f"{path} was begun with another {name.replace('_', ' ')}: {shorten(begun.get(name))},"
                f" now {shorten(header.get(name))}.",
                _BEGIN_ANEW,
            )


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Around writing: the operating system's refusals in shoal's words."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error  # pyarrow puts its own words around it
        raise SetupError(f"{path} cannot be written: {reason}.", "Make room there, or name another output.") from None
