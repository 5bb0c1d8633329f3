"""Stop strings: cut before the one that is complete first, whatever the division into pieces."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import InputError
from shoal.kit.generation.completions import StopCutter
from tests.conftest import Scale

stop_lists = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4)
examples = settings(max_examples=300)


def find_end(text: str, stops: list[str]) -> int:
    """Return the start of the stop string that is complete first, the longest of several; else the text's length."""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return min(ends, default=(0, len(text)))[1]


@examples
@given(stop_lists, st.lists(st.text("abc\n", max_size=5), max_size=8))
def test_any_division_gives_the_text_before_the_first_stop(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    end = find_end(text, stops)
    cutter, given_out = StopCutter(stops), ""
    for piece in pieces:
        new, has_stopped = cutter.step(piece)
        given_out += new
        assert text[:end].startswith(given_out)
        assert not has_stopped or given_out == text[:end]
    new, has_stopped = cutter.step("", last=True)
    assert given_out + new == text[:end]
    assert has_stopped == (end < len(text))
    assert StopCutter(stops).step(text, last=True) == (text[:end], end < len(text))


@examples
@given(stop_lists, st.text("abc", max_size=12))
def test_only_what_may_become_a_stop_is_held_back(stops: list[str], text: str) -> None:
    cutter, given_out = StopCutter(stops), ""
    for place, character in enumerate(text):
        new, has_stopped = cutter.step(character)
        given_out += new
        so_far = text[: place + 1]
        if find_end(so_far, stops) < len(so_far):
            assert has_stopped
            break
        tails = [so_far[k:] for k in range(len(so_far))]
        held = next((tail for tail in tails if any(stop.startswith(tail) for stop in stops)), "")
        assert given_out + held == so_far


def test_the_stop_that_is_complete_first_wins() -> None:
    assert StopCutter(["late", "mid"]).step("a mid late") == ("a ", True)
    assert StopCutter(["bc", "abcd"]).step("xabcd") == ("xa", True)
    cutter = StopCutter(["bc", "abcd"])
    assert [cutter.step("xab"), cutter.step("c"), cutter.step("d")] == [("x", False), ("a", True), ("", True)]
    assert StopCutter(["c", "abc", "bc"]).step("xabc") == ("x", True)  # complete at the same character: the longest


def test_stops_that_do_not_count() -> None:
    """Those that end within the first characters of a piece; one that goes on beyond them counts."""
    assert StopCutter(["ab"]).step("abab", ignored=2) == ("ab", True)
    assert StopCutter(["ab"]).step("abc", ignored=2) == ("abc", False)
    assert StopCutter(["aba"]).step("ababa", ignored=3) == ("ab", True)
    cutter = StopCutter(["ab", "abc"])
    assert [cutter.step("ab", ignored=2), cutter.finds("c"), cutter.step("c")] == [("", False), True, ("", True)]
    cutter = StopCutter(["ab", "abcd"])
    assert [cutter.step("ab", ignored=2), cutter.step("x"), cutter.step("a", last=True)] == [
        ("", False), ("abx", False), ("a", False),
    ]  # fmt: skip


def test_empty_stops_are_refused() -> None:
    with pytest.raises(InputError, match=r"^A stop string is empty\. Leave it out\.$"):
        StopCutter(["a", ""])


def test_the_cost_of_a_piece_does_not_grow(scale: Scale) -> None:
    """Nor where each piece may begin a stop. The least of 30 rounds: other work uses these cores too."""
    limit = 1.5 if scale.is_full else 4
    rounds = []
    for _ in range(30):
        cutter, seconds = StopCutter(["the end", "</s>", "eth" * 20 + "!"]), []
        for _ in range(40):
            start = time.perf_counter()
            for _ in range(100):
                cutter.step("the")
            seconds.append(time.perf_counter() - start)
        rounds.append(seconds)
    assert min(seconds[-1] for seconds in rounds) <= limit * min(seconds[0] for seconds in rounds)
