"""What Triton does not survive is refused; what it does is passed on as it was."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from shoal.component.spec import ModelSpec, TensorSpec
from shoal.gateway.refusals import RefusedError
from shoal.gateway.screening import (
    MOST_NESTED,
    SMALL,
    Rules,
    screen_json,
    screen_message,
    screen_nesting,
)

KINDS = {"Y": ("FP32", (2,)), "ANY": ("INT64", (-1,)), "TEXT": ("STRING", (1,)), "HALF": ("FP16", (2,))}
OUTPUTS = tuple(TensorSpec(name, f"TYPE_{dtype}", dims) for name, (dtype, dims) in KINDS.items())
RULES = Rules(ModelSpec("a", (TensorSpec("X", "TYPE_FP32", (-1,)),), OUTPUTS, 4), num_priorities=3)


def request(**fields: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0], **fields}]}


@pytest.mark.parametrize(
    ("fields", "num_binary", "message"),
    [
        ({"shape": [1, 2**61]}, 0, "more than 2147483648 bytes"),
        ({"shape": [2**61, 8, 0], "data": []}, 0, "more than 2147483648 bytes"),
        ({"shape": [2**63, 2]}, 0, "more than 2147483648 bytes"),
        ({"shape": [1, -1]}, 0, "Give dimensions of 0 or more"),
        ({"shape": [-1, -2]}, 0, "Give dimensions of 0 or more"),
        ({"shape": [1, 1000]}, 0, "and fewer values"),
        ({"shape": [1, 2.5]}, 0, r"Expected `int`, got `float` - at `\$.inputs\[0\].shape\[1\]`"),
        ({"parameters": {"binary_data_size": 8}}, 4, "4 bytes follow the JSON; its inputs declare 8"),
        ({"parameters": {"binary_data_size": 4}}, 4, "has shape .* of FP32, and 4 bytes"),
        ({"parameters": {"binary_data_size": -4}}, 0, "has binary_data_size -4"),
        ({"datatype": "BYTES", "shape": [3], "parameters": {"binary_data_size": 8}}, 8, "and 8 bytes"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], num_binary: int, message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        screen_json(json.dumps(request(**fields)).encode(), num_binary, RULES)


def test_of_two_equal_keys_one_is_judged_and_passed_on() -> None:
    tensor = '{"name": "X", "datatype": "FP32", "shape": [1, 4611686018427387904], "shape": [1, 1], "data": [1]}'
    body = f'{{"inputs": [{tensor}]}}'.encode()
    passed = json.loads(screen_json(body, 0, RULES)[0], object_pairs_hook=list)
    assert [value for key, value in passed[0][1][0] if key == "shape"] == [[1, 1]]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"inputs": 3}', '{"inputs": [NaN]}', '{"inputs": [{"name": NaN}]}']
)
def test_what_is_no_request(text: str) -> None:
    with pytest.raises(RefusedError, match="cannot be read"):
        screen_json(text.encode(), 0, RULES)


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text() | st.sampled_from(["[", "{", '"', "\\", '\\"']),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
)


@given(st.lists(VALUES), st.text(), st.sampled_from([0, SMALL]))
def test_data_and_ids_are_passed_on_as_they_are(data: Any, name: str, padding: int) -> None:
    """Small requests are parsed; those with NaN, and large ones, are parsed without their data."""
    body = json.dumps({"id": name, **request(shape=[], data=["x" * padding, *data]), "outputs": [{"name": "Y"}]})
    data = ["x" * padding, *data]
    passed, request_id = screen_json(body.encode(), 0, RULES)
    assert request_id == name
    assert json.dumps(json.loads(passed)["inputs"][0]["data"]) == json.dumps(data)
    assert json.loads(passed)["outputs"] == [{"name": "Y"}]


@given(st.integers(0, 200), st.text(alphabet='[]{}"\\a', max_size=20))
def test_nesting_is_counted_outside_strings(depth: int, text: str) -> None:
    content = ("[" * depth + json.dumps(text * 20) + "]" * depth).encode()
    if depth > MOST_NESTED:
        with pytest.raises(RefusedError, match=f"nested {depth} deep"):
            screen_nesting(content)
    else:
        screen_nesting(content)


def message(shape: tuple[int, ...], raw: bytes | None, **contents: list[Any]) -> Any:
    made = service_pb2.ModelInferRequest(model_name="a")
    tensor = made.inputs.add(name="X", datatype="FP32", shape=shape)
    for name, values in contents.items():
        getattr(tensor.contents, name).extend(values)
    if raw is not None:
        made.raw_input_contents.append(raw)
    return made


def test_messages_are_judged_alike() -> None:
    screen_message(message((1, 2), bytes(8)), "a", {})
    screen_message(message((1, 2), None, fp32_contents=[1, 2]), "a", {})
    screen_message(message((0, 2), b""), "a", {})
    for bad in (
        message((1, 2**61), b""), message((1, 2), bytes(4)), message((1, -1), bytes(4)), message((-1, -1), bytes(4)),
        message((1, 3), None, fp32_contents=[1, 2]), message((1, 2), None), message((2**61, 8, 0), b""),
    ):  # fmt: skip
        with pytest.raises(RefusedError):
            screen_message(bad, "a", {})
    with pytest.raises(RefusedError, match="names two models, 'b' and 'a'"):
        screen_message(message((1, 2), bytes(8)), "b", {})
    two = message((1, 2), bytes(8))
    two.raw_input_contents.append(b"")
    with pytest.raises(RefusedError, match="1 inputs and 2 raw contents"):
        screen_message(two, "a", {})
