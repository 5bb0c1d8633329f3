"""Measurement of models that make tokens: time to the first token, time between tokens, tokens per second."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from shoal.errors import InputError, ServerError
from shoal.kit.generation.pieces import Piece
from shoal.lab.bench.asking import Asker, Count, Prompt, make_asker, takes_ids
from shoal.lab.bench.load import closed_loop
from shoal.lab.bench.measure import Subject
from shoal.lab.bench.record import BenchSettings, Measured, TokenCell, TokenFigures
from shoal.lab.bench.target import BenchTarget

# One token each, with the space before it, in the vocabularies of most models.
_TEXT = "the of and to in is was for on that with as by at from it an be are this"
_WORDS = _TEXT.split()
_FIRST_IDS = range(10, 100)  # token ids that every vocabulary has
_BUSY = 0.8  # of a core: a Python process with more time is near its limit
_HERE = ("127.0.0.1", "localhost", "[::1]")
_NO_COUNT = "The answers do not say how many tokens they have."
_TOKENIZER = "Name the folder of the model's tokenizer.json: --tokenizer FOLDER"

_Loads = Sequence[Measured[TokenCell, TokenFigures]]


@dataclass(frozen=True)
class Prompts:
    """Prompts to send: ``texts`` in turn, or common words, of which ``words`` has the number for each wanted length.

    A model that takes token ids gets those of ``encode``; without it, random ones.
    """

    words: Mapping[int, int]
    texts: Sequence[str] = ()
    encode: Callable[[str], Sequence[int]] | None = None

    def make(self, length: int, number: int, *, is_ids: bool) -> Prompt:
        """Return the ``number``-th prompt of about ``length`` tokens."""
        if is_ids and not self.encode:
            return random.Random(number).choices(_FIRST_IDS, k=length)
        text = self.texts[number % len(self.texts)] if self.texts else write_prompt(self.words[length], number)
        return self.encode(text) if is_ids and self.encode else text


def write_prompt(words: int, number: int) -> str:
    """Return a prompt of ``words`` words, in another order for each ``number``, so that no engine has cached it."""
    first, *rest = itertools.islice(itertools.cycle(_WORDS), words)
    random.Random(number).shuffle(rest)
    return " ".join([first, *rest])


def fit_prompt(wanted: int, count: Count) -> int:
    """Return how many words a prompt of about ``wanted`` tokens has.

    The tokens of three prompts are counted. The first two give the tokens per word. The third has the number of
    words that follows from this; its token count corrects the number.
    """
    less, more = (count(write_prompt(words, 0)) for words in (1, 1 + len(_WORDS)))
    per_word = max(1.0, (more - less) / len(_WORDS))
    words = 1 + max(0, round((wanted - less) / per_word))
    return max(1, words + round((wanted - count(write_prompt(words, 0))) / per_word))


class Tokens(Subject[TokenCell, TokenFigures]):
    """A model that makes tokens (``target``), on its server, with clients. ``count`` counts where the server does not.

    ``prompts`` may be set later.
    """

    def __init__(self, target: BenchTarget, count: Count | None, settings: BenchSettings, held: ExitStack) -> None:
        self.label, self._settings, self._count = target.label, settings, count
        self.prompts = Prompts({})
        self._is_ids = takes_ids(target.spec)
        self._asker: Asker = make_asker(target, count, held)
        self._numbers = itertools.count(1)

    @property
    def most_rows(self) -> int:
        """Number of prompts that a request may have."""
        return self._asker.most_rows

    def fit(self, lengths: Iterable[int]) -> dict[int, int]:
        """Return the numbers of words of prompts that have about these numbers of tokens.

        Raises:
            InputError: nothing counts the tokens.
        """
        return (
            {} if self._is_ids and not self.prompts.encode else {n: fit_prompt(n, self._count_prompt) for n in lengths}
        )

    def _count_prompt(self, text: str) -> int:
        if self._is_ids or self._count:
            assert self._count
            return self._count(text)
        pieces = [*self._asker.ask([text], 1)]
        if not (number := pieces[-1].num_input_tokens if pieces else 0):
            raise InputError(_NO_COUNT, _TOKENIZER)
        return number

    def first(self, cell: TokenCell) -> Mapping[str, Any]:
        """Send the first request of a load."""
        return {"the text": ["".join(piece.text for piece in self._ask(cell, [0] * cell.batch))]}

    def _ask(self, cell: TokenCell, numbers: Sequence[int]) -> Iterator[Piece]:
        prompts = [self.prompts.make(cell.input_tokens, number, is_ids=self._is_ids) for number in numbers]
        inputs = 0 if self._is_ids or not self._count else sum(self._count(str(prompt)) for prompt in prompts)
        for piece in self._asker.ask(prompts, cell.output_tokens):
            yield piece if piece.num_input_tokens else piece._replace(num_input_tokens=inputs)

    def recover(self) -> None:
        """Wait until the server is ready again."""
        self._asker.recover()

    def load(self, cell: TokenCell) -> TokenFigures:
        """Measure the model under the closed loop ``cell``."""
        timelines: list[Timeline] = []
        readings: list[tuple[float, float]] = []  # clock seconds, and CPU seconds of this process
        self._asker.prepare(cell.concurrency)

        def send(_: int) -> int:
            numbers = [next(self._numbers) for _ in range(cell.batch)]
            timeline = Timeline.read(self._ask(cell, numbers), count=self._count)
            timelines.append(timeline)
            return timeline.output_tokens

        def read() -> None:
            used = os.times()
            readings.append((time.perf_counter(), used.user + used.system))

        settings = self._settings
        load = closed_loop(
            send, callers=cell.concurrency, seconds=settings.seconds, warm_seconds=settings.warm_seconds, on_edge=read
        )
        (opened, before), (closed, after) = readings
        counted = [line for line in timelines if opened <= line.end <= closed]
        return summarise(counted, load.rows_per_second, (after - before) / (closed - opened), cell.batch)


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
    def read(
        cls, pieces: Iterable[Piece], clock: Callable[[], float] = time.perf_counter, count: Count | None = None
    ) -> Timeline:
        """Read the pieces of an answer as they arrive. A piece without a new token only changes ``end``.

        If pieces do not say how many tokens they have, each has its share of the answer's tokens by its characters. If
        the answer does not say that either, ``count`` counts its tokens.

        Raises:
            InputError: nothing counts the tokens.
            ServerError: the answer has no tokens, or ends before its last piece.
        """
        start = end = clock()
        came: list[tuple[float, str, int]] = []
        input_tokens = 0
        for piece in pieces:
            end, input_tokens = clock(), piece.num_input_tokens or input_tokens
            came.append((end, piece.text, piece.num_output_tokens))
        arrivals: list[tuple[float, int]] = []
        for at, number in _count_pieces(came, count):
            if number > (arrivals[-1][1] if arrivals else 0):
                arrivals.append((at, number))
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


def _count_pieces(came: Sequence[tuple[float, str, int]], count: Count | None) -> Iterator[tuple[float, int]]:
    """Yield the time of each piece, and the number of tokens up to it."""
    if all(number for _, text, number in came if text):
        yield from ((at, number) for at, _, number in came)
        return
    whole = "".join(text for _, text, _ in came)
    total = came[-1][2] or (count(whole) if count else 0)
    if not total:
        raise InputError(_NO_COUNT, _TOKENIZER)
    done = 0
    for at, text, _ in came:
        done += len(text)
        yield at, max(1, round(total * done / len(whole))) if done else 0


def summarise(timelines: Sequence[Timeline], tokens_per_s: float, client_cores: float, rows: int = 1) -> TokenFigures:
    """Compute the figures of one load from the times of its answers, each to a request of so many ``rows``."""
    first = [line.arrivals[0][0] - line.start for line in timelines]
    between = [seconds for line in timelines for seconds in line.between()]
    p50, p90, p99 = _percentiles(between) if between else (None, None, None)
    return TokenFigures(
        tokens_per_s,
        len(timelines),
        median(line.input_tokens / rows for line in timelines),
        median(line.output_tokens / rows for line in timelines),
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


def compare_streams(measured: _Loads) -> Iterator[str]:
    """Yield a sentence per pair of prompt and answer length: what the most streams gain and cost against the fewest."""
    by_length: dict[tuple[str, int, int, int], list[Measured[TokenCell, TokenFigures]]] = {}
    for entry in sorted(measured, key=lambda entry: entry.cell):
        by_length.setdefault((entry.label, *entry.cell[:3]), []).append(entry)
    labels = {entry.label for entry in measured}
    lengths = {entry.cell.input_tokens for entry in measured}
    several = {key: loads for key, loads in by_length.items() if len(loads) > 1}
    for (label, asked, length, batch), (few, *_, many) in several.items():
        one, all_ = few.median, many.median
        price = ""
        if one.between_p50_ms and all_.between_p50_ms:
            price = f", {all_.between_p50_ms / one.between_p50_ms:.1f} times the time between tokens"
        yield (
            f"{f'{label}, answers' if len(labels) > 1 else 'Answers'} of {length} tokens"
            f"{f' to prompts of {asked}' if len(lengths) > 1 else ''}{f', {batch} in a request' if batch > 1 else ''},"
            f" {many.cell.concurrency} streams against {few.cell.concurrency}:"
            f" {all_.tokens_per_s / one.tokens_per_s:.1f} times the tokens per second,"
            f" {all_.first_p50_ms / one.first_p50_ms:.1f} times the time to the first token{price}."
        )


def note_tokens(measured: _Loads) -> Iterator[str]:
    """Yield sentences on what limits the figures, such as a client that is near the limit of one process."""
    several = len({entry.label for entry in measured}) > 1
    for kind, name in (("Prompts", "input_tokens"), ("Answers", "output_tokens")):
        found: dict[tuple[str, int], list[float]] = {}
        for entry in measured:
            found.setdefault((entry.label, getattr(entry.cell, name)), []).append(getattr(entry.median, name))
        for (label, wanted), real in found.items():
            if wanted and {*real} != {wanted}:
                counts = " to ".join(f"{number:g}" for number in sorted({min(real), max(real)}))
                yield f"{kind}{f' of {label}' if several else ''} had {counts} tokens instead of {wanted}."
    busy = max(entry.median.client_cores for entry in measured)
    if busy > _BUSY:
        yield (
            f"This client used up to {busy:.1f} cores, near the limit of one Python process: the server may be faster"
            " than these figures. Measure with fewer streams, or with several clients."
        )


def note_places(targets: Iterable[BenchTarget]) -> Iterator[str]:
    """Yield which servers are not on this machine, or may be under other clients' load."""
    for url in dict.fromkeys(target.url for target in targets if target.url):
        host = url.rpartition("://")[2].removesuffix("/v1").rpartition(":")[0]
        if host not in _HERE:
            yield f"The server is at {url}; the machine and the versions are the client's."
