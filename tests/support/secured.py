"""Services of tests with keys and TLS, whatever their clients can do.

With the variable ``SHOAL_TEST_KEYS``, ``tests.support.service.Service`` starts with ``--keys``, ``--tls-cert``,
``--tls-key`` and ``--audit``, and the addresses that it gives to clients are those of a ``Secured``: it sends what it
gets over TLS to the service, with a key in the head of each request. The key is the canary of such a run: nothing that
the service sends or writes may have it. A client that ends its half of a connection ends both.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path

from shoal.serving.gateway.callers.key_file import ACTS, KeyFile
from shoal.system.processes import processes
from tests.support.pairs import make_pair

VARIABLE = "SHOAL_TEST_KEYS"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADERS, _CONTINUATION, _END_HEADERS = 1, 9, 4  # of frames of HTTP/2
_PIECE = 2**16
_LONG_LINE = 2**15  # bytes of a line that are passed on before its end


class _Http1:
    """Adds the key to a connection: it follows the first line of each request, in place of the client's own.

    After a body in chunks, or a line without an end, the rest of the connection passes as it is.
    """

    def __init__(self, key: str) -> None:
        self._field = b"Authorization: Bearer " + key.encode() + b"\r\n"
        self._data, self._is_first, self._left = b"", True, 0.0  # bytes of a body that are still to come

    def feed(self, data: bytes) -> bytes:
        self._data += data
        return b"".join(self._pass())

    def _pass(self) -> Iterator[bytes]:
        while self._data:
            if self._left > 0:
                size = int(min(self._left, len(self._data)))
                yield self._data[:size]
                self._data, self._left = self._data[size:], self._left - size
                continue
            line, end, rest = self._data.partition(b"\n")
            if not end and len(line) < _LONG_LINE:
                return
            self._data = rest
            name, _, value = line.lower().partition(b":")
            if name not in (b"authorization", b"x-api-key"):
                yield line + end
            if self._is_first:
                yield self._field if line.strip() else b""
                self._is_first, self._length = not line.strip(), 0.0
            elif name == b"content-length" and re.fullmatch(rb"\d{1,15}", value.strip()):
                self._length = int(value)
            elif name == b"transfer-encoding" or not end:
                self._length = float("inf")
            elif not line.strip():
                self._is_first, self._left = True, self._length
            if not end:
                self._left = float("inf")


class _Http2:
    """Adds the key to a connection, as the last field of each request's head: a literal that no table remembers."""

    def __init__(self, key: str) -> None:
        name, value = b"authorization", f"Bearer {key}".encode()
        self._field = bytes([16, len(name)]) + name + bytes([len(value)]) + value
        self._data, self._begins = b"", True

    def feed(self, data: bytes) -> bytes:
        self._data += data
        return b"".join(self._pass())

    def _pass(self) -> Iterator[bytes]:
        if self._begins and len(self._data) >= len(_PREFACE):
            yield self._data[: len(_PREFACE)]
            self._data, self._begins = self._data[len(_PREFACE) :], False
        while not self._begins and len(self._data) >= (end := 9 + int.from_bytes(self._data[:3], "big")):
            frame, self._data = self._data[:end], self._data[end:]
            if frame[3] in (_HEADERS, _CONTINUATION) and frame[4] & _END_HEADERS:
                frame = (end - 9 + len(self._field)).to_bytes(3, "big") + frame[3:] + self._field
            yield frame


_Kind = type[_Http1] | type[_Http2]


