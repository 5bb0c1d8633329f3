"""Processor time of a token on its way from an engine to a client, by process: forms of a language model in turns.

    python benchmarks/tokens.py [--rounds 5] [--seconds 5] [--pace 0.01] [--other .../.venv/bin/python]
    python benchmarks/tokens.py --engine llm-hf|llm-onnx --streams 1,16 [--weights FOLDER]

The engine ``paced`` computes nothing: every ``pace`` seconds it gives each open stream a token, or as fast as it can
with 0. The forms are the ensemble ``llm``, ``llm_bls``, and ``llm_bls`` with the engine in its process. Clients read
bytes and look at nothing. ``--other`` is the Python of an environment with another version of shoal, which serves the
ensemble, too. Another ``--engine`` computes, with the weights of a small model or those of ``--weights``. At the end of
each turn, 256 streams take half a minute to end. By gRPC, the Triton of the last form takes a turn without its gateway.
The result, with hardware and versions, goes to benchmarks/results/tokens-ENGINE-DATE.json (``--pace 0``: tokens-full-).
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import typer
from records import dumps, write_record
from streams import LIMITS, Side, Turn, describe, measure, summary

from shoal import Client
from shoal.authoring.composition.compose import compose
from shoal.authoring.project.importing.add_model import add_model
from shoal.clients.client.calls import Call, Method, to_arrays
from shoal.clients.client.grpc_transport import to_grpc
from shoal.lab.tiny_llm import make_tiny

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.planted import write
from tests.support.service import Service
from tests.support.storms import memory_mib

ROOT = Path(__file__).parents[1]

PACED = "paced"
WITHOUT = "without gateway: "
FINAL = b"triton_final_response\x12\x02\x08\x01"  # the parameter and its value, true
DIRECT = f"{WITHOUT}together"
TOKENS = 100  # of one request; the next one follows at once
ENGINE = """
import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import threading
import time

from shoal.kit.generation.answering import Answering
from shoal.kit.generation.engines.base import EngineComponent
from shoal.kit.generation.sampling import NUMBERS


class Engine:
    settings = frozenset(row.name for row in NUMBERS)

    def __init__(self, limits):
        self.limits, self.rows, self.changing = limits, [], threading.Lock()
        threading.Thread(target=self.step, daemon=True).start()

    def is_running(self):
        return True

    def admit(self, request, stream):
        with self.changing:
            self.rows.append(Answering(request, stream))

    def step(self):
        due = time.monotonic()
        while True:
            due = max(due + PACE, time.monotonic())
            time.sleep(max(0.0005, due - time.monotonic()))
            with self.changing:
                rows = [*self.rows]
            tokens = [300 + (7 * len(row.ids) + number) % 100 for number, row in enumerate(rows)]
            ended = [row for row, token in zip(rows, tokens) if not row.add(token, beside=len(rows))]
            with self.changing:
                self.rows = [row for row in self.rows if row not in ended]

    def close(self):
        pass


class Paced(EngineComponent):
    library = "engine"

    def make_engine(self, weights, limits):
        return Engine(limits)


TritonPythonModel = Paced.for_triton()
"""


def main(
    rounds: int = 5,
    seconds: float = 5.0,
    pace: float = 0.01,
    other: str = "",
    engine: str = PACED,
    weights: Path | None = None,
    streams: str = "1,16,64,256",
) -> None:
    """Measure and record."""
    with ExitStack() as held:
        home = Path(tempfile.mkdtemp(prefix="shoal-tokens-"))  # stays with its logs if something fails
        held.push(lambda failed, *_: print(f"See {home}") if failed else shutil.rmtree(home))
        weights = weights or make_tiny(home / "weights")
        if engine == PACED:
            write_paced(home, pace)
        if engine == "llm-onnx":
            add_model(weights, "exported", task="generate", project=home)
            weights = home / "models" / "exported" / "1"
        swap = {} if engine == "llm-hf" else {"llm-hf": engine}
        given: dict[str, Any] = {"projects": [home], "weights": weights, "swap": swap}
        forms = {
            "ensemble": ("llm", compose("llm", home / "ensemble", **given), sys.executable),
            "llm_bls": ("llm_bls", compose("llm_bls", home / "apart", **given), sys.executable),
            "together": ("llm_bls", compose("llm_bls", home / "together", is_together=True, **given), sys.executable),
            **({"other ensemble": ("llm", home / "ensemble", other)} if other else {}),
        }
        services, models, sizes, restarts = {}, {}, {}, 0
        for name, (model, repository, python) in forms.items():
            begun = time.monotonic()
            service = held.enter_context(Service(repository, home / f"{name} log", *LIMITS, python=python))
            services[name], models[name] = service, model
            pids = find_pids(service)
            sizes[name] = {
                "start_s": round(time.monotonic() - begun, 1),
                "processes": len(pids["models"]),
                "models_mib": round(memory_mib(*pids["models"])),
            }
        loads = dict[str, Any]()
        ways = {"/v1": ask_v1, "generate_stream": ask_generate, "gRPC": ask_grpc}
        for way, make in ways.items() if engine == PACED else [*ways.items()][:1]:
            for number in map(int, streams.split(",")):
                sides = [*services, *([DIRECT] if way == "gRPC" else [])]
                turns: dict[str, list[Turn]] = {name: [] for name in sides}
                for at in range(rounds):
                    for name in sides if at % 2 else sides[::-1]:
                        while len(turns[name]) <= at:
                            service, model = services[name.removeprefix(WITHOUT)], models[name.removeprefix(WITHOUT)]
                            address = find_triton(service) if name == DIRECT else service.grpc
                            side = Side(service.http, address, find_pids(service))
                            try:
                                turns[name].append(asyncio.run(measure(side, make(model, side), number, seconds)))
                            except (AssertionError, OSError, grpc.aio.AioRpcError) as error:  # Triton is started again
                                restarts += 1
                                print(f"{name}, {way}, {number} streams: a turn is repeated ({error})", flush=True)
                                time.sleep(15)
                loads[f"{way}, {number} streams"] = summary(turns)
                print(way, number, dumps(loads[f"{way}, {number} streams"]), flush=True)
    name = "full" if engine == PACED and not pace else engine
    write_record(
        f"tokens-{name}", {**describe(rounds, loads), "pace_ms": 1e3 * pace, "sizes": sizes, "restarts": restarts}
    )


def find_triton(service: Service) -> str:
    """Return the address of a service's Triton."""
    words = next(iter(service.servers())).arguments()
    return "127.0.0.1:" + next(word.removeprefix("--grpc-port=") for word in words if word.startswith("--grpc-port="))


