"""A gRPC message that is announced as a whole and sent by half, as frames of HTTP/2."""

from __future__ import annotations

import socket
import struct
import threading
from typing import Self

_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _WINDOW = 0, 1, 3, 4, 6, 8
_WINDOW_SETTING, _ROOM, _MOST = 4, 65_535, 16_384


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


class Half(threading.Thread):
    """Opens a connection, calls ``path``, announces a message of ``announced`` bytes and sends half of it.

    It sends as fast as the server's flow control allows, and ``has_ended`` once the server has ended the call.
    """

    def __init__(self, address: str, path: str, announced: int) -> None:
        super().__init__(daemon=True)
        self._path, self._announced = path.encode(), announced
        host, port = address.split(":")
        self._socket = socket.create_connection((host, int(port)))
        self._room = {0: _ROOM, 1: _ROOM}  # of the connection and of its stream
        self._received = b""
        self.num_sent, self.has_ended = 0, False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self.join()
        self._socket.close()

    def run(self) -> None:
        """Send, and answer what the server's HTTP/2 asks for."""
        fields = {
            ":method": b"POST", ":scheme": b"http", ":path": self._path, ":authority": b"x", "te": b"trailers",
            "content-type": b"application/grpc",
        }  # fmt: skip
        head = b"".join(bytes([0, len(n)]) + n.encode() + bytes([len(v)]) + v for n, v in fields.items())
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, b"") + _frame(_HEADERS, 4, 1, head)
        content = b"\0" + struct.pack(">I", self._announced)
        try:
            self._socket.sendall(preface)
            while not self.has_ended:
                content += bytes(max(0, min(_MOST, self._announced // 2 - self.num_sent) - len(content)))
                room = min(*self._room.values(), len(content))
                if room:
                    self._socket.sendall(_frame(_DATA, 0, 1, content[:room]))
                    content = content[room:]
                    self.num_sent += room
                    self._room = {stream: left - room for stream, left in self._room.items()}
                self._receive(0 if room else None)
        except OSError:
            self.has_ended = True

    def _receive(self, flag: int | None) -> None:
        """Read what has come, or without ``flag`` wait for it."""
        try:
            got = self._socket.recv(65_536, socket.MSG_DONTWAIT if flag is not None else 0)
        except BlockingIOError:
            return
        self._received += got
        self.has_ended |= not got
        while len(self._received) >= 9 + (size := int.from_bytes(self._received[:3], "big")):
            kind, flags = self._received[3], self._received[4]
            stream, payload = int.from_bytes(self._received[5:9], "big"), self._received[9 : 9 + size]
            self._received = self._received[9 + size :]
            self._handle(kind, flags & 1, stream, payload)

    def _handle(self, kind: int, flag: int, stream: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flag:
            settings = dict(struct.iter_unpack(">HI", payload))
            self._room[1] += settings.get(_WINDOW_SETTING, _ROOM) - _ROOM
            self._socket.sendall(_frame(_SETTINGS, 1, 0, b""))
        elif kind == _PING and not flag:
            self._socket.sendall(_frame(_PING, 1, 0, payload))
        elif kind == _WINDOW:
            self._room[stream] += int.from_bytes(payload, "big")
        elif kind == _RESET or (kind == _HEADERS and flag):
            self.has_ended = True
