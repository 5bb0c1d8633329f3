"""Language models on OpenVINO: exported, equal to ``generate`` token by token, and composed in the place of llm-hf."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, GenerationConfig

import shoal
from shoal.authoring.composition import engines, openvino_weights
from shoal.authoring.composition.compose import compose
from shoal.authoring.composition.weights import find
from shoal.authoring.repository.engine_memory import find_engine_memory
from shoal.authoring.repository.find_graph import find_model_folders
from shoal.authoring.repository.manifest import read_manifest
from shoal.authoring.repository.model_folders import read_configs
from shoal.authoring.repository.plan import Plan
from shoal.errors import ArtifactError, InputError, ShoalError
from tests.support.families import make_family
from tests.support.generate import check_equal, expect
from tests.support.llm import find_trained, open_engine, token_inputs, tokens_of
from tests.support.once import ROOT

SHIPPED = ROOT / "models" / "llm-openvino"
ON: dict[str, Any] = {"engine": "openvino"}
LONG = 900  # tokens: two pieces of a prompt


@pytest.fixture(scope="module")
def tiny() -> Path:
    """A model that was trained to answer six questions."""
    return find_trained()


@pytest.fixture(scope="module")
def repository(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("openvino") / "repository"
    return compose("llm_bls", folder, weights=tiny, **ON, is_together=True)


@pytest.fixture(scope="module")
def exported(repository: Path) -> Path:
    return repository.with_name("repository-openvino")


@pytest.fixture(scope="module")
def component(exported: Path) -> Iterator[Any]:
    """The engine with four slots, for the tests that do not break it."""
    with open_engine(exported, SHIPPED, slots="4") as component:
        yield component


@pytest.fixture(scope="module")
def model(tiny: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny).eval()
    model.generation_config = GenerationConfig()
    return model


def wait_until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- the engine ------------------------------------------------------------------------------------------------------


def test_mixed_lengths_equal_generate(component: Any, model: Any) -> None:
    """Forty requests for four slots, two of them longer than a step's tokens; some begin alike."""
    random = np.random.default_rng(0)
    sizes = random.choice([1, 2, 17, 60, 200], 40).tolist()
    sizes[3], sizes[11] = LONG, 513
    asked = [(random.integers(0, 480, size).tolist(), int(random.choice([1, 8, 32, 96]))) for size in sizes]
    asked[20:24] = [([*asked[11][0], place], 8) for place in range(4)]
    streams = [component.stream(token_inputs(ids, new)) for ids, new in asked]
    for stream, (ids, new) in zip(streams, asked, strict=True):
        check_equal(tokens_of(stream), expect(model, ids, new))


def test_prompts_that_begin_alike_do_not_disturb_each_other(exported: Path, model: Any) -> None:
    """Short ones, at the same time and again and again: with the library's prefix cache, some got others' tokens."""
    ids = [4, 8, 15, 16, 23, 42, 99, 7]
    prompts = [ids[: 1 + place % 8] for place in range(24)]
    expected = [expect(model, each, 4 + place % 9) for place, each in enumerate(prompts)]
    with open_engine(exported, SHIPPED) as component, ThreadPoolExecutor(16) as pool:
        for _ in range(40):
            streams = pool.map(
                lambda place: tokens_of(component.stream(token_inputs(prompts[place], 4 + place % 9))), range(24)
            )
            for tokens, right in zip(streams, expected, strict=True):
                check_equal(tokens, right)


def test_leaving_frees_the_slot_and_disturbs_no_other_client(component: Any, model: Any) -> None:
    asked = [[place, 7, 99] for place in range(12)]
    streams = [component.stream(token_inputs(each, 120)) for each in asked]
    leaver = component.stream(token_inputs([3] * LONG, 100))
    next(iter(streams[1]))  # it is computed
    for each in (streams[1], streams[6], streams[10], leaver):
        each.close()
    for place in {*range(12)} - {1, 6, 10}:
        check_equal(tokens_of(streams[place]), expect(model, asked[place], 120))
    wait_until(lambda: not component.engine._running)


def test_settings_are_obeyed_or_refused_by_name(component: Any, model: Any) -> None:
    ids = [4, 8, 15]
    plain = expect(model, ids, 12)

    def ask(**more: Any) -> list[int]:
        return tokens_of(component.stream(token_inputs(ids, 12, **more)))

    tokens = ask()
    check_equal(tokens, plain)
    assert ask(end_id=tokens[4]) == tokens[: tokens.index(tokens[4])]
    assert len(ask(end_id=tokens[4], min_tokens=12)) == 12
    drawn = {"temperature": 1.5, "runtime_top_p": 1.0}
    others = [component.stream(token_inputs([place], 30, **drawn)) for place in range(3)]  # a seed is the request's own
    assert ask(**drawn, seed=5) == ask(**drawn, seed=5) != ask(**drawn, seed=6)
    assert ask(**drawn) != ask(**drawn)
    for stream in others:
        list(stream)
    (only,) = component.stream(token_inputs(ids, 12, streaming=False))
    assert only["output_ids"].ravel().tolist() == tokens
    assert only["finish_reason"].item() == b"length"
    with pytest.raises(InputError, match=r"The request has bad_words_list; this model's engine does not apply it\."):
        ask(bad_words_list=np.array([[tokens[0]], [1]]))
    with pytest.raises(InputError, match=r"The request has embedding_bias; this model's engine does not apply it\."):
        ask(embedding_bias=np.array([1.0], np.float32))
    for name in ("frequency_penalty", "presence_penalty"):  # its formulas are others
        with pytest.raises(InputError, match=f"{name} is 0.5, and this model's engine does not apply it"):
            ask(**{name: 0.5})
    with pytest.raises(InputError, match="top_logprobs is 2"):
        ask(top_logprobs=2)
    with pytest.raises(InputError, match="The prompt has 3 tokens and request_output_len is 5000"):
        list(component.stream(token_inputs(ids, 5000)))


