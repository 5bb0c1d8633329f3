"""The copy ledger: every copy between host and device that a component makes, by edge.

Arrays cross through ``Device.put`` and ``Device.fetch`` (in ``tensors.py``), which write here; so do the calls of
libraries that are known to copy a few bytes of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

UP, DOWN, ACROSS = "up", "down", "across"  # host to device, device to host, device to device

# Edges that are no tensor of the model.
SETUP = "(setup)"  # word lists and a rehearsal, once at the start
EXACT = "(exact rows)"  # token ids of rows that the device's tokenizer would get wrong, made on the host
CONTROL = "(control)"  # a few bytes a batch that decide sizes on the host

BATCHES, ROWS, EXACT_ROWS = "batches", "rows", "exact_rows"


class Edge(NamedTuple):
    """Where a copy is made: at a tensor of the model, or at one of the edges above."""

    name: str
    direction: str


@dataclass(frozen=True)
class Traffic:
    """What went over an edge; ``seconds`` is the host's time in the call, which for ``up`` may end before the copy."""

    copies: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.copies + other.copies, self.num_bytes + other.num_bytes, self.seconds + other.seconds)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.copies - other.copies, self.num_bytes - other.num_bytes, self.seconds - other.seconds)


class Ledger:
    """Running totals of one model instance; any thread may write."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._traffic: dict[Edge, Traffic] = {}
        self._events: dict[str, int] = {}

    def record(self, edge: str, direction: str, num_bytes: int, seconds: float = 0.0, *, copies: int = 1) -> None:
        """Add copies over ``edge``."""
        key, added = Edge(edge, direction), Traffic(copies, num_bytes, seconds)
        with self._lock:
            self._traffic[key] = self._traffic.get(key, Traffic()) + added

    def count(self, event: str, number: int = 1) -> None:
        """Add to a count: batches, rows, rows on the exact path."""
        with self._lock:
            self._events[event] = self._events.get(event, 0) + number

    def end_setup(self) -> None:
        """Take all that was copied so far for the start's, and forget the counts."""
        with self._lock:
            before, self._traffic, self._events = self._traffic, {}, {}
            for edge, traffic in before.items():
                key = Edge(SETUP, edge.direction)
                self._traffic[key] = self._traffic.get(key, Traffic()) + traffic

    @property
    def traffic(self) -> Mapping[Edge, Traffic]:
        """Totals by edge, as they are now."""
        with self._lock:
            return dict(self._traffic)

    @property
    def events(self) -> Mapping[str, int]:
        """Counts, as they are now."""
        with self._lock:
            return dict(self._events)
