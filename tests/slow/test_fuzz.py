"""Hostile requests sent straight to the server, by the thousand: no process ends, no answer contains a secret."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tritonclient.grpc.service_pb2 as protocol
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.serving.server.launch import Server
from shoal.serving.server.orphans import find_prefix
from tests.conftest import Scale
from tests.support.mutations import Request, Tensor, floats, with_lengths
from tests.support.wires import SECRETS, Answer, Attack, Wires, attack, http, to_protobuf

CALLERS = 8
GROWTH = 64 * 2**20  # of the stubs' shared memory, which is as large as the largest batch so far and never shrinks
KNOWN = Request(
    "ensemble_all",
    [
        Tensor("excerpt", "BYTES", [2, 1], with_lengths(b"The cat sat.", "Naïve, 漢字…".encode())),
        Tensor("BERT_WEIGHT", "FP32", [2, 1], floats(0.25, 1)),
    ],
)
# The encoder finds out by running that ids, mask or width are none of its own; its log has the reason.
FAILING = {"bert-large"}


@pytest.fixture
def wires(server: Server) -> Iterator[Wires]:
    with Wires(server) as opened:
        yield opened


class Watch:
    """State of the server that no request may change."""

    def __init__(self, server: Server, wires: Wires) -> None:
        self._server, self._wires = server, wires
        self._stubs = stubs(server)
        self._log_start = server.log.stat().st_size
        self._before = shared_memory(server)
        self._known = self._ask_known()
        self.statuses: Counter[str] = Counter()

    def take(self, sent: Attack, answer: Answer) -> None:
        """Look at what came back."""
        assert not SECRETS.search(answer.body), (sent, answer)
        kind = "gRPC" if sent.method else "HTTP" if sent.is_http else "no HTTP"
        self.statuses[f"{kind} {answer.status}"] += 1

    def check_alive(self) -> None:
        """The server and its stubs are those of the beginning, and they answer as then."""
        assert stubs(self._server) == self._stubs, cause(self._server)
        assert self._ask_known() == self._known

    def check_traces(self) -> None:
        """Check the server's log and its memory."""
        log = self._server.log.read_bytes()[self._log_start :].decode(errors="replace")
        failed = re.findall(r"model (\S+) failed on a request", log)
        assert set(failed) <= FAILING
        chained = log.count("During handling of the above exception")  # a joined batch failed first
        assert log.count("Traceback (most recent call last)") == len(failed) + chained
        after = shared_memory(self._server)
        assert after.keys() == self._before.keys()
        assert sum(after.values()) <= sum(self._before.values()) + GROWTH

    def _ask_known(self) -> list[dict[str, Any]]:
        """The known-good request over both protocols: the answers, output by output."""
        grpc = self._wires.send(Attack(to_protobuf(Random(0), KNOWN), "ModelInfer"))
        assert grpc.status == "OK", grpc
        message = protocol.ModelInferResponse.FromString(grpc.body)
        raw = {o.name: data for o, data in zip(message.outputs, message.raw_output_contents, strict=True)}
        texts = {"name": "excerpt", "shape": [2, 1], "datatype": "BYTES", "data": ["The cat sat.", "Naïve, 漢字…"]}
        weights = {"name": "BERT_WEIGHT", "shape": [2, 1], "datatype": "FP32", "data": [0.25, 1]}
        body = json.dumps({"inputs": [texts, weights]}).encode()
        answer = self._wires.send(Attack(http("POST /v2/models/ensemble_all/infer", body)))
        assert answer.status == "200", answer
        return [raw, {output["name"]: output["data"] for output in json.loads(answer.body)["outputs"]}]


def stubs(server: Server) -> set[str]:
    """The process ids of the server's children; none is there once it has ended."""
    tasks = Path(f"/proc/{server._process.pid}/task").glob("*/children")
    children = {pid for task in tasks for pid in task.read_text().split()}
    return {pid for pid in children if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"}


def shared_memory(server: Server) -> dict[str, int]:
    """Sizes of the stubs' regions, in bytes."""
    return {path.name: path.stat().st_size for path in Path("/dev/shm").glob(f"{find_prefix(server._folder)}*")}


def cause(server: Server) -> str:
    return f"exit code {server._process.poll()}: {server.log.read_text(errors='replace')[-2000:]}"


def test_hostile_requests_do_no_harm(wires: Wires, server: Server, scale: Scale, record: Callable[..., None]) -> None:
    """The sample is drawn by hypothesis, which shrinks failures; the full number is seeded, from eight callers."""
    watch = Watch(server, wires)
    if scale.is_full:
        send_seeded(watch, wires, 100_000)
    else:
        send_drawn(watch, wires, 1000)
    watch.check_traces()
    total = sum(watch.statuses.values())
    record("hostile requests", requests=total, died=0, leaks=0, answers=dict(watch.statuses.most_common()))


def send_drawn(watch: Watch, wires: Wires, number: int) -> None:
    @settings(
        max_examples=number, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.randoms(use_true_random=False))
    def run(rng: Random) -> None:
        sent = attack(rng)
        watch.take(sent, wires.send(sent))
        if watch.statuses.total() % 100 == 0:
            watch.check_alive()

    run()
    watch.check_alive()


def send_seeded(watch: Watch, wires: Wires, number: int) -> None:
    def send(seed: int) -> tuple[Attack, Answer]:
        sent = attack(Random(seed))
        try:
            return sent, wires.send(sent)
        except Exception as error:
            raise AssertionError(f"Attack {seed}: {sent.payload[:1000]!r}; {cause(watch._server)}") from error

    with ThreadPoolExecutor(CALLERS) as callers:
        for start in range(0, number, 100):
            for sent, answer in callers.map(send, range(start, start + 100)):
                watch.take(sent, answer)
            watch.check_alive()


def test_parameters_that_are_not_text(wires: Wires, server: Server) -> None:
    """Triton hands them on as they came."""
    watch = Watch(server, wires)
    texts = {"name": "excerpt", "shape": [1, 1], "datatype": "BYTES", "data": ["The cat sat."]}
    body = json.dumps({"inputs": [texts], "parameters": {"key": "value"}}).encode()
    for word in (b"key", b"value"):
        answer = wires.send(Attack(http("POST /v2/models/ensemble_all/infer", body.replace(word, b"\xc0" + word))))
        assert answer.status == "400"
        assert b"The request's parameters are not UTF-8. Send names and values as UTF-8 text." in answer.body
    watch.check_alive()
    watch.check_traces()
