"""What `shoal serve` adds to streamed answers of a model that computes nothing: beside Triton itself, in turns.

    python benchmarks/streams.py [--rounds 5] [--seconds 3] [--other .../.venv/bin/python]

The model sends one answer to each open stream in turn, as fast as Triton takes them. Clients read bytes and look at
nothing, so that the way is what is measured. ``--other`` is the Python of an environment with another version of shoal,
which takes its turn too. The bare proxy passes bytes from one ``grpc.aio`` stream to another and does nothing else: it
costs what any gateway on that library costs. The result, with hardware and versions, goes to
benchmarks/results/streams-DATE.json.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import grpc  # type: ignore[import-untyped]
import numpy as np
import typer
from records import dumps, write_record

from shoal import serve
from shoal.clients.client.calls import Call, Method
from shoal.clients.client.grpc_transport import to_grpc
from shoal.system.machine import describe_machine, library_versions

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.planted import write
from tests.support.service import Service
from tests.support.storms import memory_mib

STREAMS = (16, 64, 256)
MODEL = """
import queue
import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.requests = queue.SimpleQueue()
        threading.Thread(target=self.send, daemon=True).start()

    def execute(self, requests):
        for request in requests:
            count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])
            self.requests.put([request.get_response_sender(), count])
        return None

    def send(self):
        rows = []
        while True:
            while not rows or not self.requests.empty():
                rows.append(self.requests.get())
            for row in rows:
                row[1] -= 1
                answer = pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", np.array([b" answer"], np.object_))])
                row[0].send(answer, flags=0 if row[1] else pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            rows = [row for row in rows if row[1]]
"""
CONFIG = """
backend: "python"
max_batch_size: 0
input { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
model_transaction_policy { decoupled: true }
instance_group [ { count: 1 kind: KIND_CPU } ]
parameters { key: "public" value { string_value: "true" } }
parameters { key: "slots" value { string_value: "256" } }
"""
PROXY = """
import asyncio
import sys

import grpc


class Handler(grpc.GenericRpcHandler):
    def __init__(self):
        self.channel = grpc.aio.insecure_channel(sys.argv[1])

    def service(self, details):
        self.method = details.method
        return grpc.stream_stream_rpc_method_handler(self.stream)

    async def stream(self, _, context):
        call = self.channel.stream_stream(self.method)()
        feeding = asyncio.create_task(self.feed(context, call))
        while (answer := await call.read()) is not grpc.aio.EOF:
            await context.write(answer)
        await feeding

    async def feed(self, context, call):
        while (message := await context.read()) is not grpc.aio.EOF:
            await call.write(message)
        await call.done_writing()


async def main():
    server = grpc.aio.server(handlers=[Handler()])
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


asyncio.run(main())
"""
ANSWERS = 100  # of one request; the next one follows at once
LIMITS = ["--max-streams", "1024", "--client-share", "1"]


class Side(NamedTuple):
    """A server: its addresses, and its processes by what they are."""

    http: str
    grpc: str
    pids: dict[str, list[int]]


class Turn(NamedTuple):
    """Figures of one turn; processor time in milliseconds per answer."""

    answers_a_second: float
    p99_gap_ms: float
    cpu_ms: dict[str, float]
    gateway_mib: float


def main(rounds: int = 5, seconds: float = 3.0, other: str = "") -> None:
    """Measure and record."""
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="shoal-streams-")))
        repository = folder / "repository"
        write(repository / "says" / "config.pbtxt", CONFIG)
        write(repository / "says" / "1" / "model.py", MODEL)
        direct = held.enter_context(serve(repository))
        sides = {"Triton": Side(direct.http_url, direct.grpc_url, {})}
        for name, python in {"gateway": sys.executable, "other gateway": other}.items():
            if python:
                log = folder / f"{name} log"
                service = held.enter_context(Service(repository, log, *LIMITS, python=python))
                pids = {
                    "gateway": [service.process.pid],
                    "Triton": [process.pid for process in service.servers()],
                    "model": [process.pid for process in service.stubs()],
                }
                sides[name] = Side(service.http, service.grpc, pids)
        command = [sys.executable, "-c", PROXY, direct.grpc_url]
        proxy = held.enter_context(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        )
        held.callback(proxy.kill)
        assert proxy.stdout is not None
        bare = {"bare proxy": Side("", f"127.0.0.1:{int(proxy.stdout.readline())}", {"gateway": [proxy.pid]})}
        loads = dict[str, Any]()
        for way, ask in {"gRPC": ask_grpc, "SSE": ask_sse}.items():
            each = sides | bare if way == "gRPC" else sides
            for number in STREAMS:
                turns: dict[str, list[Turn]] = {name: [] for name in each}
                for at in range(rounds):
                    for name in list(each) if at % 2 else list(each)[::-1]:
                        turns[name].append(asyncio.run(measure(each[name], ask, number, seconds)))
                loads[f"{way}, {number} streams"] = summary(turns)
                print(way, number, dumps(loads[f"{way}, {number} streams"]), flush=True)
    write_record("streams", describe(rounds, loads))


def describe(rounds: int, loads: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a run, with hardware and versions."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "versions": library_versions("grpcio", "aiohttp", "tritonclient", "nvidia-pytriton"),
        "rounds": rounds,
        "loads": loads,
    }


def summary(turns: dict[str, list[Turn]]) -> dict[str, Any]:
    """Medians of the rounds."""

    def median(of: Callable[[Turn], float], name: str, digits: int = 3) -> float:
        return round(statistics.median(of(turn) for turn in turns[name]), digits)

    return {
        name: {
            "answers_a_second": median(lambda turn: turn.answers_a_second, name, 0),
            "p99_gap_ms": median(lambda turn: turn.p99_gap_ms, name, 1),
            "cpu_ms": {part: median(lambda turn, part=part: turn.cpu_ms[part], name) for part in turns[name][0].cpu_ms},
            "gateway_mib": median(lambda turn: turn.gateway_mib, name, 0),
        }
        for name in turns
    }


async def measure(side: Side, ask: Callable[..., Any], number: int, seconds: float) -> Turn:
    """Read ``number`` streams for ``seconds``, after one second that does not count."""
    times: list[list[float]] = [[] for _ in range(number)]
    async with grpc.aio.insecure_channel(side.grpc, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        over = asyncio.Event()
        tasks = [asyncio.create_task(ask(side, channel, each, over)) for each in times]
        await asyncio.sleep(1)
        start, before = time.monotonic(), {part: cpu_seconds(pids) for part, pids in side.pids.items()}
        await asyncio.sleep(seconds)
        end, after = time.monotonic(), {part: cpu_seconds(pids) for part, pids in side.pids.items()}
        memory = memory_mib(*side.pids.get("gateway", []))
        over.set()
        await asyncio.gather(*tasks)
    within = [[at for at in each if start <= at <= end] for each in times]
    answers = sum(map(len, within))
    gaps = np.concatenate([np.diff(each) for each in within])
    cpu_ms = {part: 1e3 * (after[part] - before[part]) / answers for part in before}
    return Turn(answers / (end - start), 1e3 * float(np.percentile(gaps, 99)), cpu_ms, memory)


def cpu_seconds(pids: list[int]) -> float:
    """Processor time of processes so far."""
    total = 0
    for pid in pids:
        total += sum(map(int, Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[11:13]))
    return total / os.sysconf("SC_CLK_TCK")


async def ask_grpc(_: Side, channel: grpc.aio.Channel, times: list[float], over: asyncio.Event) -> None:
    """Ask again and again on one stream, and note when each answer arrives."""
    request = to_grpc(Call(Method.INFER, "says", {"COUNT": np.array([ANSWERS], np.int32)})).message.SerializeToString()
    stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
    while not over.is_set():
        await stream.write(request)
        for _ in range(ANSWERS):
            assert await stream.read() is not grpc.aio.EOF
            times.append(time.monotonic())
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF


async def ask_sse(side: Side, _: grpc.aio.Channel, times: list[float], over: asyncio.Event) -> None:
    """Ask again and again on one connection, and note when each event arrives."""
    body = json.dumps({"COUNT": ANSWERS}).encode()
    head = f"POST /v2/models/says/generate_stream HTTP/1.1\r\nHost: {side.http}\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(*side.http.split(":"))
    try:
        while not over.is_set():
            writer.write(head.encode() + body)
            found, content = 0, b""
            while found < ANSWERS or not content.endswith(b"0\r\n\r\n"):
                more = await reader.read(2**16)
                assert more, content
                content = content[-6:] + more  # the end may be the beginning of the next event
                events = content.count(b"\ndata: ")
                found += events
                times += [time.monotonic()] * events
    finally:
        writer.close()


if __name__ == "__main__":
    typer.run(main)
