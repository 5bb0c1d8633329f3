"""Score any number of rows to a stream or to a file, with resumption after an interruption.

The answers of a run so far are in a journal, ``OUTPUT.partial``, so that the same command resumes where it was stopped.
The journal is a header line, then frames. A frame is a line of JSON with the size and the SHA-256 of a payload, then
the payload, which is the encoded answers of some rows. A frame that was being written when the process or the machine
failed does not match its hash and is cut off.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from shoal.clients.bulk.inputs import Feed
from shoal.clients.bulk.output_formats import JsonLines
from shoal.clients.bulk.rows import Row, shorten
from shoal.clients.bulk.scoring import Endpoint, Scored, Summary, score
from shoal.clients.bulk.tables import Table
from shoal.errors import InputError, SetupError
from shoal.system.files import open_regular

MARK, _FORMAT = "shoal infer", 2

# Progress callback: rows answered, and the fraction of the input that is read, where its size is known.
OnRows = Callable[[int, float | None], None]


def infer_to_stream(
    table: Table[Row], model: Endpoint, feed: Feed, form: JsonLines, stream: BinaryIO, on_rows: OnRows
) -> Summary:
    """Score the rows of ``table`` and write the answers to ``stream`` as they arrive, in the order of the rows."""
    done, failed, first = 0, 0, ""
    for scored in score(table.rows, model, feed):
        window = list(map(form.admit, scored))
        first = first or find_error(window, table)
        stream.write(form.encode(window))
        stream.flush()
        done, failed = done + len(window), failed + count_failed(window)
        on_rows(done, table.fraction_read())
    if not done:
        stream.write(form.header())
    return Summary(done, failed, first)


def infer_to_file(
    table: Table[Row],
    model: Endpoint,
    feed: Feed,
    form: JsonLines,
    output: Path,
    *,
    settings: Mapping[str, Any],
    on_rows: OnRows,
    is_fresh: bool = False,
) -> Summary:
    """Write the answers to ``output``, which appears only when it is complete.

    Until then the answers are kept in ``OUTPUT.partial``. The next run resumes from this file, if its ``settings`` are
    the same and the input still begins with the rows that were answered.

    Raises:
        InputError: the settings or rows differ from those of the earlier run, or the output exists.
        SetupError: the output cannot be written.
    """
    output = output.resolve()  # for a link, the file that it points to is written
    if output.is_dir():
        raise InputError(f"{output} is a folder.", "Name a file in it.")
    if output.exists() and not (is_fresh or partial_path(output).exists()):
        raise InputError(f"{output} exists; it will not be replaced.", "Name another file, or replace it: --fresh")
    with open_journal(output, settings, is_fresh=is_fresh) as journal:
        hashed = _skip(journal, table)
        if payload := next(journal.payloads(), b""):
            form.resume(payload)
        on_rows(journal.num_rows, table.fraction_read())
        first = ""
        for scored in score(table.rows, model, feed):
            for each in scored:
                hashed.update(as_bytes(each.row))
            window = list(map(form.admit, scored))
            first = first or find_error(window, table)
            failed, digest = count_failed(window), hashed.hexdigest()
            journal.append(form.encode(window), num_rows=len(window), num_failed=failed, digest=digest)
            on_rows(journal.num_rows, table.fraction_read())
        _finish(form, journal, output)
        return Summary(journal.num_rows, journal.num_failed, first)


def _skip(journal: Journal, table: Table[Row]) -> Any:
    """Skip the rows that an earlier run answered, check that they have not changed, and return their running hash."""
    hashed, skipped = hashlib.sha256(), 0
    for _, row in islice(table.rows, journal.num_rows):
        hashed.update(as_bytes(row))
        skipped += 1
    if skipped < journal.num_rows or (skipped and hashed.hexdigest() != journal.digest):
        raise InputError(
            f"The first {journal.num_rows:,} rows of {table.source.name} are not those that {journal.path.name} has"
            " answers for.",
            "Give the same input, or start over: --fresh",
        )
    return hashed


def as_bytes(row: Row) -> bytes:
    """Return a row as bytes, for digests."""
    return repr(row).encode("utf-8", "surrogatepass")


def _finish(form: JsonLines, journal: Journal, output: Path) -> None:
    aside = output.with_name(f"{output.name}.partial.new")
    with written(output):
        try:
            form.finish(journal.payloads, aside)
            with aside.open("rb") as file:
                os.fsync(file.fileno())
            aside.replace(output)
        finally:
            aside.unlink(missing_ok=True)
        journal.path.unlink()


def count_failed(window: list[Scored]) -> int:
    """Count the rows with an error."""
    return sum(isinstance(scored.answer, str) for scored in window)


def find_error(window: list[Scored], table: Table[Row]) -> str:
    """Return the error of the first row that has one, and where the row is; empty if none has."""
    failed = next((scored for scored in window if isinstance(scored.answer, str)), None)
    return f"{table.where(failed.number)}: {failed.answer}" if failed else ""


# --- journal --------------------------------------------------------------------------------------------------------


_MOST_HEADER = 2**20  # bytes


@dataclass
class Journal:
    """An open journal, locked by this process.

    ``num_rows`` rows have been answered, ``num_failed`` of them with an error; ``digest`` is the SHA-256 of these rows.
    """

    path: Path
    file: FileIO  # unbuffered: a buffer that did not fit on a full disk would be written again on close
    num_rows: int = 0
    num_failed: int = 0
    digest: str = ""

    def append(self, payload: bytes, *, num_rows: int, num_failed: int, digest: str) -> None:
        """Append a frame: the encoded answers of the next ``num_rows`` rows, and the digest of all rows so far."""
        entry: dict[str, Any] = {"rows": num_rows, "failed": num_failed, "input": digest, "bytes": len(payload)}
        entry["sha256"] = hashlib.sha256(payload).hexdigest()
        self.write(json.dumps(entry).encode() + b"\n" + payload)
        self._count(entry)

    def write(self, content: bytes) -> None:
        """Write all of ``content``."""
        rest = memoryview(content)
        with written(self.path):
            while rest:
                rest = rest[self.file.write(rest) :]

    def _count(self, entry: Mapping[str, Any]) -> None:
        self.num_rows += entry["rows"]
        self.num_failed += entry["failed"]
        self.digest = entry["input"]

    def payloads(self) -> Iterator[bytes]:
        """Yield all payloads, from the beginning."""
        with self.path.open("rb") as file:
            file.readline()
            while line := file.readline():
                yield file.read(json.loads(line)["bytes"])

    def read_back(self) -> None:
        """Count the rows of the complete frames, and truncate the file after the last complete frame."""
        with self.path.open("rb") as file:
            file.readline()
            end = file.tell()
            while entry := _read_frame(file):
                self._count(entry)
                end = file.tell()
        self.file.truncate(end)


def _read_frame(file: BinaryIO) -> dict[str, Any] | None:
    try:
        entry = json.loads(file.readline())
        payload = file.read(entry["bytes"])
        is_whole = hashlib.sha256(payload).hexdigest() == entry["sha256"]
    except (ValueError, KeyError, TypeError):
        return None
    return dict(entry) if is_whole else None


def partial_path(output: Path) -> Path:
    """Return the path of an output's journal."""
    return output.with_name(f"{output.name}.partial")