@pytest.mark.parametrize("penalty", [0.8, 1.0, 1.6])
def test_log_probabilities_and_the_penalty_are_those_of_llm_hf(penalty: float, component: Any, tiny: Path) -> None:
    """The log probabilities are those of the model, before the penalty."""
    found = []
    with open_engine(tiny) as reference:
        for each in (component, reference):
            answers = [
                *each.stream(token_inputs([4, 8, 15, 16, 23], 40, return_log_probs=True, repetition_penalty=penalty))
            ]
            places = np.concatenate([answer["output_log_probs"].ravel() for answer in answers])
            found.append(([token for answer in answers for token in answer["output_ids"].ravel().tolist()], places))
    (tokens, places), (wanted, right) = found
    assert tokens == wanted
    assert np.allclose(places, right, atol=1e-4)


def test_a_failed_step_ends_its_requests_alone(exported: Path, model: Any) -> None:
    with open_engine(exported, SHIPPED) as component:
        working, component.engine._pipeline = component.engine._pipeline, None
        with pytest.raises(ShoalError, match="OpenVINO refuses this request"):
            list(component.stream(token_inputs([1], 5)))
        component.engine._pipeline = working
        check_equal(tokens_of(component.stream(token_inputs([1], 5))), expect(model, [1], 5))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_does_not_start_again_lets_no_client_wait(exported: Path) -> None:
    """A step fails, and OpenVINO does not read its folder any more: the model is not ready, and requests are ended."""
    with open_engine(exported, SHIPPED) as component:
        stream = component.stream(token_inputs([1], 900))
        next(iter(stream))
        component.engine._folder = exported / "nowhere"
        component.engine._send = None
        with pytest.raises(ShoalError, match=r"The model failed on this request\."):
            list(stream)
        wait_until(lambda: not component.is_ready())
        with pytest.raises(ShoalError, match="The model is being unloaded"):
            list(component.stream(token_inputs([1], 5)))


def test_closing_ends_open_streams(exported: Path) -> None:
    with open_engine(exported, SHIPPED, slots="1") as component:
        streams = [component.stream(token_inputs([1], 900)) for _ in range(2)]
        next(iter(streams[0]))
    for stream in streams:
        with pytest.raises(ShoalError, match="The model is being unloaded"):
            list(stream)
    assert not component.engine.is_running()


def test_a_whole_pipeline(repository: Path, tiny: Path, tmp_path: Path) -> None:
    """Its texts, stop words and counts are those on llm-hf."""
    plain = compose("llm_bls", tmp_path / "plain", weights=tiny, is_together=True)
    asked: list[dict[str, Any]] = [{}, {"stop_words": [[" the", "sea"]]}, {"min_tokens": [[30]]}]
    found: list[list[Any]] = [[], []]
    for each, texts in zip((repository, plain), found, strict=True):
        with shoal.load(each / "llm_bls") as pipeline:
            for more in asked:
                answers = [*pipeline.stream(text_input=[["What do fish drink?"]], max_tokens=[[40]], **more)]
                last = {name: answers[-1][name].tolist() for name in ("finish_reason", "num_output_tokens")}
                texts.append((b"".join(answer["text_output"].item() for answer in answers), last))
    assert found[0] == found[1]


# --- the export ------------------------------------------------------------------------------------------------------


def test_the_export_is_made_once_for_the_same_files(repository: Path, tiny: Path, tmp_path: Path) -> None:
    weights = shutil.copytree(tiny, tmp_path / "weights")

    def make(**more: Any) -> tuple[dict[str, Any], int]:
        compose("llm_bls", tmp_path / "repository", weights=weights, **ON, is_together=True, **more)
        folder = tmp_path / "repository-openvino"
        return json.loads((folder / "exported.json").read_text("utf-8")), (folder / "exported.json").stat().st_mtime_ns

    record, made = make()
    assert record["measured"]["tokens"] == 256
    assert record["measured"]["log_probs_differ_by"] < 1e-3
    assert record["measured"]["same_tokens"] == 1.0
    assert make() == (record, made)
    os.utime(weights / "model.safetensors")
    assert make()[1] > made
    record, _ = make(quantize="int8")
    assert record["asked"]["weights"] == "int8"
    export = read_manifest(tmp_path / "repository")["weights"]["export"]
    assert export == {"weights": "int8", **record["measured"]}
    assert 0 < record["measured"]["log_probs_differ_by"] < 0.2
    own = repository.with_name("repository-openvino")
    assert (tmp_path / "repository-openvino" / "openvino_model.bin").stat().st_size < (
        0.4 * (own / "openvino_model.bin").stat().st_size
    )


