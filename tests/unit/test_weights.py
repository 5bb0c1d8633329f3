"""Weights folders: what is found, and what is refused before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ArtifactError
from shoal.kit.generation.weights import find_weights
from tests.support.checkpoints import CONFIG, TOKENIZER

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write(folder: Path, **files: Any) -> None:
    """Write JSON files by name, with ``_`` for ``.``; None removes one."""
    for name, value in files.items():
        path = folder / name.replace("_json", ".json")
        if value is None:
            path.unlink()
        else:
            path.write_text(json.dumps(value), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, config_json=CONFIG, tokenizer_json=TOKENIZER)
    write(tmp_path, tokenizer_config_json={"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    (tmp_path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    return tmp_path


def shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    for name in SHARDS:
        (folder / name).write_bytes(b"\2\0\0\0\0\0\0\0{}")
    index = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def test_one_file(folder: Path) -> None:
    found = find_weights(str(folder))
    assert (found.folder, found.shards) == (folder, ("model.safetensors",))
    assert (found.vocabulary, found.context, found.end_ids) == (6, 64, (1,))


def test_shards(folder: Path) -> None:
    shard(folder)
    assert find_weights(folder).shards == SHARDS


def test_chat_models_name_their_end_tokens(folder: Path) -> None:
    write(folder, generation_config_json={"eos_token_id": [1, 5]})
    write(folder, tokenizer_config_json={"eos_token": "<|end|>"})  # config.json has another, of plain texts
    assert find_weights(folder).end_ids == (1, 5)


@pytest.mark.parametrize(
    ("settings", "own", "ends"),
    [({"eos_token_id": 1}, "<|end|>", (1, 5)), ({"eos_token_id": 5}, "</s>", (5, 1)), ({}, "</s>", (1,)),
     ({"eos_token_id": [5, 1]}, "</s>", (5, 1)), ({"eos_token_id": 0, "bos_token_id": 5}, "no token", (0,))],
)  # fmt: skip
def test_files_that_name_other_end_tokens(
    settings: dict[str, Any], own: str, ends: tuple[int, ...], folder: Path
) -> None:
    """As published models have them: an answer ends at each of them."""
    write(folder, config_json={"vocab_size": 6, "max_position_embeddings": 64, **settings})
    write(folder, tokenizer_config_json={"bos_token": "<s>", "eos_token": own})
    assert find_weights(folder).end_ids == ends
    write(folder, tokenizer_config_json={}, special_tokens_map_json={"eos_token": {"content": own}})
    assert find_weights(folder).end_ids == ends


def test_added_tokens_beyond_the_embedding(folder: Path) -> None:
    """Gemma 3's token for images, or a pad token: no text of the vocabulary needs it."""
    write(folder, config_json={**CONFIG, "vocab_size": 5}, tokenizer_config_json={"eos_token": "<|end|>"})
    assert (find_weights(folder).vocabulary, find_weights(folder).end_ids) == (5, (1,))


@pytest.mark.parametrize("name", ["n_positions", "max_seq_len", "seq_length"])
def test_the_context_by_its_names(name: str, folder: Path) -> None:
    write(folder, config_json={"vocab_size": 6, name: 77, "eos_token_id": 1})
    assert find_weights(folder).context == 77


def test_a_model_that_names_no_context(folder: Path) -> None:
    write(folder, config_json={"vocab_size": 6, "eos_token_id": 1})
    assert find_weights(folder).context == 2048


def test_a_unigram_vocabulary_is_a_list(folder: Path) -> None:
    write(folder, tokenizer_json={"added_tokens": [], "model": {"vocab": [["a", -1.0]] * 6}})
    assert find_weights(folder).vocabulary == 6
    write(folder, tokenizer_json={"added_tokens": [], "model": {"vocab": [["a", -1.0]] * 7}})
    with pytest.raises(ArtifactError, match=r"token ids up to 6, and config\.json has vocab_size 6"):
        find_weights(folder)


def test_the_text_part_of_a_model_that_sees(folder: Path) -> None:
    write(folder, config_json={"model_type": "llava", "text_config": CONFIG})
    assert find_weights(folder).context == 64


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config_json": None}, "has no config.json."),
        ({"tokenizer_json": None}, "has no tokenizer.json."),
        ({"config_json": {**CONFIG, "vocab_size": "6"}}, "has vocab_size '6', expected a whole number."),
        ({"config_json": {**CONFIG, "max_position_embeddings": "64"}}, "has max_position_embeddings '64', expected"),
        ({"config_json": {**CONFIG, "vocab_size": 3}}, "token ids up to 3, and config.json has vocab_size 3"),
        ({"config_json": {**CONFIG, "eos_token_id": 6}}, "has eos_token_id 6, and vocab_size 6."),
        ({"tokenizer_json": {"model": {}}}, "is not a tokenizer: it has no vocabulary."),
        ({"tokenizer_json": [1]}, "is not a tokenizer: it is the JSON value [1]"),
    ],
)
def test_refused(files: dict[str, Any], words: str, folder: Path) -> None:
    write(folder, **files)
    with pytest.raises(ArtifactError) as error:
        find_weights(folder)
    assert words in str(error.value)


def test_not_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="nowhere is not a folder"):
        find_weights(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused_with_what_to_type(name: str, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ArtifactError, match="save_pretrained") as error:
        find_weights(folder)
    assert name in str(error.value)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"has no \*\.safetensors"):
        find_weights(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    shard(folder)
    (folder / SHARDS[1]).unlink()
    with pytest.raises(ArtifactError, match=rf"misses {SHARDS[1]}, .* \(1 of 2 files are missing\)"):
        find_weights(folder)


def test_shards_without_an_index(folder: Path) -> None:
    shard(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ArtifactError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        find_weights(folder)


def test_an_index_without_places(folder: Path) -> None:
    shard(folder)
    (folder / "model.safetensors.index.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ArtifactError, match="has no weight_map"):
        find_weights(folder)
