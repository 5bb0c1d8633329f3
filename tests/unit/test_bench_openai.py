"""`shoal bench` of servers with OpenAI's API, which differ in the fields that they take."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import InputError, ServerError
from tests.support.commands import Shoal

LOADS = ("--input-tokens", "12", "--output-tokens", "4", "--concurrency", "2", "--seconds", "0.1", "--repeats", "1")


class Handler(BaseHTTPRequestHandler):
    """It answers a prompt of N words with numbers, and does not take the fields in ``refused``."""

    protocol_version = "HTTP/1.1"
    refused: tuple[str, ...] = ()
    path_served = "/v1/completions"
    end = "data: [DONE]\n\n"

    def do_GET(self) -> None:
        self.answer(200 if self.path == "/v1/models" else 404, {"data": [{"id": "m", "owned_by": "other"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fields = {*asked, *(f"stream_options.{name}" for name in asked.get("stream_options", ()))}
        if self.path != self.path_served:
            self.answer(404, {"error": {"message": "no such path"}})
        elif unknown := fields & {*self.refused}:
            self.answer(400, {"error": {"message": f"unknown {min(unknown)}"}})
        else:
            self.stream(asked)

    def stream(self, asked: dict[str, Any]) -> None:
        prompt = asked.get("prompt") or asked["messages"][0]["content"]
        made = [{"text": f"{number} ", "delta": {"content": f"{number} "}} for number in range(asked["max_tokens"])]
        events: list[Any] = [{"choices": [each]} for each in made]
        if "stream_options" in asked:
            usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": len(made)}
            events.append({"choices": [], "usage": usage})
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + self.end
        self.send(200, body.encode())

    def answer(self, status: int, document: Any) -> None:
        self.send(status, json.dumps(document).encode())

    def send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@contextmanager
def serve_openai(**changed: Any) -> Iterator[str]:
    handler = type("Changed", (Handler,), changed)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True  # a kept connection may wait for a next request
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"refused": ("min_tokens", "stream_options.continuous_usage_stats")},
        {"refused": ("stream_options.continuous_usage_stats",)},
        {"path_served": "/v1/chat/completions"},
    ],
    ids=str,
)
@pytest.mark.parametrize("end", ["", "/v1"])
def test_counts_of_tokens(changed: dict[str, Any], end: str, shoal: Shoal) -> None:
    with serve_openai(**changed) as url:
        record = json.loads(shoal("bench", url + end, *LOADS, "--json"))
    (load,) = record["loads"]
    assert (load["median"]["input_tokens"], load["median"]["output_tokens"]) == (12, 4)
    assert record["repositories"][0]["model"] == "m"


def test_a_server_that_counts_no_tokens(shoal: Shoal, tmp_path: Path) -> None:
    write_words(tmp_path)
    with serve_openai(refused=("stream_options",)) as url:
        with pytest.raises(InputError, match="do not say how many tokens they have"):
            shoal("bench", url, *LOADS)
        record = json.loads(shoal("bench", f"two={url}", *LOADS, "--tokenizer", tmp_path, "--json"))
    (load,) = record["loads"]
    assert (load["repository"], load["median"]["input_tokens"], load["median"]["output_tokens"]) == ("two", 12, 4)


def test_prompts_of_a_file(shoal: Shoal, tmp_path: Path) -> None:
    (tmp_path / "prompts.csv").write_text("text\na b c\nd e f\n", encoding="utf-8")
    with serve_openai() as url:
        asked = ("bench", url, "--inputs", tmp_path / "prompts.csv")
        record = json.loads(shoal(*asked, "--output-tokens", "4", *LOADS[4:], "--json"))
        with pytest.raises(InputError, match="--input-tokens has no effect with --inputs"):
            shoal(*asked, *LOADS)
    (load,) = record["loads"]
    assert (load["input_tokens"], load["median"]["input_tokens"]) == (0, 3)


@pytest.mark.parametrize(
    ("changed", "arguments", "message"),
    [
        ({"path_served": "/other"}, (), r"m at 127.0.0.1:\d+ refused the request: no such path"),
        ({"refused": ("temperature",)}, (), "refused the request: unknown temperature"),
        ({"end": ""}, (), "ended before its last piece"),
        ({"end": "data: {\n\n"}, (), "ended early"),
        ({}, ("--batches", "2"), "m takes one prompt per request, not 2. Send several requests at a time"),
        ({}, ("--report",), "--report has no effect with m, which is measured in tokens"),
        ({}, ("--placement", "client"), "The components of m at .* are not here. Name the repository"),
        ({}, ("--model", "other"), None),
    ],
    ids=str,
)
def test_refusals(changed: dict[str, Any], arguments: tuple[str, ...], message: str | None, shoal: Shoal) -> None:
    with serve_openai(**changed) as url:
        if message is None:
            assert json.loads(shoal("bench", url, *LOADS, *arguments, "--json"))["repositories"][0]["model"] == "other"
            return
        with pytest.raises((InputError, ServerError), match=message):
            shoal("bench", url, *LOADS, *arguments)


def write_words(folder: Path) -> None:
    """Write a tokenizer that makes a token of each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
