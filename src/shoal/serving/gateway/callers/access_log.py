"""Requests from arrival to end: their ids, their lines in the audit file, and the counts of their callers' keys."""

from __future__ import annotations

import itertools
import json
import os
import re
import secrets
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from logging import makeLogRecord
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from shoal.clients.keys import hide_keys
from shoal.errors import InputError
from shoal.serving.gateway.callers.callers import ANYONE
from shoal.serving.gateway.logs import log
from shoal.serving.gateway.refusals import RefusalReason, RefusedError

_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}", re.ASCII)
_FILE_BYTES, _MOST_FILES = 64 * 2**20, 16  # rotation: size, and number of older files kept
_PERIOD = 0.2  # seconds between two writes: one for each line would cost more than the line
_MOST_WAITING = 100_000  # lines that wait to be written
_PROCESS, _numbers = secrets.token_hex(10), itertools.count()  # make an id that no other request has


class AccessEntry:
    """The access log's entry of a request, from its arrival to ``end``: who sent what, and what became of it.

    ``given`` are the ids that its client gave it; if it is one that is valid, it is kept. ``route`` is the name of what
    was asked for, ``reason`` that of a refusal, and ``received`` and ``sent`` are bytes. ``has_begun`` says that its
    answer is on the way.
    """

    def __init__(self, audit: Audit | None = None, peer: str = "", given: Sequence[str] = (), route: str = "") -> None:
        is_kept = len(given) == 1 and _ID.fullmatch(given[0]) and hide_keys(given[0]) == given[0]
        self.id = given[0] if is_kept else f"{_PROCESS}{next(_numbers):012x}"
        self.caller, self.route, self.model, self.reason = ANYONE, route, "", ""
        self.received = self.sent = self.num_messages = 0
        self.has_begun = self._is_over = False
        self._audit, self._peer, self._tokens = audit, peer, Counter[str]()
        self._began, self._start = time.time(), time.monotonic()

    def begin_message(self, num_bytes: int) -> AccessEntry:
        """Return the entry of a message of this stream, which is now the current one."""
        self.num_messages += 1
        message = AccessEntry(self._audit, self._peer, [self.id], self.route)
        message.caller, message.received = self.caller, num_bytes
        _current.set(message)
        return message

    def refuse(self, refused: RefusedError) -> None:
        """Note why it was refused."""
        is_late = self.caller.is_known and "revoked or expired key"  # in the middle of a request
        self.reason = is_late or self.caller.fault if refused.reason is RefusalReason.KEY else refused.reason.value

    def count_tokens(self, kind: str, number: int) -> None:
        """Count tokens of the prompt (``input``) or of the answer (``output``)."""
        self._tokens[kind] += number
        if self.caller.account is not None:
            self.caller.account.count_tokens(kind, number)

    def headers(self) -> Iterator[tuple[str, str]]:
        """Yield the headers, or metadata, of its answer."""
        yield "x-request-id", self.id
        if self.caller.account is not None:
            yield from self.caller.account.headers()

    def end(self, status: int | str, *, is_answered: bool) -> None:
        """Count it, and write its line, once; ``status`` is HTTP's, or gRPC's."""
        if self._is_over:
            return
        self._is_over = True
        if self.caller.account is not None:
            self.caller.account.outcomes["answered" if is_answered else "refused" if self.reason else "failed"] += 1
        if self._audit is None:
            return
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(self._began))
        entry = {
            "time": f"{moment}.{int(self._began % 1 * 1000):03}Z", "request_id": self.id, "key": self.caller.name,
            "address": self.caller.address or self._peer, "route": self.route, "model": self.model[:100],
            "status": status, "milliseconds": round(1000 * (time.monotonic() - self._start), 1),
            "bytes_received": self.received, "bytes_sent": self.sent, "input_tokens": self._tokens["input"],
            "output_tokens": self._tokens["output"], "why": self.reason,
        }  # fmt: skip
        self._audit.write(entry)


_current: ContextVar[AccessEntry | None] = ContextVar("access_entry", default=None)


def begin_entry(audit: Audit | None, peer: str, given: Sequence[str], route: str = "") -> AccessEntry:
    """Return an entry that is the current one of this task, and of the tasks that it starts."""
    entry = AccessEntry(audit, peer, given, route)
    _current.set(entry)
    return entry


def current_entry() -> AccessEntry:
    """Return the entry of the request that this task answers."""
    return _current.get() or AccessEntry()


class _File(RotatingFileHandler):
    """Audit file, which is rotated at 64 MiB, and opened again if another program has renamed it."""

    is_failed = False  # the last line was not written

    def shouldRollover(self, record: Any) -> bool:  # noqa: N802 (logging's name)
        path, stream = Path(self.baseFilename), self.stream
        if stream is not None and not (path.exists() and os.path.samestat(path.stat(), os.fstat(stream.fileno()))):
            self.stream = self._open()
            stream.close()
        return bool(super().shouldRollover(record))

    def handleError(self, _: Any) -> None:  # noqa: N802
        self.is_failed = True
        log.error("The audit file cannot be written: %s", sys.exc_info()[1], extra={"most": 1})


class Audit:
    """File with a JSON line for each request, without texts and keys. A thread writes it, five times a second.

    Raises:
        InputError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = _File(path, maxBytes=_FILE_BYTES, backupCount=_MOST_FILES, encoding="utf-8")
        except OSError as error:
            raise InputError(f"The audit file {path} cannot be written: {error.strerror}.", "Name another.") from None
        self._lines, self._is_closed = deque[str](), threading.Event()
        self._writing = threading.Thread(target=self._write_all, daemon=True)
        self._writing.start()

    def write(self, entry: dict[str, Any]) -> None:
        """Write a line soon."""
        if len(self._lines) < _MOST_WAITING:
            self._lines.append(hide_keys(json.dumps(entry)))
        else:
            log.error("Lines of the audit file are lost: it is written too slowly.", extra={"most": 1})

    def _write_all(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_closed.wait(_PERIOD)
            if lines := [self._lines.popleft() for _ in range(len(self._lines))]:
                self._file.is_failed = False
                self._file.handle(makeLogRecord({"msg": "\n".join(lines)}))
                if self._file.is_failed:
                    self._lines.extendleft(reversed(lines))

    def close(self) -> None:
        """Write what waits to be written."""
        self._is_closed.set()
        self._writing.join()
        self._file.close()
