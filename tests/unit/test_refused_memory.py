"""A request that was refused, or that failed, keeps nothing alive, and needs no garbage collector for that."""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pytest

from shoal.clients.local import load
from shoal.errors import InputError, ShoalError, forget_frames
from shoal.kit.component.base import Component
from shoal.kit.component.context import Context
from shoal.kit.component.spec import Arrays, ModelSpec
from shoal.kit.component.stream import Stream
from shoal.kit.component.streaming import StreamingComponent
from tests.support import fake_triton
from tests.support.fake_triton import InferenceRequest, Stub, Tensor
from tests.support.planted import write
from tests.support.service import wait_until

CONFIG: dict[str, Any] = {
    "name": "refusing",
    "max_batch_size": 8,
    "dynamic_batching": {},
    "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [2]}],
    "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [2]}],
}


SEEN: list[weakref.ref[Any]] = []  # what components got, which may be copies of what they were sent


def refuse(inputs: Arrays) -> None:
    """Raise an error in the way that the smallest number names."""
    SEEN.append(weakref.ref(inputs["X"]))
    match int(inputs["X"].min()):
        case -1:
            raise InputError("It is below 0.", "Send another.")
        case -2:
            raise KeyError("unexpected")
        case -3:  # the frame holds its own error
            error = InputError("It is below 0.")
            raise error
        case -4:  # the frame holds the error that led to the last one
            try:
                raise KeyError("first")
            except KeyError as error:
                first = error
                raise InputError(f"It is below 0, so {first}.") from error
        case -5:
            try:
                raise InputError("one")
            except InputError as error:
                inner = error
                raise ExceptionGroup("several", [inner]) from None


class Checking(Component):
    """Refuses a request before it runs."""

    def check(self, inputs: Arrays) -> None:
        refuse(inputs)

    def run(self, batch: Arrays) -> Arrays:
        return {"Y": batch["X"]}


class Running(Component):
    """Refuses a whole batch."""

    def run(self, batch: Arrays) -> Arrays:
        refuse(batch)
        return {"Y": batch["X"][:, : int(batch["X"].min())]} if batch["X"].min() < 2 else {"Y": batch["X"]}


class Streaming(StreamingComponent):
    """Answers twice, then refuses; a small number is answered with a wrong shape."""

    def answers(self, inputs: Arrays, _: Stream) -> Iterator[Arrays]:
        yield {"Y": inputs["X"]}
        yield {"Y": inputs["X"][:, : int(inputs["X"].min())] if 0 < inputs["X"].min() < 2 else inputs["X"]}
        refuse(inputs)


class Early(Streaming):
    """Refuses before the first answer."""

    def check(self, inputs: Arrays) -> None:
        refuse(inputs)


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    gc.disable()
    SEEN.clear()
    logging.disable()  # pytest keeps records, with their tracebacks
    yield
    logging.disable(logging.NOTSET)
    gc.enable()


def num_alive(refs: Sequence[weakref.ref[Any]]) -> int:
    return sum(ref() is not None for ref in [*refs, *SEEN])


def array(value: float, rows: int = 1) -> Any:
    return np.full((rows, 2), value, np.float32)


def process(component: type[Component], *requests: Any) -> list[Arrays | ShoalError]:
    spec = ModelSpec.from_config(CONFIG)
    return component(Context(spec, Path("nowhere"))).process([{"X": each} for each in requests])


VALUES = [-1, -2, -3, -4, -5, 1]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("component", [Checking, Running])
@pytest.mark.parametrize("place", ["alone", "first", "amid", "twice"])
def test_components(component: type[Component], value: float, place: str) -> None:
    values = {"alone": [value], "first": [value, 5], "amid": [5, 6, value, 7], "twice": [value, 5, value]}[place]
    arrays = [array(each) for each in values]
    refs = [weakref.ref(each) for each in arrays]
    answers = process(component, *arrays)
    del arrays
    has_failed = [isinstance(answer, ShoalError) for answer in answers]
    assert has_failed == [each == value and (value < 0 or component is Running) for each in values]
    kept = [ref() is not None for ref in refs]
    assert not any(is_kept for is_kept, failed in zip(kept, has_failed, strict=True) if failed)
    del answers
    assert num_alive(refs) == 0


