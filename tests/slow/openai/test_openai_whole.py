"""OpenAI's API of a real service under many requests: its description, one answer on all ways, and clients that leave.

The requests are sent without OpenAI's client, which would not send many of them.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import random
import shutil
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from shoal.authoring.repository.config import read_config, write_config
from shoal.clients.client.client import Client
from tests.support.apis import CHATS, LABELS, TEXTS, Judge, chat, connect, open_stream, post, read_events
from tests.support.service import Service, wait_until

# --- the description ------------------------------------------------------------------------------------------------


FUNCTION: dict[str, Any] = {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}


def write_requests(seed: int) -> Iterator[tuple[str, Any]]:
    """Write requests of every path, with settings drawn by chance; a third of them is refused."""
    draw = random.Random(seed)
    while True:
        text, model = draw.choice(TEXTS), draw.choice([*CHATS, "gpt-4o"])
        settings: dict[str, Any] = {"stream": True} if draw.random() < 0.6 else {}
        if draw.random() < 0.5:
            settings |= {"temperature": draw.choice([0, 0.7, 1, 2, -1]), "top_p": draw.choice([0.5, 0.9, 1, 0])}
        messages = [{"role": draw.choice([*["user"] * 8, "developer", "robot"]), "content": text}]
        said = {"model": model, "messages": messages, "max_tokens": draw.choice([1, 5, 9]), **settings}
        more: dict[str, Any] = draw.choice([
            {}, {}, {"logprobs": True}, {"logprobs": True, "top_logprobs": draw.choice([0, 2, 21])},
            {"stop": [text[:1], "e"]},
            {"n": draw.choice([1, 2])}, {"stream_options": {"include_usage": True}}, {"seed": draw.choice([7, -1])},
            {"user": "a", "metadata": {"a": "b"}}, {"tools": [5]}, {"temprature": 1},
            {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required", "max_tokens": 50},
        ])  # fmt: skip
        yield "/v1/chat/completions", {**said, **more}
        more = draw.choice([{}, {"logprobs": draw.choice([0, 3])}, {"echo": draw.choice([True, False])}])
        prompt = draw.choice([text, text, [text, "A cat"], [], [[1, 2]]])
        asked = {"model": draw.choice([model, "llamav2"]), "prompt": prompt, "max_tokens": 4, **settings, **more}
        yield "/v1/completions", asked
        called = {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required", "max_output_tokens": 50}
        more = draw.choice([{}, {"instructions": "Be brief."}, {"top_logprobs": 2}, {"store": True}, called])
        asked = {"model": model, "input": draw.choice([text, messages]), "max_output_tokens": 5, **settings, **more}
        yield "/v1/responses", asked
        tool = {"name": "now", "input_schema": FUNCTION["parameters"]}
        used = {"tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 50}
        yield (
            "/v1/messages",
            {**said, **draw.choice([{}, {"system": "Be brief."}, {"stop_sequences": ["e"]}, {"x": 1}, used])},
        )
        yield "/v1/messages/count_tokens", {"model": model, "messages": messages}
        yield "/v1/embeddings", {
            "model": draw.choice(["embedder", "embedder", "llm", "nothing"]),
            "input": draw.choice([text, TEXTS, [], "break"]), "encoding_format": draw.choice(["float", "base64", "x"]),
        }  # fmt: skip
        yield "/v1/classify", {"model": draw.choice(["labeller", "reader", "embedder"]), "input": [text, "a"]}
        ranking = {"query": text, "documents": draw.choice([TEXTS, ["a"]]), "top_n": draw.choice([1, 3, None, 0])}
        path = draw.choice(["/v1/rerank", "/v2/rerank", "/rerank"])
        yield path, {"model": "ranker", **ranking, "return_documents": draw.choice([True, False])}
        yield "/v1/score", {"model": "ranker", "text_1": text, "text_2": draw.choice([TEXTS, text, [5]])}
        instances = draw.choice([[text], [{"TEXT": text, "WEIGHT": 0.5}, text], [{"NO": 1}], []])
        yield f"/v1/models/{draw.choice(['reader', 'embedder', 'llm'])}:predict", {"instances": instances}
        yield "/tokenize", {"model": model, **draw.choice([{"prompt": text}, {"messages": messages}, {}])}
        yield "/detokenize", {"model": "llm", "tokens": draw.choice([[5, 70, 90], [-1], []])}
        yield f"/v1/models/{draw.choice(['llm', 'nothing'])}", None
        yield "/v1/models", None


def test_every_answer_is_as_described(service: Service, scale: Any) -> None:
    """No 5xx, and no answer or event that the description lacks; every path answers, and refuses."""
    judge = Judge(service)
    for path, body in itertools.islice(write_requests(0), 4200 if scale.is_full else 560):
        status, _ = judge.ask(path, body)
        assert status < 500, (path, body)
    for content, kind, status in (
        (b"{", "application/json", 400), (b"[" * 9999, "application/json", 400), (b"{}", "text/plain", 415),
        (b"x" * (2**22 + 1), "application/json", 413), (b'{"model": "\\ud800"}', "application/json", 400),
    ):  # fmt: skip
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/embeddings", "/tokenize"):
            assert judge.ask(path, content, kind)[0] == status
    paths = {path for path, status in judge.counts if status == 200}
    refused = {path for path, status in judge.counts if status >= 400}
    assert paths == judge.document["paths"].keys()
    assert refused == paths - {"/v1/models"}
    assert judge.num_events > 200, judge.counts


def test_an_engine_fault_and_the_page(service: Service) -> None:
    """A component's own error is an answer as described; the page is served with its policy."""
    judge = Judge(service)
    status, (found,) = judge.ask("/v1/embeddings", {"model": "embedder", "input": "break"})
    assert status == 400
    assert "Traceback" not in found["error"]["message"]
    with urllib.request.urlopen(f"http://{service.http}/v1/docs", timeout=30) as reply:
        assert reply.headers["Content-Type"] == "text/html; charset=utf-8"
        assert reply.headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert b"/v1/rerank" in reply.read()


