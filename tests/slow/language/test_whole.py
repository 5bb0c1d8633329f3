"""Engines that are not decoupled: requests of many rows and one answer, in this process and through the service."""

from __future__ import annotations

import json
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import grpc  # type: ignore[import-untyped]
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException, np_to_triton_dtype
from typer.testing import CliRunner

import shoal
from shoal import cli
from shoal.clients.client.calls import Call, Method
from shoal.clients.client.grpc_transport import to_grpc
from shoal.clients.local import Pipeline
from tests.conftest import Scale
from tests.support.llm import ENGINE, open_engine, token_inputs, tokens_of
from tests.support.planted import write
from tests.support.rows import ROWS, make_config, prompts, stack
from tests.support.service import Service, wait_until

WAYS = ["grpc", "http", "local"]
Here: TypeAlias = Callable[[str], Pipeline]


@pytest.fixture(scope="module")
def singles(folder: Path) -> dict[tuple[int, ...], list[int]]:
    """The tokens of each prompt asked alone, from the engine in pieces."""
    with open_engine(folder) as component:
        asked = {tuple(ids): component.stream(token_inputs(ids, 6)) for ids in prompts(64)}
        return {ids: tokens_of(stream) for ids, stream in asked.items()}


def ask(way: str, service: Service, here: Here, model: str, inputs: dict[str, Any]) -> Any:
    if way == "local":
        return here(model)(**inputs)
    with shoal.Client(getattr(service, way), protocol=way, retries=0, timeout=120) as client:
        return client.infer(model, inputs)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ["INT32", "UINT32"])
def test_each_row_is_the_single_request(
    way: str, model: str, service: Service, here: Here, singles: dict[tuple[int, ...], list[int]]
) -> None:
    for number in ROWS:
        asked = prompts(64)[:number]
        answer = ask(way, service, here, model, stack(asked, model))
        assert answer["output_ids"].dtype == np.dtype(model.lower())
        for ids, row, length in zip(asked, answer["output_ids"], answer["sequence_length"], strict=True):
            right = singles[tuple(ids)] if model == "INT32" else [*ids, *singles[tuple(ids)]]
            assert row[0, : length[0]].tolist() == right
            assert set(row[0, length[0] :].tolist()) <= {0 if model == "INT32" else 1}  # 1 is the model's end token
        assert answer["is_last"].all()
        assert set(answer["finish_reason"].ravel()) == {b"length"} or set(answer["finish_reason"].ravel()) == {"length"}


def test_rows_end_and_are_padded(service: Service, here: Here, folder: Path) -> None:
    asked = prompts(3)
    with open_engine(folder) as component:
        ends = [tokens_of(component.stream(token_inputs(ids, 6)))[2] for ids in asked]
        right = [tokens_of(component.stream(token_inputs(ids, 6, end_id=ends[0]))) for ids in asked]
    more = {"end_id": np.full((3, 1), ends[0], np.int32), "pad_id": np.full((3, 1), 9, np.int32)}
    for way in WAYS:
        answer = ask(way, service, here, "INT32", stack(asked, "INT32") | more)
        for row, length, tokens in zip(answer["output_ids"], answer["sequence_length"], right, strict=True):
            assert row[0, : length[0]].tolist() == tokens
            assert set(row[0, length[0] :].tolist()) <= {9}
        assert answer["sequence_length"][0, 0] == 2


def test_rows_are_as_fast_as_streams(service: Service, scale: Scale, record: Callable[..., None]) -> None:
    """Sixteen rows of 64 tokens, asked in one request and as sixteen streams, in turns."""
    asked, new = prompts(16), 64
    rates = dict[str, list[float]](rows=[], streams=[])
    with shoal.Client(service.grpc, timeout=120) as client, ThreadPoolExecutor(16) as pool:

        def ask_rows() -> list[list[int]]:
            answer = client.infer("INT32", stack(asked, "INT32", new))
            return [row[0].tolist() for row in answer["output_ids"]]

        def ask_streams() -> list[list[int]]:
            each = pool.map(lambda ids: tokens_of(client.stream("llm-hf", token_inputs(ids, new, end_id=-1))), asked)
            return list(each)

        right = ask_rows()
        for number in range(scale(1, full=5)):
            ways = {"rows": ask_rows, "streams": ask_streams}
            for name in list(ways) if number % 2 else list(ways)[::-1]:
                start = time.monotonic()
                assert ways[name]() == right
                rates[name].append(16 * new / (time.monotonic() - start))
    rows, streams = (statistics.median(rates[name]) for name in ("rows", "streams"))
    record("whole answers", rows_tokens_a_second=round(rows), streams_tokens_a_second=round(streams))
    if scale.is_full:
        assert rows >= 0.95 * streams


