"""Tokens of answers over time, and prompts of a wanted number of tokens."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np

from shoal.errors import ServerError
from shoal.generation import Piece

# One token each, with the space before it, in the vocabularies of most models.
_WORDS = (
    "the", "of", "and", "to", "in", "is", "was", "for", "on", "that", "with", "as", "by", "at", "from", "it", "an",
    "be", "are", "this",
)  # fmt: skip
_FILLER = "a"
_TRIES = 8  # to find a prompt's number of words


class TokenCell(NamedTuple):
    """Parameters of a load: the tokens of each prompt and each answer, and the streams at a time."""

    input_tokens: int
    output_tokens: int
    concurrency: int


class Prompt(NamedTuple):
    """Prompts of a number of tokens: so many common words, and so many times the shortest one."""

    words: int
    fillers: int = 0

    def text(self, number: int) -> str:
        """Return the ``number``-th text: the same words in an order of its own, so that engines have no cache of it."""
        first, *rest = [*itertools.islice(itertools.cycle(_WORDS), self.words), *[_FILLER] * self.fillers]
        random.Random(number).shuffle(rest)
        return " ".join([first, *rest])


class Timeline(NamedTuple):
    """One answer: when it was asked for, and at which times how many of its tokens had come, all in clock seconds."""

    start: float
    arrivals: tuple[tuple[float, int], ...]
    end: float
    input_tokens: int

    @classmethod
    def read(cls, pieces: Iterable[Piece], clock: Callable[[], float] = time.perf_counter) -> Timeline:
        """Read an answer as it comes; pieces without a new token only extend it.

        Raises:
            ServerError: it has no tokens, or ends before its last piece.
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
        """Yield the seconds from token to token after the first piece; several in one piece get equal parts."""
        for (before, fewer), (now, more) in itertools.pairwise(self.arrivals):
            yield from itertools.repeat((now - before) / (more - fewer), more - fewer)


@dataclass(frozen=True)
class TokenFigures:
    """Results of one load.

    ``first`` is from the request to the first token, ``between`` from one token to the next (None if answers have one
    piece), ``whole`` from the request to the end. ``input_tokens`` and ``output_tokens`` are the medians of what the
    server counted. ``client_cores`` are the cores that this process used.
    """

    tokens_per_s: float
    requests: float
    input_tokens: float
    output_tokens: float
    first_p50_ms: float
    first_p90_ms: float
    first_p99_ms: float
    between_p50_ms: float | None
    between_p90_ms: float | None
    between_p99_ms: float | None
    whole_p50_ms: float
    client_cores: float


def summarise(timelines: Sequence[Timeline], tokens_per_s: float, client_cores: float) -> TokenFigures:
    """Summarise the answers of one load."""
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
    """Return p50, p90 and p99 in ms."""
    p50, p90, p99 = 1000 * np.percentile(seconds, (50, 90, 99))
    return float(p50), float(p90), float(p99)


def fit_prompt(wanted: int, count: Callable[[str], int]) -> Prompt:
    """Find prompts of ``wanted`` tokens, or of nearly so many, with ``count``, which asks the server for a text's."""
    tried: dict[Prompt, int] = {}

    def gap(prompt: Prompt) -> int:
        if prompt not in tried:
            tried[prompt] = count(prompt.text(0))
        return wanted - tried[prompt]

    prompt = Prompt(1)
    per_word = 1.0
    if gap(prompt) > 0:
        per_word = max(1.0, (gap(prompt) - gap(Prompt(1 + len(_WORDS)))) / len(_WORDS))
        prompt = Prompt(1 + int(gap(prompt) / per_word))
    for _ in range(_TRIES):
        missing = gap(prompt)
        if 0 <= missing < per_word or (missing < 0 and prompt.words == 1):
            break
        step = int(missing / per_word) or (1 if missing > 0 else -1)
        prompt = Prompt(max(1, prompt.words + step))
    if gap(prompt) > 0:
        gap(Prompt(prompt.words, gap(prompt)))
    return min(tried, key=lambda each: abs(wanted - tried[each]))
