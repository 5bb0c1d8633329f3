"""`shoal bench` in tokens: prompts of a wanted length, times of tokens that come, and what a record says of them."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from shoal import cli
from shoal.errors import InputError, ServerError
from shoal.kit.generation.pieces import Piece
from shoal.lab.bench.generation import Timeline, fit_prompt, summarise, write_prompt
from shoal.lab.bench.measure import Outcome
from shoal.lab.bench.record import BenchSettings, Measured, TokenCell, TokenFigures
from shoal.lab.bench.run import make_token_record
from shoal.lab.bench.tables import make_sheets, remarks, write_page
from shoal.lab.bench.target import BenchTarget, Servers
from tests.support.commands import Shoal


@pytest.mark.parametrize("wanted", [2, 3, 7, 32, 500, 4096])
@pytest.mark.parametrize(("template", "per_word"), [(0, 1), (1, 1), (40, 1), (2, 3)])
def test_prompts_have_about_the_wanted_number_of_tokens(wanted: int, template: int, per_word: int) -> None:
    """A token for each word, or several, and those of the template."""

    def count(text: str) -> int:
        return template + per_word * len(text.split())

    words = fit_prompt(wanted, count)
    (found,) = {count(write_prompt(words, number)) for number in range(20)}
    assert abs(found - max(wanted, template + per_word)) <= per_word / 2


def test_prompts_differ_from_their_second_word_on() -> None:
    texts = [write_prompt(40, number).split() for number in range(50)]
    assert len({" ".join(words[:6]) for words in texts}) == 50
    assert {" ".join(sorted(words)) for words in texts} == {" ".join(sorted(texts[0]))}
    assert write_prompt(5, 7) == write_prompt(5, 7)


def pieces(*counts: int) -> list[Piece]:
    return [Piece("x", "length" if number == len(counts) - 1 else "", 9, n) for number, n in enumerate(counts)]


def test_times_of_tokens() -> None:
    """Three tokens in one piece count as three; a piece without a new token only moves the end."""
    clock = iter([10.0, 10.5, 10.6, 10.9, 11.0]).__next__
    line = Timeline.read(pieces(1, 2, 5, 5), clock)
    assert line == Timeline(10.0, ((10.5, 1), (10.6, 2), (10.9, 5)), 11.0, 9)
    assert line.output_tokens == 5
    assert [round(seconds, 6) for seconds in line.between()] == [0.1] * 4
    figures = summarise([line, Timeline(0.0, ((0.1, 5),), 0.1, 9)], 50.0, 0.25)
    assert figures.first_p50_ms == pytest.approx(300.0)
    assert figures.between_p50_ms == pytest.approx(100.0)
    assert (figures.requests, figures.input_tokens, figures.output_tokens) == (2, 9, 5)
    assert figures.whole_p50_ms == pytest.approx(550.0)
    alone = summarise([Timeline(0.0, ((0.1, 1),), 0.1, 9)], 10.0, 0.25)
    assert alone.between_p99_ms is None
    with pytest.raises(ServerError, match="An answer had no tokens"):
        Timeline.read([Piece("", "length", 9, 0)], itertools.count(0.0).__next__)


def test_tokens_of_pieces_that_do_not_say_them() -> None:
    """Each piece has its share of the answer's tokens by its characters."""
    came = [Piece("ab", "", 0, 0), Piece("cdef", "", 0, 0), Piece("gh", "stop", 0, 0)]
    times = [0.0, 1.0, 2.0, 3.0]
    line = Timeline.read(came, iter(times).__next__, count=lambda text: len(text) // 2)
    assert line.arrivals == ((1.0, 1), (2.0, 3), (3.0, 4))
    at_the_end = [*came[:2], Piece("gh", "stop", 5, 8)]  # as OpenAI's API has them without continuous usage
    assert Timeline.read(at_the_end, iter(times).__next__).arrivals == ((1.0, 2), (2.0, 6), (3.0, 8))
    with pytest.raises(InputError, match=r"do not say how many tokens they have\. Name .* --tokenizer FOLDER"):
        Timeline.read(came, iter(times).__next__)


LOAD = TokenFigures(100.0, 20, 32, 8, 20.0, 25.0, 40.0, 10.0, 12.0, 30.0, 90.0, 0.2)


def test_a_record_and_its_table() -> None:
    alone, many = TokenCell(32, 8, 1, 1), TokenCell(32, 8, 1, 16)
    short = TokenCell(32, 1, 1, 1)
    found = {
        alone: [LOAD, replace(LOAD, tokens_per_s=120.0), replace(LOAD, tokens_per_s=80.0)],
        many: [replace(LOAD, tokens_per_s=400.0, first_p50_ms=50.0, between_p50_ms=25.0, client_cores=0.93)],
        short: [TokenFigures(100.0, 20, 33, 1, 20.0, 25.0, 40.0, None, None, None, 90.0, 0.2)],
    }
    measured = [Measured("llm", cell, tuple(figures)) for cell, figures in found.items()]
    target = BenchTarget("llm", "llm", None, {}, Servers(), url="10.0.0.7:8001")
    outcome = Outcome(measured, [], is_interrupted=False)
    record = json.loads(json.dumps(make_token_record([target], BenchSettings(), outcome)))
    assert record["loads"][0]["min_max"] == {
        "tokens_per_s": [80.0, 120.0], "first_p50_ms": [20.0, 20.0], "between_p50_ms": [10.0, 10.0],
    }  # fmt: skip
    assert remarks(record) == [
        "Answers of 8 tokens, 16 streams against 1: 4.0 times the tokens per second, 2.5 times the time to the first"
        " token, 2.5 times the time between tokens.",
        "Prompts had 32 to 33 tokens instead of 32.",
        "This client used up to 0.9 cores, near the limit of one Python process: the server may be faster than these"
        " figures. Measure with fewer streams, or with several clients.",
        "The server is at 10.0.0.7:8001; the machine and the versions are the client's.",
    ]
    (sheet,) = make_sheets(record)
    assert sheet.rows[0][:7] == ("32", "8", "1", "100.0", "80.0", "120.0", "20.0")
    assert sheet.rows[2] == ("33", "1", "1", *["100.0"] * 3, "20.0", "25.0", "40.0", "-", "-", "-")
    page = write_page(record)
    assert page.startswith("# llm: llm\n")
    assert "| 32 | 8 | 16 | 400.0 | " in page


def test_several_models_are_columns_with_ratios_within_a_round() -> None:
    alone, eight = TokenCell(32, 8, 1, 1), TokenCell(32, 8, 8, 1)
    rates = {"hf": (100.0, 50.0, 80.0), "vllm": (300.0, 100.0, 400.0)}
    measured = [
        Measured(label, cell, tuple(replace(LOAD, tokens_per_s=rate) for rate in found))
        for cell in (alone, eight)
        for label, found in rates.items()
    ]
    targets = [BenchTarget(label, "m", None, {}, Servers(), url=f"h:{n}") for n, label in enumerate(rates, 1)]
    record = make_token_record(targets, BenchSettings(), Outcome(measured, ["A note."], is_interrupted=False))
    tokens, ratios = make_sheets(record)
    assert tokens.columns[:5] == ("", "in", "out", "prompts", "streams")
    assert tokens.rows[1][:7] == ("vllm", "32", "8", "1", "1", "300.0", "100.0")
    assert ratios.title == "Times hf's, in the same round: median (smallest-greatest)"
    assert ratios.rows[0] == ("vllm", str(alone), "3.00 (2.00-5.00)", "1.00", "1.00")
    assert str(eight) == "32 in, 8 out, 8 prompts, 1 stream"
    assert "A note." in record["notes"]


def test_refused_numbers(shoal: Shoal) -> None:
    for arguments, message in (
        (("--output-tokens", "0"), "--output-tokens '0' is not a list of whole numbers above 0"),
        (("--concurrency", "x"), "--concurrency 'x' is not a list"),
    ):
        with pytest.raises(InputError, match=message):
            shoal("bench", *arguments)


def test_the_address_may_name_the_protocol() -> None:
    asked = ["bench", "--url", "http://127.0.0.1:9", "--model", "llm"]
    assert str(CliRunner().invoke(cli.app, asked).exception).startswith("No Triton answers at 127.0.0.1:9 ")
    error = CliRunner().invoke(cli.app, [*asked, "--protocol", "grpc"]).exception
    assert "names the protocol http; this client speaks grpc" in str(error)


def test_no_server_answers() -> None:
    result = CliRunner().invoke(cli.app, ["bench", "--url", "127.0.0.1:9", "--model", "llm"])
    assert isinstance(result.exception, ServerError)