BAD = [
    ({"input_ids": np.zeros((0, 3), np.int32), "input_lengths": np.zeros((0, 1), np.int32)}, "0|row"),
    ({"request_output_len": np.array([[4], [0]], np.int32)}, "Row 1: request_output_len is 0. Ask for 1 new token"),
    ({"input_lengths": None}, "input_lengths"),
    ({"input_lengths": np.array([[2], [99]], np.int32)}, "Row 1: input_lengths is 99, and input_ids has"),
    ({"runtime_top_k": np.array([[1], [-1]], np.int32)}, "Row 1: runtime_top_k is -1"),
    ({"carry": np.array([[b"a"], [b"\xff"]], np.object_)}, "Row 1: carry is not UTF-8"),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("more", "words"), BAD)
def test_bad_rows(way: str, more: dict[str, Any], words: str, service: Service, here: Here) -> None:
    inputs = {name: value for name, value in (stack([[5, 6], [7]], "INT32") | more).items() if value is not None}
    if len(inputs["input_ids"]) == 0:
        inputs = {name: value[:0] for name, value in inputs.items()}
    with pytest.raises(shoal.ShoalError, match=words):
        ask(way, service, here, "INT32", inputs)
    assert ask(way, service, here, "INT32", stack([[5]], "INT32"))["sequence_length"].item() == 6


def test_more_rows_than_the_model_takes(service: Service, here: Here) -> None:
    """The client divides them, and so does a pipeline in this process."""
    inputs = stack([[5]] * 65, "INT32")
    for way in ("grpc", "local"):
        assert ask(way, service, here, "INT32", inputs)["sequence_length"].shape == (65, 1)


def test_a_stream_has_one_answer(service: Service) -> None:
    with shoal.Client(service.grpc) as client, client.stream("INT32", stack([[5], [6]], "INT32")) as answers:
        (answer,) = answers
    assert answer["output_ids"].shape == (2, 1, 6)


COUNTS = '''
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """A stand-in for FasterTransformer: counts on from the last id; the prompt comes first, and then padding."""

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        ids, length, new = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy()
            for name in ("input_ids", "input_lengths", "request_output_len")
        )
        rows = []
        for row, size, count in zip(ids, length[:, 0], new[:, 0]):
            found = [*row[:size], *range(row[size - 1] + 1, row[size - 1] + 1 + count)]
            rows.append([found + [0, 0], [token + 1 for token in found] + [0, 0]])
        out = np.array(rows, np.uint32)
        lengths = np.full(out.shape[:2], out.shape[2] - 2, np.uint32)
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("output_ids", out), pb_utils.Tensor("sequence_length", lengths)]
        )
'''
COUNTS_CONFIG = """
backend: "python"
max_batch_size: 8
input [
  { name: "input_ids" data_type: TYPE_UINT32 dims: [ -1 ] },
  { name: "input_lengths" data_type: TYPE_UINT32 dims: [ 1 ] },
  { name: "request_output_len" data_type: TYPE_UINT32 dims: [ 1 ] },
  { name: "runtime_top_k" data_type: TYPE_UINT32 dims: [ 1 ] optional: true }
]
output [
  { name: "output_ids" data_type: TYPE_UINT32 dims: [ -1, -1 ] },
  { name: "sequence_length" data_type: TYPE_UINT32 dims: [ -1 ] }
]
instance_group [ { kind: KIND_CPU } ]
parameters { key: "public" value { string_value: "true" } }
"""


