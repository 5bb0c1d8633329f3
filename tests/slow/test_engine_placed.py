"""The engine on transformers, on a pretended accelerator: the texts of the host, and what crosses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.authoring.composition.compose import compose
from shoal.authoring.repository.config import ModelConfig
from shoal.authoring.repository.plan import Plan
from shoal.clients import local
from shoal.clients.client.client import Client
from shoal.clients.local import load
from shoal.errors import InputError, SetupError, ShoalError
from shoal.kit.component.tensors import Device
from shoal.kit.generation.contract import pack_words
from shoal.kit.generation.engines import loading
from shoal.kit.generation.weights import find_weights
from shoal.lab.tiny_llm import make_tiny
from shoal.serving.server.launch import serve
from tests.conftest import Scale, verified
from tests.support.accelerator import PretendedDevice
from tests.support.families import make_family
from tests.support.generate import prompts, wait_for
from tests.support.llm import count_open, open_engine, token_inputs, tokens_of
from tests.support.once import ROOT

LLAMAV2 = ROOT / "models" / "llamav2"
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.0, "runtime_top_p": 1.0},
    {"temperature": 0.7, "runtime_top_k": 20},
    {"temperature": 1.3, "runtime_top_p": 0.8},
    {"temperature": 0.9, "runtime_top_k": 50, "runtime_top_p": 0.9, "repetition_penalty": 1.2},
    {"temperature": 1.0, "runtime_top_p": 0.95, "frequency_penalty": 0.5, "presence_penalty": -0.5},
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "min_tokens": 6},
    {"temperature": 1.0, "runtime_top_k": 1, "bad_words_list": pack_words([[7], [8, 9]])},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=["auto", "static"])
def pair(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[Any, Any]]:
    """The engine on the host and on the pretended accelerator, both with continuous, then with static batches."""
    with (
        open_engine(folder, batching=request.param) as here,
        open_engine(folder, device=PretendedDevice(), batching=request.param) as there,
    ):
        assert {each.device.type for each in there.engine._model.parameters()} == {"pretend"}
        yield here, there


def ask(component: Any, asked: list[dict[str, Any]], together: int) -> list[list[int]]:
    found = []
    for start in range(0, len(asked), together):
        streams = [component.stream(inputs) for inputs in asked[start : start + together]]
        found += [tokens_of(stream) for stream in streams]
    return found


@pytest.mark.parametrize("together", [*verified(1), 16])
def test_texts_are_the_hosts(pair: tuple[Any, Any], together: int, scale: Scale) -> None:
    here, there = pair
    ids = prompts(scale(16, 200), 11)
    asked = [token_inputs(each, 8, seed=row, **SAMPLED[row % len(SAMPLED)]) for row, each in enumerate(ids)]
    assert ask(there, asked, together) == ask(here, asked, 16)


def test_stop_words_end_tokens_and_log_probabilities(pair: tuple[Any, Any]) -> None:
    ids = prompts(1, 5)[0]
    (tokens,) = ask(pair[0], [token_inputs(ids, 16)], 1)
    more: list[dict[str, Any]] = [
        {"end_id": tokens[4]},
        {"stop_words_list": pack_words([tokens[3:5], [0, 0, 0]])},
        {"stop_words_list": pack_words([tokens[3:5]]), "min_tokens": 9},
        {"return_log_probs": True, "top_logprobs": 3, "temperature": 1.0, "seed": 4},
        {"streaming": False, "carry": b"{}"},
    ]
    for each in more:
        here, there = ([*one.stream(token_inputs(ids, 16, **each))] for one in pair)
        assert len(here) == len(there)
        for left, right in zip(here, there, strict=True):
            assert left.keys() == right.keys()
            for name in left.keys() - {"stream_id"}:
                if "log_probs" in name:
                    np.testing.assert_allclose(left[name], right[name], atol=1e-4)
                else:
                    assert np.array_equal(left[name], right[name]), name


def test_clients_leave_and_bad_requests_are_refused(pair: tuple[Any, Any]) -> None:
    _, there = pair
    neighbour = there.stream(token_inputs([5, 6], 60))
    leaving = [there.stream(token_inputs(ids, 900)) for ids in prompts(3, 2)]
    for bad in ({"input_ids": np.array([[99_999]], np.int32)}, {"temperature": np.array([[-1]], np.float32)}):
        with pytest.raises(InputError):
            list(there.stream(token_inputs([5], 4) | bad))
    for stream in leaving:
        next(iter(stream))
        stream.close()
    assert len(tokens_of(neighbour)) == 60
    assert not any(stream.is_open for stream in leaving)
    assert ask(there, [token_inputs([5, 6], 8)], 1) == ask(pair[0], [token_inputs([5, 6], 8)], 1)


def test_a_model_that_fails_fails_its_requests(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine(folder, device=PretendedDevice()) as there:
        wait_for(lambda: count_open(there) == 0, 30)
        model, whole = there.engine._model, type(there.engine._model).forward

        def fail(*_: Any, **__: Any) -> Any:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(type(model), "forward", fail)
        with pytest.raises(ShoalError):
            list(there.stream(token_inputs([5, 6], 8)))
        monkeypatch.setattr(type(model), "forward", whole)
        wait_for(there.is_ready, 30)
        assert len(tokens_of(there.stream(token_inputs([5, 6], 8)))) == 8


@pytest.mark.parametrize("batched", [1, 8])
def test_llamav2s_texts_are_the_hosts(batched: int, folder: Path) -> None:
    texts = [f"What is {number} about a river?" for number in range(8)]
    given = {
        "prompt": np.array([[text.encode()] for text in texts], np.object_),
        "temperature": np.array([[0.0], [1.0]] * 4, np.float32),
        "seed": np.arange(8, dtype=np.uint64)[:, None],
    }

    def answer(device: Device) -> list[bytes]:
        with open_engine(folder, LLAMAV2, device, max_tokens="12", top_k="0") as component:
            assert component.continue_rows.args[0].device.type == ("cpu" if device.kind == "cpu" else "pretend")
            parts = [
                {name: array[start : start + batched] for name, array in given.items()}
                for start in range(0, 8, batched)
            ]
            return [text for found in component.process(parts) for text in found["generated_text"].ravel().tolist()]

    found = answer(PretendedDevice())
    assert found == answer(Device())
    assert len({*found}) > 1


@pytest.mark.parametrize("name", ["mistral", *verified("opt")])
def test_other_families(name: str, tmp_path: Path) -> None:
    folder = make_family(name, tmp_path)
    asked = [token_inputs([*range(3, 3 + size)], 12) for size in (1, 2, 14, 40)]
    with open_engine(folder) as here, open_engine(folder, device=PretendedDevice()) as there:
        assert ask(there, asked, 4) == ask(here, asked, 4)


def test_a_gpu_that_is_not_there_is_an_error_before_the_weights_are_read(folder: Path) -> None:
    with (
        pytest.raises(SetupError, match=r"placed on GPU 3; its process sees 0 GPUs\. Compose with --placement cpu"),
        open_engine(folder, device=Device("gpu", 3, "engine")),
    ):
        pass


def test_with_kind_model_it_takes_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loading.find_place(Device("model", 0, "engine")) == "cpu"
    assert loading.find_place(Device()) == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    prepared: list[int] = []

    def prepare(index: int) -> int:
        prepared.append(index)
        return 3

    monkeypatch.setattr("shoal.kit.component.tensors._prepare_torch", prepare)
    assert loading.find_place(Device("model", 0, "engine")) == "cuda:0"
    assert loading.find_place(Device("gpu", 2, "engine")) == "cuda:2"
    assert prepared == [0, 2]


def test_auto_is_the_weights_own_dtype_if_the_device_computes_in_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading.load_model(find_weights(folder), "bfloat16").save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    half = find_weights(tmp_path)
    for has_bf16 in ("0", "1"):
        monkeypatch.setenv("SHOAL_BF16", has_bf16)
        assert loading.load_model(half, "auto").dtype == (torch.bfloat16 if has_bf16 == "1" else torch.float32)
        assert loading.load_model(half, "auto", place="pretend:0").dtype == torch.bfloat16
        assert loading.load_model(find_weights(folder), "auto").dtype == torch.float32


def test_with_hybrid_the_engine_is_the_servers(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's pipeline starts `prompt` and `completion` alone, and gives the text of the whole one."""
    asked: dict[str, Any] = {
        "text_input": ["What do fish do?"],
        "max_tokens": [8],
        "temperature": [0.0],
        "stream": [True],
    }
    repository = compose("llm", tmp_path / "r", weights=folder, plan=Plan(placement="hybrid", gpus=()))
    with load(repository / "llm") as whole:
        expected = [answer["text_output"].item() for answer in whole.stream(**asked)]
    started: list[str] = []
    start = local.load_component

    def note(config: ModelConfig, *more: Any) -> Any:
        started.append(config.name)
        return start(config, *more)

    monkeypatch.setattr(local, "load_component", note)
    with serve(repository) as server, Client(server.grpc_url) as client, load(repository, remote=client) as pipeline:
        found = [answer["text_output"].item() for answer in pipeline.stream(**asked)]
    assert sorted(started) == ["completion", "prompt"]
    assert b"".join(found) == b"".join(expected) != b""
