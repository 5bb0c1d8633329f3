"""Fronts that others wrote, in front of ``shoal serve``: what they send is answered as through ``shoal.Client``.

SHOAL_TRITON_SERVER names a clone of https://github.com/triton-inference-server/server, whose python/openai has the
converter of Triton's OpenAI front (seen: e1db8a6). SHOAL_DYNAMO names a folder with the files of the wheel ai-dynamo
(seen: 1.6.1). SHOAL_LITELLM names a virtual environment with LiteLLM.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from shoal import Client
from shoal.authoring.composition.compose import compose
from shoal.clients.llm.client import Llm
from shoal.kit.generation.pieces import Piece
from shoal.lab.tiny_llm import make_tiny
from tests.support.service import Service
from tests.support.trtllm import SWAP

SERVER, DYNAMO, LITELLM = "SHOAL_TRITON_SERVER", "SHOAL_DYNAMO", "SHOAL_LITELLM"
MODELS = ["llm_bls", "tensorrt_llm_bls", "ensemble"]
PROMPT, NEW = "A cat sat", 12
REQUESTS: list[dict[str, Any]] = [
    {"max_tokens": NEW, "temperature": 0},
    {"max_tokens": NEW, "temperature": 0.0, "top_p": 1.0, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"max_tokens": NEW, "temperature": 0.0, "stop": ["a", "e"]},
]
PROGRAM = """
import json, sys
import litellm

found = []
for stream in (False, True):
    answer = litellm.completion(
        model="triton/any", api_base=sys.argv[1], stream=stream, max_tokens=12,
        messages=[{"role": "user", "content": "A cat sat"}],
    )
    whole = None if stream else answer.choices[0].message.content
    found.append("".join(chunk.choices[0].delta.content or "" for chunk in answer) if stream else whole)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    place = tmp_path_factory.mktemp("fronts")
    repository = compose(MODELS, place / "repository", weights=make_tiny(place / "weights"), swap=SWAP)
    with Service(repository, place / "log") as running:
        yield running


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[Client]:
    with Client(service.grpc) as found:
        yield found


def expect(client: Client, request: dict[str, Any]) -> Piece:
    settings = {name: value for name, value in request.items() if name != "stop"}
    return Llm(client, "llm_bls").generate(PROMPT, **settings, stop_words=request.get("stop", []))


def send(client: Client, model: str, inputs: dict[str, Any]) -> tuple[str, int, int]:
    """The whole text, and the counts of tokens as the front adds them up."""
    answers = list(client.stream(model, inputs))
    text = "".join(answer["text_output"].item().decode() for answer in answers)
    return text, answers[0]["num_input_tokens"].item(), sum(answer["num_output_tokens"].item() for answer in answers)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize("request_", REQUESTS)
def test_tensors_as_the_openai_front_sends_them(
    model: str, is_streaming: bool, request_: dict[str, Any], client: Client
) -> None:
    floats = {name: value for name, value in request_.items() if name not in ("max_tokens", "stop")}
    inputs: dict[str, Any] = {
        "text_input": [[PROMPT]],
        "stream": np.array([[is_streaming]]),
        "max_tokens": np.array([[request_["max_tokens"]]], np.int32),
        **{name: np.array([[value]], np.float32) for name, value in floats.items()},
        **({"stop_words": [request_["stop"]]} if "stop" in request_ else {}),
        "return_num_input_tokens": np.array([[True]]),
        "return_num_output_tokens": np.array([[True]]),
    }
    expected = expect(client, request_)
    assert send(client, model, inputs) == (expected.text, expected.num_input_tokens, expected.num_output_tokens)


