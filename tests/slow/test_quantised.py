"""Weights of `llm-hf` in 8 bits, what is refused, and the memory that is computed before anything is loaded."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from shoal.authoring.composition.compose import compose
from shoal.authoring.repository.config import as_config, read_config
from shoal.authoring.repository.engine_memory import EngineMemory, find_engine_memory
from shoal.authoring.repository.model_folders import read_configs
from shoal.authoring.repository.plan import Instances, Plan, Tuning
from shoal.cli import app
from shoal.errors import ArtifactError, InputError, SetupError
from shoal.kit.generation.engines.loading import load_model
from shoal.kit.generation.engines.quantising import quantize
from shoal.kit.generation.weights import find_weights
from shoal.lab.tiny_llm import make_tiny
from shoal.system.machine import Gpu
from tests.support.families import make_family
from tests.support.llm import ENGINE, open_engine, token_inputs, tokens_of
from tests.support.once import ROOT
from tests.support.torchao import add_torchao

LLAMAV2 = ROOT / "models" / "llamav2"


@pytest.fixture(autouse=True)
def _torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    add_torchao(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def count_bytes(tensor: Any) -> int:
    """The bytes of a tensor, or of the parts of one of torchao's."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(count_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return int(tensor.numel() * tensor.element_size())


def weigh(model: Any) -> int:
    return sum(count_bytes(each.data) for each in model.parameters())


def test_eight_bits_take_a_third_of_the_memory(folder: Path) -> None:
    whole, small = (weigh(load_model(find_weights(folder), "float32", quantized=kind)) for kind in ("none", "int8"))
    assert small < 0.35 * whole


def test_tokens_are_those_of_the_same_models_generate(folder: Path) -> None:
    """Quantised, the model is one more model, and its engines compute it as its own ``generate`` does."""
    model = load_model(find_weights(folder), "float32", quantized="int8")
    ids = [*range(5, 15)]
    right = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0)
    for batching in ("auto", "static"):
        with open_engine(folder, quantize="int8", dtype="float32", batching=batching) as engine:
            streams = [engine.stream(token_inputs(ids, 12)) for _ in range(3)]
            assert [tokens_of(stream) for stream in streams] == [right[0, len(ids) :].tolist()] * 3


def test_llamav2_in_eight_bits(folder: Path, tmp_path: Path) -> None:
    """The text is that of the quantised model's own ``generate``; without a GPU, compose refuses it."""
    model = load_model(find_weights(folder), "float32", quantized="int8")
    prompt = {"prompt": np.array([[b"What do cats do?"]], np.object_), "temperature": np.array([[0.0]], np.float32)}
    with open_engine(folder, LLAMAV2, quantize="int8", max_tokens="12", repetition_penalty="1") as component:
        assert weigh(component.continue_rows.args[0]) == weigh(model)
        (request,) = component.requests(prompt)
        ids, ends = list(request.ids), list(request.end_ids)
        right = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=ends)
        (answer,) = component.process([prompt])
        assert answer["generated_text"].item().decode() == component.tokenizer.decode(right[0, len(ids) :].tolist())
    with pytest.raises(ArtifactError, match=r"llamav2 is on the host.*Compose with --placement gpu\."):
        compose("llamav2", tmp_path / "r", weights=folder, quantize="int8")
    repository = compose("llamav2", tmp_path / "r", weights=folder, quantize="int8", plan=Plan(placement="gpu"))
    assert read_configs(repository)["llamav2"].spec.parameters["quantize"] == "int8"


@pytest.mark.parametrize(
    ("parameters", "match"),
    [
        ({"quantize": "int3"}, "quantize of model llm-hf is 'int3'; expected none or int8 or int4"),
        ({"quantize": "int4"}, r"int4 needs an NVIDIA GPU.*"),
    ],
)
def test_what_a_host_cannot_compute_is_refused(folder: Path, parameters: dict[str, str], match: str) -> None:
    with (
        pytest.raises((SetupError, ArtifactError), match=match),
        open_engine(folder, ENGINE, None, threads=1, **parameters),
    ):
        pass


def test_weights_that_are_quantised_already(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_bytes())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"bitsandbytes.* are quantised already: .* with --engine vllm\.$"):
        load_model(find_weights(tmp_path), "float32")


