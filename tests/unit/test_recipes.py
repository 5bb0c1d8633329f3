"""Recipes of ``shoal serve MODEL`` for files and folders, and its refusals, before anything is made."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.authoring.check.repositories import read_repository
from shoal.authoring.project.recipes import RECORD, find_recipe, name_model
from shoal.authoring.repository.find_graph import find_graph
from shoal.authoring.repository.made import suggest_repository
from shoal.authoring.repository.model_folders import find_repository
from shoal.errors import InputError, ShoalError
from shoal.lab.bench.target import find_targets
from shoal.serving.server.checks import check_repository


def write_model(folder: Path, *architectures: str, **config: Any) -> Path:
    folder.mkdir()
    text = json.dumps({"architectures": architectures, **config})
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_file_is_a_model_of_its_name() -> None:
    Path("2 my net.onnx").touch()
    recipe = find_recipe("2 my net.onnx")
    assert recipe.folder == Path("build/my_net")
    assert [" ".join(command) for command in recipe.commands] == [
        "add-model 2 my net.onnx my_net --project build/my_net",
        "compose my_net build/my_net/repository --project build/my_net",
    ]
    assert find_recipe("2 my net.onnx", name="other").repository == Path("build/other/repository")


def test_a_link_has_its_own_name() -> None:
    write_model(Path("weights"), "LlamaForCausalLM")
    Path("my-llama").symlink_to("weights")
    Path("net.onnx").touch()
    Path("mine.onnx").symlink_to("net.onnx")
    Path("models/1").mkdir(parents=True)
    for path in ("models/config.pbtxt", "models/1/model.py"):
        Path(path).touch()
    Path("linked").symlink_to("models")
    assert find_recipe("my-llama/").repository == Path("build/my-llama/repository")
    assert find_recipe("my-llama", name="other").folder == Path("build/other")
    assert find_recipe("mine.onnx").folder == Path("build/mine")
    assert name_model(Path("linked/1/model.py")) == "linked"
    assert name_model(Path("linked/..")) == name_model(Path()) != "model"


@pytest.mark.parametrize(
    ("architecture", "config", "task", "said"),
    [
        ("BertModel", {}, "", "modules.json"),
        ("BertForMaskedLM", {}, "embeddings", "modules.json"),
        ("BertForSequenceClassification", {"id2label": {"0": "a", "1": "b"}}, "", ""),
        ("BertForSequenceClassification", {"id2label": {"0": "a"}}, "predict", ""),
        ("BertForSequenceClassification", {"id2label": {"0": "a"}}, "rerank", ""),
        ("LlamaForCausalLM", {}, "", ""),
        ("GPT2LMHeadModel", {}, "generate", ""),
    ],
)
def test_a_folder_says_its_task(architecture: str, config: dict[str, Any], task: str, said: str) -> None:
    folder = write_model(Path("m"), architecture, **config)
    if said:
        (folder / said).touch()
    recipe = find_recipe("m", task=task)
    first = " ".join(recipe.commands[0])
    if "LM" in architecture and "Masked" not in architecture:
        assert first == "new component m --like llm_bls --project build/m"
        compose = "compose m build/m/repository --project build/m --weights m --together"
        assert [" ".join(each) for each in recipe.commands[1:]] == [compose]
        return
    found = task or ("classify" if config else "embeddings")
    assert first == f"add-model m m_encoder --task {found} --tokenizer m_tokenizer --project build/m"
    maps = " --map m_encoder.INPUT__0=m_tokenizer.input_ids --map m_encoder.INPUT__2=m_tokenizer.token_type_ids"
    maps = maps if task == "rerank" else ""
    line = f"new pipeline m --step m_tokenizer --step m_encoder{maps} --project build/m"
    assert recipe.commands[1] == tuple(line.split())
    assert recipe.commands[2][:3] == ("compose", "m", "build/m/repository")


@pytest.mark.parametrize(
    ("architecture", "config", "task", "message"),
    [
        ("BertModel", {}, "", "does not say what it is for: its architecture is BertModel. Say it: --task embeddings"),
        ("BertForMaskedLM", {}, "", "m is a BertForMaskedLM, which fills masks: .* shoal serve m --task embeddings$"),
        (
            "BertForMaskedLM",
            {},
            "embeddings",
            "The pooling of m is not given: .* --tokenizer m_tokenizer --project build/m --pooling mean && shoal new "
            "pipeline m .* && shoal compose m build/m/repository --project build/m && shoal serve build/m/repository$",
        ),
        ("BertModel", {}, "classify", "m has no trained head for classify: it is a BertModel. .* --task embeddings"),
        ("BertForTokenClassification", {}, "", "which labels each token: shoal has no pipeline for that"),
        ("CLIPModel", {"vision_config": {}}, "", "m is a CLIPModel, which takes pictures: .*torch.jit.trace"),
        ("ViTModel", {"image_size": 224}, "embeddings", "m is a ViTModel, which takes pictures"),
        ("LlamaForCausalLM", {"quantization_config": {"quant_method": "gptq"}}, "", r"quantised \(gptq\), .*llm-vllm"),
        ("ViTForImageClassification", {}, "classify", "which classifies images"),
        ("BertForSequenceClassification", {"id2label": {"0": "a"}}, "", "whether of one text or of two"),
        ("LlamaForCausalLM", {}, "classify", "--task classify does not fit m: it is a language model"),
        ("BertModel", {}, "generate", "m is not a decoder: its architecture is BertModel"),
        ("BertModel", {}, "embed", "Unknown task 'embed'. Known: .*, generate. Did you mean embeddings[?]$"),
        ("BertModel", {}, "speech", "Unknown task 'speech'. Known: embeddings, classify, rerank, predict, generate"),
    ],
)
def test_folders_that_are_refused(architecture: str, config: dict[str, Any], task: str, message: str) -> None:
    write_model(Path("m"), architecture, **config)
    with pytest.raises(InputError, match=message):
        find_recipe("m", task=task)


@pytest.mark.parametrize(
    ("thing", "task", "message"),
    [
        ("net.keras", "", "net.keras is a model of Keras, which cannot be served. Convert it to ONNX"),
        ("net.pt2", "", "net.pt2 is a program of torch.export, .* torch.jit.trace"),
        ("net.joblib", "", "net.joblib is a pickle, .* save a forest with skops"),
        ("net.safetensors", "", "net.safetensors is weights without their model, .* config.json"),
        ("net.gguf", "", "net.gguf is not a GGUF file: it does not begin with GGUF. Copy it again"),
        ("llama.gguf", "", "gguf and accelerate, with which .* are missing. Type: pip install gguf accelerate. Or"),
        ("rows.csv", "", "rows.csv is a table, .* shoal infer --input FILE"),
        ("net.onnx", "classify", "--task classify needs a tokenizer, and the file net.onnx has none"),
        ("gone.onnx", "", "There is no file gone.onnx"),
        ("gone.gguf", "", "^There is no file gone.gguf"),
        ("gone.safetensors", "", "^There is no file gone.safetensors"),
        ("nets.keras", "", "^There is no file nets.keras. Did you mean net.keras"),
        ("gone.csv", "", "^There is no file gone.csv"),
        ("owner/model", "", r"also say the task: shoal serve owner/model --task embeddings \(or classify, "),
        ("notes.md", "", "notes.md is not a model that can be served. Known: .pt, .onnx"),
        ("adapter", "", "adapter holds an adapter, not a whole model. Merge it"),
        ("exported", "", "Name the file: shoal serve exported/model.onnx$"),
        ("several", "", r"Name the file: shoal serve several/a.onnx \(or another one of: b.onnx, c.pt\)"),
        ("project", "", "Serve its models alone: shoal serve project/models. For a pipeline of them: shoal new"),
        ("build/repostory", "", r"^There is no build/repostory\. Did you mean build/repository\?$"),
        ("nets.onnx", "", r"^There is no file nets\.onnx\. Did you mean net\.onnx\?$"),
        ("saved", "", "saved is a SavedModel of TensorFlow, .* tf2onnx"),
        ("rows", "", "rows is a data set, which cannot be served"),
        ("graph", "embeddings", r"graph holds onnx/model\.onnx and no weights of PyTorch.* shoal serve graph/onnx"),
        ("empty", "", "empty holds neither a model repository nor a model's config.json. Make a repository"),
    ],
)
def test_things_that_are_refused(thing: str, task: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.authoring.composition.gguf.find_spec", lambda name: None)
    for suffix in ("keras", "pt2", "gguf", "onnx", "joblib", "safetensors"):
        Path(f"net.{suffix}").touch()
    Path("llama.gguf").write_bytes(b"GGUF")
    files = ("notes.md", "rows.csv", "adapter/adapter_config.json", "exported/model.onnx", "saved/saved_model.pb")
    more = ("several/a.onnx", "several/b.onnx", "several/c.pt", "project/models/net/config.pbtxt", "build/repository/x")
    for name in (*files, *more, "rows/part-0.parquet", "rows/README.md"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    Path("empty").mkdir()
    write_model(Path("graph"), "BertModel")
    Path("graph/onnx").mkdir()
    Path("graph/onnx/model.onnx").touch()
    with pytest.raises(ShoalError, match=message):
        find_recipe(thing, task=task)


def test_a_name_on_the_hub_with_its_task() -> None:
    recipe = find_recipe("owner/model", task="generate")
    assert recipe.commands[-1][-3:] == ("--weights", "owner/model", "--together")


@pytest.mark.parametrize("name", ["openvino_model.xml", "decoder.onnx"])
def test_exported_weights_get_their_engine(name: str) -> None:
    folder = write_model(Path("m"), "LlamaForCausalLM")
    (folder / name).touch()
    assert find_recipe("m").commands[-1][-5:] == ("--weights", "m", "--together", "--engine", "auto")


def test_what_was_made_is_found_again_until_something_changes() -> None:
    Path("net.onnx").touch()
    recipe = find_recipe("net.onnx")
    assert not recipe.is_made()
    recipe.folder.mkdir(parents=True)
    with pytest.raises(InputError, match=r"build/net exists, and shoal serve did not make it. --name NAME"):
        assert recipe.is_made()
    (recipe.folder / RECORD).write_text(json.dumps(recipe.record), encoding="utf-8")
    assert recipe.is_made()
    assert find_recipe("net.onnx").is_made()
    manifest, config = recipe.repository / "manifest.json", recipe.folder / "models" / "net" / "config.pbtxt"
    for path in (config, manifest):
        path.parent.mkdir(parents=True)
        path.touch()
    assert find_recipe("net.onnx").is_made()
    os.utime(manifest, (1, 1))
    again = r"net/config\.pbtxt was changed after build/net/repository was composed\. Compose it again: shoal "
    with pytest.raises(InputError, match=again):
        assert find_recipe("net.onnx").is_made()
    os.utime("net.onnx", (1, 1))
    with pytest.raises(
        InputError, match=r"made before its files changed\. To serve it as it is: shoal serve build/net/repository"
    ):
        assert find_recipe("net.onnx").is_made()


def test_the_repository_that_was_made_is_named_for_its_model() -> None:
    Path("build/my_net/repository/net").mkdir(parents=True)
    assert not suggest_repository(Path("my_net"))
    Path("build/my_net/repository/net/config.pbtxt").touch()
    Path("my net.onnx").touch()
    for name in ("my_net", "my net.onnx", "my net"):
        assert suggest_repository(Path(name)) == "Did you mean build/my_net/repository?"
    asked: list[Callable[[], Any]] = [
        lambda: find_recipe("my_net"),
        lambda: find_graph(Path("my_net")),
        lambda: read_repository(Path("my_net")),
        lambda: check_repository(Path("my_net")),
        lambda: find_targets([Path("my_net")]),
    ]
    for ask in asked:
        with pytest.raises(ShoalError, match=r"my_net.*\. Did you mean build/my_net/repository\?$"):
            ask()


def test_the_repository_in_a_folder() -> None:
    assert find_repository(Path()) is None
    for name in ("a/r", "b/c/r"):
        (Path(name) / "net").mkdir(parents=True)
        (Path(name) / "manifest.json").touch()
        assert find_repository(Path()) is None
        (Path(name) / "net" / "config.pbtxt").touch()
        assert find_repository(Path(name)) == Path(name)
        assert find_repository(Path(name).parent) == Path(name)
        if name == "a/r":
            assert find_repository(Path()) == Path(name)
            (Path(name) / "net" / "config.pbtxt").unlink()
    (Path("a/r/net") / "config.pbtxt").touch()
    Path("b/c").rename("b/.shoal-1-0123abcd")  # a service's copy
    assert find_repository(Path()) == Path("a/r")
    Path("b/.shoal-1-0123abcd").rename("b/c")
    with pytest.raises(InputError, match=r"holds 2 repositories. Name one: a/r, b/c/r$"):
        find_repository(Path())
