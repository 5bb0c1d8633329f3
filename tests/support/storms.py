"""Clients that hold what they can of a service, in a process of their own: ``python -m tests.support.storms KIND ...``.

Prints "up" once all is held, and what came of it when its standard input ends.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]

OTHER = "127.0.0.2"  # an address that is not the honest clients'
PATH = "/v2/models/chain/infer"


def connect(address: str, *, source: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=20, source_address=(source, 0))


def announce(address: str, source: str, number: int) -> list[socket.socket]:
    """Connections that announce 64 MiB each and send a byte."""
    held = []
    for _ in range(number):
        held.append(connect(address, source=source))
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {2**26}\r\n\r\n{{"
        with contextlib.suppress(OSError):
            held[-1].sendall(head.encode())
    return held


def stall(address: str, source: str, number: int) -> list[socket.socket]:
    """Bodies in chunks, of which the second one never comes."""
    held = []
    for _ in range(number):
        held.append(connect(address, source=source))
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{{\r\n"
        with contextlib.suppress(OSError):
            held[-1].sendall(head.encode())
    return held


def inflate(address: str, source: str, number: int) -> list[socket.socket]:
    """Bodies of some KB that inflate to 60 MiB."""
    body, held = gzip.compress(b" " * (60 * 2**20)), []
    for _ in range(number):
        held.append(connect(address, source=source))
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: gzip\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with contextlib.suppress(OSError):
            held[-1].sendall(head.encode() + body)
    return held


def idle(address: str, source: str, number: int) -> list[socket.socket]:
    """Connections that say nothing."""
    return [connect(address, source=source) for _ in range(number)]


def unread(address: str, source: str, number: int) -> list[socket.socket]:
    """Send as many requests as a connection takes, and read no answer."""
    held, body = [], json.dumps({"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [3.0]}]})
    request = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    for _ in range(number):
        held.append(connect(address, source=source))
        held[-1].settimeout(0.5)
        with contextlib.suppress(OSError):
            held[-1].sendall(request * 200)
    return held


def half(address: str, source: str, number: int) -> list[socket.socket]:
    """Connections of a hundred gRPC calls each, of whose messages of 60 MiB all but the end is sent."""

    def frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
        return len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content

    fields = {
        ":method": "POST", ":scheme": "http", ":path": "/inference.GRPCInferenceService/ModelInfer",
        ":authority": "x", "content-type": "application/grpc", "te": "trailers",
    }  # fmt: skip
    head = b"".join(b"\0" + bytes([len(n)]) + n.encode() + bytes([len(v)]) + v.encode() for n, v in fields.items())
    held, size = [], 60 * 2**20
    for _ in range(number):
        held.append(connect(address, source=source))
        held[-1].setblocking(False)
        content = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"")
        content += b"".join(frame(1, 4, stream, head) for stream in range(1, 200, 2))
        content += b"".join(
            frame(0, 0, stream, b"\0" + size.to_bytes(4, "big") + bytes(16_000)) for stream in range(1, 200, 2)
        )
        held[-1].setblocking(True)
        held[-1].settimeout(2)
        with contextlib.suppress(OSError):
            held[-1].sendall(content)
        threading.Thread(target=_push, args=(held[-1], frame, size), daemon=True).start()
    return held


def _push(connection: socket.socket, frame: Callable[..., bytes], size: int) -> None:
    """Send what the server's windows allow, and a little less than all."""
    windows, sent, rest = Counter[int](), Counter[int](), b""
    with contextlib.suppress(OSError):
        while True:
            connection.settimeout(30)
            rest += connection.recv(65_536)
            while len(rest) >= 9 and len(rest) >= 9 + int.from_bytes(rest[:3], "big"):
                length = int.from_bytes(rest[:3], "big")
                kind, stream, content = rest[3], int.from_bytes(rest[5:9], "big"), rest[9 : 9 + length]
                rest = rest[9 + length :]
                if kind == 8:
                    windows[stream] += int.from_bytes(content, "big")
                if kind == 4 and not content:
                    connection.sendall(frame(4, 1, 0, b""))
            for stream in range(1, 200, 2):
                while min(windows[stream], windows[0]) >= 16_000 and sent[stream] < size - 40_000:
                    connection.sendall(frame(0, 0, stream, bytes(16_000)))
                    windows[stream] -= 16_000
                    windows[0] -= 16_000
                    sent[stream] += 16_000


