"""Engines asked as clients of FasterTransformer and TensorRT-LLM ask them, with Triton's own client library."""

from __future__ import annotations

import queue
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from transformers import GPT2Tokenizer
from tritonclient.utils import np_to_triton_dtype
from typer.testing import CliRunner

from shoal import cli
from shoal.authoring.composition.compose import compose
from shoal.clients.llm.tokens import open_tokenizer
from shoal.errors import ArtifactError
from tests.support.counter import make_counter
from tests.support.imports import add
from tests.support.llm import ENGINE, token_inputs
from tests.support.once import ROOT
from tests.support.planted import write
from tests.support.service import Service

COUNTED = " ".join(map(str, range(1, 37)))
IDS = "input_ids|input_lengths|request_output_len|runtime_top_k|end_id|pad_id|output_ids|sequence_length"
EXCLUDE = 'parameters { key: "exclude_input_in_output" value { string_value: "false" } }\n'
SENT = {  # by clients of TensorRT-LLM in each request, and their dtypes
    "beam_width": (1, "INT32"), "num_return_sequences": (1, "INT32"), "random_seed": (3, "UINT64"),
    "len_penalty": (1.0, "FP32"), "return_log_probs": (False, "BOOL"), "return_perf_metrics": (False, "BOOL"),
}  # fmt: skip