@pytest.fixture
def convert(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """NVIDIA's converter for models of the Python backend and TensorRT-LLM; its server library is not needed."""
    if SERVER not in os.environ:
        pytest.skip(f"{SERVER} names no clone of Triton's server")
    monkeypatch.syspath_prepend(str(Path(os.environ[SERVER]) / "python" / "openai" / "openai_frontend"))
    monkeypatch.setitem(sys.modules, "tritonserver", MagicMock())
    module, schemas = import_module("engine.utils.triton"), import_module("schemas.openai")
    model = SimpleNamespace(create_request=lambda inputs: inputs)

    def run(**given: Any) -> dict[str, Any]:
        kind = schemas.CreateChatCompletionRequest if "messages" in given else schemas.CreateCompletionRequest
        request = kind(model="any", **given)
        return dict(module._create_trtllm_generate_request(model, PROMPT, request, None, None, 16))

    return run


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize("request_", REQUESTS)
def test_requests_of_the_openai_fronts_own_converter(
    model: str, is_streaming: bool, request_: dict[str, Any], client: Client, convert: Callable[..., dict[str, Any]]
) -> None:
    chat = {"messages": [{"role": "user", "content": PROMPT}]}
    expected = expect(client, request_)
    for given in ({"prompt": PROMPT}, chat):
        inputs = convert(**given, **request_, stream=is_streaming)
        assert send(client, model, inputs) == (expected.text, expected.num_input_tokens, expected.num_output_tokens)


@pytest.mark.parametrize("model", MODELS)
def test_bodies_as_litellm_sends_them(model: str, service: Service, client: Client) -> None:
    body = {"text_input": PROMPT, "parameters": {"max_tokens": NEW}, "stream": False}
    found = subprocess.run(
        ["curl", "--silent", f"{service.http}/v2/models/{model}/generate", "--data", json.dumps(body)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert json.loads(found)["text_output"] == expect(client, REQUESTS[0]).text


@pytest.mark.parametrize("model", MODELS)
def test_litellms_own_provider(model: str, service: Service, client: Client) -> None:
    if LITELLM not in os.environ:
        pytest.skip(f"{LITELLM} names no environment with LiteLLM")
    url = f"http://{service.http}/v2/models/{model}/generate"
    done = subprocess.run(
        [f"{os.environ[LITELLM]}/bin/python", "-c", PROGRAM, url],
        capture_output=True, text=True, check=False, env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [expect(client, REQUESTS[0]).text] * 2


def test_dynamos_own_handler_of_classify(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service is in the place of the server that Dynamo has in its process."""
    if DYNAMO not in os.environ:
        pytest.skip(f"{DYNAMO} names no folder with Dynamo")
    names = ("MemoryType", "Model", "Server", "Tensor", "TritonError")
    server = SimpleNamespace(**{name: type(name, (Exception,), {}) for name in names})
    monkeypatch.setitem(sys.modules, "tritonserver", server)
    is_no_probe = SimpleNamespace(is_probe=lambda request: False)
    monkeypatch.setitem(sys.modules, "dynamo.common.backend.health_check", is_no_probe)
    monkeypatch.syspath_prepend(os.environ[DYNAMO])
    handlers = import_module("dynamo.triton.pooling_handlers")
    text = (repository / "ensemble_all" / "config.pbtxt").read_text(encoding="utf-8")
    texts = ["The cat sat.", "It is nonetheless imperative that epistemology be considered."]
    with Service(repository, tmp_path / "log") as running, Client(running.grpc) as client:

        async def infer(request: Any) -> AsyncIterator[Any]:
            found = client.infer("ensemble_all", {name: array.tolist() for name, array in request.inputs.items()})
            yield SimpleNamespace(outputs={name: array.copy() for name, array in found.items()})

        model = SimpleNamespace(
            name="ensemble_all", create_request=lambda: SimpleNamespace(inputs={}), async_infer=infer
        )
        config = text_format.Parse(text, ModelConfig())
        with pytest.raises(ValueError, match=r"has 3 TYPE_FP32 output tensor\(s\).*--classify-output-name"):
            handlers.ClassifyWorkerHandler(None, model, config)
        handler = handlers.ClassifyWorkerHandler(None, model, config, classify_output_name="SCORE")
        answer = asyncio.run(anext(handler.generate({"model": "ensemble_all", "input": texts})))
        scores = client.infer("ensemble_all", {"excerpt": [[each] for each in texts]})["SCORE"]
    assert [row["probs"] for row in answer["data"]] == scores.tolist()
