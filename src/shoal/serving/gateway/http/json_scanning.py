"""Structure of JSON that is not parsed: places of lists, numbers of values, and keys that are there twice."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

from shoal.serving.gateway.http.bodies import CHUNK, SMALL
from shoal.serving.gateway.refusals import wrong

MOST_NESTED = 64  # brackets of JSON within each other
MOST_LISTS = 4096  # in an infer request's JSON, without lists within data
MOST_PLAIN = 2**9  # characters of a number or word that are not counted
_NAMES = {"str": "string", "int": "whole number", "float": "number", "bool": "boolean"}  # of JSON's kinds
_QUOTE, _OPENING, _CLOSING, _COMMA, _COLON = 1, 2, 3, 4, 5
_KINDS = np.zeros(256, np.uint8)  # of JSON's structural characters
for _kind, _characters in enumerate((b'"', b"[{", b"]}", b",", b":"), 1):
    _KINDS[list(_characters)] = _kind


def say_kinds(error: object) -> str:
    """Return the text of an error of msgspec with JSON's kinds in place of Python's types."""

    def say(found: re.Match[str]) -> str:
        return f"{found[1]} {' or '.join(_NAMES.get(kind, kind) for kind in found[2].split(' | '))}"

    return re.sub(r"\b(Expected|got) `([a-z |]+)`", say, str(error))


def screen_nesting(content: bytes) -> None:
    """Check how deep brackets are nested, whether or not ``content`` is valid JSON.

    Raises:
        RefusedError: deeper than ``MOST_NESTED``.
    """
    if len(content) > SMALL or content.count(b"[") + content.count(b"{") > MOST_NESTED:
        scan(content)


def to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Convert an object of JSON. Of two equal keys, Triton would take the first one, and msgspec the last one.

    Raises:
        RefusedError: two keys are equal.
    """
    found = dict[str, Any]()
    for name, value in pairs:
        if name in found:
            raise wrong(f"{name!r:.60} is given twice. Give it once.")
        found[name] = value
    return found


class Span(NamedTuple):
    """Place of a list in JSON, with its brackets, and the number of its values, those of lists within it included."""

    start: int
    end: int
    num_values: int


class Counts(NamedTuple):
    """Numbers of commas, opening brackets and colons outside strings, and the characters of the longest number or word.

    Numbers and words of at most ``MOST_PLAIN`` characters count as 0.
    """

    commas: int = 0
    openings: int = 0
    colons: int = 0
    longest: int = 0


def scan(content: bytes, level: int = 0, most: int = MOST_NESTED) -> tuple[list[Span], Counts]:
    """Find the lists of JSON whose brackets are the ``level``-th ones from outside, and count what JSON has.

    Return these lists, and the counts. For content that is not valid JSON, the result is right up to the first error,
    where parsers stop.

    Raises:
        RefusedError: brackets are nested deeper than ``most``, or there are too many such lists.
    """
    depth = deepest = num_commas = num_openings = num_colons = num_quotes = longest = 0
    starts, ends, is_escaped = list[tuple[int, int]](), list[tuple[int, int]](), False
    last = -1  # place of the last structural character
    for at in range(0, len(content), CHUNK):
        piece = content[at : at + CHUNK]
        # without escapes, each second quote ends a string; replacing them by spaces keeps all positions
        piece = (b" " + piece[1:] if is_escaped else piece).replace(b"\\\\", b"  ")
        is_escaped = piece.endswith(b"\\")
        kinds = _KINDS[np.frombuffer(piece.replace(b'\\"', b"  "), np.uint8)]
        places = np.flatnonzero(kinds)
        kinds = kinds[places]
        quotes = num_quotes + np.cumsum(kinds == _QUOTE)
        gaps, is_within = np.diff(places + at, prepend=last), np.append(num_quotes % 2, quotes[:-1] % 2)
        for index in np.flatnonzero((gaps > MOST_PLAIN) & (is_within == 0)):  # a number, or spaces
            end = at + int(places[index])
            longest = max(longest, len(content[end - int(gaps[index]) + 1 : end].strip()))
        num_quotes, last = (int(quotes[-1]), at + int(places[-1])) if len(quotes) else (num_quotes, last)
        is_outside = (quotes % 2 == 0) & (kinds != _QUOTE)
        places, kinds = places[is_outside], kinds[is_outside]
        commas = num_commas + np.cumsum(kinds == _COMMA)
        depths = depth + np.cumsum((kinds == _OPENING).astype(int) - (kinds == _CLOSING))
        num_openings += int(np.count_nonzero(kinds == _OPENING))
        num_colons += int(np.count_nonzero(kinds == _COLON))
        if not len(depths):
            continue
        depth, deepest, num_commas = int(depths[-1]), max(deepest, int(depths.max())), int(commas[-1])
        if level:
            is_start, is_end = (kinds == _OPENING) & (depths == level), (kinds == _CLOSING) & (depths == level - 1)
            starts += zip((at + places[is_start]).tolist(), commas[is_start].tolist(), strict=True)
            ends += zip((at + places[is_end] + 1).tolist(), commas[is_end].tolist(), strict=True)
            if len(starts) > MOST_LISTS:
                raise wrong(f"The JSON has more than {MOST_LISTS} lists besides its inputs' data.")
    if num_quotes % 2 == 0:
        longest = max(longest, len(content[last + 1 :].strip()))
    if deepest > most:
        raise wrong(f"The JSON is nested {deepest} deep; at most {most} are read.")
    spans = [
        Span(start, end, after - before + 1)
        for (start, before), (end, after) in zip(starts, ends, strict=False)
        if content[start] == ord("[") and start < end
    ]
    return spans, Counts(num_commas, num_openings, num_colons, longest)
