"""Hostile requests to OpenAI's API, from a process of its own.

    python -m tests.support.hostile_bodies WHAT HTTP GRPC N

WHAT is ``bodies``, or ``heads``: headers, query strings and the metadata of gRPC. Each of N requests is what Hypothesis
makes of a few forms; 40 connections send them. Prints how many had which outcome, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable
from queue import Queue
from typing import Any

import grpc  # type: ignore[import-untyped]
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

CONNECTIONS = 40
SECONDS = 120
EMBEDDINGS = "/v1/embeddings"
CHAT: dict[str, Any] = {"model": "llm", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
LEAST: dict[str, dict[str, Any]] = {  # the least request of each path, without the field that is made
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "llm", "prompt": "a", "max_tokens": 1},
    "/v1/responses": {"model": "llm", "input": "a", "max_output_tokens": 1},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"model": "llm", "messages": CHAT["messages"]},
    "/tokenize": {"model": "llm", "messages": CHAT["messages"]},
    "/detokenize": {"model": "llm", "tokens": [5]},
    EMBEDDINGS: {"model": "embedder", "input": "a"},
    "/v1/classify": {"model": "labeller", "input": "a"},
    "/v1/rerank": {"model": "ranker", "query": "a", "documents": ["b"] * 2048},
    "/v1/score": {"model": "ranker", "text_1": "a", "text_2": ["b"] * 2048},
    "/v1/models/embedder:predict": {"instances": ["a"]},
}
TEXTS = ["a", "a ", "é", "😀", "\n", '"', "\\", "\x01", ",", "[", "{", ":", "9"]
SHAPES: dict[str, Callable[[str, int, int], Any]] = {  # of a text and two numbers, whose product is the size
    "text": lambda text, many, size: text * (many * size),
    "texts": lambda text, many, size: [text * size] * many,
    "messages": lambda text, many, size: [{"role": "user", "content": text * size}] * many,
    "parts": lambda text, many, size: [{"role": "user", "content": [{"type": "text", "text": text}] * size}] * many,
    "keys": lambda text, many, size: {f"{text * size}{number}": text for number in range(many)},
    "objects": lambda text, many, size: [{"TEXT": text * size}] * many,
    "number": lambda _, many, size: [10**min(size, 4299)] * many,
    "numbers": lambda _, many, size: [[0.123456789] * size] * many,
    "lists": lambda _, many, size: [json.loads("[" * min(size, 30) + "]" * min(size, 30))] * many,
}  # fmt: skip
MOST = 2**22  # bytes
HEADERS = [
    "traceparent", "tracestate", "X-Request-Id", "Authorization", "X-Api-Key", "X-Forwarded-For", "Origin", "Accept",
    "Access-Control-Request-Headers", "Content-Encoding", "Content-Type", "Inference-Header-Content-Length", "Cookie",
    "Expect", "Transfer-Encoding", "Connection", "Upgrade", "anthropic-version", "x-stainless-arch",
]  # fmt: skip
METADATA = ["x-request-id", "traceparent", "tracestate", "authorization", "x-forwarded-for", "x-a"]


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """Path and body of a request with a field that is long, has many values, or is there twice."""
    path = draw(st.sampled_from([*LEAST]))
    fields = [*LEAST[path], "metadata", "chat_template_kwargs", "stop", "dimensions", "x"]
    field, shape, text = draw(st.sampled_from(fields)), draw(st.sampled_from([*SHAPES])), draw(st.sampled_from(TEXTS))
    many = 2 ** draw(st.integers(0, 18))
    size = 2 ** draw(st.integers(0, 22))
    size = max(1, min(size, MOST // (many * (16 if shape == "keys" else 4))))
    value = {**LEAST[path], field: SHAPES[shape](text, many, size)}
    body = json.dumps(value, ensure_ascii=draw(st.booleans())).encode()
    match draw(st.sampled_from(["whole", "whole", "whole", "name", "twice", "cut", "bytes"])):
        case "name":
            body = json.dumps({**LEAST[path], text * size: 1}).encode()
        case "twice":
            body = body[:-1] + b"," + body[1:]
        case "cut":
            body = body[: draw(st.integers(0, len(body)))]
        case "bytes":
            at = draw(st.integers(0, len(body)))
            body = body[:at] + draw(st.binary(min_size=1, max_size=20)) + body[at:]
    return path, body[:MOST]


def send_body(address: str, request: tuple[str, bytes]) -> str:
    path, body = request
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    return exchange(address, f"{head}Connection: close\r\n\r\n".encode() + body)


def exchange(address: str, content: bytes) -> str:
    """Send bytes; return the status of the answer."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=SECONDS) as connection:
        with contextlib.suppress(ConnectionError):  # it was refused before all was sent
            connection.sendall(content)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(2**16):
                answer = (answer + part)[: 2**10]
    return answer[9:12].decode(errors="replace") or "closed"


