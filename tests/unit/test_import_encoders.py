"""Published encoders become leaves that answer as transformers does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    RobertaConfig,
    RobertaForSequenceClassification,
)

import shoal
from shoal.authoring.composition.artifacts import choose_precisions
from shoal.authoring.composition.compose import compose
from shoal.authoring.project.importing.add_model import add_model
from shoal.authoring.repository.apis import find_served
from shoal.authoring.repository.config import Artifact, read_config
from shoal.authoring.repository.model_folders import read_configs
from shoal.authoring.repository.plan import Plan
from shoal.clients.local import load, load_component
from shoal.errors import ArtifactError, InputError
from shoal.kit.component.provenance import read_archive
from tests.support.encoders import WIDTH, ask, embed, pipeline
from tests.support.imports import NUM_ROWS, add, here, load_script
from tests.support.published import LABELS, NUM_TOKENS, publish, publish_roberta

RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(2, WIDTH + 1, NUM_ROWS)
MASK = (np.arange(WIDTH) < LENGTHS[:, None]).astype(np.int64)
IDS = RNG.integers(5, NUM_TOKENS, (NUM_ROWS, WIDTH)) * MASK


@pytest.fixture(scope="module")
def published(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tiny_bert, tmp_path_factory.mktemp("published"))


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "triage": ("triage", {"task": "classify"}),
    "triage_onnx": ("triage", {"task": "classify", "format": "onnx"}),
    "score": ("score", {"task": "predict"}),
    "many": ("many", {"task": "classify"}),
    "mean": ("triage", {"task": "embeddings", "pooling": "mean", "normalise": True}),
    "cls": ("score", {"task": "embeddings", "pooling": "cls"}),
    "cls_onnx": ("score", {"task": "embeddings", "pooling": "cls", "format": "onnx"}),
}


@pytest.fixture(scope="module")
def project(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = tmp_path_factory.mktemp("project")
    for name, (folder, options) in CASES.items():
        add(project, published / folder, name, **options)
    return project


@pytest.fixture(scope="module")
def expected(published: Path) -> dict[str, NDArray[Any]]:
    heads = {n: ask(published / n, AutoModelForSequenceClassification, IDS, MASK) for n in ("triage", "score", "many")}
    hidden = {n: ask(published / n, AutoModel, IDS, MASK).last_hidden_state for n in ("triage", "score")}
    cls = embed(hidden["score"], MASK, "cls", is_normalised=False)
    classes = heads["triage"].logits.softmax(-1).numpy()
    return {
        "triage": classes,
        "triage_onnx": classes,
        "score": heads["score"].logits.numpy(),
        "many": heads["many"].logits.sigmoid().numpy(),
        "mean": embed(hidden["triage"], MASK, "mean", is_normalised=True),
        "cls": cls,
        "cls_onnx": cls,
    }


def check_same(found: NDArray[Any], expected: NDArray[Any]) -> None:
    """To FP32's rounding, which grows with the values: processors sum in different orders."""
    assert found.dtype == np.float32
    assert expected.std(0).min() > 1e-3  # or answers that are all the same would pass
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize("name", CASES)
def test_in_this_process(name: str, project: Path, expected: dict[str, NDArray[Any]]) -> None:
    check_same(here(project, name, INPUT__0=IDS, INPUT__1=MASK)["OUTPUT__0"], expected[name])


# --- with its tokenizer ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def roberta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_roberta(tmp_path_factory.mktemp("roberta"))


@pytest.mark.parametrize("kind", ["wordpiece", "tokenizer.json"])
def test_texts_to_classes(kind: str, published: Path, roberta: Path, tmp_path: Path) -> None:
    folder = published / "triage" if kind == "wordpiece" else roberta
    config, _ = add(tmp_path, folder, "topic", task="classify", tokenizer="tokens", max_length=16)
    file = "vocab.txt" if kind == "wordpiece" else "tokenizer.json"
    assert (tmp_path / "preprocess" / "tokens" / "1" / file).is_file()
    assert set(read_archive(tmp_path / "models" / "topic" / "1" / "model.pt")) == {file}
    pipeline(tmp_path, "topic", "tokens", "triage")
    repository = compose("triage", tmp_path / "repository", projects=[tmp_path])
    texts = ["some words", "other", "", "w1 w2 w3 W4, w5. " * 20]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    given = tokenizer(texts, padding=True, truncation=True, max_length=16, return_tensors="np")
    expected = ask(
        folder, AutoModelForSequenceClassification, given["input_ids"], given["attention_mask"]
    ).logits.softmax(-1)
    local = load(repository / "triage")
    np.testing.assert_allclose(local(TEXT=texts)["ANSWER"], expected.numpy(), rtol=0, atol=1e-5)
    local.close()
    assert config.spec.outputs[0].dims == (3 if kind == "wordpiece" else 2,)