# --- one answer on all ways -----------------------------------------------------------------------------------------


def write_texts(number: int) -> list[str]:
    """Write texts of all kinds of characters that JSON must escape, or that take several bytes."""
    draw, letters = random.Random(1), 'abc äöü "\\\n\t\x00\x1f/ 漢字 🐟 é \u2028 \ufeff <>&'
    return ["".join(draw.choices(letters, k=draw.randrange(1, 40))) for _ in range(number)]


def test_one_answer_on_all_ways(service: Service, scale: Any) -> None:
    """Predictions, embeddings, classes and ranks are those of shoal's own client, to the bit, with 16 callers."""
    texts = write_texts(400 if scale.is_full else 96)

    def equal(found: Any, expected: Any) -> None:
        assert np.array_equal(np.array(found, np.float32), expected), (found, expected)

    def ask(part: Sequence[str]) -> int:
        rows = [*part]
        with Client(service.grpc) as own:
            vectors, classes = own.infer("embedder", TEXT=rows)["EMBEDDING"], own.infer("labeller", TEXT=rows)["PROBS"]
            ranks = own.infer("ranker", QUERY=rows[:1] * len(rows), DOCUMENT=rows)["RELEVANCE"][:, 0]
            scores = own.infer("reader", TEXT=rows)

        def send(path: str, **body: Any) -> Any:
            status, found = post(service, path, json.dumps(body).encode())
            assert status == 200, found
            return found

        found = send("/v1/embeddings", model="embedder", input=rows)["data"]
        equal([each["embedding"] for each in found], vectors)
        found = send("/v1/embeddings", model="embedder", input=rows, encoding_format="base64")["data"]
        equal([np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in found], vectors)
        found = send("/v1/models/embedder:predict", instances=rows)["predictions"]
        equal([each["EMBEDDING"] for each in found], vectors)
        found = send("/v1/classify", model="labeller", input=rows)["data"]
        equal([each["probs"] for each in found], classes)
        assert [each["label"] for each in found] == [LABELS[int(row.argmax())] for row in classes]
        found = send("/v1/classify", model="reader", input=rows)["data"]
        equal([each["probs"] for each in found], scores["SCORE"])
        found = send("/v1/models/reader:predict", instances=[{"TEXT": text} for text in rows])["predictions"]
        equal([[each["SCORE"]] for each in found], scores["SCORE"])
        found = send("/v1/score", model="ranker", text_1=rows[0], text_2=rows)["data"]
        equal([each["score"] for each in found], ranks)
        found = send("/v1/rerank", model="ranker", query=rows[0], documents=rows)["results"]
        order = np.argsort(-ranks, kind="stable")
        assert [each["index"] for each in found] == order.tolist()
        equal([each["relevance_score"] for each in found], ranks[order])
        assert [each["document"]["text"] for each in found] == [rows[index] for index in order]
        return len(rows)

    with ThreadPoolExecutor(16) as pool:
        parts = [texts[start : start + 6] for start in range(0, len(texts), 6)]
        assert sum(pool.map(ask, parts)) == len(texts)


# --- leaving and stopping -------------------------------------------------------------------------------------------


