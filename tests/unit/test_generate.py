"""Requests and answers of Triton's generate extension, and errors without a status."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from shoal.clients.client.calls import Call, Method
from shoal.clients.client.failures import CallError, Kind, Peer, explain, stream_failure
from shoal.clients.client.http_transport import Events, from_generate, to_generate
from shoal.errors import InputError, ServerError, ShoalError
from shoal.kit.component.spec import ModelSpec, TensorSpec


def make_call(tensors: Mapping[str, tuple[str, tuple[int, ...]]], arrays: dict[str, Any], **options: Any) -> Call:
    """A stream's call to a model whose inputs and outputs have these dtypes and dims."""
    specs = tuple(TensorSpec(name, f"TYPE_{dtype}", dims) for name, (dtype, dims) in tensors.items())
    max_batch_size = 8 if options.pop("is_batched", True) else 0
    return Call(Method.STREAM, "m", arrays, spec=ModelSpec("m", specs, specs, max_batch_size), **options)


def as_objects(*values: bytes) -> Any:
    return np.array([values], np.object_)


def test_events_are_cut_wherever_the_body_was() -> None:
    body = 'data: {"a": "é\\n"}\n\ndata:{"b": 2}\n\n'.encode()
    for size in range(1, len(body) + 1):
        events = Events()
        found = [event for at in range(0, len(body), size) for event in events.feed(body[at : at + size])]
        assert [json.loads(event) for event in found] == [{"a": "é\n"}, {"b": 2}]


def test_requests_are_flat_lists() -> None:
    tensors = {"A": ("FP32", (2, 2)), "B": ("STRING", (1,)), "C": ("INT32", (-1,)), "D": ("BOOL", (1,))}
    arrays = {
        "A": np.arange(4, dtype=np.float32).reshape(1, 2, 2),
        "B": as_objects('"é"\n\0'.encode() + b"\xff"),
        "C": np.array([[5, 6, 7]], np.int32),
    }
    call = make_call(tensors, arrays, request_id="mine", parameters={"p": True})
    document = json.loads(to_generate(call).decode("utf-8", "surrogateescape"))
    assert document == {
        "A": [0, 1, 2, 3],
        "B": ['"é"\n\0\udcff'],
        "C": [5, 6, 7],
        "id": "mine",
        "parameters": {"p": True},
    }
    assert b"\xff" in to_generate(call), "bytes that are not UTF-8 are sent unchanged"


@pytest.mark.parametrize(
    ("dims", "shape", "is_batched", "is_sent"),
    [
        ((1,), (1, 1), True, True),
        ((-1,), (1, 3), True, True),
        ((-1, -1), (1, 1, 3), True, True),
        ((-1, -1), (1, 3, 1), True, False),
        ((-1, -1), (1, 2, 3), True, False),
        ((-1, 2), (1, 3, 2), True, True),
        ((2, -1), (2, 3), False, True),
        ((-1, -1), (2, 3), False, False),
        ((-1,), (0,), False, True),
    ],
)
def test_shapes_that_triton_cannot_restore_are_refused(
    dims: tuple[int, ...], shape: tuple[int, ...], is_batched: bool, is_sent: bool
) -> None:
    call = make_call({"A": ("FP32", dims)}, {"A": np.zeros(shape, np.float32)}, is_batched=is_batched)
    if is_sent:
        assert json.loads(to_generate(call))["A"] == [0] * int(np.prod(shape))
    else:
        with pytest.raises(
            InputError, match=rf"^A has shape \[{', '.join(map(str, shape))}\], and HTTP streams .* gRPC"
        ):
            to_generate(call)


def test_answers_get_their_dtypes_and_shapes_back() -> None:
    tensors = {"N": ("INT32", (1,)), "V": ("FP32", (-1,)), "S": ("STRING", (1,)), "M": ("FP64", (2, 2))}
    data = (
        b'{"S":"\xc3\xa9\xff","M":[1,2,3,4],"N":3,"V":[0.1,NaN,Infinity],"id":"x","model_name":"m","model_version":"7"}'
    )
    answer = from_generate(make_call(tensors, {}, request_id="x"), data)
    assert list(answer) == ["N", "V", "S", "M"]
    assert {name: (array.dtype, array.shape) for name, array in answer.items()} == {
        "N": (np.int32, (1, 1)),
        "V": (np.float32, (1, 3)),
        "S": (np.object_, (1, 1)),
        "M": (np.float64, (1, 2, 2)),
    }
    assert answer["S"].item() == b"\xc3\xa9\xff"
    assert np.array_equal(answer["V"], np.array([[0.1, np.nan, np.inf]], np.float32), equal_nan=True)
    assert (answer.version, answer.request_id) == ("7", "x")
    assert list(from_generate(make_call(tensors, {}, outputs=("V", "N")), data)) == ["V", "N"]
    two_rows = from_generate(make_call({"N": ("INT32", (1,))}, {}), b'{"N":[3,4],"model_name":"m"}')
    assert two_rows["N"].tolist() == [[3], [4]]


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"<html>", b'{"model_name":"m"}', b'{"model_name":"m","A":["x"]}'])
def test_replies_that_are_not_from_triton(data: bytes) -> None:
    with pytest.raises(CallError) as error:
        from_generate(make_call({"A": ("FP32", (2,))}, {}, outputs=("A",)), data)
    assert error.value.kind is Kind.NOT_TRITON


def test_outputs_with_ambiguous_shapes() -> None:
    data = b'{"A":[1,2],"B":1,"model_name":"m"}'
    call = make_call({"A": ("FP32", (-1, -1)), "B": ("FP32", (-1, -1))}, {})
    with pytest.raises(InputError, match=r"^Output A is FP32 \[-1, -1\], and HTTP streams .* outputs="):
        from_generate(call, data)
    tensors = {"A": ("FP32", (-1, -1)), "B": ("FP32", (-1, -1))}
    assert from_generate(make_call(tensors, {}, outputs=("B",)), data)["B"].tolist() == [[[1]]]


@pytest.mark.parametrize(
    ("message", "kind", "said"),
    [
        ("COUNT[0] is 7.", InputError, "COUNT[0] is 7."),
        ("in ensemble 'e', COUNT[0] is 7.", InputError, "COUNT[0] is 7."),
        ("Stub process 'm_0_0' is not healthy.", ServerError, "The process of model m at here has died."),
        (
            "Model m failed on this request (KeyError). See the server's log.",
            ShoalError,
            "Model m failed on this request (KeyError). See the server's log.",
        ),
        (
            "Failed to process the request(s) for model 'm_0', message: KeyError: 'x'\n\nAt:\n  /m.py(9): execute\n",
            ServerError,
            "The server at here failed: Failed to process the request(s) for model 'm_0', message: KeyError: 'x' (with",
        ),
        ("Request for unknown model: 'm' is not found", InputError, "The server at here has no model m."),
        ("Too many requests for m. Try again in 3 s.", ServerError, "The server at here rejected the request: Too"),
    ],
)
def test_errors_within_a_stream_have_no_status(message: str, kind: type[ShoalError], said: str) -> None:
    call = make_call({}, {})
    error = explain(stream_failure(message), call, Peer("here", "http", 1.0))
    assert isinstance(error, kind)
    assert isinstance(error, InputError | ServerError) == (kind is not ShoalError)
    assert str(error).startswith(said)
