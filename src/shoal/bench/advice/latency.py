"""Advice on the latency of single requests: time spent outside the steps."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.bench.advice.config_patch import drop_delay
from shoal.bench.advice.evidence import ALONE, IDLE, LARGE_SHARE, Advice, Evidence
from shoal.bench.figures import Cell, Figures


def advise_alone(evidence: Evidence) -> Iterator[Advice]:
    """Advise on the time of one caller's request that is not spent in steps: queue delay, ensemble, transport."""
    alone = evidence.cells.get(Cell(1, 1))
    if alone is None:
        return
    for name, step in alone.steps.items():
        delay = evidence.configs[name].message.dynamic_batching.max_queue_delay_microseconds / 1000
        if delay and step.requests_per_execution <= ALONE and step.queue_ms >= IDLE * delay:
            yield Advice(
                "delay",
                name,
                f"Remove the queue delay of {name}.",
                f"One caller's request waits there {step.queue_ms:.1f} of {alone.p50_ms:.1f} ms for others that do not"
                f" arrive: max_queue_delay is {delay:g} ms. Under load, requests are batched without it.",
                drop_delay(evidence.configs[name]),
            )
    if alone.server_ms is None:
        return
    between = alone.server_ms - _longest_way(evidence, alone)
    if between >= LARGE_SHARE * alone.p50_ms and evidence.levels:
        yield Advice(
            "ensemble",
            "",
            "Fewer steps would help single requests: merge cheap adjacent ones into one model.",
            f"Of {alone.server_ms:.1f} ms in the server, {between:.1f} are spent between the steps.",
        )
    outside = alone.p50_ms - alone.server_ms - (alone.local_ms or 0)
    if outside >= LARGE_SHARE * alone.p50_ms:
        yield Advice(
            "protocol",
            "",
            "Nothing in the repository would help most of a single request's time; send more rows per request.",
            f"Of {alone.p50_ms:.1f} ms, {outside:.1f} are spent in the client and in transit.",
            helps=False,
        )


def _longest_way(evidence: Evidence, figures: Figures) -> float:
    """Sum the milliseconds of the slowest step of each level: a lower bound of the latency."""
    slowest: dict[int, float] = {}
    for name, step in figures.steps.items():
        level = evidence.levels.get(name, 0)
        slowest[level] = max(slowest.get(level, 0.0), step.total_ms)
    return sum(slowest.values())
