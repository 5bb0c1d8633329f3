"""On a real GPU: the language-model engine on transformers, in this process, against the same engine on the host.

It needs torch, transformers, tokenizers and array_api_compat, and neither a server nor Triton's client:
``pytest -m gpu --noconftest -s tests/gpu/test_gpu_llm.py``. It prints tokens a second.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.authoring.repository.loading import component_class
from shoal.errors import SetupError
from shoal.kit.component.context import Context
from shoal.kit.component.spec import ModelSpec
from shoal.kit.component.tensors import Device
from shoal.lab.tiny_llm import make_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.filterwarnings("default"),  # of libraries that are newer or older than those of other tests
]

ENGINE = Path(__file__).parents[2] / "models" / "llm-hf"
HOST, GPU = Device(), Device("gpu", 0, "engine")
STREAMS = (1, 16)
_TENSOR = re.compile(r'\{ name: "(\w+)" data_type: (\w+) dims: \[ ([-\d, ]+) \]( optional: true)? \}')
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "runtime_top_p": 1.0},
    {"temperature": 0.7, "runtime_top_k": 20},
    {"temperature": 1.3, "runtime_top_p": 0.8},
    {"temperature": 0.9, "runtime_top_k": 50, "runtime_top_p": 0.9, "repetition_penalty": 1.2},
    {"temperature": 1.0, "runtime_top_p": 0.95, "frequency_penalty": 0.5, "presence_penalty": -0.5},
]


def read_spec() -> ModelSpec:
    """The engine's declaration, read without Triton's protobuf messages."""
    parts = (ENGINE / "config.pbtxt").read_text(encoding="utf-8").partition("\noutput [")
    inputs, outputs = (
        [
            {"name": name, "data_type": dtype, "dims": dims.split(","), "optional": bool(optional)}
            for name, dtype, dims, optional in _TENSOR.findall(part)
        ]
        for part in (parts[0], parts[2])
    )
    policy = {"decoupled": True}
    return ModelSpec.from_config(
        {
            "name": "llm-hf", "max_batch_size": 64, "model_transaction_policy": policy, "input": inputs,
            "output": outputs,
        }
    )  # fmt: skip


@contextmanager
def open_engine(folder: Path, device: Device, **parameters: str) -> Iterator[Any]:
    spec = replace(read_spec(), parameters={"model": str(folder), "dtype": "auto", "slots": "16", **parameters})
    component = component_class(ENGINE / "1" / "model.py")(Context(spec, ENGINE / "1", device))
    try:
        yield component
    finally:
        component.close()


def token_inputs(ids: list[int], new: int, **more: Any) -> dict[str, Any]:
    dtypes = {tensor.name: tensor.numpy_dtype for tensor in read_spec().inputs}
    given = {"input_ids": ids, "input_lengths": len(ids), "request_output_len": new, "end_id": -1, **more}
    return {name: np.array(value, dtypes[name]).reshape(1, -1) for name, value in given.items()}


def tokens_of(stream: Any) -> list[int]:
    answers = list(stream)
    assert answers[-1]["is_last"].item()
    return [token for answer in answers for token in answer["output_ids"].ravel().tolist()]


def ask(component: Any, asked: list[dict[str, Any]], together: int) -> list[list[int]]:
    found = []
    for start in range(0, len(asked), together):
        streams = [component.stream(inputs) for inputs in asked[start : start + together]]
        found += [tokens_of(stream) for stream in streams]
    return found


def requests(number: int, new: int, vocabulary: int = 480, **more: Any) -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    ids = [random.integers(4, vocabulary, random.integers(1, 90)).tolist() for _ in range(number)]
    return [token_inputs(each, new, seed=row, **(SAMPLED[row % 6] | more)) for row, each in enumerate(ids)]


def rate(component: Any, together: int, new: int, vocabulary: int = 480, **more: Any) -> float:
    """Tokens a second of ``together`` streams, after some that were not timed."""
    ask(component, requests(together, 4, vocabulary, **more), together)
    start = time.perf_counter()
    found = ask(component, requests(together, new, vocabulary, **more), together)
    return sum(map(len, found)) / (time.perf_counter() - start)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def large(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 150 million random weights in BF16, with the small model's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    made = tmp_path_factory.mktemp("large")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=8, max_position_embeddings=1024, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(made)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (made / name).write_bytes((folder / name).read_bytes())
    return made


@pytest.mark.parametrize("batching", ["auto", "static"])
def test_in_fp32_texts_are_the_hosts(batching: str, folder: Path) -> None:
    asked = requests(48, 24)
    with open_engine(folder, HOST, batching=batching) as here, open_engine(folder, GPU, batching=batching) as there:
        assert {each.device.type for each in there.engine._model.parameters()} == {"cuda"}
        expected = ask(here, asked, 16)
        for together in STREAMS:
            found = ask(there, asked, together)
            others = [row for row in range(len(asked)) if found[row] != expected[row]]
            assert not others, f"{together} at a time, requests {others} of {len(asked)} have other tokens"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_half_precision_every_request_ends(dtype: str, folder: Path) -> None:
    with open_engine(folder, GPU, dtype=dtype) as there:
        assert there.engine._model.dtype == getattr(torch, dtype)
        for together in STREAMS:
            assert [len(tokens) for tokens in ask(there, requests(32, 24), together)] == [24] * 32


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_in_few_bits_every_request_ends(kind: str, large: Path) -> None:
    pytest.importorskip("torchao")
    with open_engine(large, GPU, quantize=kind) as there:
        assert hasattr(there.engine._model.lm_head.weight.data, "__tensor_flatten__")  # one of torchao's
        for together in STREAMS:
            assert [len(tokens) for tokens in ask(there, requests(16, 24), together)] == [24] * 16


def test_a_gpu_that_is_not_there_is_refused(folder: Path) -> None:
    number = torch.cuda.device_count()
    with (
        pytest.raises(SetupError, match=f"placed on GPU {number}; its process sees {number} GPUs"),
        open_engine(folder, Device("gpu", number, "engine")),
    ):
        pass


def test_tokens_a_second(folder: Path, large: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"{torch.cuda.get_device_name()}, torch {torch.__version__}; tokens a second"]
    for name, weights, vocabulary, new in (("tiny", folder, 480, 128), ("large", large, 30_000, 64)):
        for device in (HOST, GPU):
            with open_engine(weights, device) as component:
                kind = f"{name} {str(component.engine._model.dtype).removeprefix('torch.')}"
                for label, more in (("greedy", {"temperature": 0.0}), ("0.8", {"temperature": 0.8})):
                    figures = [rate(component, together, new, vocabulary, **more) for together in STREAMS]
                    lines.append(
                        f"{kind} on {device.kind}, {label}: 1 stream {figures[0]:,.0f}, 16 streams {figures[1]:,.0f}"
                    )
    with capsys.disabled():
        print("", *lines, sep="\n")  # noqa: T201
