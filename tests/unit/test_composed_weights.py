"""Weights by reference: composing finds them, and models get their folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.authoring.check.families import check
from shoal.authoring.composition.compose import compose
from shoal.authoring.repository.config import read_config
from shoal.authoring.repository.manifest import check_manifest, read_manifest
from shoal.authoring.repository.plan import Plan
from shoal.errors import ArtifactError, InputError, ShoalError
from shoal.serving.server.container import container_command
from tests.support.containers import find_installed, write_weights
from tests.support.once import ROOT

MEMBERS = ("prompt", "llm-hf", "completion")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return write_weights(tmp_path / "weights")


def test_models_get_the_folder(weights: Path, tmp_path: Path) -> None:
    repository = compose("llm", tmp_path / "repository", weights=weights)
    for name in MEMBERS:
        assert read_config(repository / name).spec.parameters["model"] == str(weights)
    manifest = read_manifest(repository)
    assert sorted(manifest["weights"]["files"]) == ["config.json", "tokenizer.json"]
    assert sorted(manifest["not_warmed_up"]) == ["completion", "llm-hf"], "prompt has a warm-up request"
    assert not list(repository.rglob("*.safetensors")), "weights are not copied"
    check_manifest(repository)
    again = compose("llm", tmp_path / "again", weights=weights)
    assert read_manifest(again)["identity"] == manifest["identity"]
    (weights / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"tokenizer\.json is not the file that manifest\.json lists"):
        check_manifest(repository)
    (weights / "tokenizer.json").unlink()
    with pytest.raises(ArtifactError, match=r"tokenizer\.json is missing, and manifest\.json lists it"):
        check_manifest(repository)


@pytest.mark.parametrize(("dtype", "given"), [("fp16", "float16"), ("bf16", "bfloat16"), ("auto", "")])
def test_engines_compute_in_the_dtype_of_the_plan(dtype: str, given: str, weights: Path, tmp_path: Path) -> None:
    repository = compose(["llm", "llamav2"], tmp_path / "repository", weights=weights, plan=Plan(dtype=dtype))
    for name, own in (("llm-hf", "auto"), ("llamav2", "float32")):
        assert read_config(repository / name).spec.parameters["dtype"] == (given or own)
    precision = read_manifest(repository)["precision"]
    assert sorted(precision) == ([] if dtype == "auto" else ["llamav2", "llm-hf"])
    assert read_manifest(repository)["dtype"] == (dtype if precision else "fp32")


@pytest.mark.parametrize("is_from_hub", [False, True])
def test_a_container_gets_the_weights(weights: Path, tmp_path: Path, is_from_hub: bool) -> None:
    repository = compose("llm", tmp_path / "repository", weights=weights, plan=Plan(target="26.06"))
    needed = weights
    if is_from_hub:  # the hub's cache: models--OWNER--NAME/snapshots/REVISION, with links to models--OWNER--NAME/blobs
        manifest = read_manifest(repository)
        needed = tmp_path / "models--o--n"
        manifest["weights"] |= {"folder": f"{needed}/snapshots/abc", "revision": "abc"}
        (repository / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert f"--mount type=bind,src={needed},dst={needed},readonly " in container_command(repository)


def test_weights_are_needed(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"needs the weights of a language model\. Name them: --weights FOLDER"):
        compose("llm", tmp_path / "repository")


def test_an_engine_that_runs_a_decoder_needs_one(weights: Path, tmp_path: Path) -> None:
    swap = {"llm-hf": "llm-onnx"}
    (weights / "decoder.onnx").unlink()
    with pytest.raises(ArtifactError, match=r"llm-onnx runs decoder\.onnx, and .* has none\. Make it: shoal add-model"):
        compose("llm", tmp_path / "repository", weights=weights, swap=swap)
    (weights / "decoder.onnx").write_bytes(b"decoder")
    assert compose("llm", tmp_path / "repository", weights=weights, swap=swap).is_dir()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("tokenizer", "token ids up to .* vocab_size 10: it is another model's"),
        ("pickle", "weights only as pickles, .*: pytorch_model.bin"),
        ("shard", "misses b.safetensors, which model.safetensors.index.json names"),
        ("index", "neither model.safetensors nor model.safetensors.index.json"),
    ],
)
def test_weights_that_are_refused(fault: str, message: str, weights: Path, tmp_path: Path) -> None:
    model = weights / "model.safetensors"
    if fault == "tokenizer":
        (weights / "config.json").write_text('{"vocab_size": 10, "max_position_embeddings": 64}', encoding="utf-8")
    elif fault == "pickle":
        (weights / "decoder.onnx").unlink()
        model.rename(weights / "pytorch_model.bin")
    else:
        model.rename(weights / "a.safetensors")
        if fault == "shard":
            index = {"weight_map": {"one": "a.safetensors", "two": "b.safetensors"}}
            (weights / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ArtifactError, match=message):
        compose("llm", tmp_path / "repository", weights=weights)
    assert not (tmp_path / "repository").exists()


@pytest.mark.parametrize("name", ["nowhere", "./nowhere/else", "a/b/c"])
def test_a_folder_that_is_not_there(name: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="is not a folder"):
        compose("llm", tmp_path / "repository", weights=name)


def test_a_name_on_the_hub_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ArtifactError, match="The weights nobody/nothing@1 are neither a folder nor on the hub"):
        compose("llm", tmp_path / "repository", weights="nobody/nothing@1")


def test_8_bits_of_a_language_model_are_another_option(weights: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"by another option: --quantize int8$"):
        compose("llm", tmp_path / "repository", weights=weights, plan=Plan(dtype="int8"))


@pytest.mark.parametrize("placement", ["cpu", "gpu"])
def test_the_vllm_backend_gets_the_folder_in_its_arguments(placement: str, weights: Path, tmp_path: Path) -> None:
    plan = Plan(placement=placement, target="26.01")
    repository = compose("vllm", tmp_path / "repository", weights=weights, plan=plan)
    arguments = json.loads((repository / "vllm" / "1" / "model.json").read_bytes())
    assert arguments["model"] == str(weights)
    config = read_config(repository / "vllm").message
    assert [group.kind for group in config.instance_group] == [config.instance_group[0].KIND_MODEL]
    assert config.model_transaction_policy.decoupled
    assert check(repository) == []
    check_manifest(repository)
    assert "--gpus all" in container_command(repository)
    assert "tritonserver:26.01-vllm-python-py3" in container_command(repository)


def test_a_language_model_gets_what_its_engine_imports(weights: Path, tmp_path: Path) -> None:
    llm = compose("llm", tmp_path / "llm", weights=weights, plan=Plan(target="26.06"))
    names = [line.partition(">")[0] for line in find_installed(container_command(llm))]
    assert names == ["array-api-compat", "jinja2", "tokenizers", "torch", "transformers"]
    assert "transformers>=5.23" in find_installed(container_command(llm)), "the bound of the extra llm"
    swap = {"llm-hf": "llm-vllm"}
    with pytest.raises(ShoalError, match=r"llm-vllm is placed on the host, and the vLLM of .* \[kind-unsupported\]"):
        compose("llm", tmp_path / "v", weights=weights, plan=Plan(target="26.06"), swap=swap)
    plan = Plan(target="26.06", placement="gpu")
    vllm = container_command(compose("llm", tmp_path / "v", weights=weights, plan=plan, swap=swap))
    assert find_installed(vllm) == ["array-api-compat>=1.11"]  # the image has the others
    assert "tritonserver:26.06-vllm-python-py3 " in vllm
    assert "--gpus all" in vllm


def test_the_embedded_server_lacks_the_vllm_backend(weights: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"vllm needs the backend vllm: the embedded .* Compose it for NVIDIA's"):
        compose("vllm", tmp_path / "repository", weights=weights)


def test_an_engine_of_tensorrt_llm_is_composed_for_releases_that_have_it(weights: Path, tmp_path: Path) -> None:
    """The five models with an engine's files, and the model on the LLM API with the path of the weights."""
    engine = tmp_path / "engine"
    engine.mkdir()
    about = {"pretrained_config": {"mapping": {"world_size": 2, "tp_size": 2}}, "build_config": {"max_beam_width": 1}}
    (engine / "config.json").write_text(json.dumps(about), encoding="utf-8")
    for rank in range(2):
        (engine / f"rank{rank}.engine").write_bytes(b"built elsewhere")
    names = ["ensemble", "tensorrt_llm_bls"]
    there = Plan(target="26.07")
    repository = compose(names, tmp_path / "r", weights=weights, artifacts=engine, plan=there)
    models = {"ensemble", "postprocessing", "preprocessing", "tensorrt_llm", "tensorrt_llm_bls"}
    assert {path.parent.name for path in repository.glob("*/config.pbtxt")} == models
    assert sorted(path.name for path in (repository / "tensorrt_llm" / "1").iterdir() if path.suffix) == [
        "config.json", "rank0.engine", "rank1.engine",
    ]  # fmt: skip
    assert " : -n 1 tritonserver" in container_command(repository), "one process for each rank"
    api = compose("trtllm-llmapi", tmp_path / "api", weights=weights, plan=there)
    assert f'model: "{weights}"\n' in (api / "trtllm-llmapi" / "1" / "model.yaml").read_text(encoding="utf-8")
    command = container_command(api)
    assert "tritonserver:26.07-trtllm-python-py3" in command
    assert "--gpus all" in command
    for target in ("26.08", "26.11"):
        with pytest.raises(InputError, match=rf"no image of Triton {target} has it. .* from 23.10 to 26.07"):
            compose(names, tmp_path / "r", weights=weights, artifacts=engine, plan=Plan(target=target))
        with pytest.raises(InputError, match=rf"no image of Triton {target} has it. .* from 25.06 to 26.07"):
            compose("trtllm-llmapi", tmp_path / "api", weights=weights, plan=Plan(target=target))
    with pytest.raises(InputError, match=r"embedded server does not have it. .* --target 26.07; or replace it: --swap"):
        compose(names, tmp_path / "r", weights=weights, artifacts=engine)
    with pytest.raises(InputError, match=r"needs the backend llmapi: the embedded server .* --target 26.07"):
        compose("trtllm-llmapi", tmp_path / "api", weights=weights)


def test_what_takes_the_place_of_an_engine_of_tensorrt_llm(weights: Path, tmp_path: Path) -> None:
    """Its name and its tensors stay, and the answers are read as NVIDIA's; another kind of model is refused."""
    swap = {"tensorrt_llm": "llm-hf"}
    repository = compose("tensorrt_llm", tmp_path / "r", weights=weights, swap=swap)
    found, own = read_config(repository / "tensorrt_llm"), read_config(ROOT / "models" / "tensorrt_llm")
    assert (found.name, found.backend, found.message.input) == ("tensorrt_llm", "python", own.message.input)
    assert found.message.output == own.message.output
    assert found.spec.parameters["like_tensorrt_llm"] == "true"
    assert found.spec.parameters["exclude_input_in_output"] == "false"
    with pytest.raises(InputError, match="completion cannot take the place of tensorrt_llm"):
        compose("ensemble", tmp_path / "s", weights=weights, swap={"tensorrt_llm": "completion"})
