"""Parameters of language models: two values of each give two results.

A line for each folder and parameter, as in ``tests/unit/test_option_parameters.py``. Engines run in this process, on
two tiny models; vLLM is not started, and the arguments that it would get are looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from shoal.authoring.composition.openvino_weights import make_openvino
from shoal.authoring.composition.weights import find
from shoal.authoring.repository.loading import component_class
from shoal.errors import ShoalError
from shoal.kit.component.context import Context
from shoal.kit.generation.engines import vllm
from shoal.kit.generation.engines.vllm import VllmEngine
from shoal.kit.generation.weights import NONE
from shoal.lab.tiny_llm import make_tiny
from tests.conftest import Scale, as_bytes
from tests.support.imports import add
from tests.support.llm import engine_spec, open_sequences, token_inputs, tokens_of
from tests.support.once import ROOT

IDS = [5, 6, 7, 8, 9, 10]


def look_at_tokens(component: Any) -> Any:
    """Return the tokens that follow six tokens."""
    return tokens_of(component.stream(token_inputs(IDS, 4)))


def look_at_long(component: Any) -> Any:
    """Return the tokens that follow 120 tokens."""
    return tokens_of(component.stream(token_inputs(IDS * 20, 4)))


def look_at_two(component: Any) -> bool:
    """Return whether the longer of two requests is still answered when the shorter one, which came later, has ended."""
    long = component.stream(token_inputs([5], 900))
    (sequence,) = (each for each in open_sequences(component) if each.stream.is_open)  # the trial's may not be gone yet
    tokens_of(component.stream(token_inputs([9], 2)))
    is_open = bool(sequence.stream.is_open)
    long.close()
    return is_open


def look_at_text(component: Any) -> str:
    """Return the answer of a model that takes texts."""
    (answer,) = component.process([{"prompt": as_bytes(["hello"])}])
    if isinstance(answer, ShoalError):
        raise answer
    return repr(answer["generated_text"].tolist())


def look_at_query(component: Any) -> str:
    """Return what TensorRT-LLM's ``preprocessing`` makes of a text."""
    (answer,) = component.process([{"QUERY": as_bytes(["hello"]), "REQUEST_OUTPUT_LEN": np.array([[2]], np.int32)}])
    if isinstance(answer, ShoalError):
        raise answer
    return repr({name: array.tolist() for name, array in answer.items()})


class Two(NamedTuple):
    """Two values of a parameter, what is looked at, and other parameters."""

    one: str
    two: str
    look: Callable[[Any], Any]
    beside: dict[str, str] = {}  # noqa: RUF012  # nothing changes it


def look_at_vllm(name: str) -> Callable[[Any], Any]:
    return lambda component: component.engine._arguments[name]


