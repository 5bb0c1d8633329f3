"""Measurement of models that generate text: time to the first token, time between tokens, tokens per second."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from statistics import median
from typing import Any, NamedTuple, Unpack

import numpy as np

from shoal.clients.client.client import Client
from shoal.clients.client.tls import Access
from shoal.clients.llm.client import Llm
from shoal.errors import InputError, ServerError
from shoal.kit.component.spec import TensorSpec
from shoal.kit.generation.pieces import Piece
from shoal.lab.bench.load import closed_loop
from shoal.lab.bench.measure import Pool
from shoal.lab.bench.record import BenchSettings, Measured, TokenCell, TokenFigures, start_record
from shoal.system.progress import OnProgress

_OUTPUTS = {"text_output", "finish_reason", "num_input_tokens", "num_output_tokens"}
_INPUTS = {"text_input", "max_tokens", "min_tokens", "stream"}
# One token each, with the space before it, in the vocabularies of most models.
_TEXT = "the of and to in is was for on that with as by at from it an be are this"
_WORDS = _TEXT.split()
_BUSY = 0.8  # of a core: a Python process with more time is near its limit
_HERE = ("127.0.0.1", "localhost", "[::1]")

_Loads = Sequence[Measured[TokenCell, TokenFigures]]


def generates_text(outputs: Iterable[TensorSpec]) -> bool:
    """Whether ``outputs`` include all outputs of shoal's text-generating models, such as ``text_output``."""
    return {tensor.name for tensor in outputs} >= _OUTPUTS


def bench_tokens(
    url: str,
    cells: Sequence[TokenCell],
    settings: BenchSettings,
    *,
    model: str = "",
    on_progress: OnProgress = lambda stage, done, total: None,
    **access: Unpack[Access],
) -> dict[str, Any]:
    """Measure a language model on the running server at ``url`` under each load (``cells``); return the record.

    ``access`` has the options of ``shoal.Client`` for access: ``api_key``, ``ca_cert`` and ``client_cert``.

    All loads are measured once, then all again, ``settings.repeats`` times in all. Each request sets ``min_tokens`` and
    ``max_tokens`` to the load's ``output_tokens``, so that every answer has this number of tokens.

    Raises:
        InputError: the model does not generate text, or refuses the length of a prompt or an answer.
        ServerError: no server answers, or it refuses or loses a request.
    """
    with closing(Pool(url, settings.protocol, **access)) as pool:
        pool.connect(1)
        with pool.take() as client:
            url, model = client.url, model or client.default_model()
            _check(client, model)
            llm = Llm(client, model)
            on_progress("fitting prompts", 0, 1)
            words = {length: fit_prompt(length, llm) for length in sorted({cell.input_tokens for cell in cells})}
            on_progress("fitting prompts", 1, 1)
        found: dict[TokenCell, list[TokenFigures]] = {cell: [] for cell in cells}
        total, done, numbers = settings.repeats * len(cells), itertools.count(), itertools.count(1)
        for _, cell in itertools.product(range(settings.repeats), cells):
            on_progress("measuring", next(done), total)
            pool.connect(cell.concurrency, [model])
            prompts = map(partial(write_prompt, words[cell.input_tokens]), numbers)
            found[cell].append(_load(pool, model, cell, prompts, settings))
        on_progress("measuring", total, total)
    return make_record(url, settings, [Measured(model, cell, tuple(figures)) for cell, figures in found.items()])


def _check(client: Client, model: str) -> None:
    spec = client.describe(model)
    missing = sorted(_INPUTS - {tensor.name for tensor in spec.inputs})
    if missing or not generates_text(spec.outputs):
        absent = ", ".join(sorted(_OUTPUTS - {tensor.name for tensor in spec.outputs}))
        lacks = f"input {missing[0]}" if missing else f"the output {absent}"
        raise InputError(
            f"Model {model} lacks {lacks}: it cannot be measured in tokens.",
            "A pipeline is measured from its repository: shoal bench REPOSITORY; a language model: --model NAME",
        )


def write_prompt(words: int, number: int) -> str:
    """Return a prompt of ``words`` words, in another order for each ``number``, so that no engine has cached it."""
    first, *rest = itertools.islice(itertools.cycle(_WORDS), words)
    random.Random(number).shuffle(rest)
    return " ".join([first, *rest])


def fit_prompt(wanted: int, llm: Llm) -> int:
    """Return how many words a prompt of about ``wanted`` tokens has.

    The server counts the tokens of three prompts. The first two give the tokens per word. The third has the number of
    words that follows from this; its token count corrects the number.
    """

    def count(words: int) -> int:
        return llm.generate(write_prompt(words, 0), max_tokens=1).num_input_tokens

    less, more = count(1), count(1 + len(_WORDS))
    per_word = max(1.0, (more - less) / len(_WORDS))
    words = 1 + max(0, round((wanted - less) / per_word))
    return max(1, words + round((wanted - count(words)) / per_word))


def _load(pool: Pool, model: str, cell: TokenCell, prompts: Iterator[str], settings: BenchSettings) -> TokenFigures:
    timelines: list[Timeline] = []
    readings: list[tuple[float, float]] = []  # clock seconds, and CPU seconds of this process

    def send(_: int) -> int:
        with pool.take() as client:
            pieces = Llm(client, model).stream(
                next(prompts), max_tokens=cell.output_tokens, min_tokens=cell.output_tokens
            )
            timeline = Timeline.read(pieces)
        timelines.append(timeline)
        return timeline.output_tokens

    def read() -> None:
        used = os.times()
        readings.append((time.perf_counter(), used.user + used.system))

    load = closed_loop(
        send, callers=cell.concurrency, seconds=settings.seconds, warm_seconds=settings.warm_seconds, on_edge=read
    )
    (opened, before), (closed, after) = readings
    counted = [line for line in timelines if opened <= line.end <= closed]
    return summarise(counted, load.rows_per_second, (after - before) / (closed - opened))


