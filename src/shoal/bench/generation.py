"""Measurement of models that generate text: time to the first token, time between tokens, tokens per second."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, fields
from functools import partial
from statistics import median
from typing import Any

import shoal
from shoal.bench.figures import rounded
from shoal.bench.load import closed_loop
from shoal.bench.measure import Settings
from shoal.bench.record import LIBRARIES
from shoal.bench.target import Pool
from shoal.bench.tokens import Prompt, Timeline, TokenCell, TokenFigures, fit_prompt, summarise
from shoal.client.client import Client
from shoal.component.spec import TensorSpec
from shoal.errors import InputError
from shoal.llm.client import Llm
from shoal.machine import describe_machine, library_versions
from shoal.progress import OnProgress

_OUTPUTS = {"text_output", "finish_reason", "num_input_tokens", "num_output_tokens"}
_INPUTS = {"text_input", "max_tokens", "min_tokens", "stream"}
_SPREADS = ("tokens_per_s", "first_p50_ms", "between_p50_ms")
_BUSY = 0.8  # of a core: a Python process with more time is near its limit
_HERE = ("127.0.0.1", "localhost", "[::1]")


def generates_text(outputs: Iterable[TensorSpec]) -> bool:
    """Whether a model has the outputs of a model that generates text."""
    return {tensor.name for tensor in outputs} >= _OUTPUTS


def bench_tokens(
    url: str,
    cells: Sequence[TokenCell],
    settings: Settings,
    *,
    model: str = "",
    on_progress: OnProgress = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Measure a model on the running server at ``url`` under each load, repeats in turn; return the record.

    Each answer has exactly the wanted number of tokens: ``min_tokens`` is ``max_tokens``.

    Raises:
        InputError: the model does not generate text, or refuses a length.
        ServerError: no server answers, or it refuses or loses a request.
    """
    with closing(Pool(url, settings.protocol)) as pool:
        with pool.take() as client:
            model = model or client.default_model()
            _check(client, model)
            lengths = sorted({cell.input_tokens for cell in cells})
            prompts = {}
            for number, length in enumerate(lengths):
                on_progress("fitting prompts", number, len(lengths))
                prompts[length] = fit_prompt(length, partial(_count, Llm(client, model)))
            on_progress("fitting prompts", len(lengths), len(lengths))
        found: dict[TokenCell, list[TokenFigures]] = {cell: [] for cell in cells}
        total, done, numbers = settings.repeats * len(cells), itertools.count(), itertools.count(1)
        for _, cell in itertools.product(range(settings.repeats), cells):
            on_progress("measuring", next(done), total)
            pool.connect(cell.concurrency, [model])
            found[cell].append(_load(pool, model, cell, prompts[cell.input_tokens], settings, numbers))
        on_progress("measuring", total, total)
    return make_record(url, model, settings, found)


def _check(client: Client, model: str) -> None:
    spec = client.describe(model)
    missing = sorted(_INPUTS - {tensor.name for tensor in spec.inputs})
    if missing or not generates_text(spec.outputs):
        lacks = f"input {missing[0]}" if missing else f"one of the outputs {', '.join(sorted(_OUTPUTS))}"
        raise InputError(
            f"Model {model} has not {lacks}: it cannot be measured in tokens.",
            "Name a model that generates text: --model llm; or measure a repository in rows: shoal bench REPOSITORY",
        )


def _count(llm: Llm, text: str) -> int:
    return llm.generate(text, max_tokens=1).num_input_tokens


