"""Models for OpenAI's API: language models, an embedder, a labeller, a reader and a ranker; and requests to them."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema  # type: ignore[import-untyped]

from shoal.authoring.composition.compose import compose
from shoal.lab.tiny_llm import make_tiny
from tests.support.planted import write
from tests.support.service import Service

if TYPE_CHECKING:
    import openai

CHATS = ["llm", "llm_bls"]
TEXTS = ["A cat", "The fish swims", "Ein Fisch — über Größe", "x", "A river, and a boat on it", "🐟", "again"]
LABELS = ("calm", "glad", "sad")
_CODE = '''
import numpy as np
from shoal.kit.component.base import Component


def vectors(texts, size):
    """Numbers from the bytes of each text, with more digits than FP32 has."""
    rows = [[sum(text) / (7 + at) + len(text) * at for at in range(size)] for text in texts.ravel()]
    return np.array(rows, np.float32).reshape(len(rows), size)


class Step(Component):
    def run(self, batch):
        name = self.context.spec.name
        if name == "ranker":
            both = zip(batch["QUERY"].ravel(), batch["DOCUMENT"].ravel())
            return {"RELEVANCE": np.array([[len({*a} & {*b}) + len(b) / 1000] for a, b in both], np.float32)}
        texts = batch["TEXT"]
        if b"break" in texts.ravel().tolist():
            raise RuntimeError("told to fail")
        if name == "embedder":
            return {"EMBEDDING": vectors(texts, 5)}
        if name == "labeller":
            made = vectors(texts, 3)
            return {"PROBS": made / made.sum(axis=1, keepdims=True)}
        weight = batch["WEIGHT"] if "WEIGHT" in batch else np.full((len(texts), 1), 0.5, np.float32)
        made = vectors(texts, 2)
        name = np.array([[b"r"]] * len(texts), np.object_)
        return {"SCORE": weight * made[:, :1], "OTHER": made[:, 1:], "NAME": name}


TritonPythonModel = Step.for_triton()
'''
_CONFIG = """
backend: "python"
max_batch_size: 4
input [ {inputs} ]
output [ {outputs} ]
instance_group [ {{ kind: KIND_CPU }} ]
parameters {{ key: "public" value {{ string_value: "true" }} }}
{more}
"""
_MODELS = {  # inputs, outputs, and more of the configuration
    "embedder": ("TEXT:STRING", "EMBEDDING:FP32:5", ""),
    "labeller": ("TEXT:STRING", "PROBS:FP32:3", ""),
    "reader": (
        "TEXT:STRING WEIGHT?:FP32", "SCORE:FP32:1 OTHER:FP32:1 NAME:STRING:1",
        'parameters { key: "api" value { string_value: "classify=SCORE" } }',
    ),
    "ranker": ("QUERY:STRING DOCUMENT:STRING", "RELEVANCE:FP32:1", ""),
}  # fmt: skip


def write_apis(repository: Path) -> Path:
    """Write the four models, of which each takes four rows at a time; return the repository."""
    for name, (inputs, outputs, more) in _MODELS.items():
        text = _CONFIG.format(inputs=_tensors(inputs), outputs=_tensors(outputs), more=more)
        write(repository / name / "config.pbtxt", text)
        write(repository / name / "1" / "model.py", _CODE)
    write(repository / "labeller" / "labels.txt", "\n".join(LABELS))
    return repository


def _tensors(names: str) -> str:
    found = []
    for each in names.split():
        name, kind, *size = each.split(":")
        more = " optional: true" if name.endswith("?") else ""
        more += ' label_filename: "labels.txt"' if name == "PROBS" else ""
        found.append(f'{{ name: "{name.rstrip("?")}" data_type: TYPE_{kind} dims: [ {(size or ["1"])[0]} ]{more} }}')
    return ", ".join(found)


def make_repository(place: Path) -> Path:
    """Compose the language models with tiny weights, and write the four models beside them."""
    return write_apis(
        compose(["llm", "llm_bls", "llamav2"], place / "repository", weights=make_tiny(place / "weights"))
    )


# --- requests -------------------------------------------------------------------------------------------------------


def connect(service: Service, **options: Any) -> openai.OpenAI:
    """OpenAI's client, which validates answers strictly and sends nothing twice."""
    import openai

    chosen: Any = {"api_key": "none", "max_retries": 0, "_strict_response_validation": True, **options}
    return openai.OpenAI(base_url=f"http://{service.http}/v1", **chosen)