DRAWN = {"temperature": "2", "max_tokens": "8"}
ENTRIES: dict[tuple[str, str], Any] = {
    ("llm-hf", "model"): Two("one", "two", look_at_tokens),
    ("llm-hf", "context"): Two("5", "64", look_at_tokens),
    ("llm-hf", "slots"): Two("1", "2", look_at_two),
    ("llm-hf", "cache_tokens"): Two("64", "1024", look_at_long),
    ("llm-hf", "dtype"): Two("float32", "bfloat16", lambda c: str(c.engine._model.dtype)),
    ("llm-hf", "batching"): Two("auto", "static", lambda c: type(c.engine).__name__),
    **{
        (engine, "exclude_input_in_output"): Two("false", "true", lambda c: "started")
        for engine in ("llm-hf", "llm-onnx", "llm-openvino", "llm-vllm")
    },
    **{
        (engine, "like_tensorrt_llm"): Two("false", "true", lambda c: c.is_like_nvidia)
        for engine in ("llm-hf", "llm-onnx", "llm-openvino", "llm-vllm")
    },
    ("llm-onnx", "model"): Two("one", "two", look_at_tokens),
    ("llm-onnx", "context"): Two("5", "64", look_at_tokens),
    ("llm-onnx", "slots"): Two("1", "2", look_at_two),
    ("llm-openvino", "model"): Two("one", "two", look_at_tokens),
    ("llm-openvino", "context"): Two("5", "64", look_at_tokens),
    ("llm-openvino", "slots"): Two("1", "2", lambda c: c.engine._scheduling.max_num_seqs),
    ("llm-openvino", "cache_tokens"): Two("64", "1024", look_at_long),
    ("llm-openvino", "dtype"): Two("float32", "bfloat16", lambda c: c.engine._properties["KV_CACHE_PRECISION"]),
    ("llm-vllm", "model"): Two("one", "two", look_at_vllm("model")),
    ("llm-vllm", "context"): Two("5", "64", look_at_vllm("max_model_len")),
    ("llm-vllm", "slots"): Two("1", "2", look_at_vllm("max_num_seqs")),
    ("llm-vllm", "dtype"): Two("float32", "bfloat16", look_at_vllm("dtype")),
    ("llm-vllm", "engine_args"): Two(
        '{"gpu_memory_utilization": 0.4}', '{"gpu_memory_utilization": 0.5}', look_at_vllm("gpu_memory_utilization")
    ),
    ("preprocessing", "model"): Two("nowhere", "one", look_at_query),
    ("preprocessing", "context"): Two("2", "64", look_at_query),
    ("preprocessing", "exclude_input_in_output"): Two("true", "false", look_at_query),
    ("preprocessing", "max_text_bytes"): Two("3", "99", look_at_query),
    ("llamav2", "model"): Two("one", "two", look_at_text),
    ("llamav2", "dtype"): Two("float32", "bfloat16", lambda c: str(c.continue_rows.args[0].dtype)),
    ("llamav2", "max_tokens"): Two("2", "4", look_at_text),
    ("llamav2", "repetition_penalty"): Two("1", "9", look_at_text, DRAWN),
    ("llamav2", "seed"): Two("0", "1", look_at_text, DRAWN),
    ("llamav2", "system_prompt"): Two("", "Be brief.", look_at_text, DRAWN),
    ("llamav2", "temperature"): Two("0", "2", look_at_text),
    ("llamav2", "top_k"): Two("1", "500", look_at_text, DRAWN),
    ("llamav2", "top_p"): Two("0.01", "1", look_at_text, DRAWN),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny models, each also exported to ONNX, and to OpenVINO's format."""
    root = tmp_path_factory.mktemp("files")
    for seed, name in enumerate(("one", "two")):
        make_tiny(root / name, hidden=16, layers=1, seed=seed)
        add(root / "project", root / name, name, task="generate")
        make_openvino(find(str(root / name)), root / "openvino" / name, NONE)
    return root


@pytest.fixture(autouse=True)
def _no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not start vLLM, which needs an environment of its own."""
    monkeypatch.setattr(vllm, "_complete", lambda arguments, *_: dict(arguments))
    monkeypatch.setattr(VllmEngine, "_keep", lambda self: self._is_ready.set())
    monkeypatch.setattr(VllmEngine, "admit", lambda self, request, stream: stream.end())
    monkeypatch.setattr(VllmEngine, "close", lambda self: None)


@pytest.mark.parametrize(("key", "entry"), [pytest.param(k, e, id="-".join(k)) for k, e in ENTRIES.items()])
def test_two_values_give_two_results(key: tuple[str, str], entry: Two, files: Path, scale: Scale) -> None:
    """Where tokens are drawn, and in `make verify`, also the same result again."""
    (name, parameter), seen = key, []
    for value in (entry.one, *[entry.two] * scale(2 if entry.beside else 1, 2)):
        given = {"model": "one", **entry.beside, parameter: value}
        model = given["model"]
        places = {"llm-onnx": files / "project" / "models" / model / "1", "llm-openvino": files / "openvino" / model}
        place = places.get(name, files / model)
        folder = ROOT / ("preprocess" if name == "preprocessing" else "models") / name
        spec = engine_spec(**{**given, "model": str(place), "folder": folder})  # type: ignore[arg-type]
        try:
            component: Any = component_class(folder / "1" / "model.py")(Context(spec, folder / "1", num_threads=1))
            with closing(component):
                seen.append(str(entry.look(component)))
        except ShoalError as error:
            seen.append(f"refused: {error}")
    assert seen[0] not in seen[1:]
    assert len({*seen[1:]}) == 1
    assert not seen[1].startswith("refused"), seen


def test_a_smaller_limit_of_vllm_s_log_probabilities_is_this_engine_s(files: Path) -> None:
    for arguments, most in (
        ("{}", 20),
        ('{"max_logprobs": 5}', 5),
        ('{"max_logprobs": 0}', 0),
        ('{"max_logprobs": -1}', 20),
    ):
        folder = ROOT / "models" / "llm-vllm"
        spec = engine_spec(files / "one", folder, engine_args=arguments)
        component: Any = component_class(folder / "1" / "model.py")(Context(spec, folder / "1"))
        with closing(component):
            assert component.engine.limits.top_logprobs == most
            with pytest.raises(ShoalError, match=f"top_logprobs is {most + 1}"):
                list(component.stream(token_inputs(IDS, 1, top_logprobs=most + 1)))


def test_vllm_has_a_chosen_token_among_the_most_probable_ones_once() -> None:
    other, first, second = (
        SimpleNamespace(logprob=value, rank=rank) for value, rank in ((-3.0, 9), (-0.5, 1), (-1.0, 2))
    )
    assert vllm._read_place(7, {7: other, 1: first, 2: second}, 2) == (-3.0, [1, 2], [-0.5, -1.0])
    assert vllm._read_place(2, {2: second, 1: first}, 2) == (-1.0, [1, 2], [-0.5, -1.0])
    assert vllm._read_place(7, {7: other}, 0) == (-3.0, [], [])
