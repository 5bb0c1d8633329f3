"""Answers of one streaming component to another, over a Unix socket instead of Triton's BLS.

BLS cannot give answers in pieces to several threads of one process: in the Python backend of Triton 24.10 to 26.07 at
least, ``ResponseIterator::Next`` waits for Python's interpreter lock with the iterator's lock, the thread that receives
answers waits for the iterator's lock with the lock of all iterators, and a thread that begins a request waits for that
one with the interpreter lock. And Triton 24.10 loses errors that follow an answer.

So only the request goes through BLS, with the parameter ``ANSWERS``: the address of a socket in Linux's abstract
namespace. A streaming component connects to it, ends the request in Triton at once, and sends its answers there. Either
side notices at once when the other one ends. A model that does not connect is not one of shoal's.

Each message is a header in JSON, with its length and that of the whole message before it, then the arrays' bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
from collections.abc import Generator, Mapping
from typing import Any

import numpy as np

from shoal import errors
from shoal.component.tensors import Array, Arrays, Device
from shoal.errors import InputError, ServerError, ShoalError

ANSWERS = "shoal_answers"  # request parameter
_PREFIX = "shoal-answers-"
_LENGTHS = struct.Struct("<II")  # of the header, and of the arrays
_PEER = struct.Struct("3i")  # process, user and group; see SO_PEERCRED in unix(7)


class Listener:
    """Asking side: socket to which one model may connect. The request goes out with its ``address``."""

    def __init__(self) -> None:
        self.address = f"{_PREFIX}{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.address}")
        self._socket.listen(1)
        self._socket.setblocking(False)

    def accept(self) -> Answers | None:
        """Return the answers of the model that has connected; None if none has."""
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._socket.accept()
            connection.setblocking(True)
            if _is_own(connection):
                return Answers(connection)
            connection.close()
        return None

    def close(self) -> None:
        """Accept no model any more."""
        self._socket.close()


class Answers:
    """Asking side: answers as they come; another thread may ``close`` them."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._file = connection.makefile("rb")

    def read(self, model: str, device: Device) -> Generator[dict[str, Array]]:
        """Yield each answer of ``model``, with its arrays on ``device``.

        Raises:
            ShoalError: the model failed; with the class of its own error.
            ServerError: the model was ended.
        """
        while (message := self._receive()) is not None:
            header, payload = message
            if "error" in header:
                kind, what, fix = header["error"]
                raise getattr(errors, kind, ShoalError)(what, fix)
            if "arrays" not in header:
                return
            arrays = {name: _decode(*form) for name, form in zip(header["arrays"], _cut(header, payload), strict=True)}
            yield {name: device.put(array, name) for name, array in arrays.items()}
        raise ServerError(f"Model {model} was ended before its last answer.", "Try again in a few seconds.")

    def _receive(self) -> tuple[Any, memoryview] | None:
        try:
            lengths = self._file.read(_LENGTHS.size)
            if len(lengths) < _LENGTHS.size:
                return None
            num_header, num_payload = _LENGTHS.unpack(lengths)
            content = self._file.read(num_header + num_payload)
        except (OSError, ValueError):  # closed by another thread, or the model's process was killed
            return None
        if len(content) < num_header + num_payload:
            return None
        return json.loads(content[:num_header]), memoryview(content)[num_header:]

    def shut(self) -> None:
        """End the reading, from any thread: the model knows at once."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Leave, and release the socket."""
        self.shut()
        self._file.close()
        self._socket.close()


class Connection:
    """Answering side: never blocks. What the other side has not read yet waits in this process."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if not address.startswith(_PREFIX):
                raise ConnectionRefusedError
            self._socket.connect(f"\0{address}")
            if not _is_own(self._socket):
                raise ConnectionRefusedError
        except OSError:
            self._socket.close()
            raise InputError(f"The parameter {ANSWERS} names no socket of a component.", "Leave it out.") from None
        self._socket.setblocking(False)
        self._unsent = bytearray()

    def fileno(self) -> int:
        """Return the socket's file descriptor."""
        return self._socket.fileno()

    def send(self, item: Arrays | ShoalError | None, device: Device) -> bool:
        """Send an answer, an error or the end; return whether no bytes are left to ``flush`` later."""
        self._unsent += _encode(item, device)
        return self.flush()

    def flush(self) -> bool:
        """Send waiting bytes until the socket is full; return whether none are left."""
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            return False
        except OSError:  # the other side has left, which the host's watching thread notices
            self._unsent.clear()
        return True

    def has_left(self) -> bool:
        """Whether the other side has closed its socket."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Release the socket."""
        self._socket.close()


def connect(parameters: Mapping[str, Any]) -> Connection | None:
    """Connect to the component that has sent a request with these parameters; None for any other client.

    Raises:
        InputError: there is no such address, or it is not a component's.
    """
    address = parameters.get(ANSWERS)
    return None if address is None else Connection(str(address))


def _is_own(connection: socket.socket) -> bool:
    """Whether the other side is a process of the same user."""
    content = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return bool(_PEER.unpack(content)[1] == os.geteuid())


def _encode(item: Arrays | ShoalError | None, device: Device) -> bytes:
    payloads: list[Any] = []
    header: dict[str, Any] = {}
    if isinstance(item, ShoalError):
        header["error"] = [type(item).__name__, item.what, item.fix]
    elif item is not None:
        header["arrays"] = {}
        for name, array in item.items():
            there = device.fetch(array, name)
            form = there.dtype.str if there.dtype != np.object_ else ""
            payload = np.ascontiguousarray(there).tobytes() if form else _join(there)
            payloads.append(payload)
            header["arrays"][name] = [form, there.shape, len(payload)]
    content = json.dumps(header).encode()
    return b"".join([_LENGTHS.pack(len(content), sum(map(len, payloads))), content, *payloads])


def _join(strings: np.ndarray[Any, Any]) -> bytes:
    """Return the strings' lengths, four bytes each, and then the strings."""
    elements = [each if isinstance(each, bytes) else str(each).encode() for each in strings.ravel().tolist()]
    return np.array([strings.size, *map(len, elements)], "<u4").tobytes() + b"".join(elements)


def _split(payload: memoryview) -> np.ndarray[Any, Any]:
    count = int(np.frombuffer(payload, "<u4", 1)[0])
    ends = 4 * (count + 1) + np.cumsum(np.frombuffer(payload, "<u4", count + 1)[1:])
    starts = [4 * (count + 1), *ends.tolist()]
    strings = np.empty(count, np.object_)
    for index, end in enumerate(ends.tolist()):
        strings[index] = bytes(payload[starts[index] : end])
    return strings


def _cut(header: Any, payload: memoryview) -> Generator[tuple[str, list[int], memoryview]]:
    start = 0
    for form, shape, size in header["arrays"].values():
        yield form, shape, payload[start : start + size]
        start += size


def _decode(form: str, shape: list[int], payload: memoryview) -> np.ndarray[Any, Any]:
    flat = np.frombuffer(payload, np.dtype(form)) if form else _split(payload)
    return flat.reshape(shape)
