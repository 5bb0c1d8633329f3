"""A model with the tensors of NVIDIA's vLLM backend, asked by shoal's own client of language models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest

import shoal
from shoal.clients.llm.client import AsyncLlm, Llm
from shoal.clients.llm.dialects import Vllm
from shoal.errors import InputError
from shoal.kit.generation.pieces import Piece
from shoal.kit.generation.sampling import SETTINGS as ALL
from shoal.serving.server.launch import Server
from tests.support.planted import write

CODE = '''
import json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Answers as the backend does: with the words of the settings, which it reads from JSON."""

    def execute(self, requests):
        for request in requests:
            given = {
                name: pb_utils.get_input_tensor_by_name(request, name).as_numpy()[0]
                for name in ("text_input", "stream", "sampling_parameters", "exclude_input_in_output")
            }
            assert given["exclude_input_in_output"]
            words = [f"{name}={value}" for name, value in json.loads(given["sampling_parameters"]).items()]
            if not given["stream"]:
                words = [" ".join(words)]
            sender = request.get_response_sender()
            for number, word in enumerate(words, 1):
                outputs = {
                    "text_output": np.array([word.encode()], np.object_),
                    "finish_reason": np.array([b"length" if number == len(words) else b"None"], np.object_),
                    "num_input_tokens": np.array([3], np.uint32),
                    "num_output_tokens": np.array([2], np.uint32),
                }
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor(*each) for each in outputs.items()]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''
RETURNS = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
CONFIG = f"""
backend: "python"
max_batch_size: 0
model_transaction_policy {{ decoupled: true }}
input [
  {{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }},
  {{ name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true }},
  {{ name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] optional: true }},
  {", ".join(f'{{ name: "{name}" data_type: TYPE_BOOL dims: [ 1 ] optional: true }}' for name in RETURNS)},
  {{ name: "exclude_input_in_output" data_type: TYPE_BOOL dims: [ 1 ] optional: true }}
]
output [
  {{ name: "text_output" data_type: TYPE_STRING dims: [ -1 ] }},
  {{ name: "finish_reason" data_type: TYPE_STRING dims: [ -1 ] }},
  {{ name: "num_input_tokens" data_type: TYPE_UINT32 dims: [ 1 ] }},
  {{ name: "num_output_tokens" data_type: TYPE_UINT32 dims: [ -1 ] }}
]
instance_group [ {{ kind: KIND_CPU }} ]
"""
SETTINGS: dict[str, Any] = {"max_tokens": 5, "top_p": 0.5, "stop_words": ["é", "b"], "seed": None, "bad_words": []}
WORDS = ["max_tokens=5", "top_p=0.5", "stop=['é', 'b']"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("dialects")
    write(repository / "vllm" / "config.pbtxt", CONFIG)
    write(repository / "vllm" / "1" / "model.py", CODE)
    with shoal.serve(repository) as running:
        yield running


@pytest.mark.parametrize("way", ["grpc", "http"])
def test_the_client_asks_vllm(way: Literal["grpc", "http"], server: Server) -> None:
    """With vLLM's names, and only the settings that are given; the counts are those of the answer so far."""
    url = server.grpc_url if way == "grpc" else server.http_url
    with shoal.Client(url, protocol=way) as client:
        llm = Llm(client, "vllm")
        assert llm.generate("A", **SETTINGS) == Piece(" ".join(WORDS), "length", 3, 2)
        pieces = [*llm.stream("A", **SETTINGS)]
        with pytest.raises(InputError, match=r"NVIDIA's vLLM backend takes texts alone. Send the chat as one text"):
            llm.generate([{"role": "user", "content": "A"}])
    assert pieces == [Piece(word, "length" if word == WORDS[-1] else "", 3, 2 * n) for n, word in enumerate(WORDS, 1)]

    async def ask() -> Piece:
        async with shoal.AsyncClient(url, protocol=way) as client:
            return await AsyncLlm(client, "vllm").generate("A", **SETTINGS)

    assert asyncio.run(ask()).text == json.loads(json.dumps(" ".join(WORDS)))


def test_the_names_are_those_of_the_table_of_settings() -> None:
    given: dict[str, Any] = {row.name: ["a"] if row.is_list else 1 for row in ALL if row.name not in ("guide", "echo")}
    sent = json.loads(Vllm([]).to_inputs("A", given, is_streaming=False)["sampling_parameters"][0])
    assert [*sent] == [row.vllm for row in ALL if row.name in given]
    for name in ("guide", "echo"):
        with pytest.raises(InputError, match=f"without {name}"):
            Vllm([]).to_inputs("A", {name: {"regex": "a"}}, is_streaming=False)
