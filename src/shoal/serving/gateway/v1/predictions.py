"""Answers of models that turn texts into numbers: embeddings, classes and scores, and the outputs of any model."""

from __future__ import annotations

import asyncio
import base64
import math
import secrets
import time
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from itertools import count
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from shoal.clients.client.calls import find_text_input
from shoal.kit.component.spec import ModelSpec
from shoal.serving.gateway.http.bodies import work_apart
from shoal.serving.gateway.refusals import RefusalReason
from shoal.serving.gateway.v1.counts import Counted, Texts
from shoal.serving.gateway.v1.counts import count as count_tokens
from shoal.serving.gateway.v1.errors import ApiError
from shoal.serving.gateway.v1.model_request import ModelRequest
from shoal.serving.gateway.v1.prediction_requests import (
    ClassifyRequest,
    EmbeddingsRequest,
    PredictRequest,
    RerankRequest,
    ScoreRequest,
    Truncating,
)
from shoal.serving.gateway.v1.schema import MOST_BODY
from shoal.serving.gateway.v1.sse import to_response

_VALUE = 8  # bytes of a number of an answer


async def answer_embeddings(asked: EmbeddingsRequest, model_request: ModelRequest, texts: Texts) -> web.Response:
    """Answer with an embedding for each text, in their order."""
    array, counted = await _infer({texts.served.text: asked.texts}, model_request, texts, asked, "input")
    if asked.dimensions not in (None, size := array.shape[1]):
        if asked.dimensions not in texts.dimensions or asked.dimensions > size:
            sizes = ", ".join(map(str, sorted({*(each for each in texts.dimensions if each < size), size})))
            what = f"dimensions is {asked.dimensions}, and {asked.model} gives embeddings of {sizes}."
            raise ApiError(f"{what} Leave it out.", "dimensions", "unsupported_parameter")
        whole, array = array, array[:, : asked.dimensions]
        lengths = [np.linalg.norm(each, axis=1, keepdims=True) for each in (whole, array)]
        array = array * (lengths[0] / np.maximum(lengths[1], np.finfo(np.float32).tiny))  # as long as it was

    def to_row(index: int, row: Any) -> dict[str, Any]:
        is_text = asked.encoding_format == "base64"
        embedding = base64.b64encode(row.astype("<f4").tobytes()).decode() if is_text else row.tolist()
        return {"object": "embedding", "index": index, "embedding": embedding}

    head = {"object": "list", "model": asked.model, **counted.members}
    return await _to_response(head, "data", map(to_row, count(), array), array.size)


async def answer_classify(
    asked: ClassifyRequest, model_request: ModelRequest, texts: Texts, labels: tuple[str, ...]
) -> web.Response:
    """Answer with the probabilities, or the score, of each text, and the label of the greatest one."""
    array, counted = await _infer({texts.served.text: asked.texts}, model_request, texts, asked, "input")
    if labels and len(labels) != array.shape[1]:
        what = f"The model's output {texts.served.output} has {array.shape[1]} classes for {len(labels)} labels."
        raise ApiError(what, "model")

    def to_row(index: int, row: Any) -> dict[str, Any]:
        label = labels[int(np.argmax(row))] if labels else None
        return {"index": index, "label": label, "probs": row.tolist(), "num_classes": len(row)}

    head = {**_make_head("classify", asked.model), **counted.members}
    head["usage"]["completion_tokens"] = 0
    return await _to_response(head, "data", map(to_row, count(), array), array.size)


async def answer_rerank(asked: RerankRequest, model_request: ModelRequest, texts: Texts) -> web.Response:
    """Answer with the scores of documents for a query, the greatest one first."""
    most, least = asked.max_tokens_per_doc, texts.counter.most if texts.counter else math.inf
    if most is not None and most < least:
        what = f"max_tokens_per_doc is {most}: the model's tokenizer, not the request, says how much of a text is read"
        raise ApiError(f"{what}. Leave it out.", "max_tokens_per_doc", "unsupported_parameter")
    documents = asked.texts
    pairs = [asked.query] * len(documents), documents
    scores, counted = await _score(pairs, model_request, texts, asked, "documents")
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: asked.top_n or asked.top_k]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in order]
    if asked.return_documents is not False:
        results = [{**each, "document": {"text": documents[each["index"]]}} for each in results]
    head = {"id": f"rerank-{secrets.token_hex(12)}", "model": asked.model}
    return to_response({**head, "results": results, **counted.members})


async def answer_score(asked: ScoreRequest, model_request: ModelRequest, texts: Texts) -> web.Response:
    """Answer with the score of each pair of texts, in their order."""
    scores, counted = await _score(asked.pairs, model_request, texts, asked, "text_2")
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    return to_response({**_make_head("score", asked.model), "data": data, **counted.members})


def _make_head(kind: str, model: str) -> dict[str, Any]:
    return {"id": f"{kind}-{secrets.token_hex(12)}", "object": "list", "created": int(time.time()), "model": model}


async def _score(
    pairs: tuple[list[str], list[str]], model_request: ModelRequest, texts: Texts, asked: Truncating, field: str
) -> tuple[list[float], Counted]:
    first, second = pairs
    size = sum(map(len, first))  # of characters, which encoding may multiply by 4
    if size > MOST_BODY or (size := sum(len(text.encode()) for text in first)) > MOST_BODY:
        what = f"The first text, once for each second one, has more than {MOST_BODY} bytes."
        raise ApiError(f"{what} Send fewer at a time.", reason=RefusalReason.LARGE)
    model_request.reserve(size)
    values = {texts.served.text: first, texts.served.second: second}
    array, counted = await _infer(values, model_request, texts, asked, field)
    return array[:, 0].tolist(), counted


