"""Tokenizers of weights folders: the ids and texts of transformers, whichever file has a setting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from shoal.errors import ArtifactError
from shoal.kit.generation.tokenizer import find_specials, read_model_tokenizer, read_settings
from shoal.lab.tiny_llm import make_tokenizer

BASE = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
TEXT = "<s>Fish <|turn|> swim</s><x1> <img>Hello<t0> <extra><|endturn|> <p>\n<|user|>A cat<|assistant|>"


def token(text: str, **more: Any) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": text, **flags, "special": True, **more}


SIZE = make_tokenizer().get_vocab_size()
DECODER = {str(SIZE): token("<|turn|>"), str(SIZE + 1): token("<|endturn|>", special=False, normalized=True)}
SETTINGS: list[dict[str, Any]] = [
    {}, {"eos_token": "<|user|>"}, {"added_tokens_decoder": DECODER},
    {"added_tokens_decoder": DECODER, "eos_token": "<|endturn|>", "pad_token": "<extra>"},
    {"pad_token": "<extra>", "extra_special_tokens": ["<x1>", "<|user|>"]},
    {"additional_special_tokens": ["<x1>", "Fish"]}, {"extra_special_tokens": {"image_token": "<img>"}},
    {"image_token": "<img>", "mask_token": "<t0>"},
    {"bos_token": {"__type": "AddedToken", **token("<s>", lstrip=True)}}, {"bos_token": None, "eos_token": None},
]  # fmt: skip
FILES: list[dict[str, Any]] = [
    {},
    {"special_tokens_map": {"bos_token": "<s>", "eos_token": token("<|user|>"), "pad_token": "<p>"}},
    {"added_tokens": {"<|turn|>": SIZE + 1, "<t0>": SIZE, "Hell": SIZE + 2}},
    {"special_tokens_map": {"eos_token": "<t0>"}, "added_tokens": {"<t0>": SIZE}},
]


def write(folder: Path, settings: dict[str, Any], files: dict[str, Any], lost: str = "") -> Path:
    """Write a tokenizer; ``lost`` is what its tokenizer.json lacks: the flags, or the first added token."""
    tokenizer = json.loads(make_tokenizer().to_str())
    for added in tokenizer["added_tokens"]:
        added["special"] &= lost != "flags"
    if lost == "a token":
        del tokenizer["added_tokens"][0]
    for name, content in {"tokenizer": tokenizer, "tokenizer_config": {**BASE, **settings}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.mark.parametrize("lost", ["", "flags", "a token"])
@pytest.mark.parametrize("files", FILES, ids=["alone", "special tokens", "added tokens", "both"])
def test_the_ids_and_texts_of_transformers(files: dict[str, Any], lost: str, tmp_path: Path) -> None:
    for settings in SETTINGS:
        folder = write(tmp_path, settings, files, lost)
        right, ours = AutoTokenizer.from_pretrained(folder), read_model_tokenizer(folder)
        ids = right(TEXT, add_special_tokens=False)["input_ids"]
        assert ours.encode(TEXT, add_special_tokens=False).ids == ids, settings
        for is_skipping in (True, False):
            wanted = right.decode(ids, skip_special_tokens=is_skipping, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=is_skipping) == wanted, settings
        named = find_specials(read_settings(folder), folder)
        assert {name: named.get(name) for name in ("bos_token", "eos_token", "pad_token")} == {
            name: getattr(right, name) for name in ("bos_token", "eos_token", "pad_token")
        }


@pytest.mark.parametrize(
    "settings",
    [{"bos_token": 5}, {"eos_token": {"text": "</s>"}}, {"added_tokens_decoder": [1]}, {"extra_special_tokens": 7},
     {"added_tokens_decoder": {"5": "</s>"}}, {"added_tokens_decoder": {"x": token("a")}}],
)  # fmt: skip
def test_settings_of_another_form_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"tokenizer_config\.json is not a tokenizer's configuration"):
        read_model_tokenizer(write(tmp_path, settings, {}))
