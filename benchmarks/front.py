"""What the front of `shoal serve` costs: a small ensemble asked of Triton itself and through the front, in turns.

    python benchmarks/front.py [--rounds 7] [--seconds 2]

The models do next to nothing, so that the way there is what is measured: an upper bound for anything real. Both run on
this machine, which the callers share. The result, with hardware and versions, goes to
benchmarks/results/front-DATE.json.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import typer

from shoal import Client, serve
from shoal.bench.load import Load, closed_loop
from shoal.machine import describe_machine, library_versions

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.service import Service, make_repository

CALLERS = (1, 16)


def main(rounds: int = 7, seconds: float = 2.0) -> None:
    """Measure and record."""
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="shoal-front-")))
        repository = make_repository(folder)
        direct = held.enter_context(serve(repository))
        front = held.enter_context(Service(repository, folder / "log"))
        urls = {"grpc": (direct.grpc_url, front.grpc), "http": (direct.http_url, front.http)}
        loads = {
            f"{protocol}, {callers} caller{'s' if callers > 1 else ''}": list(
                measure(urls[protocol], protocol, callers, rounds, seconds)
            )
            for protocol in urls
            for callers in CALLERS
        }
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "versions": library_versions("grpcio", "aiohttp", "tritonclient", "nvidia-pytriton"),
        "rounds": rounds,
        "loads": {name: summary(turns) for name, turns in loads.items()},
    }
    path = Path(__file__).parent / "results" / f"front-{result['date']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["loads"], indent=1))


def measure(
    urls: tuple[str, str], protocol: str, callers: int, rounds: int, seconds: float
) -> Iterator[tuple[Load, Load]]:
    """Triton's own load and that through the front, round by round."""
    with Client(urls[0], protocol=protocol) as direct, Client(urls[1], protocol=protocol) as front:

        def ask(client: Client) -> int:
            client.infer("chain", X=[[1.0]])
            return 1

        for _ in range(rounds):
            yield (
                closed_loop(lambda _: ask(direct), callers=callers, seconds=seconds),
                closed_loop(lambda _: ask(front), callers=callers, seconds=seconds),
            )


def summary(turns: list[tuple[Load, Load]]) -> dict[str, Any]:
    """Medians of the rounds, milliseconds and requests a second, and of their differences."""
    return {
        "p50_ms": {
            name: round(1e3 * statistics.median(turn[at].percentile(50) for turn in turns), 3)
            for at, name in enumerate(("Triton", "through the front"))
        },
        "more_ms": round(1e3 * statistics.median(b.percentile(50) - a.percentile(50) for a, b in turns), 3),
        "requests_a_second": {
            name: round(statistics.median(turn[at].rows_per_second for turn in turns), 1)
            for at, name in enumerate(("Triton", "through the front"))
        },
        "rate_ratio": round(statistics.median(b.rows_per_second / a.rows_per_second for a, b in turns), 3),
    }


if __name__ == "__main__":
    typer.run(main)
