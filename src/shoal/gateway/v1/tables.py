"""Answers of models that turn texts into numbers: embeddings, classes and scores, and the outputs of any model."""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections import defaultdict
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from shoal.component.spec import ModelSpec
from shoal.gateway.core.refusals import Why
from shoal.gateway.v1.ask import Asker
from shoal.gateway.v1.errors import ApiError
from shoal.gateway.v1.schema import (
    MOST_BODY,
    ClassifyRequest,
    EmbeddingsRequest,
    PredictRequest,
    RerankRequest,
    ScoreRequest,
)
from shoal.gateway.v1.writing import to_response
from shoal.repository.apis import Served

_USAGE = {"prompt_tokens": 0, "total_tokens": 0}  # such models do not count tokens
_LARGE = 2**16  # numbers of an answer that are encoded outside the event loop


async def answer_embeddings(asked: EmbeddingsRequest, asker: Asker, served: Served) -> web.Response:
    """Answer with an embedding for each text, in their order."""
    array = await _infer({served.text: asked.texts}, asker, served)

    def encode() -> bytes:
        if asked.encoding_format == "base64":
            rows: list[Any] = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in array]
        else:
            rows = array.tolist()
        data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
        return msgspec.json.encode({"object": "list", "data": data, "model": asked.model, "usage": _USAGE})

    return await _to_response(encode, array.size)


async def answer_classify(
    asked: ClassifyRequest, asker: Asker, served: Served, labels: tuple[str, ...]
) -> web.Response:
    """Answer with the probabilities, or the score, of each text, and the label of the greatest one."""
    array = await _infer({served.text: asked.texts}, asker, served)
    if labels and len(labels) != array.shape[1]:
        what = f"The model's output {served.output} has {array.shape[1]} classes for {len(labels)} labels."
        raise ApiError(what, "model")

    def encode() -> bytes:
        data = [
            {
                "index": index,
                "label": labels[int(np.argmax(array[index]))] if labels else None,
                "probs": row,
                "num_classes": len(row),
            }
            for index, row in enumerate(array.tolist())
        ]
        return msgspec.json.encode({
            "id": f"classify-{secrets.token_hex(12)}", "object": "list", "created": int(time.time()),
            "model": asked.model, "data": data, "usage": {**_USAGE, "completion_tokens": 0},
        })  # fmt: skip

    return await _to_response(encode, array.size)


async def answer_rerank(asked: RerankRequest, asker: Asker, served: Served) -> web.Response:
    """Answer with the scores of documents for a query, the greatest one first."""
    scores = await _score([asked.query] * len(asked.documents), asked.documents, asker, served)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: asked.top_n]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in order]
    if asked.return_documents is not False:
        results = [{**each, "document": {"text": asked.documents[each["index"]]}} for each in results]
    head = {"id": f"rerank-{secrets.token_hex(12)}", "model": asked.model}
    return to_response({**head, "results": results, "usage": _USAGE})


async def answer_score(asked: ScoreRequest, asker: Asker, served: Served) -> web.Response:
    """Answer with the score of each pair of texts, in their order."""
    scores = await _score(*asked.pairs, asker, served)
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    return to_response({
        "id": f"score-{secrets.token_hex(12)}", "object": "list", "created": int(time.time()), "model": asked.model,
        "data": data, "usage": _USAGE,
    })  # fmt: skip


async def _score(first: list[str], second: list[str], asker: Asker, served: Served) -> list[float]:
    if sum(map(len, first)) > MOST_BODY:
        what = f"The first text, once for each second one, has more than {MOST_BODY} characters."
        raise ApiError(f"{what} Send fewer at a time.", why=Why.LARGE)
    array = await _infer({served.text: first, served.second: second}, asker, served)
    scores: list[float] = array[:, 0].tolist()
    return scores


async def answer_predict(asked: PredictRequest, asker: Asker, spec: ModelSpec, text: str) -> web.Response:
    """Answer with the outputs for each instance: a text, for the input ``text``, or values by input."""
    rows = [_to_row(number, each, text) for number, each in enumerate(asked.instances)]
    alike = defaultdict[tuple[str, ...], list[int]](list)  # numbers of the rows with the same inputs
    for number, row in enumerate(rows):
        alike[tuple(sorted(row))].append(number)
    if not spec.is_batched and len(rows) > 1:
        raise ApiError("The model takes one instance at a time.", "instances")
    found: list[tuple[list[int], dict[str, Any]]] = []
    for names, numbers in alike.items():
        picked = [rows[number] for number in numbers]
        values = {name: [row[name] for row in picked] if spec.is_batched else picked[0][name] for name in names}
        answer = await asker.infer(values)
        columns = {name: array if spec.is_batched else array[None] for name, array in answer.items()}
        for name, array in columns.items():
            if len(array) != len(numbers):
                raise ApiError(f"The model does not answer each row with a row of {name}.", "instances")
        found.append((numbers, columns))

    def encode() -> bytes:
        predictions: list[Any] = [None] * len(rows)
        for numbers, columns in found:
            for at, number in enumerate(numbers):
                predictions[number] = {name: _to_python(array[at]) for name, array in columns.items()}
        return msgspec.json.encode({"predictions": predictions})

    return await _to_response(encode, sum(array.size for _, columns in found for array in columns.values()))


def _to_row(number: int, instance: str | dict[str, Any], text: str) -> dict[str, Any]:
    if not isinstance(instance, str):
        return instance
    if not text:
        raise ApiError("The model has no input for texts alone: give values by input.", f"instances[{number}]")
    return {text: instance}


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


async def _infer(values: dict[str, list[str]], asker: Asker, served: Served) -> Any:
    answer = await asker.infer(values)
    array = answer.get(served.output)
    if array is None or array.ndim != 2 or len(array) != len(values[served.text]) or not np.isfinite(array).all():
        raise ApiError(f"The model's output {served.output} is not a row of finite numbers for each text.", "input")
    return array


async def _to_response(encode: Any, num_values: int) -> web.Response:
    body = await asyncio.to_thread(encode) if num_values > _LARGE else encode()
    return web.Response(body=body, content_type="application/json")