HTTP: dict[str, Callable[[str, str, int], list[socket.socket]]] = {
    "announce": announce, "stall": stall, "inflate": inflate, "idle": idle, "unread": unread,
    "half": half,
}  # fmt: skip


def outcomes(held: list[socket.socket]) -> Counter[str]:
    """Return the service's answer to each connection so far, or that it was closed."""
    found = Counter[str]()
    with selectors.DefaultSelector() as selector:
        for connection in held:
            selector.register(connection, selectors.EVENT_READ)
        ready = [key.fileobj for key, _ in selector.select(0)]
        for _ in range(len(held) // 100):
            ready += [key.fileobj for key, _ in selector.select(0) if key.fileobj not in ready]
    for connection in held:
        if connection not in ready:
            found["open"] += 1
            continue
        try:
            said = connection.recv(100)
        except OSError:
            said = b""
        found[said.split(b" ")[1].decode() if said.startswith(b"HTTP/") else "closed"] += 1
    return found


# --- gRPC -----------------------------------------------------------------------------------------------------------


def grpc_storm(kind: str, address: str, source: str, number: int, size: int, each: int = 20) -> Counter[str]:
    """Streams over gRPC that say they come from ``source``; returns the statuses that they ended with."""
    from tritonclient.grpc import service_pb2

    found, lock, up = Counter[str](), threading.Lock(), threading.Semaphore(0)
    stop, channels = threading.Event(), []

    def messages() -> Iterator[bytes]:
        request = service_pb2.ModelInferRequest(model_name="chain")
        request.inputs.add(name="X", datatype="BYTES" if size else "FP32", shape=[1, 1])
        text = b"x" * size
        request.raw_input_contents.append(len(text).to_bytes(4, "little") + text if size else bytes(4))
        content = request.SerializeToString()
        for _ in range({"silent": 0, "answered": 1, "large": each}[kind]):
            yield content
        stop.wait()

    def note(call: Any) -> None:
        with lock:
            found[call.code().name] += 1

    for index in range(number):
        if index % 90 == 0:
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
            channels.append(grpc.insecure_channel(address, options))
        call = channels[-1].stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(
            messages(), metadata=(("x-forwarded-for", source),)
        )
        call.add_done_callback(lambda call=call: note(call))

        def read(call: Any = call) -> None:
            num = 0
            with contextlib.suppress(grpc.RpcError):
                for answer in call:
                    num += 1
                    with lock:
                        found["answers"] += 1
                        found["errors"] += bool(service_pb2.ModelStreamInferResponse.FromString(answer).error_message)
            up.release()

        if kind != "silent":
            threading.Thread(target=read, daemon=True).start()
    hold()
    end = time.monotonic() + 45
    while kind == "large" and found["answers"] < number * each and time.monotonic() < end:
        time.sleep(0.1)
    with lock:
        return Counter(found)


def main() -> None:
    kind, address, source, number, *more = sys.argv[1:]
    found: Counter[str]
    if kind in HTTP:
        held = HTTP[kind](address, source, int(number))
        hold()
        found = outcomes(held)
    else:
        found = grpc_storm(kind, address, source, int(number), *map(int, more))
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.stdout.flush()
    os._exit(0)  # with threads that still wait


def hold() -> None:
    """Until the test has seen enough."""
    sys.stdout.write("up\n")
    sys.stdout.flush()
    sys.stdin.read()


class Storm:
    """Such a process, while the context lasts; then ``found`` is what came of it."""

    def __init__(self, kind: str, address: str, number: int, *more: int, source: str = OTHER) -> None:
        command = [sys.executable, "-m", __name__, kind, address, source, str(number), *map(str, more)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.found: dict[str, int] = {}

    def wait_up(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "up\n"

    def __enter__(self) -> Storm:
        return self

    def __exit__(self, *_: object) -> None:
        out = self._process.communicate(timeout=60)[0]
        self.found = json.loads(out.splitlines()[-1])


def memory_mib(*pids: int) -> float:
    """Return the memory of processes together; shared pages count once."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").split("\nPss:")[1].split()[0])
    return total / 1024


class Peak:
    """The most memory that processes had together while the context lasted, looked at ten times a second."""

    def __init__(self, pids: list[int]) -> None:
        self._pids, self._stop, self.mib = pids, threading.Event(), 0.0
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._stop.wait(0.1):
            self.mib = max(self.mib, memory_mib(*self._pids))

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


if __name__ == "__main__":
    main()