async def answer_predict(asked: PredictRequest, model_request: ModelRequest, spec: ModelSpec) -> web.Response:
    """Answer with the outputs for each row: values by input, or the value of the model's only one."""
    rows, alike = await model_request.work(partial(_group, asked, spec))
    if not spec.is_batched and len(rows) > 1:
        raise ApiError("The model takes one instance at a time.", asked.field)
    found: dict[int, tuple[int, dict[str, Any]]] = {}  # by row: its place in the outputs with it
    num_values = 0
    for names, numbers in alike.items():
        values = {
            name: [rows[number][name] for number in numbers] if spec.is_batched else rows[0][name] for name in names
        }
        answer = await model_request.infer(values)
        columns = {name: array if spec.is_batched else array[None] for name, array in answer.items()}
        for name, array in columns.items():
            if len(array) != len(numbers):
                raise ApiError(f"The model does not answer each row with a row of {name}.", asked.field)
        num_values += sum(array.size for array in columns.values())
        found |= {number: (at, columns) for at, number in enumerate(numbers)}

    def to_prediction(number: int) -> dict[str, Any]:
        at, columns = found[number]
        return {name: _to_python(array[at]) for name, array in columns.items()}

    return await _to_response({}, "predictions", map(to_prediction, range(len(rows))), num_values)


def _group(asked: PredictRequest, spec: ModelSpec) -> tuple[list[dict[str, Any]], dict[tuple[str, ...], list[int]]]:
    """Return the rows as values by input, and the numbers of those with the same inputs."""
    required = [tensor.name for tensor in spec.inputs if not tensor.is_optional] or [each.name for each in spec.inputs]
    text, only = find_text_input(spec), required[0] if len(required) == 1 else ""  # for texts and others alone
    rows: list[dict[str, Any]] = []
    for number, row in enumerate(asked.rows):
        is_text, place = isinstance(row, str) or _is_encoded(row), f"{asked.field}[{number}]"
        name = text if is_text else only
        if isinstance(row, dict) and not is_text:
            rows.append({name: _to_bytes(value, place) for name, value in row.items()})
            continue
        if not name:
            from shoal.serving.gateway.v1.elsewhere import show_instances

            what = f"The model has no input for {'texts' if is_text else 'values'} alone: give values by input"
            raise ApiError(f"{what}, such as {show_instances(spec)}", place)
        rows.append({name: _to_bytes(row, place)})
    alike = defaultdict[tuple[str, ...], list[int]](list)
    for number, row in enumerate(rows):
        alike[tuple(sorted(row))].append(number)
    return rows, alike


def _is_encoded(value: Any) -> bool:
    """Whether a value is ``{"b64": ...}``: bytes in base64, as in the protocols of KServe and TensorFlow Serving."""
    return isinstance(value, dict) and value.keys() == {"b64"}


def _to_bytes(value: Any, place: str) -> Any:
    if not _is_encoded(value):
        return value
    try:
        return base64.b64decode(value["b64"], validate=True)
    except (ValueError, TypeError):
        raise ApiError("The value of b64 is not base64.", place) from None


def _to_python(array: Any) -> Any:
    """Return a row of an output: its only value, or a list."""
    value = array.tolist()
    if array.shape == (1,):
        value = value[0]
    return _decode(value) if array.dtype == np.object_ else value


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(each) for each in value]
    return value.decode("utf-8", "backslashreplace")


async def _infer(
    values: dict[str, list[str]], model_request: ModelRequest, texts: Texts, asked: Truncating, field: str
) -> tuple[Any, Counted]:
    """Return the model's numbers for rows of texts, and how many tokens it reads of them."""
    served, counter = texts.served, texts.counter
    if counter is None and asked.truncate == "NONE":
        what = f"truncate is NONE, and no step of {asked.model} counts tokens. Leave it out."
        raise ApiError(what, "truncate", "unsupported_parameter")
    counting = counter and asyncio.create_task(count_tokens(counter, model_request, values, asked, field))
    try:
        answer = await model_request.infer(values)
        counted = await counting if counting else Counted()
    finally:
        if counting:
            counting.cancel()
            await asyncio.gather(counting, return_exceptions=True)
    array = answer.get(served.output)
    if array is None or array.ndim != 2 or len(array) != len(values[served.text]) or not np.isfinite(array).all():
        raise ApiError(f"The model's output {served.output} is not a row of finite numbers for each text.", "input")
    return array, counted


async def _to_response(head: dict[str, Any], name: str, rows: Iterable[Any], num_values: int) -> web.Response:
    """Return the JSON of ``head`` and of the list ``name``; each row by a call of its own, which is short."""

    def encode() -> bytes:
        begin = msgspec.json.encode(head)[:-1] + (b"," if head else b"")
        return begin + f'"{name}":['.encode() + b",".join(map(msgspec.json.encode, rows)) + b"]}"

    body = await work_apart(encode, num_values * _VALUE)
    return web.Response(body=body, content_type="application/json")