def test_the_command_tokens(service: Service, tmp_path: Path) -> None:
    """New tokens alone, of a model that gives the prompt first, two beams and padding, and of our own."""

    def tokens(way: str, query: str, server: str, *arguments: str) -> list[str]:
        asked = ["tokens", query, "--url", server, "--protocol", way, *arguments]
        result = CliRunner().invoke(cli.app, asked, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout.splitlines()

    write(tmp_path / "repository" / "gpt3_1.3b" / "config.pbtxt", COUNTS_CONFIG)
    write(tmp_path / "repository" / "gpt3_1.3b" / "1" / "model.py", COUNTS)
    with shoal.serve(tmp_path / "repository") as server:
        for way, url in (("grpc", server.grpc_url), ("http", server.http_url)):
            found = tokens(way, "1 2 3 4 5 6", url, "--model", "gpt3_1.3b", "--output-length", "30")
            assert found == [",".join(map(str, row)) for row in (range(7, 37), [2, 3, 4, 5, 6, 7, *range(8, 38)])]
            url = getattr(service, way)
            single, prompted = (tokens(way, "5,6,7", url, "--model", name) for name in ("INT32", "UINT32"))
            assert single == prompted


@pytest.mark.parametrize("way", ["grpc", "http"])
def test_a_stop_request_ends_its_own_request(way: Literal["grpc", "http"], service: Service) -> None:
    """At once, with a marked last answer; and what other requests and callers asked goes on."""
    long, outputs = token_inputs([5], 900), ["is_last", "finish_reason"]  # what HTTP carries without shapes
    with shoal.Client(getattr(service, way), protocol=way) as client, shoal.Client(service.grpc) as other:
        with (
            client.stream("llm-hf", long, request_id="other", outputs=outputs) as kept,
            other.stream("llm-hf", long) as nameless,
        ):
            with client.stream("llm-hf", long, request_id="mine", outputs=outputs) as answers:
                found = [next(iter(answers))]
                stop = token_inputs([5], 1, stop=True)
                asked = time.monotonic()
                assert not list(other.stream("llm-hf", stop, request_id="mine"))
                found += answers
                seconds = time.monotonic() - asked
            assert len(list(kept)) == len(list(nameless)) == 900
        assert seconds < 5
        assert len(found) < 900
        assert [answer["is_last"].item() for answer in found] == [False] * (len(found) - 1) + [True]
        assert found[-1]["finish_reason"].item() in (b"cancelled", "cancelled")
        with pytest.raises(shoal.ShoalError, match="Stop: no request of yours with id 'mine' to llm-hf is in flight"):
            list(client.stream("llm-hf", stop, request_id="mine", outputs=outputs))


class Asked(NamedTuple):
    """The answer to a request outside streams, or in a stream of its own: its id, reason and number of tokens."""

    request_id: str
    reason: str = ""
    length: int = 0
    error: str = ""


def ask_as(caller: str, way: str, service: Service, inputs: dict[str, Any], request_id: str) -> Asked:
    """Ask through a proxy, on behalf of the address ``caller``."""
    if way in ("json", "binary"):
        with tritonclient.http.InferenceServerClient(service.http, network_timeout=120) as client:
            given = [tritonclient.http.InferInput(name, each.shape, np_to_triton_dtype(each.dtype)) for name, each in
                     inputs.items()]  # fmt: skip
            for tensor, array in zip(given, inputs.values(), strict=True):
                tensor.set_data_from_numpy(array, binary_data=way == "binary")
            names = ("finish_reason", "sequence_length")
            wanted = [tritonclient.http.InferRequestedOutput(name, binary_data=way == "binary") for name in names]
            headers = {"X-Forwarded-For": caller}
            try:
                found = client.infer("INT32", given, request_id=request_id, headers=headers, outputs=wanted)
            except InferenceServerException as error:
                return Asked("", error=error.message())
            answer = found.get_response()
            if not answer["outputs"]:
                return Asked(answer["id"])
            reason, length = (found.as_numpy(name).item() for name in names)
            return Asked(answer["id"], reason.decode() if isinstance(reason, bytes) else reason, length)
    if way == "generate":
        body = {name: array.item() if array.size == 1 else array.tolist() for name, array in inputs.items()}
        sent = json.dumps({**body, "id": request_id}).encode()
        request = urllib.request.Request(f"http://{service.http}/v2/models/INT32/generate", sent)
        request.add_header("X-Forwarded-For", caller)
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                answer = json.loads(reply.read())
        except urllib.error.HTTPError as error:
            with error:
                return Asked("", error=json.loads(error.read())["error"])
        return Asked(answer["id"], answer.get("finish_reason", ""), answer.get("sequence_length", 0))
    message, metadata = to_grpc(Call(Method.INFER, "INT32", inputs, request_id=request_id)).message, [
        ("x-forwarded-for", caller)
    ]  # fmt: skip
    with grpc.insecure_channel(service.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            if way == "grpc":
                answer = stub.ModelInfer(message, metadata=metadata, timeout=120)
            else:
                (each,) = stub.ModelStreamInfer(iter([message]), metadata=metadata, timeout=120)
                if each.error_message:
                    return Asked(each.infer_response.id, error=each.error_message)
                answer = each.infer_response
        except grpc.RpcError as error:
            return Asked("", error=error.details())
    found = tritonclient.grpc.InferResult(answer)
    if not answer.outputs:
        return Asked(answer.id)
    return Asked(answer.id, found.as_numpy("finish_reason").item().decode(), found.as_numpy("sequence_length").item())


@pytest.mark.without_keys("its callers are addresses, which here have one key")
@pytest.mark.parametrize(
    ("way", "stop_way"),
    [("grpc", "json"), ("json", "binary"), ("binary", "generate"), ("generate", "stream"), ("stream", "grpc")],
)
def test_a_stop_request_ends_whole_requests_of_its_caller_alone(way: str, stop_way: str, service: Service) -> None:
    """Both clients gave their requests the same id, with a character that JSON escapes."""
    long, stop, request_id = token_inputs([5], 900), token_inputs([5], 1, stop=True), 'mine "é"'
    with ThreadPoolExecutor(3) as pool:
        mine, other, foreign = (
            pool.submit(ask_as, caller, way, service, long, name)
            for caller, name in [("10.0.0.1", request_id), ("10.0.0.1", "other"), ("10.0.0.2", request_id)]
        )
        assert wait_until(lambda: service.metric("shoal_in_flight") >= 3)
        for name, words in [(request_id, f"no request of yours with id {request_id!r} to INT32"), ("", "an empty id")]:
            assert words in ask_as("10.0.0.3", stop_way, service, stop, name).error
        asked = time.monotonic()
        assert ask_as("10.0.0.1", stop_way, service, stop, request_id) == Asked(request_id)
        stopped = mine.result()
        seconds = time.monotonic() - asked
        assert stopped[:2] == (request_id, "cancelled")
        assert stopped.length < 900
        assert other.result() == Asked("other", "length", 900)
        assert foreign.result() == Asked(request_id, "length", 900)
    assert seconds < 5
    wrong = ask_as("10.0.0.1", way, service, token_inputs([5], 0), request_id).error
    assert wrong == "request_output_len is 0. Ask for 1 new token or more."
    wide = {name: np.repeat(array, 65, 0) for name, array in long.items()}
    assert f"[request id: {request_id}]" in ask_as("10.0.0.1", "grpc", service, wide, request_id).error


def test_declarations_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    def load(config: str) -> None:
        write(tmp_path / "llm-hf" / "config.pbtxt", config)
        write(tmp_path / "llm-hf" / "1" / "model.py", (ENGINE / "1" / "model.py").read_text(encoding="utf-8"))
        with open_engine(folder, tmp_path / "llm-hf"):
            pass

    mixed = make_config().replace('"output_ids" data_type: TYPE_INT32', '"output_ids" data_type: TYPE_UINT32')
    with pytest.raises(shoal.ShoalError, match=r"input_ids INT32, output_ids UINT32, .* Declare all of them INT32"):
        load(mixed)
    unknown = make_config().replace("input [", 'input [ { name: "beam_with" data_type: TYPE_INT32 dims: [ 1 ] },')
    with pytest.raises(shoal.ShoalError, match=r"input beam_with, which engines do not read. Did you mean beam_width?"):
        load(unknown)
    with pytest.raises(shoal.ShoalError, match=r"exclude_input_in_output .* decoupled gives new tokens alone"):
        load(make_config(has_prompt=True) + "model_transaction_policy { decoupled: true }\n")
