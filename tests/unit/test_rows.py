"""Requests of several rows to an engine: answered as they come or whole, stopped, and failing."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shoal.errors import InputError, ShoalError
from shoal.kit.component.context import Context
from shoal.kit.component.stream import QueueStream, Stream
from shoal.kit.generation.answering import Answering
from shoal.kit.generation.answers import join_rows, split_rows
from shoal.kit.generation.contract import Limits, TokenRequest
from shoal.kit.generation.engines.base import EngineComponent
from shoal.kit.generation.sampling import NUMBERS
from tests.support.llm import ENGINE, engine_spec

SPEC = engine_spec("/model")


class Counting(EngineComponent):
    """Counts on from the prompt's last id; a prompt that begins with 9 fails at its second token."""

    limits, settings, has_prompt = Limits(100, 60, 4), frozenset(row.name for row in NUMBERS), False

    def setup(self, context: Context) -> None:
        self.engine: Any = self
        self.outputs = {tensor.name for tensor in context.spec.outputs}
        self.streams: list[Stream] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def admit(self, request: TokenRequest, stream: Stream) -> None:
        self.streams.append(stream)
        threading.Thread(target=self._count, args=(request, stream), daemon=True).start()

    def _count(self, request: TokenRequest, stream: Stream) -> None:
        answering = Answering(request, stream)
        for number in range(1, 60):
            if not answering.add(request.ids[-1] + number):
                return
            self.may_go_on.wait()
            if request.ids[0] == 9:
                stream.end(RuntimeError("no such token"))
                return

    def is_running(self) -> bool:
        return True

    def close(self) -> None:
        pass


def make(**changes: Any) -> Counting:
    return Counting(Context(replace(SPEC, **changes), ENGINE))


def ask(prompts: list[list[int]], new: list[int], *, streaming: list[bool]) -> dict[str, Any]:
    return {
        "input_ids": np.array(prompts, np.int32),
        "input_lengths": np.array([[len(each)] for each in prompts], np.int32),
        "request_output_len": np.array(new, np.int32)[:, None],
        "streaming": np.array(streaming)[:, None],
        "carry": np.array([[str(number).encode()] for number in range(len(prompts))], np.object_),
    }


def test_rows_are_answered_as_their_tokens_come() -> None:
    answers = list(make().stream(ask([[10], [20], [30]], [3, 1, 5], streaming=[True] * 3)))
    assert all(answer["output_ids"].shape == (1, 1, 1) for answer in answers)
    for row, (first, new) in enumerate([(11, 3), (21, 1), (31, 5)]):
        own = [answer for answer in answers if answer["batch_index"].item() == row]
        assert [answer["output_ids"].item() for answer in own] == list(range(first, first + new))
        assert [answer["is_last"].item() for answer in own] == [False] * (new - 1) + [True]
        assert [answer["carry"].item() for answer in own] == [str(row).encode()] + [b""] * (new - 1)
        assert len({answer["stream_id"].item() for answer in own}) == 1
    assert len({answer["stream_id"].item() for answer in answers}) == 3


@pytest.mark.parametrize("is_decoupled", [True, False])
def test_whole_rows_are_one_answer(is_decoupled: bool) -> None:
    (answer,) = make(is_decoupled=is_decoupled).stream(ask([[10], [20]], [3, 1], streaming=[False] * 2))
    assert answer["output_ids"].tolist() == [[[11, 12, 13]], [[21, 0, 0]]]
    assert answer["sequence_length"].tolist() == [[3], [1]]
    assert answer["batch_index"].tolist() == [[0], [1]]
    assert answer["finish_reason"].tolist() == [[b"length"], [b"length"]]


@pytest.mark.parametrize("is_streaming", [True, False])
def test_a_row_that_fails_while_it_is_computed(is_streaming: bool) -> None:
    """The request fails with it; the engine is free of the other rows, and answers the next request."""
    component = make()
    with pytest.raises(ShoalError, match=r"Row 1: Model llm-hf failed on this request \(RuntimeError\)"):
        list(component.stream(ask([[10], [9], [30]], [50, 2, 50], streaming=[is_streaming] * 3)))
    end = time.monotonic() + 5
    while any(stream.is_open for stream in component.streams) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(stream.is_open for stream in component.streams)
    assert len(list(component.stream(ask([[1]], [2], streaming=[True])))) == 2


def test_a_request_to_stop_ends_the_rows_that_are_open() -> None:
    component = make()
    component.may_go_on.clear()
    stream = component.stream(ask([[10], [20], [30]], [50, 1, 50], streaming=[True] * 3))
    assert isinstance(stream, QueueStream)
    found = iter(stream)
    assert sorted(next(found)["batch_index"].item() for _ in range(3)) == [0, 1, 2]
    time.sleep(0.1)  # until row 1 has ended
    stream.stop()
    (last,) = found
    assert last["batch_index"].tolist() == [[0], [2]]
    assert last["is_last"].all()
    assert last["output_ids"].shape == (2, 1, 0)
    assert set(last["finish_reason"].ravel()) == {b"cancelled"}
    assert not any(each.is_open for each in component.streams)
    component.may_go_on.set()


def test_refused_rows() -> None:
    with pytest.raises(InputError, match=r"streaming is true for some rows and false for others\. Send the same for"):
        list(make().stream(ask([[1], [2]], [3, 3], streaming=[True, False])))
    nameless = make(outputs=tuple(tensor for tensor in SPEC.outputs if tensor.name != "batch_index"))
    with pytest.raises(InputError, match=r"has 2 rows, and answers of model llm-hf do not say which one they are to"):
        list(nameless.stream(ask([[1], [2]], [3, 3], streaming=[True, True])))
    assert len(list(nameless.stream(ask([[1]], [3], streaming=[True])))) == 3
    assert len(list(nameless.stream(ask([[1], [2]], [3, 3], streaming=[False, False])))) == 1


def test_rows_are_joined_and_split_again() -> None:
    """The shorter one of two rows is padded, and so is what a row did not ask for."""
    ids = [np.array([[[5, 6]]], np.int32), np.array([[[7]]], np.int32)]
    first = {
        "output_ids": ids[0],
        "top_token_ids": np.array([[[1, 2], [3, 4]]]),
        "logprobs": np.array([[b"[]"]], object),
    }
    joined = join_rows([first, {"output_ids": ids[1]}])
    assert joined["output_ids"].tolist() == [[[5, 6]], [[7, 0]]]
    assert joined["top_token_ids"].tolist() == [[[1, 2], [3, 4]], [[-1, -1], [-1, -1]]]
    assert joined["logprobs"].tolist() == [[b"[]"], [b"null"]]
    numbers = {"batch_index": np.array([[4], [2]], np.int32)}
    assert [(number, row["output_ids"].tolist()) for number, row in split_rows(joined | numbers)] == [
        (4, [[[5, 6]]]),
        (2, [[[7, 0]]]),
    ]