def find_pids(service: Service) -> dict[str, list[int]]:
    """Return a service's processes by what they do."""
    return {
        "gateway": [service.process.pid],
        "Triton": [process.pid for process in service.servers()],
        "models": [process.pid for process in service.stubs()],
    }


def write_paced(project: Path, pace: float) -> None:
    """Write the engine that computes nothing, with places for 256 requests."""
    config = (ROOT / "models" / "llm-hf" / "config.pbtxt").read_text(encoding="utf-8").replace("llm-hf", PACED)
    config = re.sub(r'(key: "slots".*?string_value: )"16"', r'\1"256"', config, flags=re.DOTALL)
    write(project / "models" / PACED / "config.pbtxt", config)
    write(project / "models" / PACED / "1" / "model.py", ENGINE.replace("PACE", str(pace)))


def ask_v1(model: str, _: Side) -> Callable[..., Any]:
    """Ask OpenAI's API."""
    chat = {
        "model": model,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": TOKENS,
        "min_tokens": TOKENS,
        "stream": True,
    }
    return _ask_sse("/v1/chat/completions", chat)


def ask_generate(model: str, _: Side) -> Callable[..., Any]:
    """Ask Triton's generate extension."""
    asked = {"text_input": "Hello", "max_tokens": TOKENS, "min_tokens": TOKENS, "stream": True}
    return _ask_sse(f"/v2/models/{model}/generate_stream", asked)


def _ask_sse(path: str, document: dict[str, Any]) -> Callable[..., Any]:
    async def ask(side: Side, _: grpc.aio.Channel, times: list[float], over: asyncio.Event) -> None:
        body = json.dumps(document).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {side.http}\r\nContent-Type: application/json\r\n"
        reader, writer = await asyncio.open_connection(*side.http.split(":"))
        try:
            while not over.is_set():
                writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                content, start = b"", len(times)
                while not content.endswith(b"\r\n0\r\n\r\n"):
                    more = await reader.read(2**16)
                    assert more, content
                    assert more.startswith(b"HTTP/1.1 200") or content, more
                    content = content[-16:] + more
                    times += [time.monotonic()] * more.count(b"data: ")
                times += times[-1:] * (TOKENS - len(times) + start)  # pieces may have several tokens
        finally:
            writer.close()

    return ask


def ask_grpc(model: str, side: Side) -> Callable[..., Any]:
    """Ask Triton's protocol."""
    with Client(side.grpc) as client:
        spec = client.describe(model)
    inputs = {"text_input": ["Hello"], "max_tokens": [TOKENS], "min_tokens": [TOKENS], "stream": [True]}
    arrays = to_arrays(spec.inputs, inputs, is_batched=True)
    request = to_grpc(Call(Method.STREAM, model, arrays)).message.SerializeToString()

    async def ask(_: Side, channel: grpc.aio.Channel, times: list[float], over: asyncio.Event) -> None:
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
        while not over.is_set():
            await stream.write(request)
            start = len(times)
            while True:
                content = await stream.read()
                assert content is not grpc.aio.EOF
                times.append(time.monotonic())
                if FINAL in content:
                    break
            times += times[-1:] * (TOKENS - len(times) + start)
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF

    return ask


if __name__ == "__main__":
    typer.run(main)
