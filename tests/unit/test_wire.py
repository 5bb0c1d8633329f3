"""Requests over gRPC are judged by their bytes: what is counted is what protobuf would read."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from shoal.kit.component.spec import ModelSpec
from shoal.serving.gateway.http.bodies import SMALL
from shoal.serving.gateway.refusals import RefusedError
from shoal.serving.gateway.v2 import screening
from shoal.serving.gateway.v2.rules import Rules
from shoal.serving.gateway.v2.screening import MOST_DIMS, Screened, _reduce, screen_grpc
from shoal.serving.gateway.v2.wire import MOST_BYTES, MOST_FIELDS, MOST_VALUES

Request = service_pb2.ModelInferRequest
FIELDS = {
    "bool_contents": st.booleans(),
    "int_contents": st.integers(-(2**31), 2**31 - 1), "uint_contents": st.integers(0, 2**32 - 1),
    "int64_contents": st.integers(-(2**63), 2**63 - 1), "uint64_contents": st.integers(0, 2**64 - 1),
    "fp32_contents": st.just(0.5), "fp64_contents": st.just(0.5), "bytes_contents": st.binary(max_size=200),
}  # fmt: skip


INPUTS = [{"name": name, "data_type": "TYPE_FP32", "dims": [1]} for name in ("X", *map(str, range(999)))]
OUTPUTS = [{"name": "Y", "data_type": "TYPE_FP32", "dims": [1]}]
RULES = Rules(ModelSpec.from_config({"name": "a", "input": INPUTS, "output": OUTPUTS}))


class AnyModel(dict[str, Rules]):
    """Rules under any name, of a model with a thousand inputs."""

    def get(self, *_: Any) -> Any:
        return RULES


def screen(content: bytes) -> Screened:
    return asyncio.run(screen_grpc(content, AnyModel()))


@pytest.fixture(params=["as a whole", "without contents"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small messages are parsed as a whole; here all of them are not, in the second way."""
    if request.param == "without contents":
        monkeypatch.setattr(screening, "SMALL", -1)


def message(*shape: int, raw: bytes | None = None, datatype: str = "FP32", **contents: Any) -> Any:
    made = Request(model_name="a", id="mine")
    made.parameters["triton_enable_empty_final_response"].bool_param = True
    tensor = made.inputs.add(name="X", datatype=datatype, shape=shape)
    for name, values in contents.items():
        getattr(tensor.contents, name).extend(values)
    if raw is not None:
        made.raw_input_contents.append(raw)
    return made


@pytest.mark.usefixtures("way")
def test_consistent_tensors_are_accepted() -> None:
    for made in (
        message(1, 2, raw=bytes(8)), message(0, 2, raw=b""), message(2, raw=bytes(9), datatype="BYTES"),
        message(1, 2, fp32_contents=[1, 2]), message(2, bytes_contents=[b"", b"a"], datatype="BYTES"),
        message(3, int_contents=[1, -1, 2**31 - 1], datatype="INT32"), message(70_000, raw=bytes(280_000)),
    ):  # fmt: skip
        assert screen(made.SerializeToString()) == ("a", "", "mine", True)


@pytest.mark.usefixtures("way")
def test_inconsistent_tensors_are_refused() -> None:
    more = message(1, 2, raw=bytes(8))
    more.raw_input_contents.append(b"")
    for made in (
        message(1, 2**61, raw=b""), message(1, 2, raw=bytes(4)), message(1, -1, raw=bytes(4)), message(1, 2), more,
        message(1, 3, fp32_contents=[1, 2]), message(3, bytes_contents=[b"a" * 9, b"b" * 9], datatype="BYTES"),
        message(4, int_contents=[1, -1, 2**31 - 1], datatype="INT32"), message(*[1] * (MOST_DIMS + 1), raw=bytes(4)),
    ):  # fmt: skip
        with pytest.raises(RefusedError) as caught:
            screen(made.SerializeToString())
        assert caught.value.request_id == "mine"


@given(st.fixed_dictionaries({}, optional={name: st.lists(values) for name, values in FIELDS.items()}))
def test_values_are_counted_as_protobuf_reads_them(contents: dict[str, Any]) -> None:
    made = message(1, **contents)
    reduced, sizes = _reduce(made.SerializeToString(), AnyModel())
    assert sizes == [(max(map(len, contents.values()), default=0), False)]
    made.inputs[0].ClearField("contents")
    assert reduced == made


@given(st.lists(st.binary(max_size=50)), st.dictionaries(st.text(max_size=5), st.integers(-9, 9)))
def test_sizes_are_those_of_the_raw_contents(raw: list[bytes], parameters: dict[str, int]) -> None:
    made = Request(model_name="a", raw_input_contents=raw)
    for name, value in parameters.items():
        made.parameters[name].int64_param = value
    for number in range(len(raw)):
        made.inputs.add(name=str(number), shape=[number]).parameters["a"].string_param = "b"
    reduced, sizes = _reduce(made.SerializeToString(), AnyModel())
    assert sizes == [(len(each), True) for each in raw]
    made.ClearField("raw_input_contents")
    assert reduced == made


