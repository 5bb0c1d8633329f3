"""Bounded readers of files that others wrote, which no pipe, device or size stops; and an atomic writer."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

# Bytes: of texts, of tokenizers and indices of weights (the largest known tokenizer.json has 33 MiB), and of forests,
# ONNX graphs and programs (protobuf's own limit).
MAX_TEXT, MAX_LARGE_TEXT, MAX_BINARY = 16 * 2**20, 64 * 2**20, 2 * 2**30
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a regular file to read its bytes.

    Raises:
        OSError: the file is missing, or it is a folder, a pipe, a device or a socket.
    """
    try:
        _check_regular(Path(path).stat().st_mode, path)  # before it is opened, since this may change a device
        at = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error), os.fspath(path)) from None  # NUL, or a lone surrogate, in the name
    try:
        _check_regular(os.fstat(at).st_mode, path)
    except OSError:
        os.close(at)
        raise
    return open(at, "rb")  # noqa: PTH123  # pathlib opens no descriptor; the caller closes it


def _check_regular(mode: int, path: str | os.PathLike[str]) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if kind := describe_special(mode):
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", os.fspath(path))


def describe_special(mode: int) -> str:
    """Describe a pipe, a socket or a device; empty for a file or a folder."""
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return ""
    return "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"


def read_bytes(path: str | os.PathLike[str], most: int = MAX_TEXT) -> bytes:
    """Read a regular file of at most ``most`` bytes. The files of ``/proc``, which have no size, are empty.

    Raises:
        OSError: the file cannot be read, is not a regular file, or is larger.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and at most {most:,} are read", os.fspath(path))
        return file.read(size)


def read_text(path: str | os.PathLike[str], most: int = MAX_TEXT) -> str:
    """Read a regular file of at most ``most`` bytes as UTF-8 text; its line ends become line feeds.

    Raises:
        OSError: as for ``read_bytes``.
        UnicodeDecodeError: the file is not UTF-8.
    """
    return read_bytes(path, most).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def copy_file(source: Path, target: Path) -> None:
    """Copy the content of a regular file.

    Raises:
        OSError: as for ``open_regular``, or the target cannot be written.
    """
    open_regular(source).close()  # shutil would copy a device without end
    shutil.copyfile(source, target)


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically. Its mode is kept; a file that is new can be read by its owner alone.

    Raises:
        OSError: the file cannot be written; it is then as it was.
    """
    at, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    aside = Path(name)
    try:
        with os.fdopen(at, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(at)
        if path.exists():
            shutil.copymode(path, aside)
        aside.replace(path)
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Parse JSON; ``options`` are those of ``json.loads``.

    Raises:
        ValueError: the text is not JSON, is nested too deep, or has a lone surrogate, which no UTF-8 can express.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text))
    try:
        value = json.loads(text, **options)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"it has the lone surrogate U+{ord(error.object[error.start]):X}") from None
    except ValueError as error:
        if "set_int_max_str_digits" not in str(error):  # advice for programmers
            raise
        raise ValueError("it has an integer of more than 4,300 digits") from None
    return value


def read_json(path: str | os.PathLike[str], most: int = MAX_TEXT) -> Any:
    """Read a JSON value of any type.

    Raises:
        OSError: as for ``read_bytes``.
        ValueError: as for ``parse_json``, or the file is not UTF-8.
    """
    return parse_json(read_bytes(path, most))
