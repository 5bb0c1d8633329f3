"""The generate extension's JSON as gRPC messages, with Triton 24.10's own answers as the reference."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2
from tritonclient.utils import serialize_byte_tensor

from shoal.kit.component.spec import REPOSITORY, ModelSpec, TensorSpec
from shoal.serving.gateway.http.bodies import CHUNK, SMALL
from shoal.serving.gateway.refusals import RefusedError
from shoal.serving.gateway.v2.generate import to_json, to_message
from shoal.serving.gateway.v2.rules import Rules, read_rules
from shoal.serving.gateway.v2.screening import READ, screen_message
from tests.support.configs import PYTHON, chain, make_configs

KINDS = {"B": "BOOL", "I": "INT32", "U": "UINT64", "F": "FP32", "S": "STRING", "T": "INT8", "H": "FP16"}
TENSORS = [TensorSpec(name, f"TYPE_{kind}", (-1,), is_optional=True) for name, kind in KINDS.items()]
TENSORS.append(TensorSpec("M", "TYPE_INT32", (-1, 2), is_optional=True))


def spec(*tensors: TensorSpec, max_batch_size: int = 0) -> ModelSpec:
    return ModelSpec("m", tensors or tuple(TENSORS), (), max_batch_size=max_batch_size)


def convert(document: Any, **options: Any) -> Any:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    rules = Rules(options.pop("spec", spec()), takes_any=options.pop("takes_any", True))
    message, _ = to_message(body, rules, "")
    screen_message(message, {"m": rules})
    return message


@pytest.mark.parametrize(
    ("document", "shape", "raw"),
    [
        ({"I": 5}, [1], np.array([5], np.int32).tobytes()),
        ({"I": []}, [0], b""),
        ({"B": [True, False]}, [2], b"\1\0"),
        ({"U": 2**64 - 1}, [1], b"\xff" * 8),
        ({"F": [1, 2.5]}, [2], np.array([1, 2.5], np.float32).tobytes()),
        (b'{"F": [NaN]}', [1], np.array([np.nan], np.float32).tobytes()),
        ({"S": ["é", ""]}, [2], b"\2\0\0\0\xc3\xa9\0\0\0\0"),
        (b'{"S": "\xff"}', [1], b"\1\0\0\0\xff"),
        ({"M": [1, 2, 3, 4]}, [2, 2], np.arange(1, 5, dtype=np.int32).tobytes()),
        ({"parameters": {"I": 5}}, [1], np.array([5], np.int32).tobytes()),
    ],
)
def test_values_become_tensors(document: Any, shape: list[int], raw: bytes) -> None:
    message = convert(document)
    (tensor,) = message.inputs
    assert (list(tensor.shape), message.raw_input_contents[0]) == (shape, raw)
    assert tensor.datatype == {"S": "BYTES"}.get(tensor.name, KINDS.get(tensor.name, "INT32"))


@pytest.mark.parametrize(
    ("dims", "count", "shape"),
    [
        ((1,), 1, [1, 1]),
        ((1,), 3, [3, 1]),
        ((-1,), 3, [1, 3]),
        ((-1,), 0, [1, 0]),
        ((2, 3), 6, [1, 2, 3]),
        ((-1, -1), 6, [1, 1, 6]),  # as Triton and the client do
        ((2, -1, -1), 6, [1, 2, 1, 3]),
    ],
)
def test_rows(dims: tuple[int, ...], count: int, shape: list[int]) -> None:
    message = convert({"X": [0] * count}, spec=spec(TensorSpec("X", "TYPE_INT32", dims), max_batch_size=8))
    assert list(message.inputs[0].shape) == shape


def test_other_members_are_parameters() -> None:
    message = convert({"I": 1, "a": 3, "b": "s", "parameters": {"c": True, "d": 1.5}})
    found = {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in message.parameters.items()}
    assert found == {"a": 3, "b": "s", "c": True, "d": 1.5}
    assert to_message(b'{"id": "me"}', Rules(spec()), "3")[1] == "me"
    assert to_message(b"{}", Rules(spec()), "3")[0].model_version == "3"


@settings(max_examples=300)
@given(st.text(min_size=1).filter(lambda name: name not in {*KINDS, "M", "id", "parameters", *READ, REPOSITORY}))
def test_a_member_that_is_no_input_is_refused(name: str) -> None:
    """Triton would take it as a parameter, which nothing reads."""
    for document in ({"I": 1, name: 1}, {"I": 1, "parameters": {name: "a"}}):
        with pytest.raises(RefusedError, match=r"Model m has no input .*\. (Did you mean|It has B, I, U,)"):
            convert(document, takes_any=False)


def test_the_nearest_name_is_named_and_tritons_own_parameters_pass() -> None:
    with pytest.raises(RefusedError, match=r"Model m has no input 'max_token'. Did you mean 'max_tokens'?"):
        convert({"max_token": 1}, spec=spec(TensorSpec("max_tokens", "TYPE_INT32", (1,))), takes_any=False)
    message = convert({"I": 1, "timeout": 100, "sequence_id": 5, REPOSITORY: "x"}, takes_any=False)
    assert set(message.parameters) == {"timeout", "sequence_id", REPOSITORY}


def test_models_that_stand_on_nvidias_vllm_backend_take_any_member() -> None:
    configs = make_configs(vllm=PYTHON.replace('"python"', '"vllm"'), plain=PYTHON, both=chain("plain", "vllm"))
    assert {name for name, rules in read_rules(configs).items() if rules.takes_any} == {"vllm", "both"}
    assert all(rules.takes_any for rules in read_rules(configs, is_lenient=True).values())


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"I": 1.5}, r"Input 'I' \(INT32 \[-1\]\) takes whole numbers, .* not 1\.5"),
        ({"I": "a"}, 'not "a"'),
        ({"I": True}, "not true"),
        ({"I": None}, "not null"),
        ({"I": {"a": 1}}, 'not {"a": 1}'),
        ({"M": [[1, 2], [3, 4]]}, r"a flat list; not \[1, 2\]"),
        ({"M": [1, 2, 3]}, r"Input 'M' has 3 values, which do not fit its shape \[-1, 2\]"),
        ({"B": 1}, "takes true or false"),
        ({"S": 1}, "takes strings"),
        ({"S": "\ud800"}, r"Input 'S' has a value that STRING \[-1\] cannot hold"),
        ({"T": 300}, r"Input 'T' has a value that INT8 \[-1\] cannot hold"),
        ({"U": -1}, r"Input 'U' has a value that UINT64 \[-1\] cannot hold"),
        ({"H": 1.0}, "Input 'H' is FP16, which JSON cannot represent"),
        ({"other": [3]}, r"'other' is \[3\]. It is not an input of the model; a parameter is a string"),
        ({"other": 2**70}, "'other' is 1180591620717411303424"),
        ({"I": 1, "parameters": {"I": 2}}, "'I' is given twice"),
        (b'{"I": 1, "I": 2}', "'I' is given twice"),
        ({"F": 1e300}, "a number that an input of FP32 or FP64 cannot hold"),
        ({"F": 10**400}, r"Input 'F' has a value that FP32 \[-1\] cannot hold"),
        (b'{"F": 1e999}', "a number that an input of FP32 or FP64 cannot hold"),
        (b'{"I": 1e999}', "takes whole numbers"),
        (b'{"I": ' + b"1" * 5000 + b"}", "cannot be read"),
        (b'{"I": NaN', "cannot be read"),
        (b"[NaN]", "cannot be read"),
        (b"NaN", "cannot be read"),
        (b"", "cannot be read"),
        (b"5", "cannot be read"),
        (b"\xff", "cannot be read"),
        (b'{"id": "\\ud800"}', "cannot be read"),
        ({"I": 1, "id": None}, "id must be a string"),
        ({"I": 1, "id": "x" * 1025}, "id is longer than 1024 bytes"),
        ({"I": 1, "parameters": [1]}, "parameters an object"),
        ({"I": 1, "parameters": None}, "parameters an object"),
        ({"I": [0] * 100_000}, "The JSON has 100000 values; generate takes 65536"),
        ({"I": "x" * 2**22}, "bytes; generate takes 4194304"),
        ({str(number): 1 for number in range(129)}, "129 parameters; at most 128"),
        ({"I": 1, "id": 5}, "id must be a string"),
        ({"I": 1, "parameters": 5}, "parameters an object"),
    ],
)
def test_documents_that_do_not_fit(document: Any, message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        convert(document)


def test_rows_have_a_limit() -> None:
    column = spec(TensorSpec("X", "TYPE_INT32", (1,)), max_batch_size=8)
    assert list(convert({"X": [0] * 8}, spec=column).inputs[0].shape) == [8, 1]
    with pytest.raises(RefusedError, match=r"Input 'X' \(INT32 \[1\]\) has 9 rows; m takes 1 to 8"):
        convert({"X": [0] * 9}, spec=column)


ODD: list[Any] = ["\ud800", 2**63, 10**4000, -1]
NAMES = [*KINDS, "M", "id", "parameters", "p"]


def fill(start: bytes, item: bytes, end: bytes) -> bytes:
    """JSON that is just small enough to be read on the event loop."""
    return start + item * ((SMALL - len(start) - len(end)) // len(item)) + end


@pytest.mark.parametrize(
    "body",
    [
        fill(b'{"S": [""', b',""', b"]}"),
        fill(b'{"F": [0', b",0", b"]}"),
        fill(b'{"F": [0', b",0.1234567", b"]}"),
        fill(b'{"p": [0', b",0", b"]}"),
        fill(b'{"S": "', b"\\u00e9", b'"}'),
        fill(b'{"S": "', b"\xff", b'"}'),
        fill(b"", b"[", b""),
        b"{" + b",".join(b'"%x":1' % number for number in range(1700)) + b"}",
    ],
    ids=["strings", "integers", "floats", "not an input", "escapes", "bytes", "brackets", "members"],
)
def test_small_documents_are_read_within_milliseconds(body: bytes) -> None:
    """Within 5 ms; the test allows for other work on the machine."""
    assert len(body) <= SMALL
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        with contextlib.suppress(RefusedError):
            convert(body)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.015


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(ODD),
    lambda children: st.lists(children) | st.dictionaries(st.sampled_from(NAMES), children),
    max_leaves=8,
)


@given(VALUES, st.integers(0, 200), st.binary(max_size=3), st.booleans())
def test_odd_json_is_refused_or_converted(document: Any, at: int, noise: bytes, is_cut: bool) -> None:
    """No other exception: it would be a fault of the service, with status 500."""
    body = json.dumps(document).encode()
    body = body[:at] + noise + body[at + is_cut * len(noise) :]
    with contextlib.suppress(RefusedError):
        message, given_id = to_message(body, Rules(spec()), "")
        screen_message(message, {"m": Rules(spec())})
        message.SerializeToString()
        json.loads(to_json(service_pb2.ModelInferResponse(model_name="m"), given_id).decode(errors="replace"))


@pytest.mark.parametrize(
    ("kind", "array"),
    [("FP32", np.arange(10_000, dtype=np.float32)), ("INT64", np.arange(4096)), ("BF16", np.zeros(4097, np.uint16))],
)
def test_long_answers_are_written_in_parts(kind: str, array: Any) -> None:
    answer = service_pb2.ModelInferResponse(model_name="m")
    answer.outputs.add(name="Y", datatype=kind, shape=array.shape)
    answer.raw_output_contents.append(array.tobytes())
    assert json.loads(to_json(answer, "")) == {"Y": array.tolist(), "model_name": "m", "model_version": ""}


@pytest.mark.parametrize("texts", [['"é"\n\\' * CHUNK], ["", "a" * CHUNK, "b"], []])
def test_long_texts_are_written_in_parts(texts: list[str]) -> None:
    answer = service_pb2.ModelInferResponse(model_name="m")
    answer.outputs.add(name="Y", datatype="BYTES", shape=[len(texts)])
    array = np.array([text.encode() for text in texts], np.object_)
    answer.raw_output_contents.append(serialize_byte_tensor(array).item() if texts else b"")
    assert json.loads(to_json(answer, ""))["Y"] == (texts[0] if len(texts) == 1 else texts)


def test_answers_become_json() -> None:
    answer = service_pb2.ModelInferResponse(model_name="m", model_version="1", id="ours")
    answer.parameters["triton_final_response"].bool_param = True
    answer.parameters["sequence_id"].int64_param = 0
    arrays = {
        "B": ("BOOL", np.array([True, False])),
        "F": ("FP32", np.array([0.1], np.float32)),
        "H": ("BF16", np.array([0x3FC0], np.uint16)),
        "N": ("INT32", np.zeros(0, np.int32)),
        "S": ("BYTES", np.array(["é".encode(), b"\xff"], np.object_)),
    }
    for name, (kind, array) in arrays.items():
        answer.outputs.add(name=name, datatype=kind, shape=array.shape)
        answer.raw_output_contents.append(serialize_byte_tensor(array).item() if kind == "BYTES" else array.tobytes())
    assert to_json(answer, "mine") == (
        b'{"B":[true,false],"F":0.10000000149011612,"H":1.5,"N":[],"S":["\xc3\xa9","\xff"],"id":"mine",'
        b'"model_name":"m","model_version":"1","sequence_id":0}'
    )
