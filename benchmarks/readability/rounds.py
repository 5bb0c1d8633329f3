"""The rounds: in each, every system takes its turn at everything."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from arrivals import open_loop
from flops import matrix_rates
from systems import Bare, Spent, Walk

from shoal.bench.load import Load, closed_loop

LOAD = 0.7  # of what a system answered with all callers
MOST_CALLERS = 64  # of the open loop

ENOUGH_WARMTH = 10.0  # seconds, after two calls

Score = Callable[[Sequence[str]], Any]
Send = Callable[[int], int]


@dataclass(frozen=True)
class System:
    """Who scores texts; ``is_here`` in this process, so that it is called by one caller, in this thread."""

    name: str
    score: Score
    is_here: bool = False
    awake: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass
class Rounds:
    """Figures of every round, and all latencies of a kind together."""

    walk: Walk
    bare: Bare
    served: Sequence[System]  # ours first
    recipe: System
    batch: int
    callers: int
    turns: int
    seconds: float
    has_open_loop: bool
    dtype: torch.dtype
    figures: list[dict[str, Any]] = field(default_factory=list)
    latencies: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    _took: dict[tuple[str, int], float] = field(default_factory=dict)

    def warm(self) -> None:
        """Let everybody answer what they will be asked, and learn how long that takes."""
        ours = self.served[0]
        self._time("bare", self.batch, self.bare.send)
        self.bare.spent = Spent()
        for system, num_rows in ((ours, self.batch), (self.recipe, self.batch), (self.recipe, 1)):
            self._time(system.name, num_rows, self._sender(system, 0, num_rows))
        for system in self.served:
            with system.awake():
                self._time(system.name, 1, self._sender(system, 0, 1))

    def _time(self, name: str, num_rows: int, send: Send) -> None:
        begin = time.perf_counter()
        for index in range(3):  # TorchScript compiles at its first two calls
            start = time.perf_counter()
            send(index)
            if index and time.perf_counter() - begin > ENOUGH_WARMTH:
                break
        self._took[name, num_rows] = time.perf_counter() - start

    def run(self) -> None:
        """One round more."""
        first = len(self.figures) * 1009  # requests of a round begin elsewhere in the texts
        ours = self.served[0]
        found: dict[str, Any] = {"matrix_tflop_per_s": matrix_rates(self.dtype)}
        found["batch"] = {name: {"rows_per_s": round(rate, 3)} for name, rate in self._batches(first).items()}
        found["steps"] = self.bare.steps()
        loads = {s.name: self._turn(s, first, 1, callers=self.callers) for s in self.served}
        found["callers"] = {name: self._keep("callers", name, load) for name, load in loads.items()}
        one = {s.name: self._turn(s, first, 1, callers=1) for s in (ours, self.recipe)}
        found["one"] = {name: self._keep("one", name, load) for name, load in one.items()}
        if self.has_open_loop:
            found["open"] = {s.name: self._open(s, first, loads[s.name].rows_per_second) for s in self.served}
        self.figures.append(found)

    def _batches(self, first: int) -> dict[str, float]:
        """Rows a second of each, which take turns request by request: the machine's pace changes within seconds."""
        ours = self.served[0]
        senders = {
            "bare": lambda index: self.bare.send(first + index),
            ours.name: self._sender(ours, first, self.batch),
            self.recipe.name: self._sender(self.recipe, first, self.batch),
        }
        seconds = dict.fromkeys(senders, 0.0)
        for index in range(self.turns):
            for name, send in senders.items():
                start = time.perf_counter()
                send(index)
                seconds[name] += time.perf_counter() - start
        return {name: self.turns * self.batch / spent for name, spent in seconds.items()}

    def _sender(self, system: System, first: int, num_rows: int) -> Send:
        def send(index: int) -> int:
            system.score(self.walk.request(first + index, num_rows))
            return num_rows

        return send

    def _turn(self, system: System, first: int, num_rows: int, *, callers: int) -> Load:
        send = self._sender(system, first, num_rows)
        if system.is_here:
            return self._here(system.name, num_rows, send)
        with system.awake():
            return closed_loop(send, callers=callers, seconds=self.seconds)

    def _here(self, name: str, num_rows: int, send: Send) -> Load:
        """Whole requests, one after the other, in this thread; at least two."""
        seconds = max(self.seconds, 2 * self._took[name, num_rows])
        latencies: list[float] = []
        rows, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            start = time.perf_counter()
            rows += send(len(latencies))
            latencies.append(time.perf_counter() - start)
        return Load(rows / sum(latencies), np.array(latencies))

    def _open(self, system: System, first: int, capacity: float) -> dict[str, float]:
        rate = LOAD * capacity
        with system.awake():
            send, seed = self._sender(system, first, 1), len(self.figures)
            load = open_loop(send, rate=rate, seconds=self.seconds, seed=seed, most_callers=MOST_CALLERS)
        return {"requests_per_s": round(rate, 3), **self._keep("open", system.name, load)}

    def _keep(self, kind: str, name: str, load: Load) -> dict[str, float]:
        self.latencies.setdefault(kind, {}).setdefault(name, []).extend(load.latencies.tolist())
        return {"rows_per_s": round(load.rows_per_second, 3), **percentiles(load.latencies)}

    def pooled(self) -> dict[str, dict[str, dict[str, float]]]:
        """Percentiles over all rounds, by kind and system."""
        return {
            kind: {name: percentiles(np.array(values)) for name, values in systems.items()}
            for kind, systems in self.latencies.items()
        }


def percentiles(seconds: Any) -> dict[str, float]:
    """In milliseconds, how far the tail is from the middle, and of how many requests."""
    p50, p99 = (float(np.percentile(seconds, q)) for q in (50, 99))
    return {
        "p50_ms": round(1e3 * p50, 3),
        "p99_ms": round(1e3 * p99, 3),
        "p99_over_p50": round(p99 / p50, 3),
        "requests": len(seconds),
    }
