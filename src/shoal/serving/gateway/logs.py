"""Logging of the service and of Triton: plain lines on a terminal, one JSON object per line elsewhere."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from functools import cache
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from shoal.clients.keys import hide_keys
from shoal.errors import InputError
from shoal.system.machine import describe_machine

# Format of Google's logging library (glog): severity, date and time, thread, place.
_LINE = re.compile(r"([IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ \d+ ([\w.]+:\d+)\] (.*)")
_TABLE = re.compile(r"[+|][- ]")
_LEVELS = {"I": logging.INFO, "W": logging.WARNING, "E": logging.ERROR, "F": logging.CRITICAL}
# Harmless warnings on a machine without a GPU.
_NO_GPU = re.compile(r"CUDA driver version is|CudaDriverHelper|DCGM unable|pinned system memory|initialize NVML")
_FIELDS = ("model", "kind", "request_id", "place")  # optional fields of a record
_PERIOD = 0.2  # seconds between two reads of a log
_MOST_BYTES = 8 * 2**20  # of Triton's log, which is truncated once it is forwarded
_FILE_BYTES, _MOST_FILES = 64 * 2**20, 3  # rotation of the service's own log: size, and number of older files kept
_FLOOD_SECONDS = 10.0
_MOST_ALIKE = 20  # records per log statement in that time; a record's field "most" overrides it
_CONTROL = {number: f"\\x{number:02x}" for number in (*range(32), *range(127, 160))}  # they could forge lines

log = logging.getLogger("shoal")
triton = logging.getLogger("shoal.triton")


class JsonLines(logging.Formatter):
    """Formatter for one JSON object per line.

    The keys are ``time`` in UTC, ``level``, ``source``, ``message`` and, where known, ``model``, ``kind``,
    ``request_id`` and ``place`` (the line of code in Triton).
    """

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as one line."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry = {
            "time": f"{moment}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "source": {triton.name: "triton", log.name: "shoal"}.get(record.name, record.name),
            "message": record.getMessage(),
        }
        entry |= {name: getattr(record, name) for name in _FIELDS if getattr(record, name, "")}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return hide_keys(json.dumps(entry, ensure_ascii=False))


class Plain(logging.Formatter):
    """Formatter for plain lines: time of day, ``Triton:`` if Triton logged it, the level if it is not INFO, message."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as one line, followed by the traceback if it has one."""
        who = "Triton: " if record.name == triton.name else ""
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        message = record.getMessage().translate(_CONTROL)
        text = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {who}{level}{message}"
        return hide_keys(f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text)


class Flood(logging.Filter):
    """Filter that limits how many records each log statement of shoal and of Triton may log in ten seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[Any, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log a record. The first record after suppressed records says how many were suppressed."""
        is_printed = record.name == triton.name and not hasattr(record, "place")
        if is_printed or (record.name == triton.name and record.levelno <= logging.INFO):
            return True
        key = getattr(record, "place", (record.pathname, record.lineno))
        most = getattr(record, "most", _MOST_ALIKE)
        since, number = self._seen.get(key, (0.0, 0))
        if record.created - since < _FLOOD_SECONDS:
            self._seen[key] = since, number + 1
            return number < most
        self._seen[key] = record.created, 1
        if number > most:
            record.msg = f"{record.msg} ({number - most} more like it)"
        return True


class _File(RotatingFileHandler):
    """Log file whose write errors are reported once, not as a traceback for each line."""

    def handleError(self, _: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        log.error("The log cannot be written: %s", sys.exc_info()[1], extra={"most": 1, "is_of_log": True})


def configure(file: Path | None) -> None:
    """Send log records of shoal and Triton to standard error, and to ``file`` if given.

    Triton's own records are shown only from level WARNING on, and what models print is not shown on a terminal. All are
    in the file.

    Raises:
        InputError: the file cannot be written.
    """
    stream = logging.StreamHandler(sys.stderr)
    stream.setLevel(logging.INFO)
    is_terminal = sys.stderr.isatty()
    stream.setFormatter(Plain() if is_terminal else JsonLines())
    stream.addFilter(
        lambda record: (
            record.name != triton.name or record.levelno > logging.INFO or not (is_terminal or hasattr(record, "place"))
        )
    )
    handlers: list[logging.Handler] = [stream]
    if file is not None:
        try:
            file.write_bytes(b"")
            handler = _File(file, maxBytes=_FILE_BYTES, backupCount=_MOST_FILES, encoding="utf-8")
        except OSError as error:
            raise InputError(f"The log {file} cannot be written: {error.strerror}.", "Name another file.") from None
        handler.setFormatter(JsonLines())
        handler.addFilter(lambda record: not hasattr(record, "is_of_log"))
        handlers.append(handler)
    for each in handlers:  # each handler has its own counters
        each.addFilter(Flood())
    log.setLevel(logging.INFO)
    triton.setLevel(logging.DEBUG)
    # records of other libraries get the same format
    logging.basicConfig(handlers=handlers, level=logging.WARNING, force=True)


class Tail:
    """Forwards the lines of Triton's log file to ``logging``, each as ``show`` makes it, and truncates a long file."""

    def __init__(self, path: Path, show: Callable[[str], str] = str) -> None:
        self._path, self._show, self._at, self._rest = path, show, 0, b""

    async def follow(self) -> None:
        """Forward new lines until cancelled."""
        while True:
            self.read()
            await asyncio.sleep(_PERIOD)

    def read(self) -> None:
        """Forward the lines that were added to the file since the last call."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file.seek(self._at)
            content = file.read()
            self._at = file.tell()
        *lines, self._rest = (self._rest + content).split(b"\n")
        for line in lines:
            forward(self._show(line.decode("utf-8", "replace")))
        if self._at > _MOST_BYTES:
            os.truncate(self._path, 0)
            self._at = 0


def forward(line: str) -> None:
    """Log a line of Triton's log. Lines of its tables, such as that of its options, have the level DEBUG.

    Another line was printed by a model and has the level INFO, or by Triton about a lacking GPU and has DEBUG.
    """
    found = _LINE.fullmatch(line)
    if found and not found[3]:  # the head of a table
        return
    if found:
        level = logging.INFO if _NO_GPU.search(found[3]) and not _has_gpu() else _LEVELS[found[1]]
        triton.log(level, "%s", found[3].removeprefix('"').removesuffix('"'), extra={"place": found[2]})
    elif line.strip():
        is_quiet = _TABLE.match(line) or (_NO_GPU.search(line) and not _has_gpu())
        triton.log(logging.DEBUG if is_quiet else logging.INFO, "%s", line)


@cache
def _has_gpu() -> bool:
    return "gpu" in describe_machine()
