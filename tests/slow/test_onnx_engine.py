"""Decoders on ONNX Runtime: exported, equal to ``generate`` token by token, and composed in the place of llm-hf."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM

from shoal.authoring.composition.compose import compose
from shoal.authoring.project.importing.add_model import add_model
from shoal.authoring.repository.config import read_config
from shoal.errors import ArtifactError, InputError, ShoalError
from shoal.lab.tiny_llm import make_tiny
from tests.conftest import verified
from tests.support.imports import add
from tests.support.llm import count_open, find_trained, open_engine, token_inputs, tokens_of
from tests.support.once import ROOT
from tests.support.skeletons import run

SHIPPED = ROOT / "models" / "llm-onnx"
CLOSE = 1e-4  # between the two best logits: then either token is right
LONG = 900  # tokens: two pieces of a prompt


@pytest.fixture(scope="module")
def tiny() -> Path:
    """A model that was trained to answer six questions."""
    return find_trained()


@pytest.fixture(scope="module")
def project(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    _, said = add(folder, tiny, "tiny-onnx", task="generate")
    assert said[0].startswith("LlamaForCausalLM from ")
    assert "its tokens are the model's" in said[1]
    return folder


@pytest.fixture(scope="module")
def oracle(tiny: Path) -> Callable[[list[int], int], list[int]]:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny).eval()

    def generate(ids: list[int], new: int) -> list[int]:
        given = torch.tensor([ids])
        options = {"attention_mask": torch.ones_like(given), "do_sample": False, "eos_token_id": None}
        with torch.inference_mode():
            out = model.generate(given, max_new_tokens=new, **options)
        return [*map(int, out[0, len(ids) :])]

    def logits(ids: list[int]) -> Any:
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0, -1].topk(2).values

    generate.logits = logits  # type: ignore[attr-defined]
    return generate


def check_equal(oracle: Any, ids: list[int], found: list[int], new: int) -> None:
    """Check the tokens up to the first one where the model itself is undecided."""
    wanted = oracle(ids, new)
    assert len(found) == new
    for place, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        if ours != theirs:
            first, second = oracle.logits(ids + wanted[:place])
            assert first - second <= CLOSE, f"token {place} is {ours}, not {theirs}"
            return


def make_requests(count: int) -> list[tuple[list[int], int]]:
    random = np.random.default_rng(0)
    sizes = random.choice([1, 2, 17, 60, 200], count).tolist()
    sizes[3], sizes[11] = LONG, 513
    return [
        (random.integers(0, 480, size).tolist(), int(new))
        for size, new in zip(sizes, random.choice([1, 8, 32, 96], count), strict=True)
    ]


def wait_until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- the engine --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", ["5", *verified("1", "16")])
def test_mixed_lengths_equal_generate(slots: str, project: Path, oracle: Any) -> None:
    requests = make_requests(40)
    with open_engine("", project / "models" / "tiny-onnx", slots=slots) as component:
        streams = [component.stream(token_inputs(ids, new)) for ids, new in requests]
        found = [tokens_of(stream) for stream in streams]
        wait_until(lambda: count_open(component) == 0)
    for (ids, new), tokens in zip(requests, found, strict=True):
        check_equal(oracle, ids, tokens, new)


def test_short_requests_overtake_long_ones(project: Path) -> None:
    with open_engine("", project / "models" / "tiny-onnx", slots="2") as component:
        long = component.stream(token_inputs([5], 900))
        for _ in range(3):
            assert len(tokens_of(component.stream(token_inputs([9, 9], 8)))) == 8
        assert count_open(component) == 1
        long.close()
        wait_until(lambda: count_open(component) == 0)


def test_leaving_frees_the_slot_and_disturbs_no_other_client(project: Path, oracle: Any) -> None:
    """Requests leave while they wait, while their prompt is read, and while they are answered."""
    ids = [[place, 7, 99] for place in range(12)]
    with open_engine("", project / "models" / "tiny-onnx", slots="4") as component:
        streams = [component.stream(token_inputs(each, 120)) for each in ids]
        leaver = component.stream(token_inputs([3] * LONG, 100))
        for place in (1, 6, 10):
            if place == 1:
                next(iter(streams[place]))  # it is computed
            streams[place].close()
        leaver.close()
        kept = [place for place in range(12) if place not in (1, 6, 10)]
        found = [tokens_of(streams[place]) for place in kept]
        wait_until(lambda: count_open(component) == 0)
        assert tokens_of(component.stream(token_inputs(ids[6], 5))) == oracle(ids[6], 5)
    for place, tokens in zip(kept, found, strict=True):
        check_equal(oracle, ids[place], tokens, 120)


def test_settings_reach_the_choice(project: Path, oracle: Any) -> None:
    ids = [4, 8, 15]
    plain = oracle(ids, 12)
    with open_engine("", project / "models" / "tiny-onnx") as component:

        def ask(**more: Any) -> list[int]:
            return tokens_of(component.stream(token_inputs(ids, 12, **more)))

        assert ask(end_id=plain[4]) == plain[: plain.index(plain[4])]
        assert plain[0] not in ask(bad_words_list=np.array([[plain[0]], [1]]))
        drawn = {"temperature": 1.0, "runtime_top_p": 1.0}
        assert ask(**drawn, seed=5) == ask(**drawn, seed=5) != ask(**drawn, seed=6)
        (only,) = component.stream(token_inputs(ids, 12, streaming=False))
        assert only["output_ids"].ravel().tolist() == plain
        assert only["finish_reason"].item() == b"length"
        with pytest.raises(InputError, match="The prompt has 3 tokens and request_output_len is 5000"):
            list(component.stream(token_inputs(ids, 5000)))


def test_a_failed_step_ends_its_requests_alone(project: Path, oracle: Any) -> None:
    with open_engine("", project / "models" / "tiny-onnx") as component:
        decoder = component.engine._decoder
        names, decoder._names = decoder._names, ["no such input", *decoder._names[1:]]
        with pytest.raises(ShoalError, match="The model failed on this request"):
            list(component.stream(token_inputs([1], 5)))
        decoder._names = names
        assert tokens_of(component.stream(token_inputs([1], 5))) == oracle([1], 5)


def test_closing_ends_open_streams(project: Path) -> None:
    with open_engine("", project / "models" / "tiny-onnx", slots="1") as component:
        streams = [component.stream(token_inputs([1], 900)) for _ in range(2)]
        next(iter(streams[0]))
    for stream in streams:
        with pytest.raises(ShoalError, match="The model is being unloaded"):
            list(stream)
    assert not any(thread.name == "shoal-onnx" for thread in threading.enumerate())


def test_it_needs_neither_torch_nor_transformers(project: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import model; print({'torch', 'transformers'} & {*sys.modules})"
    )
    out = subprocess.run([sys.executable, "-c", code, project / "models/tiny-onnx/1"], capture_output=True, check=True)
    assert out.stdout == b"set()\n"


# --- the import --------------------------------------------------------------------------------------------------


def test_the_command(tiny: Path, tmp_path: Path) -> None:
    result = run("add-model", tiny, "tiny", "--task", "generate", "--project", tmp_path)
    assert result.exit_code == 0, result.output
    folder = tmp_path / "models" / "tiny"
    assert f"--weights {folder}/1 --swap llm-hf=tiny" in result.stdout
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (folder / "1" / name).read_bytes() == (tiny / name).read_bytes()
    with open_engine(folder / "1", SHIPPED) as component:  # it is a weights folder, too
        assert len(tokens_of(component.stream(token_inputs([1], 5)))) == 5
    repository = compose("llm_bls", tmp_path / "bls", weights=folder / "1", swap={"llm-hf": "llm-onnx"})
    assert read_config(repository / "llm-onnx").spec.parameters["model"] == str(folder / "1")


def test_weights_of_another_model(project: Path, tmp_path: Path) -> None:
    other = make_tiny(tmp_path / "other", hidden=32, layers=1)
    tokenizer = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")  # other bytes
    with pytest.raises(ArtifactError, match=r"tiny-onnx has a decoder with another tokenizer\.json than .*other\."):
        compose("llm", tmp_path / "r", projects=[project], weights=other, swap={"llm-hf": "tiny-onnx"})


def test_models_that_are_not_decoders(tiny: Path, project: Path, tmp_path: Path) -> None:
    def refuse(source: Path, error: type[ShoalError], match: str, **options: Any) -> None:
        with pytest.raises(error, match=match):
            add_model(source, "m", project=tmp_path / "project", task="generate", **options)
        assert not (tmp_path / "project").exists()

    bert = tmp_path / "bert"
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    BertForMaskedLM(BertConfig(vocab_size=484, **sizes)).save_pretrained(bert)
    shutil.copy(tiny / "tokenizer.json", bert)
    refuse(bert, InputError, "is not a decoder: its architecture is BertForMaskedLM")
    pickled = tmp_path / "pickled"
    shutil.copytree(tiny, pickled)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    refuse(pickled, ArtifactError, "has weights only as pickles")
    other = tmp_path / "other"
    shutil.copytree(tiny, other)
    config = json.loads((other / "config.json").read_text(encoding="utf-8"))
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 100}), encoding="utf-8")
    refuse(other, ArtifactError, "it is another model's")
    refuse(project / "models" / "tiny-onnx" / "1", InputError, r"has decoder\.onnx, and no safetensors")
    refuse(tmp_path / "nowhere", ArtifactError, "is not a folder")
    refuse(tiny, InputError, "Unknown option for a decoder: pooling. It takes: none", pooling="mean")


def test_decoders_that_cannot_be_started(project: Path, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"has no decoder\.onnx.* shoal add-model .* NAME --task generate"):  # noqa: SIM117
        with open_engine(tiny, SHIPPED):
            pass
    folder = tmp_path / "weights"
    shutil.copytree(project / "models" / "tiny-onnx" / "1", folder)
    (folder / "decoder.onnx").write_bytes(b"cut off")
    with pytest.raises(ArtifactError, match=r"ONNX Runtime .* refuses .*decoder\.onnx"):  # noqa: SIM117
        with open_engine(folder, SHIPPED):
            pass
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "graph", [x], [y])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), folder / "decoder.onnx"
    )
    with pytest.raises(ArtifactError, match="is not a decoder with cache for 484 tokens: its inputs begin with x"):  # noqa: SIM117
        with open_engine(folder, SHIPPED):
            pass


def test_a_swap_takes_the_place_of_the_engine(tiny: Path, project: Path, tmp_path: Path) -> None:
    repository = compose("llm", tmp_path / "repository", projects=[project], weights=tiny, swap={"llm-hf": "tiny-onnx"})
    assert (repository / "tiny-onnx" / "1" / "decoder.onnx").is_file()
    assert not (repository / "llm-hf").exists()
