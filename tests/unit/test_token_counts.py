"""Tokens of answers that pass the service, counted as they come."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from shoal.kit.component.spec import ModelSpec, TensorSpec
from shoal.serving.gateway.callers.accounts import Account
from shoal.serving.gateway.callers.callers import Caller
from shoal.serving.gateway.callers.key_file import KeyLimits
from shoal.serving.gateway.core.stream_requests import StreamRequests, TokenCounts
from shoal.serving.gateway.refusals import RefusedError
from tests.support.configs import make_configs

COUNTS = tuple(TensorSpec(f"num_{kind}_tokens", "TYPE_UINT32", (1,)) for kind in ("input", "output"))
SPEC = ModelSpec("llm", (), (TensorSpec("text_output", "TYPE_STRING", (1,)), *COUNTS), 1)


def answer(**counts: int) -> Any:
    message = service_pb2.ModelInferResponse(model_name="llm")
    message.outputs.add(name="text_output", datatype="BYTES", shape=[1, 1])
    message.raw_output_contents.append(b"\1\0\0\0a")
    for name, number in counts.items():
        message.outputs.add(name=f"num_{name}_tokens", datatype="UINT32", shape=[1, 1])
        message.raw_output_contents.append(np.uint32(number).tobytes())
    return message


def test_each_token_counts_once() -> None:
    tokens = TokenCounts([SPEC])
    first, second = tokens.meter("llm"), tokens.meter("llm")
    assert first
    assert second
    for so_far in (1, 1, 4):
        first.read(answer(input=300, output=so_far))
    second.read(answer(input=5, output=0))
    first.read(service_pb2.ModelInferResponse())  # an error, or the empty last answer
    second.read(answer(output=2))  # the client asked for one count only
    assert tokens.counts == {("llm", "input"): 305, ("llm", "output"): 6}


@pytest.mark.parametrize("limit", [0, 10])
def test_a_key_with_a_limit_of_tokens_asks_for_its_counts(limit: int) -> None:
    """Or names no outputs, so that it gets all."""
    configs = make_configs(
        llm="""max_batch_size: 1 model_transaction_policy { decoupled: true }
        input { name: "text_input" data_type: TYPE_STRING dims: 1 }
        output { name: "text_output" data_type: TYPE_STRING dims: 1 }
        output { name: "num_input_tokens" data_type: TYPE_UINT32 dims: 1 }
        output { name: "num_output_tokens" data_type: TYPE_UINT32 dims: 1 }"""
    )
    requests = StreamRequests(configs)
    caller = Caller("id", account=Account("one", KeyLimits(tokens_per_minute=limit)))
    for names, is_refused in (
        ([], False), (["text_output"], True), (["num_input_tokens"], True),
        (["text_output", "num_input_tokens", "num_output_tokens"], False),
    ):  # fmt: skip
        message = service_pb2.ModelInferRequest(model_name="llm")
        for name in names:
            message.outputs.add(name=name)
        expected = pytest.raises(RefusedError, match="the outputs num_") if is_refused and limit else nullcontext()
        with expected:
            requests.check(caller, "llm", message.SerializeToString())


def test_rows_are_counted_each() -> None:
    """A whole answer has two rows; other answers name theirs."""

    def rows(numbers: list[int], index: list[int] | None) -> Any:
        message = service_pb2.ModelInferResponse(model_name="llm")
        for name, values, dtype in (("num_output_tokens", numbers, np.uint32), ("batch_index", index, np.int32)):
            if values is not None:
                message.outputs.add(name=name, shape=[len(values), 1])
                message.raw_output_contents.append(np.array(values, dtype).tobytes())
        return message

    for index in (None, [0, 1]):
        tokens = TokenCounts([SPEC])
        meter = tokens.meter("llm")
        assert meter
        meter.read(rows([3, 300], index))
        assert tokens.counts == {("llm", "output"): 303}
    tokens = TokenCounts([SPEC])
    meter = tokens.meter("llm")
    assert meter
    for number, row in ((1, 0), (1, 1), (2, 1), (2, 0), (3, 1)):
        meter.read(rows([number], [row]))
    assert tokens.counts == {("llm", "output"): 5}


def test_answers_that_are_not_as_declared() -> None:
    """Triton passes on what a model gives: other sizes of the counts and of the rows' numbers."""
    for counts, index, total in ((b"\1", None, 0), (b"\5\0\0\0", b"\0", 5), (b"\5\0\0\0", bytes(8), 5), (b"", b"", 0)):
        message = service_pb2.ModelInferResponse(model_name="llm")
        for name, raw in (("num_output_tokens", counts), ("batch_index", index)):
            if raw is not None:
                message.outputs.add(name=name, shape=[1, 1])
                message.raw_output_contents.append(raw)
        tokens = TokenCounts([SPEC])
        meter = tokens.meter("llm")
        assert meter
        meter.read(message)
        assert tokens.counts["llm", "output"] == total


def test_only_models_that_declare_both_counts() -> None:
    one = replace(SPEC, name="one", outputs=SPEC.outputs[:2])
    other = replace(SPEC, name="other", outputs=(COUNTS[0], replace(COUNTS[1], dtype="TYPE_INT64")))
    lists = replace(SPEC, name="lists", outputs=(COUNTS[0], replace(COUNTS[1], dims=(-1,))))
    tokens = TokenCounts([SPEC, one, other, lists])
    assert tokens.models == ["llm"]
    assert [tokens.meter(name) for name in ("one", "other", "lists", "unknown")] == [None] * 4