class Secured:
    """Key and certificate of a service whose log is ``log``, and the addresses for its clients."""

    def __init__(self, log: Path) -> None:
        self._home, folder = log.parent, Path(tempfile.mkdtemp(prefix="secured-", dir=log.parent))
        cert, key = make_pair(folder)
        file = KeyFile(folder / "keys.json")
        self._key = file.new("tests", may=ACTS)
        self.options = ["--keys", file.path, "--tls-cert", cert, "--tls-key", key, "--audit", folder / "audit"]
        self._context = {kind: ssl.create_default_context(cafile=cert) for kind in (_Http1, _Http2)}
        self._context[_Http2].set_alpn_protocols(["h2"])
        self._leaks = set[str]()
        self._loop = asyncio.new_event_loop()
        self._tasks, self._servers = set[asyncio.Task[None]](), list[asyncio.Server]()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def serve(self, http: str, grpc: str, metrics: str) -> list[str]:
        """Return addresses that stand for those of the service."""
        kinds: dict[str, _Kind] = {http: _Http1, grpc: _Http2, metrics: _Http1}
        serving = (self._listen(address, kind) for address, kind in kinds.items())
        return [asyncio.run_coroutine_threadsafe(each, self._loop).result() for each in serving]

    async def _listen(self, address: str, kind: _Kind) -> str:
        host, _, port = address.rpartition(":")

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task, ends = asyncio.current_task(), [writer]
            assert task is not None
            self._tasks.add(task)
            try:
                there = await self._connect(writer.get_extra_info("peername")[0], host.strip("[]"), int(port))
                answers, behind = await asyncio.open_connection(
                    sock=there, ssl=self._context[kind], server_hostname="localhost", limit=_PIECE
                )
                ends.append(behind)
                await self._pump_both(
                    self._pump(reader, behind, kind(self._key).feed), self._pump(answers, writer, self._look())
                )
                for end in ends:
                    end.close()
                for end in ends:
                    await end.wait_closed()
            except (OSError, asyncio.CancelledError):
                pass
            finally:
                for end in ends:
                    end.transport.abort()
                self._tasks.discard(task)

        server = await asyncio.start_server(take, host.strip("[]"), 0, limit=_PIECE)
        for listening in server.sockets:  # what waits here, a service takes for read
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PIECE)
        self._servers.append(server)
        return f"{host}:{server.sockets[0].getsockname()[1]}"

    async def _connect(self, peer: str, host: str, port: int) -> socket.socket:
        there = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        there.setblocking(False)
        there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _PIECE)
        try:
            if peer not in ("127.0.0.1", "::1"):
                there.bind((peer, 0))
            await self._loop.sock_connect(there, (host, port))
        except BaseException:
            there.close()
            raise
        return there

    @staticmethod
    async def _pump_both(*ways: Coroutine[None, None, None]) -> None:
        """Pass on what comes until one side ends; raise what ended it otherwise."""
        pumping = [asyncio.ensure_future(way) for way in ways]
        try:
            done, _ = await asyncio.wait(pumping, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        finally:
            for each in pumping:
                each.cancel()
            await asyncio.gather(*pumping, return_exceptions=True)

    @staticmethod
    async def _pump(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, change: Callable[[bytes], bytes]
    ) -> None:
        """Pass on what comes until it ends."""
        writer.transport.set_write_buffer_limits(_PIECE)
        while data := await reader.read(_PIECE):
            writer.write(change(data))
            await writer.drain()

    def _look(self) -> Callable[[bytes], bytes]:
        """Return a function that looks for the key in what the service sends on a connection."""
        last = b""

        def look(data: bytes) -> bytes:
            nonlocal last
            last = last[-len(self._secret) :] + data
            if self._secret in last:
                self._leaks.add(f"an answer: {last[:200]!r}")
            return data

        return look

    @property
    def _secret(self) -> bytes:
        return self._key.split("_")[2][:40].encode()

    def search(self, pid: int) -> None:
        """Look for the key where the service that runs as ``pid`` may have written it."""
        folders = [self._home, *Path(tempfile.gettempdir()).glob(f"shoal-{pid}-*")]
        walks = (os.walk(folder) for folder in folders)  # which passes over what an old server removes meanwhile
        files = [Path(place, name) for walk in walks for place, _, names in walk for name in names]
        files += Path("/dev/shm").glob(f"shoal_{pid}_*")
        own = [process for process in processes() if not process.is_ended]
        files += [Path(f"/proc/{process.pid}/{name}") for process in own for name in ("cmdline", "environ")]
        for path in files:
            with suppress(OSError):  # it is gone, or another user's
                if path.is_file() and not path.is_symlink() and self._secret in path.read_bytes():
                    self._leaks.add(str(path))

    def end(self) -> None:
        """Close all connections.

        Raises:
            AssertionError: the key was found.
        """

        async def close() -> None:
            for server in self._servers:
                server.close()
            for task in [*self._tasks]:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        assert not self._leaks, f"The key of the tests is in {', '.join(sorted(self._leaks))}"