def chat(text: str, **more: Any) -> dict[str, Any]:
    """Request for twelve tokens."""
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 12, "temperature": 0, **more}


def to_request(
    service: Service, path: str, body: bytes | None, kind: str = "application/json"
) -> urllib.request.Request:
    """POST of a body; GET without one."""
    return urllib.request.Request(f"http://{service.http}{path}", body, {"Content-Type": kind})


def open_stream(service: Service, body: Any, path: str = "/v1/chat/completions") -> http.client.HTTPConnection:
    """Send a request, and do not read its answer yet."""
    connection = http.client.HTTPConnection(service.http, timeout=900)
    connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return connection


def post(service: Service, path: str, body: bytes, kind: str = "application/json") -> tuple[int, Any]:
    """Status and JSON of the answer to a body that no client would send."""
    try:
        with urllib.request.urlopen(to_request(service, path, body, kind), timeout=30) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


# --- the description --------------------------------------------------------------------------------------------------


class Judge:
    """Sends requests, and validates each answer and each event by the service's own description."""

    def __init__(self, service: Service) -> None:
        self._service = service
        with urllib.request.urlopen(f"http://{service.http}/v1/openapi.json", timeout=30) as reply:
            self.document = json.loads(reply.read())
        self._validators: dict[str, Any] = {}
        self.counts: Counter[tuple[str, int]] = Counter()  # by path and status
        self.num_events = 0

    def ask(self, path: str, body: Any = None, kind: str = "application/json") -> tuple[int, list[Any]]:
        """Status, and the answer or the events."""
        content = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(to_request(self._service, path, content, kind), timeout=60) as reply:
                status, media, text = reply.status, reply.headers.get_content_type(), reply.read()
        except urllib.error.HTTPError as error:
            with error:
                status, media, text = error.code, error.headers.get_content_type(), error.read()
        return status, self.judge(path, status, media, text)

    def judge(self, path: str, status: int, media: str, text: bytes) -> list[Any]:
        """Validate an answer; return it, or its events."""
        known = self.document["paths"]
        name = next(
            each for each in known
            if path == each or (
                "{model}" in each and path.startswith("/v1/models/")
                and path.endswith(":predict") == each.endswith(":predict")
            )
        )  # fmt: skip
        (operation,) = known[name].values()
        answers = operation["responses"]
        schema = (answers.get(str(status)) or answers[f"{status // 100}XX"])["content"][media]["schema"]
        self.counts[name, status] += 1
        found = read_events(text) if media == "text/event-stream" else [json.loads(text)]
        for each in found:
            self._validate(schema, each)
        self.num_events += len(found) if media == "text/event-stream" else 0
        return found

    def _validate(self, schema: Any, value: Any) -> None:
        key = json.dumps(schema)
        if key not in self._validators:
            whole = {**schema, "components": self.document["components"]}
            self._validators[key] = jsonschema.Draft202012Validator(whole)
        self._validators[key].validate(value)


def read_events(text: bytes) -> list[Any]:
    """Read the data of server-sent events; a name is that in the data, and [DONE] is left out."""
    found = []
    for block in text.decode().split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        if fields["data"] != "[DONE]":
            found.append(json.loads(fields["data"]))
            assert "event" not in fields or fields["event"] == found[-1]["type"]
    return found
