"""Requests of OpenAI's API, with the bounds of their fields."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shoal.serving.gateway.v1 import schema
from shoal.serving.gateway.v1.errors import ApiError
from shoal.serving.gateway.v1.messages import CountRequest, MessageRequest
from shoal.serving.gateway.v1.prediction_requests import (
    ClassifyRequest,
    EmbeddingsRequest,
    PredictRequest,
    RerankRequest,
    ScoreRequest,
)
from shoal.serving.gateway.v1.responses import ResponseRequest
from shoal.serving.gateway.v1.tokens import DetokenizeRequest, TokenizeRequest

USER = {"role": "user", "content": "Hello"}
CHAT: dict[str, Any] = {"model": "m", "messages": [USER]}
TEXT: dict[str, Any] = {"model": "m", "input": "Hello"}
KINDS: dict[str, tuple[type[Any], dict[str, Any]]] = {  # the least request of each kind
    "chat": (schema.ChatRequest, CHAT),
    "completion": (schema.CompletionRequest, {"model": "m", "prompt": "Hello"}),
    "embeddings": (EmbeddingsRequest, TEXT),
    "classify": (ClassifyRequest, TEXT),
    "rerank": (RerankRequest, {"model": "m", "query": "a", "documents": ["b"]}),
    "score": (ScoreRequest, {"model": "m", "text_1": "a", "text_2": "b"}),
    "predict": (PredictRequest, {"instances": ["a"]}),
    "response": (ResponseRequest, TEXT),
    "message": (MessageRequest, {**CHAT, "max_tokens": 5}),
    "count": (CountRequest, CHAT),
    "tokenize": (TokenizeRequest, {"model": "m"}),
    "detokenize": (DetokenizeRequest, {"model": "m", "tokens": [5]}),
}
HUGE = 2**31


def ask(kind: str, changed: dict[str, Any]) -> Any:
    known, least = KINDS[kind]
    return schema.decode(known, json.dumps({**least, **changed}).encode())


def refuse(kind: str, changed: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as refused:
        ask(kind, changed)
    return refused.value


def messages(number: int, content: Any = "a") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}] * number}


def parts(number: int, kind: str = "text") -> list[dict[str, str]]:
    return [{"type": kind, "text": "a"}] * number


BOUNDS: list[tuple[str, list[Any], list[Any], str]] = [  # kind and field, values within and beyond, and the place
    ("chat model", ["a" * 256], ["", "a" * 257, 5, None], "model"),
    ("chat messages", [[USER] * 4096], [[], [USER] * 4097, "Hello", None], "messages"),
    ("chat max_tokens", [1, HUGE - 1, None], [0, -1, HUGE, 2**64, 1.5, "5"], "max_tokens"),
    ("chat max_completion_tokens", [1, HUGE - 1], [0, HUGE], "max_completion_tokens"),
    ("chat temperature", [0, 2.5, -1, None], ["hot", [], True], "temperature"),  # the pipeline knows the bounds
    ("chat seed", [0, -1, 2**63 - 1, -(2**63)], [1.5, "1", 2**63, -(2**63) - 1, 10**400], "seed"),
    ("chat top_k", [0, HUGE - 1, None], [-1, HUGE, 2**64, 1.5], "top_k"),
    ("chat min_tokens", [0, HUGE - 1, None], [-1, HUGE, 2**64], "min_tokens"),
    ("message top_k", [0, HUGE - 1, None], [-1, HUGE], "top_k"),
    ("response top_logprobs", [0, HUGE - 1, None], [-1, HUGE], "top_logprobs"),
    ("chat stop", ["a", ["a"] * 64, [], None], [["a"] * 65, 5], "stop"),
    ("chat stop", [["a"], ["a" * 4096]], [["a", 5], ["a", "b" * 4097]], "stop[1]"),
    ("chat top_logprobs", [0, 20], [-1, 1.5, HUGE], "top_logprobs"),
    ("chat stream", [True, False, None], ["yes", 1], "stream"),
    ("chat stream_options", [{}, {"include_usage": True}, None], [5, []], "stream_options"),
    ("chat stream_options", [{"include_usage": None}], [{"include_usage": 1}], "stream_options.include_usage"),
    ("completion prompt", ["a", ["a"] * 128, [1, 2], [[1, 2], [3]]], [[], None, 5], "prompt"),
    ("completion prompt", ["a"], [[-1], [1.5], [[]], [None]], "prompt[0]"),
    ("completion logprobs", [0, 5, None], [-1, True, HUGE], "logprobs"),
    ("embeddings input", ["a", ["a"] * 2048], ["", [], ["a"] * 2049], "input"),
    ("embeddings input", [["a", "b"]], [["", "a"]], "input[0]"),
    ("embeddings input", ["a"], [[1, 2], [[1]]], "input[0]"),
    ("embeddings encoding_format", ["float", "base64", None], ["int8", 5], "encoding_format"),
    ("classify input", ["a", ["a"] * 2048], [[], ["a"] * 2049], "input"),
    ("rerank documents", [["a"] * 2048], [[], ["a"] * 2049, "a"], "documents"),
    ("rerank top_n", [1, 99, None], [0, -1], "top_n"),
    ("score text_1", ["a", ["a"] * 2048], [[], ["a"] * 2049], "text_1"),
    ("predict instances", [["a"] * 2**14, [{"X": [1]}], "a"], [[], ["a"] * (2**14 + 1), 5], "instances"),
    ("predict instances", [["a", 5, [5.5]]], [["a", None]], "instances[1]"),
    ("response input", ["a", [USER] * 4096], [[], [USER] * 4097, 5], "input"),
    ("response max_output_tokens", [1, None], [0, HUGE], "max_output_tokens"),
    ("response truncation", ["disabled", "auto"], ["some"], "truncation"),
    ("message max_tokens", [1], [0, HUGE, None], "max_tokens"),
    ("message stop_sequences", [["a"] * 64], [["a"] * 65], "stop_sequences"),
    ("message system", ["a", parts(1024)], [[], parts(1025), 5], "system"),
    ("count messages", [[USER]], [[]], "messages"),
    ("tokenize messages", [[USER]], [[], [USER] * 4097], "messages"),
    ("tokenize return_token_strs", [False], [True], "return_token_strs"),
    ("detokenize tokens", [[], [0, HUGE - 1], [1] * 2**18], [[1] * (2**18 + 1), 5], "tokens"),
    ("detokenize tokens", [[5]], [[-1], [HUGE], [1.5], ["a"]], "tokens[0]"),
]
