"""Hostile requests as bytes of either protocol, sent without a client library's help."""

from __future__ import annotations

import gzip
import json
import re
import socket
import struct
import urllib.parse
import zlib
from http.client import HTTPResponse
from random import Random
from typing import Any, NamedTuple, Self

import grpc  # type: ignore[import-untyped]
import numpy as np
import tritonclient.grpc.service_pb2 as protocol

from shoal.serving.server.launch import Server
from tests.support.mutations import KEYS, MAX_DEPTH, TEXTS, VALUES, Request, Tensor, hostile, spoil

SECONDS = 30.0  # for an answer that is due
PATIENCE = 0.05  # until a server that may wait for the rest of a cut request learns that there is none
SERVICE = "/inference.GRPCInferenceService/"
METHODS = ("ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "RepositoryIndex", "ModelStatistics", "Nope")
HEADS = (
    "GET /v2/health/ready", "HEAD /v2", "OPTIONS /v2/models/cuml/infer", "PUT /v2/models/cuml/infer", "GET /",
    "DELETE /v2/models/cuml", "POST /v2/repository/models/cuml/unload", "POST /v2/repository/index", "GET /v2/logging",
    "GET /v2/systemsharedmemory/status", "POST /v2/models/cuml/trace/setting", "GET /v2/models/cuml/config", "GET //",
    "GET /v2/models/../../etc/passwd", "POST /v2/models/%2e%2e%2fcuml/infer", "GET /v2/models/%00", "NOPE /v2",
    "GET /v2/models/ensemble_all/versions/1/stats", "GET " + "/a" * 3000, "GET /%s%n%x?a=b&c", "GET /v2/models/%FF",
    "POST /v2",
)  # fmt: skip
BIG_SHAPE = re.compile(rb'"shape[^\]]*(\d{6}|\d[eE.])')
SECRETS = re.compile(rb"Traceback|At:\n|\.py\(|/dev/shm|/work|/tmp|/home|/root|/usr|shoal_\d|site-packages")


class Attack(NamedTuple):
    """Bytes to send: a whole HTTP request with its head, or the message of a gRPC ``method``.

    A connection with data that is not HTTP (``is_http`` false) may end without an answer.
    """

    payload: bytes
    method: str = ""
    is_http: bool = True


class Answer(NamedTuple):
    """``status`` is HTTP's number or gRPC's name; ``none`` where the connection ended without one."""

    status: str
    body: bytes


# --- writing -----------------------------------------------------------------------------------------------------


def attack(rng: Random) -> Attack:
    """The next one; about half of them over each protocol."""
    request = hostile(rng)
    if rng.random() < 0.5:
        message = to_protobuf(rng, request)
        draw = rng.random()
        if draw < 0.25:
            message = spoil(rng, message)
        elif draw < 0.28:
            message = rng.randbytes(rng.choice((1, 10, 300)))
        return Attack(message, "ModelInfer" if rng.random() < 0.95 else rng.choice(METHODS))
    draw = rng.random()
    if draw < 0.1:
        return Attack(http(rng.choice(HEADS), rng.choice((b"", b"{}", rng.randbytes(20)))))
    if draw < 0.2:
        spoilt = spoil(rng, to_http(rng, request))
        if not BIG_SHAPE.search(spoilt):
            return Attack(spoilt, is_http=False)
    return Attack(to_http(rng, request))


def http(line: str, body: bytes, headers: dict[str, str] | None = None) -> bytes:
    """A request of HTTP/1.1."""
    headers = {"Host": "localhost", "Content-Length": str(len(body)), **(headers or {})}
    return "\r\n".join([f"{line} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items()), "", ""]).encode() + body


def to_http(rng: Random, request: Request) -> bytes:
    """Encode as JSON, with data in it or behind it; sometimes as plain text, compressed, or with a false header."""
    version = f"/versions/{urllib.parse.quote(request.version, safe='')}" if request.version else ""
    line = f"POST /v2/models/{urllib.parse.quote(request.model, safe='')}{version}"
    draw = rng.random()
    if draw < 0.07:
        return http(f"{line}/{rng.choice(('generate', 'generate_stream'))}", generate_body(rng))
    if draw < 0.1:
        return http(f"{line}/infer", rng.choice((b"", rng.randbytes(40), b"\0" * 828, *TEXTS)), raw_header(rng))
    tree, binary = to_json(rng, request)
    head = dump(rng, bearable(tree if rng.random() < 0.75 else graft(rng, tree)))
    size = len(head) if rng.random() < 0.95 else rng.choice((0, 1, len(head) - 1, len(head) + 1, 2**31, 2**32, 2**64))
    headers = {"Inference-Header-Content-Length": str(size)} if binary or size != len(head) else {}
    return compressed(rng, f"{line}/infer", head + binary, headers)


def to_json(rng: Random, request: Request) -> tuple[dict[str, Any], bytes]:
    """The document, and the binary data that follows it."""
    inputs, binary, is_binary = [], b"", rng.random() < 0.5
    for tensor in request.inputs:
        entry: dict[str, Any] = {"name": tensor.name, "shape": tensor.shape, "datatype": tensor.dtype}
        data = None if is_binary else listed(tensor)
        parameters = dict(tensor.parameters)
        if data is None:
            parameters["binary_data_size"] = len(tensor.data) if rng.random() < 0.95 else rng.choice(VALUES)
            binary += tensor.data
        else:
            entry["data"] = data
        inputs.append({**entry, "parameters": parameters} if parameters else entry)
    tree: dict[str, Any] = {"id": request.id, "inputs": inputs, "parameters": request.parameters}
    if request.outputs:
        tree["outputs"] = [{"name": name, "parameters": parameters} for name, parameters in request.outputs]
    return tree, binary


def bearable(tree: Any) -> Any:
    """Without lists of numbers that the server would make room for by a great shape."""
    inputs = tree.get("inputs") if isinstance(tree, dict) else None
    for entry in inputs if isinstance(inputs, list) else ():
        if isinstance(entry, dict) and BIG_SHAPE.search(json.dumps({"shape": entry.get("shape")}).encode()):
            entry.pop("data", None)
    return tree


def listed(tensor: Tensor) -> list[Any] | None:
    """The data as JSON has it; bytes that are not UTF-8 as lone surrogates. None if it is not a list."""
    if tensor.dtype == "BYTES":
        texts, start = [], 0
        while start + 4 <= len(tensor.data):
            (length,) = struct.unpack_from("<I", tensor.data, start)
            texts.append(tensor.data[start + 4 : start + 4 + length].decode(errors="surrogateescape"))
            start += 4 + length
        return texts
    if tensor.dtype not in ("FP32", "INT64") or len(tensor.data) % (4 if tensor.dtype == "FP32" else 8):
        return None
    return list(np.frombuffer(tensor.data, np.float32 if tensor.dtype == "FP32" else np.int64).tolist())


def dump(rng: Random, tree: Any) -> bytes:
    """JSON, with the escapes of lone surrogates or with the bytes that no UTF-8 has."""
    return json.dumps(tree, ensure_ascii=rng.random() < 0.5).encode(errors="surrogateescape")


def graft(rng: Random, tree: Any) -> Any:
    """``tree`` with one of its values, at any depth, replaced or removed."""
    if isinstance(tree, dict | list) and tree and rng.random() < 0.8:
        key: Any = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
        if rng.random() < 0.15:
            del tree[key]
        else:
            tree[key] = graft(rng, tree[key])
        return tree
    depth = rng.choice((1, 5, 100, MAX_DEPTH))
    deep: Any = rng.choice(("a", 1))
    for _ in range(depth):
        deep = [deep]
    return rng.choice((None, {}, [], deep, [[], {}], {"a": {"b": None}}, 10**400, -(10**30), [None, True], *VALUES))


def generate_body(rng: Random) -> bytes:
    """For `/generate`: inputs and parameters by name."""
    body: dict[str, Any] = {"excerpt": rng.choice(TEXTS).decode(errors="surrogateescape"), "BERT_WEIGHT": 0.5}
    for _ in range(rng.choice((0, 1, 2))):
        body[rng.choice((*body, *KEYS))] = rng.choice((*VALUES, [], ["a", "b"], {"a": 1}, None))
    return dump(rng, body)


def raw_header(rng: Random) -> dict[str, str]:
    return {"Inference-Header-Content-Length": "0"} if rng.random() < 0.7 else {}


def compressed(rng: Random, line: str, body: bytes, headers: dict[str, str]) -> bytes:
    if rng.random() > 0.08:
        return http(line, body, headers)
    name, squeeze = rng.choice((("gzip", gzip.compress), ("deflate", zlib.compress), ("br", bytes), ("gzip", bytes)))
    squeezed = squeeze(body + b" " * rng.choice((0, 0, 2**20)))
    return http(line, squeezed if rng.random() < 0.6 else spoil(rng, squeezed), {**headers, "Content-Encoding": name})


def to_protobuf(rng: Random, request: Request) -> bytes:
    """A ModelInferRequest, with its data raw or, for a few dtypes, typed; sometimes both, or too few."""
    message = protocol.ModelInferRequest(model_name=request.model, model_version=request.version, id=request.id)
    put_parameters(message.parameters, request.parameters)
    is_typed = rng.random() < 0.2
    for tensor in request.inputs:
        entry = message.inputs.add(name=tensor.name, datatype=tensor.dtype, shape=tensor.shape)
        put_parameters(entry.parameters, tensor.parameters)
        if is_typed and tensor.dtype in ("BYTES", "FP32", "INT64") and (values := listed(tensor)) is not None:
            put_typed(entry.contents, tensor.dtype, values)
        if not is_typed or rng.random() < 0.1:
            message.raw_input_contents.append(tensor.data)
    for name, parameters in request.outputs:
        put_parameters(message.outputs.add(name=name).parameters, parameters)
    if message.raw_input_contents and rng.random() < 0.03:
        message.raw_input_contents.pop()
    return bytes(message.SerializeToString())


def put_typed(contents: Any, dtype: str, values: list[Any]) -> None:
    if dtype == "BYTES":
        contents.bytes_contents.extend(value.encode(errors="surrogateescape") for value in values)
    else:
        (contents.fp32_contents if dtype == "FP32" else contents.int64_contents).extend(values)


def put_parameters(target: Any, parameters: dict[str, Any]) -> None:
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    for key, value in parameters.items():
        setattr(target[key], kinds[type(value)], value)


# --- sending -----------------------------------------------------------------------------------------------------


class Wires:
    """Ways to a server for bytes of any kind; good for several threads."""

    def __init__(self, server: Server) -> None:
        host, port = server.http_url.split(":")
        self._http = (host, int(port))
        self._channel = grpc.insecure_channel(server.grpc_url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def send(self, attack: Attack) -> Answer:
        """The answer.

        Raises:
            OSError: what is due did not come in time, or the connection broke.
        """
        return self._call(attack) if attack.method else self._exchange(attack)

    def _call(self, attack: Attack) -> Answer:
        try:
            return Answer("OK", self._channel.unary_unary(SERVICE + attack.method)(attack.payload, timeout=SECONDS))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimeoutError(error.details()) from None
            return Answer(error.code().name, (error.details() or "").encode())

    def _exchange(self, attack: Attack) -> Answer:
        with socket.create_connection(self._http, timeout=SECONDS) as sock:
            # Closed by a reset: a hundred thousand ports in TIME_WAIT would be too many.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if attack.is_http:
                sock.sendall(attack.payload)
                with HTTPResponse(sock, method=attack.payload.split(b" ")[0].decode()) as response:
                    response.begin()
                    return Answer(str(response.status), response.read())
            try:
                sock.sendall(attack.payload)
                body = read_all(sock)
            except ConnectionError:
                return Answer("none", b"")
        status = re.match(rb"HTTP/1\.[01] (\d+)", body)
        return Answer(status[1].decode() if status else "none", body)


def read_all(sock: socket.socket) -> bytes:
    """Return all data until the other side closes the connection; after a while, end our side."""
    sock.settimeout(PATIENCE)
    body = b""
    while True:
        try:
            more = sock.recv(65536)
        except TimeoutError:
            if sock.gettimeout() == SECONDS:
                raise
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(SECONDS)
            continue
        if not more:
            return body
        body += more
