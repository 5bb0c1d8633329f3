"""Answers of a streaming component to another component, over a Unix socket.

They do not go through BLS (business logic scripting), because BLS deadlocks if several threads of one process read
streamed answers, at least in the Python backend of Triton 24.10 to 26.07. Three threads wait in a circle:

- ``ResponseIterator::Next`` holds the lock of its iterator and waits for Python's interpreter lock;
- the thread that receives answers holds the lock of all iterators and waits for the lock of that iterator;
- a thread that begins a request holds the interpreter lock and waits for the lock of all iterators.

Triton 24.10 also loses errors that follow an answer.

So only the request goes through BLS. Its parameter ``ANSWERS`` is the address of a socket in Linux's abstract
namespace. A streaming component connects to this socket, ends the request in Triton at once, and sends its answers over
the socket. Each side notices at once when the other side ends. A model that does not connect was not made with shoal;
its answers come through BLS.

A message consists of two lengths (of the header and of the arrays, 4 bytes each), a JSON header, and the arrays' bytes.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from shoal import errors
from shoal.errors import InputError, ServerError, ShoalError
from shoal.kit.component.spec import Array, Arrays
from shoal.kit.component.tensors import Device

ANSWERS = "shoal_answers"  # request parameter
_PREFIX = "shoal-answers-"
_LENGTHS = struct.Struct("<II")  # of the header, and of the arrays
_PEER = struct.Struct("3i")  # process, user and group; see SO_PEERCRED in unix(7)


class Listener:
    """Socket of the calling component, to which the called model may connect; the request contains its ``address``."""

    def __init__(self) -> None:
        self.address = f"{_PREFIX}{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.address}")
        self._socket.listen(1)
        self._socket.setblocking(False)

    def accept(self) -> Answers | None:
        """Return the connection, to read the answers from, if the called model has connected, else None."""
        with suppress(BlockingIOError):
            connection, _ = self._socket.accept()
            connection.setblocking(True)
            if _is_own(connection):
                return Answers(connection)
            connection.close()
        return None

    def close(self) -> None:
        """Close the socket, so that no model can connect."""
        self._socket.close()


class Answers:
    """Calling component's side of a connection: reads the answers. Another thread may call ``shut``."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._file = connection.makefile("rb")

    def read(self, model: str, device: Device) -> Generator[dict[str, Array]]:
        """Yield each answer of ``model``, with its arrays on ``device``.

        Raises:
            ShoalError: the model failed; the error has the class that the model raised.
            ServerError: the model's process ended before its last answer.
        """
        while (message := self._receive()) is not None:
            header, payload = message
            if "error" in header:
                kind, what, fix = header["error"]
                raise getattr(errors, kind, ShoalError)(what, fix)
            if "arrays" not in header:
                return
            yield {name: device.put(array, name) for name, array in _decode(header, payload)}
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
        """End the reading; any thread may call this. The called model notices it at once."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the reading and release the socket."""
        self.shut()
        self._file.close()
        self._socket.close()


class Connection:
    """Called model's side of a connection: sends the answers. It never blocks: unsent bytes wait in this object."""

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
            raise InputError(f"The parameter {ANSWERS} is not the address of a component.", "Leave it out.") from None
        self._socket.setblocking(False)
        self._unsent = bytearray()

    def fileno(self) -> int:
        """Return the socket's file descriptor."""
        return self._socket.fileno()

    def send(self, item: Arrays | ShoalError | None, device: Device) -> bool:
        """Send an answer, an error or, with None, the end of the answers; return False if bytes are left unsent."""
        self._unsent += _encode(item, device)
        return self.flush()

    def flush(self) -> bool:
        """Send unsent bytes until the socket is full; return False if bytes are left."""
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            return False
        except OSError:  # the caller has left; StreamingModel's watching thread notices
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
    """Connect to the component that sent a request with these parameters; None if no component sent it.

    Raises:
        InputError: the parameter ``shoal_answers`` is not the address of a socket of the same user.
    """
    address = parameters.get(ANSWERS)
    return None if address is None else Connection(str(address))


def _is_own(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to the same user."""
    content = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return bool(_PEER.unpack(content)[1] == os.geteuid())


def _encode(item: Arrays | ShoalError | None, device: Device) -> bytes:
    payloads: list[bytes] = []
    header: dict[str, Any] = {}
    if isinstance(item, ShoalError):
        header["error"] = [type(item).__name__, item.what, item.fix]
    elif item is not None:
        header["arrays"] = {}
        for name, array in item.items():
            there = device.fetch(array, name)
            if there.dtype == np.object_:  # JSON has no bytes: Latin-1 maps each byte to the character of its number
                texts = [each if isinstance(each, bytes) else str(each).encode() for each in there.ravel().tolist()]
                header["arrays"][name] = ["", there.shape, [text.decode("latin-1") for text in texts]]
            else:
                payloads.append(np.ascontiguousarray(there).tobytes())
                header["arrays"][name] = [there.dtype.str, there.shape, len(payloads[-1])]
    content = json.dumps(header).encode()
    return b"".join([_LENGTHS.pack(len(content), sum(map(len, payloads))), content, *payloads])


def _decode(header: Any, payload: memoryview) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    start = 0
    for name, (form, shape, content) in header["arrays"].items():
        if form:
            flat = np.frombuffer(payload[start : start + content], np.dtype(form))
            start += content
        else:
            flat = np.array([text.encode("latin-1") for text in content], np.object_)
        yield name, flat.reshape(shape)