@pytest.mark.parametrize("form", ["torchscript", "onnx"])
@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_pairs_to_scores(kind: str, form: str, published: Path, roberta: Path, tmp_path: Path) -> None:
    """With the segments of BERT, and without any; and CrossEncoder's sigmoid."""
    folder = published / "score"
    if kind == "roberta":
        folder = tmp_path / "one"
        shutil.copytree(roberta, folder)
        config = RobertaConfig.from_pretrained(roberta, num_labels=1)
        RobertaForSequenceClassification(config).save_pretrained(folder)
    project = tmp_path / "project"
    added, said = add(project, folder, "ranker", task="rerank", tokenizer="pairs", max_length=16, format=form)
    assert [tensor.name for tensor in added.spec.inputs] == ["INPUT__0", "INPUT__1", "INPUT__2"]
    assert added.spec.parameters["api"] == "rerank"
    assert any("at most 16 per pair" in line for line in said)
    made = shoal.Ensemble("both", projects=[project])
    tokens = made.step("pairs", QUERY=made.input("Q", "STRING", [1]), DOCUMENT=made.input("D", "STRING", [1]))
    given = zip(("INPUT__0", "INPUT__1", "INPUT__2"), tokens.values(), strict=True)
    made.output("SCORE", made.step("ranker", dict(given))["OUTPUT__0"])
    made.write(project / "ensembles" / "both")
    repository = compose("both", tmp_path / "repository", projects=[project])
    configs = read_configs(repository)
    assert str(find_served(configs["both"], configs)) == "rerank=SCORE"
    queries, documents = ["some words", "w1"] * 2, ["other", "", "some w2 w3 " * 9, "w4"]
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSequenceClassification.from_pretrained(folder)
    pairs = tokenizer(queries, documents, padding=True, truncation=True, max_length=16, return_tensors="pt")
    with torch.inference_mode():
        expected = model(**pairs).logits.sigmoid().numpy()
    with load(repository / "both") as local:
        np.testing.assert_allclose(local(Q=queries, D=documents)["SCORE"], expected, rtol=0, atol=1e-5)


def test_an_activation_that_is_not_known(published: Path, tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    shutil.copytree(published / "score", folder)
    path = folder / "config.json"
    config = {**json.loads(path.read_text("utf-8")), "sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}
    path.write_text(json.dumps(config), "utf-8")
    with pytest.raises(InputError, match=r"files name the activation 'torch\.nn\.Tanh'\. Known: Sigmoid, Identity\."):
        add_model(folder, "m", project=tmp_path / "project")
    with pytest.raises(InputError, match=r"gives 3 numbers, not a score"):
        add_model(published / "triage", "m", project=tmp_path / "project", task="rerank")


def test_sizes_to_which_embeddings_may_be_cut(published: Path, tmp_path: Path) -> None:
    folder = tmp_path / "nested"
    shutil.copytree(published / "triage", folder)
    path = folder / "config.json"
    config = {**json.loads(path.read_text("utf-8")), "matryoshka_dimensions": [8, 16, 9999]}
    path.write_text(json.dumps(config), "utf-8")
    added, _ = add(tmp_path, folder, "m", task="embeddings", pooling="mean")
    assert added.dimensions == (8, 16)


def test_another_vocabulary_is_refused(published: Path, tmp_path: Path) -> None:
    add(tmp_path, published / "triage", "topic", task="classify", tokenizer="tokens")
    pipeline(tmp_path, "topic", "tokens", "triage")
    vocabulary = tmp_path / "preprocess" / "tokens" / "1" / "vocab.txt"
    vocabulary.write_text(vocabulary.read_text(encoding="utf-8") + "more\n", encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"model\.pt was made with another vocab\.txt than "):
        compose("triage", tmp_path / "repository", projects=[tmp_path])


# --- what is derived ---------------------------------------------------------------------------------------------


def test_the_written_configuration(project: Path) -> None:
    config = read_config(project / "models" / "triage")
    spec = config.spec
    assert [(t.name, t.dtype, t.dims) for t in (*spec.inputs, *spec.outputs)] == [
        ("INPUT__0", "TYPE_INT64", (-1,)), ("INPUT__1", "TYPE_INT64", (-1,)), ("OUTPUT__0", "TYPE_FP32", (3,)),
    ]  # fmt: skip
    assert json.loads(spec.parameters["labels"]) == list(LABELS.values())
    assert spec.parameters["attention_mask"] == "INPUT__1"
    assert spec.parameters["content"] == "triage, 3 probabilities, the softmax of its own trained head"
    assert (config.backend, spec.max_batch_size, config.artifacts) == ("pytorch", 512, (Artifact(("model.pt",), True),))
    assert choose_precisions([config], None, Plan())["triage"].dtype == "fp32"  # as it was verified
    onnx = read_config(project / "models" / "triage_onnx")
    assert (onnx.backend, onnx.artifacts) == ("onnxruntime", (Artifact(("model.onnx",), True),))
    assert "sigmoid" in read_config(project / "models" / "many").spec.parameters["content"]
    assert str(project) not in (project / "models" / "triage" / "config.pbtxt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["triage", "score", "mean"])
def test_the_trunk_alone_is_bf16(name: str, project: Path, expected: dict[str, NDArray[Any]], tmp_path: Path) -> None:
    repository = compose(name, tmp_path / "repository", projects=[project], plan=Plan(dtype="bf16"), is_warmed_up=False)
    loaded = load(repository / name)
    found = np.asarray(loaded(INPUT__0=IDS[:256], INPUT__1=MASK[:256])["OUTPUT__0"])
    loaded.close()
    wanted = expected[name][:256]
    assert 0 < np.abs(found - wanted).max() < 0.1 * np.abs(wanted).max()
    module = load_script(repository / name / "1" / "model.pt")
    assert any(key.startswith("trunk.") for key in module.state_dict())


@pytest.mark.parametrize("name", ["triage", "score", "mean"])
def test_the_graph_is_fused(name: str, project: Path) -> None:
    component: Any = load_component(read_config(project / "models" / name))
    (answer,) = component.process([{"INPUT__0": IDS[:8], "INPUT__1": MASK[:8]}])
    assert answer["OUTPUT__0"].shape[0] == 8
    kinds = [node.kind() for node in component.module.graph.nodes()]
    assert kinds.count("mkldnn::_linear_pointwise") >= 12  # six in each layer
    component.close()