def test_requests_of_a_server(tmp_path: Path) -> None:
    """Refused by their shape or by the component, or without a right answer."""
    stub = Stub(Running, tmp_path, CONFIG)
    arrays = [np.zeros((1, 3), np.float32), np.zeros((0, 2), np.float32), *map(array, VALUES)]
    refs = [weakref.ref(each) for each in arrays]
    while arrays:
        assert stub.infer(InferenceRequest([Tensor("X", arrays.pop())]))[0].has_error()
    assert num_alive(refs) == 0


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("component", [Streaming, Early])
def test_streams_of_a_server(component: type[StreamingComponent], value: float, tmp_path: Path) -> None:
    config = CONFIG | {"model_transaction_policy": {"decoupled": True}}
    with fake_triton.installed():
        stub = Stub(component, tmp_path, config)
        request = InferenceRequest([Tensor("X", array(value))])
        refs = [weakref.ref(request.tensors[0]._array)]
        responses = [*stub.stream(request)]
        assert responses.pop().has_error()
        assert len(responses) == (0 if component is Early and value < 0 else 1 if value > 0 else 2)
        request._sender = None  # which knows the request: a circle of the fake alone
        del request, responses
        assert wait_until(lambda: num_alive(refs) == 0, 20)
        stub.finalize()


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("component", [Streaming, Early])
def test_streams_in_this_process(component: type[StreamingComponent], value: float) -> None:
    spec = ModelSpec.from_config(CONFIG | {"model_transaction_policy": {"decoupled": True}})
    given = array(value)
    refs, stream = [weakref.ref(given)], component(Context(spec, Path("nowhere"))).stream({"X": given})
    with pytest.raises(ShoalError):
        list(stream)
    del given, stream
    assert wait_until(lambda: num_alive(refs) == 0, 20)


ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] }, { name: "Z" data_type: TYPE_FP32 dims: [ 2 ] } ]
ensemble_scheduling {
  step [ { model_name: "one" model_version: -1
           input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" } },
         { model_name: "two" model_version: -1
           input_map { key: "X" value: "X" } output_map { key: "Y" value: "Z" } } ]
}
"""
MODEL = """
backend: "python"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", ["one", "both"])
def test_pipelines(name: str, value: float, tmp_path: Path) -> None:
    """Pipelines of one model, and of two that run at the same time."""
    for model in ("one", "two"):
        write(tmp_path / model / "config.pbtxt", MODEL)
        code = "from tests.unit.test_refused_memory import Running\nTritonPythonModel = Running.for_triton()\n"
        write(tmp_path / model / "1" / "model.py", code)
    write(tmp_path / "both" / "config.pbtxt", ENSEMBLE)
    write(tmp_path / "both" / "1" / ".gitkeep", "")
    with load(tmp_path / name) as pipeline:
        given = array(value)
        refs = [weakref.ref(given)]
        with pytest.raises(ShoalError) as caught:
            pipeline(X=given)
        assert caught.value.__traceback__ is not None  # of this process, which callers may want to see
        del caught, given
        assert wait_until(lambda: num_alive(refs) == 0, 20)


def test_frames_of_errors_that_lead_to_each_other() -> None:
    one, two = ValueError(), ValueError()
    one.__cause__, two.__context__ = two, one
    for each in (one, two):
        each.__traceback__ = TracebackType(None, sys._getframe(), 0, 1)
    forget_frames(one)
    assert all(each is None for each in (one.__traceback__, two.__traceback__, one.__cause__, two.__context__))
