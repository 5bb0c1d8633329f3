"""Files that stop or fill a careless reader, and the limits that a test of them runs under."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SECONDS, WAIT, MEMORY = 20, 120, 1536 * 2**20  # of one call: processor time, time, and memory beyond the present


def link(target: str) -> Callable[[Path], object]:
    return lambda path: path.symlink_to(target)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(3 * 2**30)


def text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content, encoding="utf-8")


NO_FILES: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "endless zeros": link("/dev/zero"),
    "a terminal": link("/dev/tty"),
    "the kernel's log": link("/proc/kmsg"),
    "memory": link("/proc/self/mem"),
    "3 GB": sparse,
    "a folder": Path.mkdir,
    "a link to nothing": link("nothing"),
}
NO_JSON: dict[str, Callable[[Path], object]] = {
    "nested": text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}"),
    "half a character": text('{"a": "\\ud800"}'),
    "a list": text("[1]"),
    "a number": text("7"),
    "wrong types": text(
        '{"weight_map": 1, "files": [], "launch": 3, "vocab_size": {}, "model": [], "eos_token_id": {"a": []},'
        ' "chat_template": [3], "added_tokens": 4, "shoal": 1}'
    ),
    "not UTF-8": lambda path: path.write_bytes(b'{"a": "\xff"}'),
}


def put(path: Path, make: Callable[[Path], object]) -> None:
    """Replace the file at ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    make(path)


@contextmanager
def limits() -> Iterator[None]:
    """Limit time and memory of this process; what goes beyond fails by a TimeoutError or MemoryError."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not over after {SECONDS} s of work, or {WAIT} s")

    size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    handlers = {number: signal.signal(number, stop) for number in (signal.SIGALRM, signal.SIGPROF)}
    signal.alarm(WAIT)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
