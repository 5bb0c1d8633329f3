"""Requests that would end Triton are refused; others are passed on unchanged."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from shoal.authoring.repository.model_folders import read_configs
from shoal.kit.component.spec import ModelSpec, TensorSpec
from shoal.serving.gateway.http.bodies import CHUNK, SMALL
from shoal.serving.gateway.http.json_scanning import MOST_NESTED, scan, screen_nesting
from shoal.serving.gateway.refusals import RefusalReason, RefusedError
from shoal.serving.gateway.v2.rules import Rules, read_rules
from shoal.serving.gateway.v2.screening import MOST_BESIDE, MOST_PARAMETERS, screen_json, screen_message
from tests.support.service import make_repository

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
        ({"shape": [1, 2.5]}, 0, r"Expected whole number, got number - at `\$.inputs\[0\].shape\[1\]`"),
        ({"parameters": {"binary_data_size": 8}}, 4, "4 bytes follow the JSON; its inputs declare 8"),
        ({"parameters": {"binary_data_size": 4}}, 4, "has shape .* of FP32, and 4 bytes"),
        ({"parameters": {"binary_data_size": -4}}, 0, "has binary_data_size -4"),
        ({"datatype": "STRING"}, 0, "'X' has the datatype 'STRING'. Known: BYTES, BOOL, UINT8"),
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
    max_leaves=10,
)


@settings(max_examples=50)
@given(st.lists(VALUES), st.text(), st.sampled_from([0, SMALL]))
def test_data_and_ids_are_passed_on_as_they_are(data: Any, name: str, padding: int) -> None:
    """Small requests are parsed; those with NaN, and large ones, are parsed without their data."""
    data = ["x" * padding, *data]
    count = scan(json.dumps(data).encode())[1].commas + 1
    body = json.dumps({"id": name, **request(shape=[count], data=data), "outputs": [{"name": "Y"}]})
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


@pytest.mark.parametrize("text", ['"', "\\", '\\"', '\\\\"', "[", ","])
@pytest.mark.parametrize("offset", range(4))
def test_pieces_are_scanned_as_one(text: str, offset: int) -> None:
    """Strings and escapes that begin in one piece and end in the next."""
    value = "x" * (CHUNK - 20 + offset) + text * 40
    content = json.dumps({"a": [{"b": [value, 1, 2]}, [[]]], "c": [value]}).encode()
    spans, counts = scan(content, 4)
    assert [json.loads(content[start:end]) for start, end, _ in spans] == [[value, 1, 2], []]
    assert ([span.num_values for span in spans], counts) == ([3, 1], (4, 7, 3, 0))
    long = content[:-1] + b', "d": ' + b" " * 5000 + b"9" * (CHUNK + 5) + b"  }"
    assert scan(long)[1] == (5, 7, 4, CHUNK + 5)
    assert scan(b"1" * 2000)[1].longest == 2000
    assert [json.loads(content[start:end]) for start, end, _ in scan(content, 2)[0]][1] == [value]


@pytest.mark.parametrize("kind", ["numbers", "NaN", "strings", "lists"])
def test_long_data_is_passed_on_unread(kind: str) -> None:
    kinds: dict[str, list[Any]] = {
        "numbers": [1.25, 3],
        "NaN": [float("nan"), -float("inf")],
        "strings": ['a"],[', "\\"],
        "lists": [[1], []],
    }
    values = kinds[kind]
    document = request(shape=[2, SMALL], data=values * SMALL)
    document["inputs"] += [{"name": "X", "datatype": "FP32", "shape": [1], "data": [3]}]
    rules = RULES._replace(spec=ModelSpec("a", RULES.spec.inputs * 2, OUTPUTS, 4))
    passed, _ = screen_json(json.dumps(document).encode(), 0, rules)
    is_same = json.dumps(json.loads(passed), sort_keys=True) == json.dumps(document, sort_keys=True)
    assert is_same  # a comparison that pytest would not explain, which takes minutes
    with pytest.raises(RefusedError, match=rf"has shape \[{SMALL}\], and {2 * SMALL} values"):
        screen_json(json.dumps(request(shape=[SMALL], data=values * SMALL)).encode(), 0, RULES)
    with pytest.raises(RefusedError, match="and fewer values"):
        screen_json(json.dumps(request(shape=[1, 10**8], data=values * SMALL)).encode(), 0, RULES)


def test_an_unknown_input_and_rows_alone() -> None:
    document = request(shape=[1, 2], data=[1, 2])
    document["inputs"][0]["name"] = "Y"
    with pytest.raises(RefusedError, match=r"^a has no input 'Y'\. Its inputs: X \(FP32 \[-1, -1\]\)\.$"):
        screen_json(json.dumps(document).encode(), 0, RULES)
    shown = r'An input is an object: \{"name": "X", "datatype": "FP32", "shape": \[1, 1\], .*/v1/models/a:predict'
    with pytest.raises(RefusedError, match=shown):
        screen_json(json.dumps({"inputs": [[1, 2]]}).encode(), 0, RULES)
    with pytest.raises(RefusedError, match=rf"missing required field `inputs`\. {shown}"):
        screen_json(json.dumps({"instances": [[1, 2]]}).encode(), 0, RULES)


LONG = "x" * MOST_BESIDE


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({**request(), "id": LONG}, "bytes besides its inputs' data; at most 65536 are read"),
        ({**request(), "parameters": {str(number): 1 for number in range(10_000)}}, "bytes besides its inputs' data"),
        (request(shape=[1] * MOST_BESIDE), "Expected array, got string"),
        ({"inputs": request()["inputs"] * 5000}, "more than 4096 lists"),
        ({**request(), "id": "x" * 1025}, "id is longer than 1024 bytes"),
        ({**request(), "id": "é" * 513}, "id is longer than 1024 bytes"),
        ({"inputs": request()["inputs"] * 2}, "2 inputs; at most 1 are read"),
        (request(shape=[1] * 65), "65 dimensions of input 'X'; at most 64"),
        ({**request(), "parameters": {str(number): 1 for number in range(129)}}, "129 parameters; at most 128"),
        (request(parameters={str(number): 1 for number in range(129)}), "129 parameters; at most 128"),
        ({**request(), "outputs": [{"name": str(number)} for number in range(3)]}, "a has no output '0'. Its"),
        ({**request(), "outputs": [{}]}, "missing required field `name`"),
        ({**request(), "outputs": [{"name": "Y"}, {"name": "TEXT"}, {"name": "Y"}]}, "'Y' is listed twice"),
        ({**request(), "parameters": [1]}, "Expected object, got array"),
        ({**request(), "outputs": [{"name": "Y", "parameters": [1]}]}, "Expected object, got array"),
    ],
)
def test_numbers_and_sizes_have_limits(body: dict[str, Any], message: str) -> None:
    with pytest.raises(RefusedError, match=re.escape(message)):
        screen_json(json.dumps(body).encode(), 0, RULES)


# --- what Triton itself reads ---------------------------------------------------------------------------------------

FLAGS, WHOLE, ODD = [True, False], [0, 1, 3], ["1", "", 1.0, float("nan"), None]
READ: dict[str, tuple[list[Any], list[Any]]] = {  # values that are right, and those that are refused
    "sequence_id": ([0, 7, 2**63 - 1, "", "x" * 128], [-1, "x" * 129, True, 1.5, None]),
    "sequence_start": (FLAGS, [*WHOLE, *ODD]),
    "sequence_end": (FLAGS, [*WHOLE, *ODD]),
    "priority": (WHOLE, [-1, 4, 2**32, 2**63 - 1, *FLAGS, *ODD]),
    "timeout": ([*WHOLE, 2**63 - 1], [-1, *FLAGS, *ODD]),
    "binary_data_output": (FLAGS, [*WHOLE, *ODD]),
    "triton_enable_empty_final_response": (FLAGS, [*WHOLE, *ODD]),
    "triton_other": ([], [1, True, "x"]),
    "mine": ([1, -1, True, "x" * 1000, 2.5, -(2**63)], [None]),
}
TIMES = [(name, value, True) for name, (right, _) in READ.items() for value in right]
TIMES += [(name, value, False) for name, (_, wrong) in READ.items() for value in wrong]


def judged(parameters: dict[str, Any], outputs: list[dict[str, Any]], way: str) -> None:
    """Screen a request as JSON or as a message."""
    if way == "json":
        screen_json(json.dumps({**request(), "parameters": parameters, "outputs": outputs}).encode(), 0, RULES)
        return
    made = message((1, 2), bytes(8))
    add(made.parameters, parameters)
    for output in outputs:
        add(made.outputs.add(name=output["name"]).parameters, output.get("parameters", {}))
    screen_message(made, {"a": RULES})


def add(target: Any, parameters: dict[str, Any]) -> None:
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    for name, value in parameters.items():
        if value is None:
            target[name].SetInParent()
        else:
            setattr(target[name], kinds[type(value)], value)


@pytest.mark.parametrize("way", ["json", "message"])
@pytest.mark.parametrize(("name", "value", "is_right"), TIMES)
def test_parameters_of_requests(name: str, value: Any, is_right: bool, way: str) -> None:
    if is_right:
        judged({name: value}, [], way)
    else:
        with pytest.raises(RefusedError) as caught:
            judged({name: value}, [], way)
        assert caught.value.reason is RefusalReason.WRONG
        if not (way == "json" and value != value):  # JSON does not know NaN
            assert name in caught.value.message


@pytest.mark.parametrize("way", ["json", "message"])
@pytest.mark.parametrize(
    ("name", "number", "words"),
    [
        ("Y", 1, ""), ("Y", 2, ""), ("Y", 1000, ""), ("Y", 2**31 - 1, ""),
        ("Y", 0, "classification 0"), ("Y", -1, "classification -1"), ("Y", 2**31, "2147483648"), ("Y", 2**32, "429"),
        ("Y", True, "classification True"), ("Y", "1", "classification '1'"), ("Y", 1.0, "classification 1.0"),
        ("Y", None, "classification None"), ("TEXT", 1, "not integers, FP32"), ("HALF", 1, "not integers, FP32"),
    ],
)  # fmt: skip
def test_classification(name: str, number: Any, words: str, way: str) -> None:
    outputs = [{"name": name, "parameters": {"classification": number}}]
    if not words:
        judged({}, outputs, way)
    else:
        with pytest.raises(RefusedError, match=re.escape(words)):
            judged({}, outputs, way)


def test_outputs_that_may_be_empty_are_classified_over_grpc_alone() -> None:
    outputs = [{"name": "ANY", "parameters": {"classification": 1}}]
    judged({}, outputs, "message")
    with pytest.raises(RefusedError, match="because it can be empty"):
        judged({}, outputs, "json")


@pytest.mark.parametrize("way", ["json", "message"])
@pytest.mark.parametrize("name", ["shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"])
def test_shared_memory_is_closed(name: str, way: str) -> None:
    with pytest.raises(RefusedError, match="Shared memory is closed") as caught:
        judged({}, [{"name": "Y", "parameters": {name: 1}}], way)
    assert caught.value.reason is RefusalReason.CLOSED
    made = message((1, 2), bytes(8))
    add(made.inputs[0].parameters, {name: 1})
    body = json.dumps(request(parameters={name: 1})).encode()
    with pytest.raises(RefusedError, match="Shared memory is closed"):
        screen_json(body, 0, RULES) if way == "json" else screen_message(made, {"a": RULES})


def test_messages_have_the_same_limits() -> None:
    for spoil, words in (
        (lambda made: made.inputs.add(name="W"), "2 inputs; at most 1"),
        (lambda made: setattr(made, "id", "x" * 1025), "id is longer than 1024"),
        (lambda made: add(made.parameters, {str(n): 1 for n in range(MOST_PARAMETERS + 1)}), "129 parameters"),
        (lambda made: made.outputs.add(name="W"), "a has no output 'W'"),
        (lambda made: [made.outputs.add(name="Y") for _ in range(5)], "5 outputs; at most 4"),
        (lambda made: [made.outputs.add(name="Y") for _ in range(2)], "'Y' is listed twice"),
        (lambda made: made.inputs[0].shape.extend([1] * 63), "65 dimensions"),
    ):
        made = message((1, 2), bytes(8))
        spoil(made)
        with pytest.raises(RefusedError, match=words):
            screen_message(made, {"a": RULES})


def test_priorities_are_those_of_the_models_below(tmp_path: Path) -> None:
    """An ensemble passes a request's priority on to its steps."""
    priorities = "dynamic_batching { priority_levels: 3 default_priority_level: 1 }"
    repository = make_repository(tmp_path)
    config = repository / "second" / "config.pbtxt"
    config.write_text(config.read_text(encoding="utf-8").replace("dynamic_batching { }", priorities), encoding="utf-8")
    rules = read_rules(read_configs(repository))
    found = {name: rule.num_priorities for name, rule in rules.items()}
    assert found == {"chain": 3, "first": 0, "other": 0, "second": 3}


def message(shape: tuple[int, ...], raw: bytes | None, **contents: list[Any]) -> Any:
    made = service_pb2.ModelInferRequest(model_name="a")
    tensor = made.inputs.add(name="X", datatype="FP32", shape=shape)
    for name, values in contents.items():
        getattr(tensor.contents, name).extend(values)
    if raw is not None:
        made.raw_input_contents.append(raw)
    return made


def test_messages_are_judged_alike() -> None:
    screen_message(message((1, 2), bytes(8)), {})
    screen_message(message((1, 2), None, fp32_contents=[1, 2]), {})
    screen_message(message((0, 2), b""), {})
    for bad in (
        message((1, 2**61), b""), message((1, 2), bytes(4)), message((1, -1), bytes(4)), message((-1, -1), bytes(4)),
        message((1, 3), None, fp32_contents=[1, 2]), message((1, 2), None), message((2**61, 8, 0), b""),
    ):  # fmt: skip
        with pytest.raises(RefusedError):
            screen_message(bad, {})
    two = message((1, 2), bytes(8))
    two.raw_input_contents.append(b"")
    with pytest.raises(RefusedError, match="1 inputs and 2 raw contents"):
        screen_message(two, {})
