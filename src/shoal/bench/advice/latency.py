"""Advice on single requests: what lies outside the steps' own work."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.bench.advice.config_patch import drop_delay
from shoal.bench.advice.evidence import ALONE, IDLE, LARGE_SHARE, Advice, Evidence
from shoal.bench.figures import Cell, Figures


def advise_alone(evidence: Evidence) -> Iterator[Advice]:
    """What one caller waits for beside the steps' own work."""
    alone = evidence.cells.get(Cell(1, 1))
    if alone is None:
        return
    for name, step in alone.steps.items():
        delay = evidence.configs[name].message.dynamic_batching.max_queue_delay_microseconds / 1000
        if delay and step.requests_per_execution <= ALONE and step.queue_ms >= IDLE * delay:
            yield Advice(
                "delay",
                name,
                f"Let {name} wait for nobody.",
                f"One caller's request waits there {step.queue_ms:.1f} of {alone.p50_ms:.1f} ms for others that do not"
                f" come: max_queue_delay is {delay:g} ms. Under load requests meet without it.",
                drop_delay(evidence.configs[name]),
            )
    if alone.server_ms is None:
        return
    between = alone.server_ms - _longest_way(evidence, alone)
    if between >= LARGE_SHARE * alone.p50_ms and evidence.levels:
        yield Advice(
            "ensemble",
            "",
            "Fewer steps would help single requests: put cheap neighbours into one model.",
            f"Of {alone.server_ms:.1f} ms in the server, {between:.1f} are spent between the steps.",
        )
    outside = alone.p50_ms - alone.server_ms - (alone.local_ms or 0)
    if outside >= LARGE_SHARE * alone.p50_ms:
        yield Advice(
            "protocol",
            "",
            "Nothing in the repository would help most of a single request's time; more rows a request share it.",
            f"Of {alone.p50_ms:.1f} ms, {outside:.1f} are spent in the client and on the way.",
            helps=False,
        )


def _longest_way(evidence: Evidence, figures: Figures) -> float:
    """Milliseconds of the slowest step of each level, which no request can be faster than."""
    slowest: dict[int, float] = {}
    for name, step in figures.steps.items():
        level = evidence.levels.get(name, 0)
        slowest[level] = max(slowest.get(level, 0.0), step.total_ms)
    return sum(slowest.values())
