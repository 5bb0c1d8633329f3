"""Classes that make parts of a tokenizer themselves: the ids and texts of AutoTokenizer, or a refusal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from shoal.errors import SetupError
from shoal.kit.generation.tokenizer import _QWEN2, find_specials, read_model_tokenizer, read_settings
from tests.support.tokenizers import LLAMA, TEXTS

ALPHABET = pre_tokenizers.ByteLevel.alphabet()
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
PROBES = [
    *TEXTS, "", "a", " leading", "two  spaces", "  \n\ttabs", "1234 56,7", "I'LL we've", "e\u0301", "\uff41",
    "<s>[INST] hi [/INST]", "x <s> y", "</s>a", "<|im_start|>user\nhi<|im_end|>\n", "<bos>a <eos> b",
    "<|endoftext|>The cat",
]  # fmt: skip


def train(tokenizer: Tokenizer, specials: list[str], *, has_bytes: bool = False) -> Tokenizer:
    """Train on the texts; ``has_bytes``: a token for each byte, as of SentencePiece, which is no added token."""
    tokens = [*specials, *(f"<0x{byte:02X}>" for byte in range(256) if has_bytes)]
    alphabet = [] if has_bytes else ALPHABET
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=tokens, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    made = json.loads(tokenizer.to_str())
    made["added_tokens"] = [token for token in made["added_tokens"] if token["id"] < len(specials)]
    return Tokenizer.from_str(json.dumps(made))


def llama() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), LLAMA
    tokenizer = train(tokenizer, ["<unk>", "<s>", "</s>"], has_bytes=True)
    tokenizer.pre_tokenizer = None
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def gemma() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = train(tokenizer, ["<pad>", "<eos>", "<bos>", "<unk>"], has_bytes=True)
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    return tokenizer


def gpt2(*before: Any, normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer, tokenizer.decoder = normalizer, decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, BYTES]) if before else BYTES
    tokenizer = train(tokenizer, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def qwen() -> Tokenizer:
    tokenizer = gpt2(normalizer=normalizers.NFC())
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_QWEN2), "isolated"), plain])
    return tokenizer


def digits() -> Tokenizer:
    """As SmolLM's, whose class does not split digits."""
    return gpt2(pre_tokenizers.Digits(individual_digits=True))


ENDS = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
META = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
GOOGLE = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
KINDS: dict[str, tuple[Callable[[], Tokenizer], tuple[str, ...], dict[str, Any], tuple[dict[str, Any], ...]]] = {
    "llama": (
        llama, ("LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast"), META,
        ({}, {"legacy": False}, {"legacy": True}, {"add_prefix_space": False}, {"add_eos_token": True}),
    ),
    "gemma": (gemma, ("GemmaTokenizer", "GemmaTokenizerFast"), GOOGLE, ({}, {"add_eos_token": True})),
    "gpt2": (
        gpt2, ("GPT2Tokenizer", "GPT2TokenizerFast", "GPTNeoXTokenizer", "CodeGenTokenizer"), {},
        ({}, {"add_prefix_space": True}, {"add_bos_token": True, "bos_token": "<|endoftext|>"}),
    ),
    "digits": (digits, ("GPT2Tokenizer", "PreTrainedTokenizerFast"), ENDS, ({},)),
    "qwen": (
        qwen, ("Qwen2Tokenizer", "Qwen2TokenizerFast", "CohereTokenizerFast"), ENDS | {"bos_token": "<|im_start|>"},
        ({},),
    ),
}  # fmt: skip


def write(folder: Path, tokenizer: Tokenizer, model: str, **settings: Any) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": model}), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_the_ids_and_texts_of_transformers(kind: str, tmp_path: Path) -> None:
    make, classes, named, others = KINDS[kind]
    tokenizer = make()
    for model in ("llama", "mistral", "gpt2", "qwen2"):
        for name in classes:
            for more in others:
                folder = write(tmp_path, tokenizer, model, tokenizer_class=name, **named, **more)
                right, ours = AutoTokenizer.from_pretrained(folder), read_model_tokenizer(folder)
                for text in PROBES:
                    what = model, name, more, text
                    ids = right(text).input_ids
                    assert ours.encode(text).ids == ids, what
                    plain = right(text, add_special_tokens=False).input_ids
                    assert ours.encode(text, add_special_tokens=False).ids == plain, what
                    assert ours.decode(ids) == right.decode(ids, skip_special_tokens=True), what


@pytest.mark.parametrize("kind", ["gpt2", "gemma", "qwen"])
def test_transformers_is_not_needed_where_the_file_has_what_the_class_makes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, classes, named, _ = KINDS[kind]
    folder = write(tmp_path, make(), "llama", tokenizer_class=classes[0], **named)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert read_model_tokenizer(folder).encode("The cat").ids


def test_without_transformers_the_class_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path, llama(), "llama", tokenizer_class="LlamaTokenizer", **META)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SetupError, match=r"names LlamaTokenizer, .* it is not installed\."):
        read_model_tokenizer(folder)
    write(tmp_path, llama(), "llama", tokenizer_class="PreTrainedTokenizerFast", **META)
    assert read_model_tokenizer(folder).encode("The cat").ids


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in KINDS[kind][1]])
def test_named_tokens_that_no_file_names_are_the_classes(kind: str, name: str, tmp_path: Path) -> None:
    folder = write(tmp_path, KINDS[kind][0](), "llama", tokenizer_class=name, pad_token=None)
    right, named = AutoTokenizer.from_pretrained(folder), find_specials(read_settings(folder), folder)
    for token in ("bos_token", "eos_token", "unk_token", "pad_token"):
        assert named.get(token) == getattr(right, token), token