@contextmanager
def open_journal(output: Path, settings: Mapping[str, Any], *, is_fresh: bool) -> Iterator[Journal]:
    """Open a new journal for ``output``, or resume the existing journal.

    The caller removes the journal once ``output`` is written.

    Raises:
        InputError: the journal was begun with other settings, or was not written by shoal infer.
        SetupError: another process writes the journal, or the folder cannot be written.
    """
    path = partial_path(output)
    with written(path):
        if path.exists():
            open_regular(path).close()  # a pipe would be waited for
        file = path.open("ab", buffering=0)
    with file:
        journal = Journal(path, file)
        with written(path):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fix = "Wait for it, or name another output."
                raise SetupError(f"Another process is writing {path}.", fix) from None
            _begin(journal, settings, is_fresh=is_fresh)
        yield journal


def _begin(journal: Journal, settings: Mapping[str, Any], *, is_fresh: bool) -> None:
    wanted = json.dumps({MARK: _FORMAT, **dict(sorted(settings.items()))})
    with journal.path.open("rb") as file:
        line = file.readline(_MOST_HEADER)
    is_begun = line.endswith(b"\n")
    if not f'{{"{MARK}": '.startswith(line.decode("ascii", "replace")[: len(MARK) + 5]):
        raise InputError(f"{journal.path} was not written by shoal infer.", "Move it away, or name another output.")
    if is_begun and not is_fresh:
        _check_settings(json.loads(line), json.loads(wanted), journal.path)
        journal.read_back()
    else:  # a new journal, or one whose header is incomplete
        journal.file.truncate(0)
        journal.write(wanted.encode() + b"\n")


def _check_settings(begun: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    for name in (*wanted, *begun):
        if wanted.get(name) != begun.get(name):
            raise InputError(
                f"{path} was begun with another {name.replace('_', ' ')}: {shorten(begun.get(name))},"
                f" now {shorten(wanted.get(name))}.",
                "Start over: --fresh",
            )


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Turn an error of the operating system while ``path`` is written into a ``SetupError``."""
    try:
        yield
    except OSError as error:
        is_plain = error.errno not in (None, errno.EINVAL)  # pyarrow adds its own words to the message
        reason = os.strerror(error.errno) if is_plain and error.errno else error.strerror or error
        raise SetupError(f"{path} cannot be written: {reason}.", "Make room there, or name another output.") from None
