"""A client's stream to a fake server, whose answers a test scripts."""

from __future__ import annotations

from shoal.serving.gateway.callers.callers import Caller
from shoal.serving.gateway.callers.quotas import Reservation
from shoal.serving.gateway.core.active_server import ActiveServer
from shoal.serving.gateway.core.fair_queue import FairQueue
from shoal.serving.gateway.core.relay import Relay, RelayedAnswer
from shoal.serving.gateway.core.stream_requests import StreamRequests
from shoal.serving.gateway.core.traffic import Traffic
from shoal.serving.gateway.options import Limits
from tests.support.configs import ENGINE, PYTHON, chain, make_configs
from tests.support.fake_upstream import FakeCall, FakeUpstream

MINE = Caller("mine")
CONFIGS = make_configs(llm=ENGINE, plain=PYTHON, both=chain("plain", "llm"), pair=chain("plain", "plain"))


class Bench:
    """A relay to a fake server, in a task of its own that keeps the answers."""

    def __init__(self) -> None:
        self.active, self.upstream = ActiveServer(), FakeUpstream()
        self.active.upstream, self.active.closed = self.upstream, ""
        self.traffic = Traffic(self.active, CONFIGS, Limits(), max_wait=1.0)
        self.requests = StreamRequests(CONFIGS)
        self.relay = Relay(MINE, self.upstream, self.active, self.traffic, self.requests, [("traceparent", "x")])
        self.answers: list[RelayedAnswer] = []

    def let_wait(self, width: int) -> FairQueue:
        """Let so many requests to ``llm`` into the server at a time; return the turns."""
        turns = self.traffic._queues["llm"] = FairQueue(width)
        self.traffic._with_slots = frozenset(["llm"])
        return turns

    @property
    def call(self) -> FakeCall:
        """The first call to the server."""
        return self.upstream.fake.calls[0]

    @property
    def stops(self) -> list[FakeCall]:
        """The later calls: the requests to stop."""
        return self.upstream.fake.calls[1:]

    async def send(self, model: str = "llm", request_id: str = "mine", held: Reservation | None = None) -> str:
        """Send a request and return the id that the service gave it."""
        await self.relay.send(model, request_id, b"", num_bytes=10, held=held)
        return list(self.relay.unanswered)[-1]

    async def read(self) -> None:
        """Keep the answers, until the relay ends."""
        async for answer in self.relay:
            self.answers.append(answer)
