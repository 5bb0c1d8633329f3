"""Requests that schemathesis makes from the description of OpenAI's API: valid ones, and such with something wrong."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.apis import Judge, chat, post
from tests.support.service import Service

schemathesis = pytest.importorskip("schemathesis")
MODELS = {  # for whom they are; others get any text as a model's name
    "/v1/embeddings": "embedder", "/v1/classify": "labeller", "/v1/rerank": "ranker", "/v1/score": "ranker",
    "/v2/rerank": "ranker", "/rerank": "ranker",
    "/v1/models/{model}:predict": "reader",
}  # fmt: skip
MOST = {"max_tokens": 4, "max_completion_tokens": 4, "max_output_tokens": 4, "min_tokens": 0}


def name_model(case: Any, number: int) -> None:
    """Let three of four requests be for a model that is there, and its answer be short. What is wrong stays wrong."""
    model = MODELS.get(case.operation.path, ("llm", "llm_bls", "gpt-4o")[number % 3])
    if number % 4 and "model" in (case.path_parameters or {}):
        case.path_parameters["model"] = model
    if isinstance(case.body, dict) and isinstance(name := case.body.get("model"), str):
        if number % 4 and 1 <= len(name) <= 256:
            case.body["model"] = model
        for field, most in MOST.items():
            if isinstance(value := case.body.get(field), int) and most < value < 2**31:
                case.body[field] = most


def test_requests_that_a_program_makes(service: Service, scale: Any, record: Any) -> None:
    """No 5xx, no answer that the description lacks, nothing wrong accepted; a known request is right after each 100."""
    judge, begin = Judge(service), time.monotonic()
    schema = schemathesis.openapi.from_dict(judge.document)
    schema.config.update(base_url=f"http://{service.http}")
    known, asked = json.dumps({"model": "llm", **chat("Hello")}).encode(), 0
    expected = post(service, "/v1/chat/completions", known)[1]["choices"]
    checks = schemathesis.checks
    everywhere = [
        checks.not_a_server_error, checks.status_code_conformance, checks.content_type_conformance,
        checks.response_headers_conformance, checks.allow_header_conformance,
    ]  # fmt: skip
    strategies = [
        found.ok().as_strategy(generation_mode=mode)
        for found in schema.get_all_operations() for mode in schemathesis.GenerationMode
        if mode.is_positive or found.ok().body or found.ok().path_parameters
    ]  # fmt: skip

    with requests.Session() as session:

        @settings(
            max_examples=scale(400, full=100_000), phases=[Phase.generate], derandomize=True, database=None,
            deadline=None, suppress_health_check=[*HealthCheck],
        )  # fmt: skip
        @given(st.one_of(strategies))
        def ask(case: Any) -> None:
            nonlocal asked
            asked += 1
            name_model(case, asked)
            response = case.call(session=session, timeout=60)
            refusing = [] if response.status_code == 413 else [checks.negative_data_rejection]  # it lacks 413
            case.validate_response(response, checks=[*everywhere, *refusing])
            (media,) = response.headers["content-type"]
            judge.judge(case.operation.path, response.status_code, media.partition(";")[0], response.content)
            if asked % 100 == 0:
                assert post(service, "/v1/chat/completions", known)[1]["choices"] == expected

        ask()
    answered = sum(count for (_, status), count in judge.counts.items() if status == 200)
    record("openai_schema", requests=asked, answered=answered, seconds=round(time.monotonic() - begin))
    assert {path for path, _ in judge.counts} == judge.document["paths"].keys()
    assert answered > asked / 20, judge.counts