@pytest.mark.parametrize(
    ("added", "name"),
    [
        (Request(model_name="b"), "model_name"),
        (Request(model_name="a"), "model_name"),
        (Request(model_version="1"), "model_version"),
        (Request(id="x"), "id"),
    ],
)
def test_a_field_that_is_given_twice(added: Any, name: str) -> None:
    made = message(1, raw=bytes(4))
    made.model_version = "2"
    with pytest.raises(RefusedError, match=f"has a field {name} twice"):
        screen(made.SerializeToString() + added.SerializeToString())


@pytest.mark.parametrize(
    ("field", "value"), [("name", "Y"), ("datatype", "FP64"), ("contents", {"fp32_contents": [1]})]
)
def test_a_field_of_an_input_that_is_given_twice(field: str, value: Any) -> None:
    tensor = Request.InferInputTensor
    first = tensor(name="X", datatype="FP32", shape=[1], contents={"fp32_contents": [1]})
    content = first.SerializeToString() + tensor(**{field: value}).SerializeToString()
    made = Request(model_name="a").SerializeToString() + b"\x2a" + bytes([len(content)]) + content
    assert getattr(Request.FromString(made).inputs[0], field) is not None
    with pytest.raises(RefusedError, match=f"has a field {field} twice"):
        screen(made)


@given(st.binary(max_size=60) | st.lists(st.sampled_from([10, 1, 97, 0x2A, 3, 0x3A, 0x80, 0xFF, 0])).map(bytes))
def test_whatever_comes(content: bytes) -> None:
    """Bytes that pass are a message to protobuf too, with the same number of inputs."""
    try:
        reduced, sizes = _reduce(content, AnyModel())
    except RefusedError:
        return
    try:
        whole = Request.FromString(content)
    except DecodeError:  # within the contents of an input, which Triton reads
        return
    assert [len(each) for each in whole.raw_input_contents] == [size for size, is_raw in sizes if is_raw]
    assert len(whole.inputs) == len(reduced.inputs)


@pytest.mark.parametrize(
    "contents", [b"\x2a\x01\x80", b"\x12" + bytes([11]) + b"\x80" * 10 + b"\0", b"\x32\x03aaa", b"\x0b"]
)
def test_contents_that_are_not_numbers(contents: bytes) -> None:
    tensor = Request.InferInputTensor(name="X", datatype="INT32", shape=[1]).SerializeToString()
    tensor += b"\x2a" + bytes([len(contents)]) + contents
    made = Request(model_name="a").SerializeToString() + b"\x2a" + bytes([len(tensor)]) + tensor
    with pytest.raises(DecodeError):
        Request.FromString(made)
    with pytest.raises(RefusedError, match="not a ModelInferRequest"):
        _reduce(made, AnyModel())


def test_too_many_entries() -> None:
    raw = message(1, raw=bytes(4)).SerializeToString()
    assert len(raw) < SMALL
    part = Request(parameters={"a": service_pb2.InferParameter(bool_param=True)}).SerializeToString()
    with pytest.raises(RefusedError, match=f"more than {MOST_FIELDS} fields") as caught:
        screen(raw + part * MOST_FIELDS)
    assert caught.value.request_id == "mine"
    texts = message(1, MOST_VALUES + 1, datatype="BYTES", bytes_contents=[b""] * (MOST_VALUES + 1))
    with pytest.raises(RefusedError, match=r"more than 65536 strings .* Send them as raw_input_contents"):
        screen(texts.SerializeToString())
    several = message(1, datatype="BYTES", bytes_contents=[b""] * (MOST_VALUES // 2))
    for number in range(2):
        several.inputs.add(name=str(number), datatype="BYTES").contents.bytes_contents.extend(
            [b""] * (MOST_VALUES // 2)
        )
    with pytest.raises(RefusedError, match="more than 65536 strings"):
        screen(several.SerializeToString())
    inputs = Request(model_name="a", inputs=[Request.InferInputTensor(name="X")] * 1001)
    with pytest.raises(RefusedError, match="1001 inputs"):
        screen(inputs.SerializeToString())
    named = message(1, raw=bytes(4))
    named.parameters["a"].string_param = "x" * MOST_BYTES
    with pytest.raises(RefusedError, match="bytes of names and parameters"):
        screen(named.SerializeToString())
    large = message(2**20, raw=np.zeros(2**20, np.float32).tobytes())
    assert screen(large.SerializeToString()).model == "a"