def copy_engine(home: Path, name: str, engine: Path, *, is_whole: bool) -> None:
    """A copy of an engine, whole in the dialect of FasterTransformer, or in pieces in that of TensorRT-LLM."""
    config = re.sub('name: "llm-(hf|onnx)"', f'name: "{name}"', (engine / "config.pbtxt").read_text(encoding="utf-8"))
    more = "".join(f'{{ name: "{each}" data_type: TYPE_{SENT[each][1]} dims: [ 1 ] optional: true }},' for each in SENT)
    more += '{ name: "lora_task_id" data_type: TYPE_UINT64 dims: [ 1 ] optional: true },'
    config = config.replace("input [", f"input [ {more}", 1)
    if is_whole:
        config = config.replace("model_transaction_policy { decoupled: true }\n", "") + EXCLUDE
        config = re.sub(rf'(name: "(?:{IDS})" data_type: TYPE_)INT32', r"\1UINT32", config).replace(
            ": 1\n", ": 64\n", 1
        )
    write(home / "models" / name / "config.pbtxt", config)
    write(home / "models" / name / "1" / "model.py", (engine / "1" / "model.py").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_counter(tmp_path_factory.mktemp("counter") / "weights")


@pytest.fixture(scope="module")
def service(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    home = tmp_path_factory.mktemp("clients")
    add(home, weights, "exported", task="generate")
    copy_engine(home, "gpt3_1.3b", ENGINE, is_whole=True)
    copy_engine(home, "gpt3-onnx", ROOT / "models" / "llm-onnx", is_whole=True)
    copy_engine(home, "tensorrt_llm", ENGINE, is_whole=False)
    config = home / "models" / "gpt3-onnx" / "config.pbtxt"
    own = f'key: "model" value {{ string_value: "{home / "models" / "exported" / "1"}" }}'
    text = re.sub(r'key: "model".*?string_value: "" }', own, config.read_text(encoding="utf-8"), flags=re.DOTALL)
    config.write_text(text, encoding="utf-8")
    compose(["gpt3_1.3b", "gpt3-onnx", "tensorrt_llm"], home / "repository", weights=weights, projects=[home])
    with Service(home / "repository", home / "log") as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer(weights: Path) -> Any:
    return GPT2Tokenizer.from_pretrained(weights)


def tensors(library: Any, arrays: dict[str, Any]) -> list[Any]:
    found = []
    for name, array in arrays.items():
        found.append(library.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
        found[-1].set_data_from_numpy(array)
    return found


@pytest.mark.parametrize("model", ["gpt3_1.3b", "gpt3-onnx"])
@pytest.mark.parametrize("library", [tritonclient.http, tritonclient.grpc])
def test_a_client_of_fastertransformer(model: str, library: Any, service: Service, tokenizer: Any) -> None:
    """UINT32 ids, one answer that begins with the prompt, and greedy because ``runtime_top_p`` is 0."""
    ids = tokenizer("1 2 3 4 5 6").input_ids
    arrays = {
        "input_ids": np.array([ids], np.uint32),
        "input_lengths": np.array([[len(ids)]], np.uint32),
        "request_output_len": np.array([[30]], np.uint32),
        "runtime_top_k": np.array([[1]], np.uint32),
        "runtime_top_p": np.array([[0]], np.float32),
        "temperature": np.array([[1]], np.float32),
    }
    url = service.http if library is tritonclient.http else service.grpc
    with library.InferenceServerClient(url) as client:
        answer = client.infer(model, tensors(library, arrays)).as_numpy("output_ids")
    assert answer.dtype == np.uint32
    assert answer.shape == (1, 1, 36)
    assert tokenizer.decode(answer.squeeze()) == COUNTED


class Streamed:
    """A stream of Triton's gRPC client: its answers, in order."""

    def __init__(self, service: Service) -> None:
        self.found = queue.Queue[Any]()
        self.client = tritonclient.grpc.InferenceServerClient(service.grpc)
        self.client.start_stream(lambda result, error: self.found.put(error or result))

    def ask(self, arrays: dict[str, Any], request_id: str = "") -> None:
        self.client.async_stream_infer("tensorrt_llm", tensors(tritonclient.grpc, arrays), request_id=request_id)

    def finish(self) -> list[Any]:
        self.client.stop_stream()
        self.client.close()
        return [self.found.get(block=False) for _ in range(self.found.qsize())]


def sent(ids: list[int], new: int, **more: Any) -> dict[str, Any]:
    arrays = token_inputs(ids, new, temperature=1.0, runtime_top_k=1, runtime_top_p=0.0, streaming=True)
    for name, (value, dtype) in SENT.items():
        arrays[name] = np.array([[more.get(name, value)]], {"FP32": "f4", "BOOL": "?"}.get(dtype, dtype.lower()))
    return arrays


def test_a_client_of_tensorrt_llm(service: Service, tokenizer: Any) -> None:
    ids = tokenizer("1 2 3 4 5 6").input_ids
    stream = Streamed(service)
    stream.ask(sent(ids, 30))
    pieces = [answer.as_numpy("output_ids")[0, 0] for answer in stream.finish()]
    assert tokenizer.decode([*ids, *np.concatenate(pieces)]) == COUNTED


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (sent([5], 3, beam_width=2), "beam_width is 2, and answers have one beam. Send 1."),
        (sent([5], 3) | {"lora_task_id": np.array([[3]], np.uint64)}, "The request has lora_task_id, and the weights"),
        (sent([5], 3) | {"seed": np.array([[3]], np.uint64)}, "The request has seed and random_seed"),
    ],
)
def test_what_clients_of_tensorrt_llm_may_not_ask(arrays: dict[str, Any], words: str, service: Service) -> None:
    stream = Streamed(service)
    stream.ask(arrays)
    (error,) = stream.finish()
    assert words in str(error)


def test_a_client_of_tensorrt_llm_stops_its_stream(service: Service) -> None:
    stream = Streamed(service)
    stream.ask(sent([5], 240), "7")
    first = stream.found.get(timeout=60)
    start = time.monotonic()
    stream.ask({name: array for name, array in token_inputs([0], 0, stop=True).items() if name != "end_id"}, "7")
    answers = [first, *stream.finish()]
    assert time.monotonic() - start < 2
    assert (
        sum(answer.as_numpy("output_ids").size for answer in answers if answer.as_numpy("output_ids") is not None) < 240
    )


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("model", ["gpt3_1.3b", "tensorrt_llm"])
def test_the_command_tokens(model: str, protocol: str, service: Service, weights: Path, tmp_path: Path) -> None:
    """With GPT-2's files, whole and in pieces; a piece at the end token has no tokens."""
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes((weights / name).read_bytes())
    for query, text in (("1 2 3 4 5 6", COUNTED), ("7 97", "7 97 98 99")):
        asked = ["tokens", query, "--tokenizer", str(tmp_path), "--model", model]
        result = CliRunner().invoke(
            cli.app, [*asked, "--url", getattr(service, protocol), "--protocol", protocol], catch_exceptions=False
        )
        assert result.stdout.strip() == text


def test_tokenizers_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ArtifactError, match=r"gpt-none is not a folder, and the Hugging Face hub did not give it: .* Name a"
    ):
        open_tokenizer("gpt-none")
    for name in ("vocab.json", "merges.txt"):
        write(tmp_path / name, "{")
    with pytest.raises(
        ArtifactError, match=r"has no tokenizer of GPT-2 in vocab.json and merges.txt: .* Name a folder"
    ):
        open_tokenizer(str(tmp_path))