def test_weights_in_the_format_are_taken_as_they_are(exported: Path, tmp_path: Path) -> None:
    repository = compose("llm_bls", tmp_path / "repository", weights=exported, **ON)
    assert not (tmp_path / "repository-openvino").exists()
    config = read_configs(repository)["llm-openvino"]
    assert config.weights == str(exported)
    memory = find_engine_memory(config, on_gpu=False)
    assert memory is not None
    assert memory.weights == (exported / "openvino_model.bin").stat().st_size
    assert memory.cache > 0
    with pytest.raises(InputError, match=r"--quantize int8 has no effect: .* is in OpenVINO's format already"):
        compose("llm_bls", tmp_path / "again", weights=exported, **ON, quantize="int8")
    with pytest.raises(ArtifactError, match=r"has no openvino_model\.xml"), open_engine(find_trained(), SHIPPED):
        pass


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("mamba", "MambaForCausalLM keeps another state than a cache of keys and values in each layer"),
        ("bloom", "OpenVINO does not compute BloomForCausalLM"),
        ("far", "LlamaForCausalLM computes differently after 2000 tokens"),
        ("mistral", "MistralForCausalLM in OpenVINO's format differs from transformers by"),
    ],
)
def test_families_that_it_does_not_compute_are_refused(family: str, reason: str, tmp_path: Path) -> None:
    weights = make_family("llama" if family == "far" else family, tmp_path / "weights")
    if family == "far":  # longer than what is compared
        config = json.loads((weights / "config.json").read_text("utf-8"))
        config |= {"max_position_embeddings": 4096, "sliding_window": 2000}
        (weights / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(ShoalError, match=reason) as error:
        compose("llm_bls", tmp_path / "repository", weights=weights, **ON)
    assert error.value.fix == "Compose it with --engine hf."
    assert sorted(each.name for each in tmp_path.iterdir()) == ["weights"]


def test_an_export_that_lost_too_much_is_refused(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(openvino_weights._MOST, "int8", 1e-6)
    with pytest.raises(ArtifactError, match="format and int8 differs from transformers by") as error:
        compose("llm_bls", tmp_path / "repository", weights=tiny, **ON, quantize="int8")
    assert error.value.fix == "Leave --quantize out."


# --- the choice ------------------------------------------------------------------------------------------------------


def engine_of(repository: Path) -> tuple[str, list[str]]:
    """The model folder of the engine, and the notes that name it."""
    manifest = read_manifest(repository)
    return manifest["swap"].get("llm-hf", "llm-hf"), [note for note in manifest["notes"] if "engine" in note]


def test_auto_takes_openvino_where_it_can(tiny: Path, exported: Path, tmp_path: Path) -> None:
    bloom = make_family("bloom", tmp_path / "bloom")
    found = {}
    for name, weights, more in (
        ("tiny", tiny, {}),
        ("exported", exported, {}),
        ("bloom", bloom, {}),
        ("container", tiny, {"plan": Plan(target="26.06")}),
        ("gpu", tiny, {"plan": Plan(placement="gpu")}),
        ("hf", tiny, {"engine": "hf"}),
        ("none", tiny, {"engine": ""}),
    ):
        given: dict[str, Any] = {"engine": "auto", "weights": weights, **more}
        found[name] = engine_of(compose("llm", tmp_path / f"on-{name}", is_warmed_up=False, **given))
    assert found["tiny"] == (
        "llm-openvino",
        ["The engine is llm-openvino: it is installed, and computes what transformers does"],
    )
    assert found["exported"] == ("llm-openvino", [])
    assert [engine for engine, _ in found.values()][2:] == ["llm-hf"] * 5
    assert "OpenVINO does not compute BloomForCausalLM" in found["bloom"][1][0]
    assert "the server of 26.06 has no OpenVINO GenAI" in found["container"][1][0]
    assert "it computes on a GPU" in found["gpu"][1][0]
    assert found["hf"] == found["none"] == ("llm-hf", [])


def test_auto_without_openvino(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda _: None)
    engine, (note,) = engine_of(compose("llm", tmp_path / "r", weights=tiny, engine="auto", is_warmed_up=False))
    assert engine == "llm-hf"
    assert note == "The engine is llm-hf: OpenVINO is not installed: pip install 'shoal[openvino]'."


def test_engines_that_are_not_chosen(tiny: Path, tmp_path: Path) -> None:
    wanted = engines.Wanted(["llm"], find_model_folders([]), {}, find(str(tiny)), "", tmp_path / "r")
    chosen = wanted.choose("auto", Plan(), has_environments=True)
    assert not chosen.swap
    assert chosen.notes[0].startswith("The engine is llm-hf: --env names the environment.")
    with pytest.raises(InputError, match=r"Unknown engine 'mlx'\. Known: auto, hf, openvino, vllm, onnx"):
        wanted.choose("mlx", Plan())