@st.composite
def heads(draw: st.DrawFn) -> tuple[str, Any]:
    """``http`` and the bytes of a request, or ``grpc`` and the metadata of a call."""
    long = st.builds(lambda part, many: part * many, st.binary(max_size=8), st.integers(0, 2**10))
    values = st.binary(max_size=40) | long
    if draw(st.booleans()):
        text = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=2**10)
        given = draw(st.lists(st.tuples(st.sampled_from(METADATA), text), max_size=20))
        return "grpc", (*given, *draw(st.lists(st.tuples(st.just("x-a-bin"), st.binary(max_size=2**10)), max_size=5)))
    path = draw(st.sampled_from([*LEAST, "/v2/models/embedder/infer", "/v1/models", "/v2/health/ready"]))
    lines = draw(st.lists(st.tuples(st.sampled_from(HEADERS), values), max_size=20))
    body = json.dumps(LEAST.get(path, {})).encode()
    target = path.encode() + draw(st.just(b"") | values.map(lambda value: b"?" + value))
    head = [b"POST " + target + b" HTTP/1.1", b"Host: 127.0.0.1", b"Content-Type: application/json"]
    head += [b"Content-Length: %d" % len(body), b"Connection: close"]
    return "http", b"\r\n".join([*head, *(name.encode() + b": " + value for name, value in lines), b"", body])


def send_head(address: str, channel: Any, request: tuple[str, Any]) -> str:
    kind, content = request
    if kind == "http":
        return exchange(address, content)
    message = service_pb2.ModelInferRequest(model_name="embedder")
    message.inputs.add(name="TEXT", datatype="BYTES", shape=[1, 1]).contents.bytes_contents.append(b"a")
    call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    try:
        call(message.SerializeToString(), metadata=content, timeout=SECONDS)
    except grpc.RpcError as error:
        return str(error.code().name)
    except ValueError:  # the client itself refuses such metadata
        return "not sent"
    return "OK"


def main(what: str, http: str, address: str, number: str) -> None:
    """Send the requests, and print their outcomes."""
    waiting, outcomes = Queue[Any](CONNECTIONS), Counter[str]()
    channel = grpc.insecure_channel(address)

    def work() -> None:
        while (request := waiting.get()) is not None:
            try:
                outcome = send_body(http, request) if what == "bodies" else send_head(http, channel, request)
            except TimeoutError:
                outcome = "silent"
            outcomes[outcome] += 1

    threads = [threading.Thread(target=work) for _ in range(CONNECTIONS)]
    for thread in threads:
        thread.start()

    @settings(
        max_examples=int(number), phases=[Phase.generate], database=None, deadline=None, derandomize=True,
        suppress_health_check=[*HealthCheck],
    )  # fmt: skip
    @given(bodies() if what == "bodies" else heads())
    def make(request: Any) -> None:
        waiting.put(request)

    make()
    for _ in threads:
        waiting.put(None)
    for thread in threads:
        thread.join()
    sys.stdout.write(json.dumps(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