class Timeline(NamedTuple):
    """Times of one answer, in clock seconds, and the number of tokens in its prompt.

    ``start`` is the time of the request. Each entry of ``arrivals`` is the time of a piece with new tokens, and the
    number of tokens received until then. ``end`` is the time of the last piece.
    """

    start: float
    arrivals: tuple[tuple[float, int], ...]
    end: float
    input_tokens: int

    @classmethod
    def read(cls, pieces: Iterable[Piece], clock: Callable[[], float] = time.perf_counter) -> Timeline:
        """Read the pieces of an answer as they arrive. A piece without a new token only changes ``end``.

        Raises:
            ServerError: the answer has no tokens, or ends before its last piece.
        """
        start = end = clock()
        arrivals: list[tuple[float, int]] = []
        input_tokens = 0
        for piece in pieces:
            end, input_tokens = clock(), piece.num_input_tokens
            if piece.num_output_tokens > (arrivals[-1][1] if arrivals else 0):
                arrivals.append((end, piece.num_output_tokens))
        if not arrivals:
            raise ServerError("An answer had no tokens.", "See the server's log.")
        return cls(start, tuple(arrivals), end, input_tokens)

    @property
    def output_tokens(self) -> int:
        """Number of the answer's tokens."""
        return self.arrivals[-1][1]

    def between(self) -> Iterator[float]:
        """Yield, for each token after the first piece, the seconds since the token before it.

        Tokens that arrive in one piece share the time since the previous piece equally.
        """
        for (before, fewer), (now, more) in itertools.pairwise(self.arrivals):
            yield from itertools.repeat((now - before) / (more - fewer), more - fewer)


def summarise(timelines: Sequence[Timeline], tokens_per_s: float, client_cores: float) -> TokenFigures:
    """Compute the figures of one load from the times of its answers."""
    first = [line.arrivals[0][0] - line.start for line in timelines]
    between = [seconds for line in timelines for seconds in line.between()]
    p50, p90, p99 = _percentiles(between) if between else (None, None, None)
    return TokenFigures(
        tokens_per_s,
        len(timelines),
        median(line.input_tokens for line in timelines),
        median(line.output_tokens for line in timelines),
        *_percentiles(first),
        p50,
        p90,
        p99,
        1000 * median(line.end - line.start for line in timelines),
        client_cores,
    )


def _percentiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Return the 50th, 90th and 99th percentile in ms."""
    p50, p90, p99 = 1000 * np.percentile(seconds, (50, 90, 99))
    return float(p50), float(p90), float(p99)


def make_record(url: str, settings: BenchSettings, measured: _Loads) -> dict[str, Any]:
    """Build the benchmark's record: figures, machine, versions and settings, as JSON values."""
    model = measured[0].label
    return {
        "unit": "tokens",
        **start_record(settings, measured, "transformers"),
        "repositories": [{"label": model, "model": model, "url": url}],
        "comparison": list(_compare(measured)),
        "notes": list(_notes(url, measured)),
        "advice": {},
    }


def _compare(measured: _Loads) -> Iterator[str]:
    """Yield a sentence per pair of prompt and answer length: what the most streams gain and cost against the fewest."""
    by_length: dict[tuple[int, int], list[Measured[TokenCell, TokenFigures]]] = {}
    for entry in sorted(measured, key=lambda entry: entry.cell):
        by_length.setdefault((entry.cell.input_tokens, entry.cell.output_tokens), []).append(entry)
    for (_, length), (few, *_, many) in ((key, loads) for key, loads in by_length.items() if len(loads) > 1):
        one, all_ = few.median, many.median
        price = ""
        if one.between_p50_ms and all_.between_p50_ms:
            price = f", {all_.between_p50_ms / one.between_p50_ms:.1f} times the time between tokens"
        yield (
            f"Answers of {length} tokens, {many.cell.concurrency} streams against {few.cell.concurrency}:"
            f" {all_.tokens_per_s / one.tokens_per_s:.1f} times the tokens per second,"
            f" {all_.first_p50_ms / one.first_p50_ms:.1f} times the time to the first token{price}."
        )


def _notes(url: str, measured: _Loads) -> Iterator[str]:
    """Yield sentences on what limits the figures, such as a client that is near the limit of one process."""
    prompts = {entry.cell.input_tokens: entry.median.input_tokens for entry in measured}
    answers = {entry.cell.output_tokens: entry.median.output_tokens for entry in measured}
    for kind, lengths in (("Prompts", prompts), ("Answers", answers)):
        for wanted, real in lengths.items():
            if real != wanted:
                yield f"{kind} had {real:g} tokens instead of {wanted}."
    busy = max(entry.median.client_cores for entry in measured)
    if busy > _BUSY:
        yield (
            f"This client used up to {busy:.1f} cores, near the limit of one Python process: the server may be faster"
            " than these figures. Measure with fewer streams, or with several clients."
        )
    if url.rpartition(":")[0] not in _HERE:
        yield f"The server is at {url}; the machine and the versions are the client's."