def test_without_torchao(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(SetupError, match=r"pip install 'shoal\[quantize\]'"), open_engine(folder, quantize="int8"):
        pass


@pytest.mark.parametrize(("name", "most"), [("gpt2", "c_attn|c_fc|c_proj"), ("mixtral", "experts")])
def test_weights_outside_of_linear_layers_are_refused(name: str, most: str, tmp_path: Path) -> None:
    weights = find_weights(make_family(name, tmp_path))
    with pytest.raises(ArtifactError, match=rf"% of its weights outside of linear layers, the most in \S*({most})"):
        load_model(weights, "float32", quantized="int8")


class Odd(torch.nn.Module):
    """A model with an inner width that no group divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = torch.nn.Linear(72, 64, bias=False), torch.nn.Linear(72, 99, bias=False)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head


def test_groups_that_do_not_divide_a_layer_are_refused() -> None:
    with pytest.raises(ArtifactError, match=r"up has 72 inputs, and int4 has a scale for each 128, 64 or 32 of them"):
        quantize(Odd(), "int4")


# --- memory ----------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, dict[str, str]] = {
    "as it is": {},
    "one slot": {"slots": "1"},
    "many slots": {"slots": "64"},
    "a short context": {"context": "64"},
    "its own cache": {"cache_tokens": "1000"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantize": "int8", "dtype": "float32"},
    "int8 of bfloat16": {"quantize": "int8", "dtype": "bfloat16", "slots": "3"},
}


def compute(weights: Path, **parameters: str) -> EngineMemory:
    config = read_config(ENGINE)
    for name, value in {"model": str(weights), **parameters}.items():
        config.message.parameters[name].string_value = value
    found = find_engine_memory(as_config(config.message, config.folder), on_gpu=False)
    assert found is not None
    return found


@pytest.mark.parametrize("parameters", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_bytes_are_those_of_the_tensors(family: str, parameters: dict[str, str], tmp_path: Path) -> None:
    """Weights and cache are within 5 % of what torch holds, on the host, for the same engine."""
    weights = make_family(family, tmp_path / "weights")
    memory = compute(weights, **parameters)
    with open_engine(weights, ENGINE, None, threads=1, **parameters) as component:
        engine = component.engine
        cache = engine._manager.batch_processor.cache.cache_tensor
        assert memory.weights == pytest.approx(weigh(engine._model), rel=0.05)
        assert memory.cache == pytest.approx(cache.numel() * cache.element_size(), rel=0.05)
        assert memory.logits == engine.limits.slots * engine.limits.vocabulary * engine._model.dtype.itemsize


def run(*words: Any) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_plan_adds_up_and_refuses_what_does_not_fit(folder: Path) -> None:
    result = run("plan", "llm", "--weights", folder, "--placement", "gpu", "--json")
    assert result.exit_code == 0, result.output
    assert '"GPU 0"' in result.output
    assert "warning" not in result.output  # `prompt` is on the host: it needs no CuPy
    result = run("plan", "llm", "--weights", folder)
    assert "engines, on host: " in result.output
    result = run("plan", "llm", "--placement", "gpu", "--weights", folder, "--gpu-memory", 1)
    assert result.exit_code == 0, result.output
    result = run("plan", "llm", "--weights", folder, "--gpu-memory", 1)
    assert "no language model is on a GPU" in str(result.exception)
    plan = ["plan", "llm", "--weights", folder, "--placement", "gpu", "--json"]
    whole, small = (json.loads(run(*plan, *more).stdout)["engines"]["GPU 0"] for more in ([], ["--quantize", "int8"]))
    assert small < whole
    plan = ["plan", "llm", "--weights", folder, "--engine", "openvino", "--json"]  # nothing is exported for it
    whole, small = (json.loads(run(*plan, *more).stdout)["engines"]["host"] for more in ([], ["--quantize", "int8"]))
    assert small < whole


def test_the_memory_of_other_machines_gpus(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "w")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "w" / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": 10**7}), encoding="utf-8"
    )
    plan = ["plan", "llm", "--weights", tmp_path / "w", "--placement", "gpu"]
    assert run(*plan, "--gpu-memory", 100).exit_code == 0
    assert "of GPU 0, which has 1,073,741,824" in str(run(*plan, "--gpu-memory", 1).exception)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", b""),
        ("model.safetensors", b"\x05\0\0\0\0\0\0\0[1,2]"),
        ("model.safetensors", (10**5).to_bytes(8, "little") + b"[" * 10**5),
        ("config.json", {"num_hidden_layers": "two"}),
        ("config.json", {"num_key_value_heads": "few"}),
        ("config.json", {"head_dim": "wide"}),
    ],
)
def test_damaged_weights_have_no_size(name: str, content: Any, folder: Path, tmp_path: Path) -> None:
    """Other rules, and the engine, report them."""
    shutil.copytree(folder, tmp_path / "w")
    path = tmp_path / "w" / name
    if isinstance(content, dict):
        content = json.dumps(json.loads(path.read_text(encoding="utf-8")) | content).encode()
    path.write_bytes(content)
    config = read_config(ENGINE)
    config.message.parameters["model"].string_value = str(tmp_path / "w")
    assert find_engine_memory(as_config(config.message, config.folder), on_gpu=False) is None


def test_several_models_on_one_card_and_on_three(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances multiply, and the engines of one repository share their card; what is too much is refused."""
    memory = compute(folder)
    one = memory.weights + memory.cache + memory.logits
    cards = [Gpu("H100", f"GPU-{number}", int(2.5 * one)) for number in range(3)]
    monkeypatch.setattr("shoal.authoring.repository.engine_memory.find_gpus", lambda: cards)

    def compose_on(count: int, *gpus: int) -> Path:
        plan = Plan(placement="gpu", gpus=(0, 1, 2))
        tuning = {"llm-hf": Tuning(instances=(Instances(count, gpus),))}
        return compose("llm", tmp_path / "r", weights=folder, plan=plan, tuning=tuning)

    compose_on(2, 0)
    compose_on(2, 0, 1, 2)
    with pytest.raises(ArtifactError, match=rf"Engines take {3 * one:,} bytes of GPU 0, which has .*\[engine-memory\]"):
        compose_on(3, 0)


def test_compose_refuses_a_kind_that_nothing_takes(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--quantize int8 has no effect: none of these models"):
        compose("llm", tmp_path / "r", weights=folder, swap={"llm-hf": "llm-vllm"}, quantize="int8")
    for kind, why in (("int4", "computes in 4 bits on no processor"), ("int8", "is slower there in 8 bits")):
        with pytest.raises(ArtifactError, match=f"llm-hf is on the host, and its weights in {kind} .* torchao {why}"):
            compose("llm", tmp_path / "r", weights=folder, quantize=kind)
    repository = compose("llm", tmp_path / "r", weights=folder, quantize="int8", plan=Plan(placement="gpu"))
    assert read_configs(repository)["llm-hf"].spec.parameters["quantize"] == "int8"
