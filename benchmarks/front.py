"""What the front of `shoal serve` costs: a small ensemble asked of Triton itself and through the front, in turns.

    python benchmarks/front.py [--rounds 7] [--seconds 2] [--other .../.venv/bin/python | --keys --tls]

The models do next to nothing, so that the way there is what is measured: an upper bound for anything real. Both run on
this machine, which the callers share. ``--other`` is the Python of an environment with another version of shoal: its
front takes its turn too, and the ratios of this one to it are recorded. With ``--keys``, a front whose clients have a
key with limits, and which writes an audit file, takes its turn; with ``--tls``, one whose connections are encrypted,
and kept. The result, with hardware and versions, goes to benchmarks/results/front-DATE.json, front-keys-DATE.json or
front-tls-DATE.json.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import typer
from records import dumps, write_record

from shoal import Client, serve
from shoal.lab.bench.load import Load, closed_loop
from shoal.serving.gateway.callers.key_file import KeyFile
from shoal.system.machine import describe_machine, library_versions

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.pairs import make_pair
from tests.support.service import Service, make_repository

CALLERS = (1, 16)


def main(rounds: int = 7, seconds: float = 2.0, other: str = "", keys: bool = False, tls: bool = False) -> None:
    """Measure and record."""
    more = [name for name, is_asked in (("keys", keys), ("TLS", tls)) if is_asked]
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="shoal-front-")))
        repository = make_repository(folder)
        direct = held.enter_context(serve(repository))
        fronts = [held.enter_context(Service(repository, folder / "log"))]
        if other:
            fronts.append(held.enter_context(Service(repository, folder / "other log", python=other)))
        options: list[Any] = []
        asked: dict[str, Any] = {}  # what the clients of the last front give
        if keys:
            file = KeyFile(folder / "keys.json")
            limits = {"requests_per_minute": 10**6, "tokens_per_minute": 10**6, "at_once": 100}
            asked["api_key"] = file.new("one", limits=limits)
            options += "--keys", file.path, "--audit", folder / "audit"
        if tls:
            asked["ca_cert"], key = make_pair(folder)
            options += "--tls-cert", asked["ca_cert"], "--tls-key", key
        if more:
            fronts.append(held.enter_context(Service(repository, folder / "other log", *options)))
        urls = {
            "grpc": [direct.grpc_url, *(front.grpc for front in fronts)],
            "http": [direct.http_url, *(front.http for front in fronts)],
        }
        if tls:
            for protocol, scheme in (("grpc", "grpcs"), ("http", "https")):
                urls[protocol][-1] = f"{scheme}://{urls[protocol][-1].partition('://')[2] or urls[protocol][-1]}"
        loads = {
            f"{protocol}, {callers} caller{'s' if callers > 1 else ''}": list(
                measure(urls[protocol], protocol, callers, rounds, seconds, asked)
            )
            for protocol in urls
            for callers in CALLERS
        }
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "versions": library_versions("grpcio", "aiohttp", "tritonclient", "nvidia-pytriton"),
        "rounds": rounds,
        "loads": {
            name: summary(turns, f"with {' and '.join(more)}" if more else "other") for name, turns in loads.items()
        },
    }
    for name, turns in loads.items() if more else ():
        cost = statistics.median(1 / turn[2].rows_per_second - 1 / turn[1].rows_per_second for turn in turns)
        result["loads"][name][f"{'_'.join(more).lower()}_ms_a_request"] = round(1e3 * cost, 3)
    write_record("-".join(["front", *more]).lower(), result)
    print(dumps(result["loads"]))


def measure(
    urls: list[str], protocol: str, callers: int, rounds: int, seconds: float, asked: dict[str, Any]
) -> Iterator[list[Load]]:
    """The load of each address, round by round; clients of the last one have the key and certificate in ``asked``."""
    with ExitStack() as held:
        clients = [
            held.enter_context(Client(url, protocol=protocol, **(asked if url is urls[-1] else {}))) for url in urls
        ]

        def ask(client: Client) -> int:
            client.infer("chain", X=[[1.0]])
            return 1

        for _ in range(rounds):
            yield [closed_loop(lambda _, c=client: ask(c), callers=callers, seconds=seconds) for client in clients]


def summary(turns: list[list[Load]], third: str = "other") -> dict[str, Any]:
    """Medians of the rounds, milliseconds and requests a second, and of their differences and ratios."""
    names = ("Triton", "through the front", f"through the front, {third}")[: len(turns[0])]
    found: dict[str, Any] = {
        "p50_ms": {
            name: round(1e3 * statistics.median(turn[at].percentile(50) for turn in turns), 3)
            for at, name in enumerate(names)
        },
        "more_ms": round(1e3 * statistics.median(turn[1].percentile(50) - turn[0].percentile(50) for turn in turns), 3),
        "requests_a_second": {
            name: round(statistics.median(turn[at].rows_per_second for turn in turns), 1)
            for at, name in enumerate(names)
        },
        "rate_ratio": ratio(turns, 0, lambda load: load.rows_per_second),
    }
    if len(names) > 2:
        found[f"to_{third.replace(' ', '_')}"] = {
            "rate": ratio(turns, 2, lambda load: load.rows_per_second),
            "p50": ratio(turns, 2, lambda load: load.percentile(50)),
        }
    return found


def ratio(turns: list[list[Load]], base: int, of: Callable[[Load], float]) -> float:
    """The front's figure over another one's, as the median of the rounds."""
    return round(statistics.median(of(turn[1]) / of(turn[base]) for turn in turns), 3)


if __name__ == "__main__":
    typer.run(main)