def _load(
    pool: Pool, model: str, cell: TokenCell, prompt: Prompt, settings: Settings, numbers: Iterator[int]
) -> TokenFigures:
    timelines: list[Timeline] = []
    readings: list[tuple[float, float]] = []  # clock seconds, and CPU seconds of this process

    def send(_: int) -> int:
        with pool.take() as client:
            pieces = Llm(client, model).stream(
                prompt.text(next(numbers)), max_tokens=cell.output_tokens, min_tokens=cell.output_tokens
            )
            timeline = Timeline.read(pieces)
        timelines.append(timeline)
        return timeline.output_tokens

    def read() -> None:
        used = os.times()
        readings.append((time.perf_counter(), used.user + used.system))

    load = closed_loop(
        send, callers=cell.concurrency, seconds=settings.seconds, warm_seconds=settings.warm_seconds,
        on_open=read, on_close=read,
    )  # fmt: skip
    (opened, before), (closed, after) = readings
    counted = [line for line in timelines if opened <= line.end <= closed]
    return summarise(counted, load.rows_per_second, (after - before) / (closed - opened))


def make_record(
    url: str, model: str, settings: Settings, found: Mapping[TokenCell, Sequence[TokenFigures]]
) -> dict[str, Any]:
    """Build the record: figures, machine, versions and settings, as JSON values."""
    medians = {cell: _medians(repeats) for cell, repeats in found.items()}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "unit": "tokens",
        "machine": describe_machine(),
        "versions": {"shoal": shoal.__version__, **library_versions(*LIBRARIES, "transformers")},
        "settings": asdict(settings),
        "repositories": [{"label": model, "model": model, "url": url}],
        "loads": [
            {
                "repository": model,
                **cell._asdict(),
                "median": rounded(medians[cell]),
                "min_max": rounded({name: _spread(repeats, name) for name in _SPREADS}),
                "repeats": [rounded(asdict(figures)) for figures in repeats],
            }
            for cell, repeats in found.items()
        ],
        "comparison": list(_compare(medians)),
        "notes": list(_notes(url, medians)),
        "advice": {},
    }


def _medians(repeats: Sequence[TokenFigures]) -> dict[str, Any]:
    values = {field.name: [getattr(figures, field.name) for figures in repeats] for field in fields(TokenFigures)}
    return {name: None if None in each else median(each) for name, each in values.items()}


def _spread(repeats: Sequence[TokenFigures], name: str) -> tuple[float, float] | None:
    values = [getattr(figures, name) for figures in repeats]
    return None if None in values else (min(values), max(values))


def _compare(medians: Mapping[TokenCell, Mapping[str, Any]]) -> Iterator[str]:
    """Yield, for each pair of lengths, the gain and the price of the most streams against the fewest."""
    by_length: dict[tuple[int, int], list[TokenCell]] = {}
    for cell in sorted(medians):
        by_length.setdefault((cell.input_tokens, cell.output_tokens), []).append(cell)
    for (_, length), (few, *_, many) in ((key, cells) for key, cells in by_length.items() if len(cells) > 1):
        one, all_ = medians[few], medians[many]
        gain, later = (all_[name] / one[name] for name in ("tokens_per_s", "first_p50_ms"))
        price = ""
        if one["between_p50_ms"]:
            price = f", {all_['between_p50_ms'] / one['between_p50_ms']:.1f} times the time between tokens"
        yield (
            f"Answers of {length} tokens, {many.concurrency} streams against {few.concurrency}: {gain:.1f} times the"
            f" tokens per second, {later:.1f} times the time to the first token{price}."
        )


def _notes(url: str, medians: Mapping[TokenCell, Mapping[str, Any]]) -> Iterator[str]:
    """Yield what limits the figures."""
    for name in ("input_tokens", "output_tokens"):
        other = {getattr(cell, name): middle[name] for cell, middle in medians.items()}
        for wanted, real in other.items():
            if real != wanted:
                kind = "Prompts" if name == "input_tokens" else "Answers"
                yield f"{kind} had {real:g} tokens instead of {wanted}."
    busy = max(middle["client_cores"] for middle in medians.values())
    if busy > _BUSY:
        yield (
            f"This client used up to {busy:.1f} cores, near the limit of one Python process: the server may be faster"
            " than these figures. Measure with fewer streams, or with several clients."
        )
    if url.rpartition(":")[0] not in _HERE:
        yield f"The server is at {url}; the machine and the versions are the client's."
