"""Facts derived from published encoders, and encoders and options that are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from transformers import (
    AddedToken,
    AutoModel,
    AutoTokenizer,
    MPNetConfig,
    MPNetModel,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from shoal.authoring.project.importing.add_model import add_model
from shoal.errors import ArtifactError, InputError
from shoal.kit.encoders.packaged import SMALL_ENCODER
from tests.support.imports import add, here
from tests.support.published import publish, publish_roberta


@pytest.fixture(scope="module")
def published(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tiny_bert, tmp_path_factory.mktemp("published"))


def test_labels_that_transformers_makes_are_labels(published: Path, tmp_path: Path) -> None:
    config, said = add(tmp_path, published / "unnamed", "unnamed", task="classify", max_batch_size=8)
    assert config.spec.parameters["labels"] == '["LABEL_0", "LABEL_1", "LABEL_2", "LABEL_3"]'
    assert config.message.output[0].label_filename == "labels.txt"
    assert (config.folder / "labels.txt").read_text(encoding="utf-8") == "LABEL_0\nLABEL_1\nLABEL_2\nLABEL_3\n"
    assert "labels: LABEL_0, LABEL_1, LABEL_2, LABEL_3" in said
    assert config.spec.max_batch_size == 8


def test_a_head_that_may_be_of_pairs(published: Path, tmp_path: Path) -> None:
    """A cross-encoder would be added as what it is not: this is said, with the way out."""
    for source, task in (("score", "predict"), ("unnamed", "classify")):
        _, said = add(tmp_path, published / source, source, task=task)
        (note,) = [line for line in said if line.startswith("note: ")]
        assert "without a second text and without segment ids" in note
        assert note.endswith("add it with --task rerank")
    _, said = add(tmp_path, published / "score", "embedding", task="embeddings", pooling="mean")
    assert not any(line.startswith("note: ") for line in said)
    _, said = add(tmp_path, published / "triage", "distil", task="classify")  # which takes no segment ids
    assert not any(line.startswith("note: ") for line in said)


def write_sentences(folder: Path, kinds: list[str], **pooling: Any) -> None:
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": f"{i}_{kind}"} for i, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling), encoding="utf-8")


def test_pooling_as_its_own_files_say(published: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sentences"
    shutil.copytree(published / "triage", folder)
    with pytest.raises(InputError, match=r"The pooling of .* is not given: it has no modules\.json .* --pooling mean"):
        add_model(folder, "m", project=tmp_path, task="embeddings")
    write_sentences(folder, ["Transformer", "Pooling"], pooling_mode_cls_token=True, pooling_mode_mean_tokens=False)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 20}', encoding="utf-8")
    config, said = add(tmp_path, folder, "m", task="embeddings", tokenizer="t")
    assert "last hidden state of [CLS]" in config.spec.parameters["content"]
    assert "not normalised: as its files for sentence-transformers say" in said
    assert said[-1].endswith("at most 20 per text")
    for kinds in (["Transformer", "Pooling", "LSTM"], ["Transformer", "Pooling", "Dense"], ["WordEmbeddings"]):
        write_sentences(folder, kinds, pooling_mode_mean_tokens=True)  # the Dense module has no files
        with pytest.raises(InputError, match=rf"cannot be computed: its modules\.json lists {', '.join(kinds)}\b"):
            add_model(folder, "n", project=tmp_path, task="embeddings", pooling="mean")
    write_sentences(folder, ["Transformer", "Pooling"], pooling_mode_max_tokens=True)
    with pytest.raises(InputError, match=r"is not given: its pooling is pooling_mode_max_tokens, which is not known\."):
        add_model(folder, "n", project=tmp_path, task="embeddings")
    _, said = add(tmp_path, folder, "n", task="embeddings", pooling="mean")
    assert "not normalised: as its files for sentence-transformers say" in said


def write_dense(folder: Path, num_inputs: int, num_outputs: int, *, kind: str = "Tanh", bias: bool = True) -> nn.Module:
    """Write a Dense module as sentence-transformers does, and return it."""
    linear = nn.Linear(num_inputs, num_outputs, bias=bias)
    folder.mkdir()
    settings = {"in_features": num_inputs, "out_features": num_outputs, "bias": bias}
    config = {**settings, "activation_function": f"torch.nn.modules.activation.{kind}"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = {f"linear.{name}": value for name, value in linear.state_dict().items()}
    if bias:
        save_file(weights, str(folder / "model.safetensors"))
    else:
        torch.save(weights, folder / "pytorch_model.bin")
    return nn.Sequential(linear, getattr(nn, kind)())


def test_layers_after_the_pooling(published: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = tmp_path / "sentences"
    shutil.copytree(published / "score", folder)
    kinds = ["Transformer", "Pooling", "Dense", "Dropout", "Dense", "Normalize"]
    write_sentences(folder, kinds, pooling_mode_mean_tokens=True)
    first = write_dense(folder / "2_Dense", 16, 24)
    second = write_dense(folder / "4_Dense", 24, 8, kind="Identity", bias=False)
    config, said = add(tmp_path, folder, "m", task="embeddings")
    assert config.spec.outputs[0].dims == (8,)
    assert "with the layers after its pooling: 8 numbers per text" in said
    ids, mask = np.array([[7, 8, 9, 0], [5, 4, 3, 2]]), np.array([[1, 1, 1, 0], [1, 1, 1, 1]])
    with torch.inference_mode():
        model = AutoModel.from_pretrained(folder).eval()
        hidden = model(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask)).last_hidden_state
        means = torch.stack([row[: sum(used)].mean(0) for row, used in zip(hidden, mask, strict=True)])
        expected = nn.functional.normalize(second(first(means)), dim=1)
    found = here(tmp_path, "m", INPUT__0=ids, INPUT__1=mask)["OUTPUT__0"]
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("way", ["plain", "normalised by its files", "normalised by the option", "dense", "too large"])
def test_embeddings_cut_to_a_size(way: str, published: Path, tmp_path: Path) -> None:
    """As ``encode`` of sentence-transformers does: after its modules, before its option normalize_embeddings."""
    torch.manual_seed(0)
    folder, size = tmp_path / "sentences", 99 if way == "too large" else 5
    shutil.copytree(published / "score", folder)
    last = {"normalised by its files": ["Normalize"], "dense": ["Dense"]}.get(way, [])
    write_sentences(folder, ["Transformer", "Pooling", *last], pooling_mode_mean_tokens=True)
    dense = write_dense(folder / "2_Dense", 16, 8) if way == "dense" else nn.Identity()
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"truncate_dim": size}), encoding="utf-8")
    is_option = way == "normalised by the option" or None
    config, said = add(tmp_path, folder, "m", task="embeddings", normalise=is_option)
    ids, mask = np.array([[7, 8, 9, 3], [5, 4, 3, 2]]), np.ones((2, 4), np.int64)
    with torch.inference_mode():
        model = AutoModel.from_pretrained(folder).eval()
        hidden = model(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask)).last_hidden_state
        expected = dense(hidden.mean(1))
        expected = nn.functional.normalize(expected, dim=1) if last == ["Normalize"] else expected
        expected = expected[:, :size]
        expected = nn.functional.normalize(expected, dim=1) if is_option else expected
    found = here(tmp_path, "m", INPUT__0=ids, INPUT__1=mask)["OUTPUT__0"]
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-5)
    assert config.spec.outputs[0].dims == found.shape[1:]
    assert any("files for sentence-transformers cut the rest" in line for line in said) == (size == 5)


@pytest.mark.parametrize("size", ["8", 0, -3, 2.5, True])
def test_a_size_that_is_none(size: Any, published: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sentences"
    shutil.copytree(published / "score", folder)
    write_sentences(folder, ["Transformer", "Pooling"], pooling_mode_mean_tokens=True)
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"truncate_dim": size}), encoding="utf-8")
    with pytest.raises(InputError, match=r"config_sentence_transformers\.json has truncate_dim "):
        add_model(folder, "m", project=tmp_path, task="embeddings")


@pytest.mark.parametrize("pad", [0, 1, 5])
def test_positions_that_roberta_reserves(pad: int, tmp_path: Path) -> None:
    """The longest text is answered, and its length is the number of positions less the reserved ones."""
    folder = publish_roberta(tmp_path)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    changed = RobertaConfig(**{**config, "pad_token_id": pad, "max_position_embeddings": 34})
    RobertaForSequenceClassification(changed).save_pretrained(folder)
    _, said = add(tmp_path, folder, "m", task="embeddings", pooling="mean", tokenizer="t")
    most = 34 - (pad + 1)
    assert said[-1].endswith(f"at most {most} per text")
    ids = np.full((1, most), 6)
    with torch.inference_mode():
        expected = AutoModel.from_pretrained(folder).eval()(torch.tensor(ids)).last_hidden_state.mean(1)
    found = here(tmp_path, "m", INPUT__0=ids, INPUT__1=np.ones_like(ids))["OUTPUT__0"]
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-5)


def test_layers_of_another_encoder(published: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sentences"
    shutil.copytree(published / "score", folder)
    write_sentences(folder, ["Transformer", "Pooling", "Dense"], pooling_mode_mean_tokens=True)
    write_dense(folder / "2_Dense", 24, 8)
    with pytest.raises(InputError, match=r"layers after the pooling of .* take 24 numbers, and the encoder gives 16"):
        add_model(folder, "m", project=tmp_path, task="embeddings")


def test_an_encoder_that_cannot_be_traced(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("unordered_map::at")

    monkeypatch.setattr(torch.jit, "trace", fail)  # as for Gemma 3, transformers 5.23
    with pytest.raises(ArtifactError, match=r"of the kind bert cannot be traced: unordered_map::at\. Take an"):
        add_model(published / "score", "m", project=tmp_path, task="embeddings", pooling="mean")


def test_prompts_are_the_clients(published: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sentences"
    shutil.copytree(published / "triage", folder)
    path, prompts = folder / "config_sentence_transformers.json", {"query": "query: ", "passage": ""}
    for name, default, note in (
        ("one", None, "note: it was trained with prompts, which texts should begin with: query 'query: '"),
        ("two", "query", "note: sentence-transformers puts a default prompt before each text, 'query: '; here texts"),
    ):
        path.write_text(json.dumps({"prompts": prompts, "default_prompt_name": default}), encoding="utf-8")
        _, said = add(tmp_path, folder, name, task="embeddings", pooling="mean")
        (found,) = [line for line in said if line.startswith("note: ")]
        assert found.startswith(note)


def test_an_encoder_without_fused_attention(tmp_path: Path) -> None:
    folder = tmp_path / "mpnet"
    folder.mkdir()
    publish_roberta(folder)
    config = MPNetConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=80,
    )  # fmt: skip
    MPNetModel(config).save_pretrained(folder)
    config, _ = add(tmp_path, folder, "m", task="embeddings", pooling="mean", tokenizer="tokens")
    assert config.spec.outputs[0].dims == (16,)


def test_added_tokens_of_a_wordpiece(published: Path, tmp_path: Path) -> None:
    """They are one token within any text, which vocab.txt cannot say."""
    folder = tmp_path / "added"
    shutil.copytree(published / "triage", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken("w7", single_word=False, normalized=False)])  # which the vocabulary has
    tokenizer.save_pretrained(folder)
    add(tmp_path, folder, "m", task="embeddings", pooling="mean", tokenizer="tokens")
    assert not (tmp_path / "preprocess" / "tokens" / "1" / "vocab.txt").exists()
    written = Tokenizer.from_file(str(tmp_path / "preprocess" / "tokens" / "1" / "tokenizer.json"))
    ids = written.encode("xw7x w8").ids
    assert ids == AutoTokenizer.from_pretrained(folder)("xw7x w8")["input_ids"]
    assert tokenizer.convert_tokens_to_ids("w7") in ids


def test_stages_are_reported(published: Path, tmp_path: Path) -> None:
    stages: list[tuple[str, int, int]] = []
    options: dict[str, Any] = {"task": "classify", "on_progress": lambda *stage: stages.append(stage)}
    add_model(published / "triage", "m", project=tmp_path, **options)
    assert stages[::2] == [(name, 0, 1) for name, _, _ in stages[1::2]]
    assert [name for name, done, _ in stages if done] == [
        "loading the libraries for an encoder", f"loading {published / 'triage'}",
        "exporting model.pt and comparing its answers", "checking the model folder",
    ]  # fmt: skip


# --- what cannot be ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("triage", {"task": "tokens"}, r"Unknown task 'tokens'\. Known: embeddings, classify, rerank, predict, gen"),
        ("triage", {"task": "embeddings", "pooling": "max"}, r"Unknown pooling 'max'\. Known: mean, cls\."),
        ("triage", {"task": "classify", "format": "gguf"}, r"Unknown format 'gguf'\. Known: torchscript, onnx"),
        ("triage", {"task": "classify", "pooling": "cls"}, r"pooling is for embeddings; a trained head"),
        ("triage", {"task": "predict", "normalise": True}, r"normalise is for embeddings; a trained head"),
        ("triage", {"task": "predict"}, r"The head of .* gives 3 numbers, not a score\. Use --task classify"),
        ("score", {"task": "classify"}, r"The head of .* gives a score, not classes\. Use --task predict"),
        ("triage", {"task": "classify", "max_length": 9}, r"max_length is for a tokenizer, and none is given\."),
        (
            "triage",
            {"task": "classify", "max_length": 65, "tokenizer": "t"},
            r"max_length is 65; .*triage takes 3 to 64 tokens",
        ),
        ("triage", {"task": "classify", "max_batch_size": 0}, r"max_batch_size is 0; an encoder takes rows"),
        ("triage", {"task": "classify", "mask": "x"}, r"Unknown option for an encoder: mask\. It takes: task, "),
        ("triage", {"task": "classify", "tokenizer": "m"}, r"There is a model m already"),
    ],
)
def test_options_that_cannot_be(
    source: str, options: dict[str, Any], message: str, published: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        add_model(published / source, "m", project=tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_says_its_task(published: Path, tmp_path: Path) -> None:
    config, said = add(tmp_path, published / "triage", "topic")
    assert config.spec.parameters["api"] == "classify"
    assert any("probabilities" in line for line in said)
    with pytest.raises(InputError, match=r"gives one score, and its files do not say whether of one text or of two"):
        add_model(published / "score", "m", project=tmp_path)
    config, _ = add(tmp_path, published / "score", "score", task="predict")
    assert "api" not in config.spec.parameters


def test_a_name_on_the_hub_needs_a_task(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"The model's task is not given\. Add --task embeddings, --task classify or"):
        add_model("owner/name", "m", project=tmp_path)


def test_no_head_is_drawn_at_random(tiny_bert: Path, tmp_path: Path) -> None:
    message = r"bert0 has no trained head for classify: it is a BertModel\. Take a checkpoint"
    with pytest.raises(InputError, match=message):
        add_model(tiny_bert, "m", project=tmp_path, task="classify")
    with pytest.raises(InputError, match=r"has no trained head for predict: its checkpoint lacks "):
        add_model(SMALL_ENCODER, "m", project=tmp_path, task="predict")
    add(tmp_path, tiny_bert, "m", task="embeddings", pooling="mean")


@pytest.mark.parametrize("task", ["BertForTokenClassification", "DistilBertForTokenClassification",
                                  "ModernBertForTokenClassification", "BertForQuestionAnswering"])  # fmt: skip
def test_a_head_of_another_task(task: str, published: Path, tmp_path: Path) -> None:
    """The names of its weights may be those of a classifier of texts."""
    folder = tmp_path / "tokens"
    shutil.copytree(published / "unnamed", folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "architectures": [task]}), encoding="utf-8")
    for own in ("classify", "predict"):
        with pytest.raises(
            InputError, match=rf"is a {task}, which .*: shoal has no pipeline for that\. .* trace a module"
        ):
            add_model(folder, "m", project=tmp_path, task=own)
    add(tmp_path, folder, "m", task="embeddings", pooling="mean")


def test_weights_that_are_missing(published: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "cut"
    shutil.copytree(published / "triage", folder)
    weights = load_file(folder / "model.safetensors")
    weights = {key: value for key, value in weights.items() if "layer.1." not in key}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"is not an encoder .*: its checkpoint lacks .* and \d+ more\."):
        add_model(folder, "m", project=tmp_path, task="embeddings", pooling="mean")


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("triage", {"task": "classify", "tokenizer": "tokens"}),
        ("score", {"task": "rerank", "tokenizer": "tokens"}),
        ("triage", {"task": "embeddings", "pooling": "mean"}),
    ],
)
def test_a_tokenizer_that_is_missing(source: str, options: dict[str, Any], published: Path, tmp_path: Path) -> None:
    """transformers makes one of five tokens then."""
    folder = tmp_path / "notok"
    shutil.copytree(published / source, folder, ignore=shutil.ignore_patterns("tokenizer*", "vocab*", "special*"))
    message = r"notok has no tokenizer: .*\. Copy tokenizer\.json \(or vocab\.txt\) of the same model there"
    with pytest.raises(InputError, match=message):
        add_model(folder, "m", project=tmp_path / "project", **options)
    assert not (tmp_path / "project").exists()


def test_a_folder_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty holds no model: it has no config\.json .* Name a folder with config"):
        add_model(tmp_path / "empty", "m", project=tmp_path, task="embeddings", pooling="mean")


def test_an_export_that_differs_is_not_written(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.kit.encoders import export

    monkeypatch.setattr(export, "compare", lambda *_: 0.5)
    with pytest.raises(ArtifactError, match=r"model\.pt differs from the trained encoder by 0\.5"):
        add_model(published / "triage", "m", project=tmp_path, task="classify")
    assert list(tmp_path.iterdir()) == []