def test_clients_that_leave(service: Service, scale: Any) -> None:
    """Before the first token, within the stream and while waiting for a place: the engine stops, and neighbours are
    right.

    Every client asks for 900 tokens, and more clients come than the engine has places. The metric of tokens stops
    growing when all have left, far from what was asked for.
    """
    number, most = (200 if scale.is_full else 48), 900
    expected = [
        post(service, "/v1/chat/completions", json.dumps({"model": "llm", **chat(f"Hello {at}")}).encode())[1]
        for at in range(4)
    ]
    before = service.metric("shoal_tokens_total")
    have_begun = threading.Barrier(16)

    def leave(at: int) -> None:
        streams = at % 4 != 3
        body = {"model": CHATS[at % 2], **chat(f"Hello {at}", max_tokens=most), "stream": streams}
        connection = open_stream(service, body)
        if at < 16:
            have_begun.wait(60)
        if at % 3 == 0 and streams:
            reply = connection.getresponse()
            if reply.status == 200:
                reply.read(200 * (at % 5) + 1)
            else:
                assert reply.status in (429, 503)
        else:
            time.sleep(at % 5 / 20)
        connection.close()

    def stay(at: int) -> None:
        body = json.dumps({"model": "llm", **chat(f"Hello {at % 4}")}).encode()
        while (found := post(service, "/v1/chat/completions", body))[0] in (429, 503):
            time.sleep(0.1)
        assert found[1]["choices"] == expected[at % 4]["choices"]

    with ThreadPoolExecutor(number + 16) as pool:
        leavers = [pool.submit(leave, at) for at in range(number)]
        neighbours = [pool.submit(stay, at) for at in range(16)]
        for each in (*leavers, *neighbours):
            each.result(120)
    assert wait_until(lambda: service.metric("shoal_in_flight") == 0, 30), service.get("/metrics")[1]
    assert wait_until(lambda: service.metric("shoal_streams") == 0, 30)
    written = service.metric("shoal_tokens_total")
    assert 0 < written - before < number * most / 2
    time.sleep(1)
    assert service.metric("shoal_tokens_total") == written


def test_streams_when_the_service_stops(repository: Path, tmp_path: Path, scale: Any) -> None:
    """SIGTERM: each stream ends with [DONE] and all its tokens, also those that wait for a place; new requests get 503,
    in OpenAI's form.
    """
    number = scale(50, full=1000)
    if scale.is_full:  # a model takes four requests for each slot
        repository = shutil.copytree(repository, tmp_path / "repository")
        config = repository / "llm-hf" / "config.pbtxt"
        message = read_config(config.parent).message
        message.parameters["slots"].string_value = str(number // 8)
        write_config(message, config, comment="More slots.")
    limits = ["--grace", "900", "--max-wait", "800", "--max-streams", "2048", "--client-share", "1"]
    with Service(repository, tmp_path / "log", *limits) as service:
        bodies = [chat(f"Hello {at}", max_tokens=200, model=CHATS[at % 2], stream=True) for at in range(number)]
        connections = [open_stream(service, body) for body in bodies]
        assert wait_until(
            lambda: service.metric("shoal_requests_total") + service.metric("shoal_streams") >= number, 60
        )
        assert service.metric("shoal_streams") > number / 2
        service.process.send_signal(signal.SIGTERM)
        assert wait_until(lambda: "SIGTERM" in service.log.read_text(encoding="utf-8"), 30)
        body = json.dumps({"model": "llm", **chat("Hello")}).encode()
        status, found = post(service, "/v1/chat/completions", body)
        assert (status, found["error"]["code"]) == (503, "service_unavailable"), found
        with ThreadPoolExecutor(number) as pool:
            texts = [*pool.map(lambda connection: connection.getresponse().read(), connections)]
        for each in connections:
            each.close()
        assert service.process.wait(120) == 0
    for text in texts:
        assert text.endswith(b"data: [DONE]\n\n")
        reasons = [event["choices"][0]["finish_reason"] for event in read_events(text)]
        assert reasons[-1] in ("stop", "length")
        assert [*filter(None, reasons)] == reasons[-1:]


def test_an_engine_that_dies(repository: Path, tmp_path: Path) -> None:
    """A stream in flight ends with an error that the client raises; afterwards, requests are answered again."""
    with Service(repository, tmp_path / "log") as service, connect(service) as client:
        stream = client.chat.completions.create(model="llm", **chat("Hello", max_tokens=900), stream=True)
        next(iter(stream))
        for stub in service.stubs():
            if any("llm-hf" in word for word in stub.arguments()):
                os.kill(stub.pid, signal.SIGKILL)
        with pytest.raises(openai.APIError, match=r"ended|stopp|replac"):
            for _ in stream:
                pass
        patient = connect(service, max_retries=20, timeout=120)
        deadline = time.monotonic() + 120
        while True:
            try:
                found = patient.chat.completions.create(model="llm", **chat("Hello"))
                break
            except openai.InternalServerError:
                assert time.monotonic() < deadline
        assert found.choices[0].message.content
        patient.close()
