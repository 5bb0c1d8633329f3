"""`shoal bench` in tokens: prompts of a wanted length, times of tokens that come, and what a record says of them."""

from __future__ import annotations

import itertools
import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from shoal import cli
from shoal.clients.llm.client import Llm
from shoal.errors import InputError, ServerError
from shoal.kit.generation.pieces import Piece
from shoal.lab.bench.generation import Timeline, fit_prompt, make_record, summarise, write_prompt
from shoal.lab.bench.record import BenchSettings, Measured, TokenCell, TokenFigures
from shoal.lab.bench.tables import make_sheets, remarks, write_page
from tests.support.commands import Shoal


class Counter:
    """Counts tokens as a server does: a token of the template, and so many per word."""

    def __init__(self, template: int, per_word: int) -> None:
        self.template, self.per_word = template, per_word

    def generate(self, text: str, *, max_tokens: int) -> Piece:
        assert max_tokens == 1
        return Piece("", "length", self.count(text), 1)

    def count(self, text: str) -> int:
        return self.template + self.per_word * len(text.split())


@pytest.mark.parametrize("wanted", [2, 3, 7, 32, 500, 4096])
@pytest.mark.parametrize(("template", "per_word"), [(0, 1), (1, 1), (40, 1), (2, 3)])
def test_prompts_have_about_the_wanted_number_of_tokens(wanted: int, template: int, per_word: int) -> None:
    counter = Counter(template, per_word)
    words = fit_prompt(wanted, cast(Llm, counter))
    (found,) = {counter.count(write_prompt(words, number)) for number in range(20)}
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
        Timeline.read(pieces(0), itertools.count(0.0).__next__)


LOAD = TokenFigures(100.0, 20, 32, 8, 20.0, 25.0, 40.0, 10.0, 12.0, 30.0, 90.0, 0.2)


def test_a_record_and_its_table() -> None:
    alone, many = TokenCell(32, 8, 1), TokenCell(32, 8, 16)
    short = TokenCell(32, 1, 1)
    found = {
        alone: [LOAD, replace(LOAD, tokens_per_s=120.0), replace(LOAD, tokens_per_s=80.0)],
        many: [replace(LOAD, tokens_per_s=400.0, first_p50_ms=50.0, between_p50_ms=25.0, client_cores=0.93)],
        short: [TokenFigures(100.0, 20, 33, 1, 20.0, 25.0, 40.0, None, None, None, 90.0, 0.2)],
    }
    measured = [Measured("llm", cell, tuple(figures)) for cell, figures in found.items()]
    record = json.loads(json.dumps(make_record("10.0.0.7:8001", BenchSettings(), measured)))
    assert record["loads"][0]["min_max"] == {
        "tokens_per_s": [80.0, 120.0], "first_p50_ms": [20.0, 20.0], "between_p50_ms": [10.0, 10.0],
    }  # fmt: skip
    assert remarks(record) == [
        "Answers of 8 tokens, 16 streams against 1: 4.0 times the tokens per second, 2.5 times the time to the first"
        " token, 2.5 times the time between tokens.",
        "Prompts had 33 tokens instead of 32.",
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


def test_options_that_do_not_go_together(shoal: Shoal) -> None:
    for arguments, message in (
        (("build/x", "--output-tokens", "8"), "--output-tokens is not for repositories"),
        (("build/x", "--url", "localhost:8001"), "--url is not for repositories"),
        (("--batches", "8"), "--batches is for repositories. Name one: shoal bench build/repository --batches"),
        (("--report",), "--report is for repositories"),
        (("--output-tokens", "0"), "--output-tokens '0' is not a list of whole numbers above 0"),
        (("--streams", "x"), "--streams 'x' is not a list"),
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


@pytest.mark.parametrize(
    ("owner", "says"),
    [
        ("vllm", "answers OpenAI's API, and not Triton's. Only servers of Triton and of shoal serve are measured so"),
        ("shoal", "is not a Triton that speaks http (HTTP 404)"),
    ],
)
def test_a_server_of_another_api(owner: str, says: str) -> None:
    """It answers its list of models alone."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"data": [{"id": "m", "owned_by": owner}]}).encode()
            self.send_response(200 if self.path == "/v1/models" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        result = CliRunner().invoke(cli.app, ["bench", "--url", f"http://127.0.0.1:{server.server_port}"])
        server.shutdown()
    assert says in str(result.exception)
