"""Small tokenizers of each family of decoders, trained on a few texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXTS = [
    "The cat sat on the mat, didn't it? It's a fine day; we've seen two cats.\n\nThey do not sit.",
    "Größe, naïve café — «déjà vu» … 12,345.67 €",
    "日本語のテキスト。漢字とかな。",
    "Привет, мир! Как дела?",
    "😀 👩‍👩‍👧 🇩🇪 fish 🐟 and  two  spaces\tand a tab",
    "مرحبا بالعالم שלום עולם ᚠᛇᚻ",
]
SPECIALS = ["<unk>", "<s>", "</s>"]
ADDED = [AddedToken("<think>", normalized=False), AddedToken("two words", normalized=False)]
LLAMA = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


def _finish(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([*SPECIALS, "<|end|>"])
    tokenizer.add_tokens(ADDED)
    return tokenizer


def byte_level() -> Tokenizer:
    """Make a tokenizer like GPT-2's, Llama 3's and Qwen's: each byte of UTF-8 is a character of a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return _finish(tokenizer)


def sentencepiece(decoder: decoders.Decoder = LLAMA) -> Tokenizer:
    """Make a tokenizer like Llama 2's, Mistral's and Gemma's: words begin with ▁, rare characters are byte tokens."""
    metaspace = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained = Tokenizer(models.Unigram())
    trained.normalizer = metaspace
    trainer = trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", special_tokens=SPECIALS, show_progress=False)
    trained.train_from_iterator(TEXTS[:2], trainer)
    found = [(token, score) for token, score in json.loads(trained.to_str())["model"]["vocab"] if token not in SPECIALS]
    rows = [*((token, 0.0) for token in SPECIALS), *((f"<0x{byte:02X}>", 0.0) for byte in range(256)), *found]
    tokenizer = Tokenizer(models.Unigram(rows, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = metaspace
    tokenizer.decoder = decoder
    return _finish(tokenizer)


def wordpiece(*, cleanup: bool = True) -> Tokenizer:
    """Make a tokenizer like BERT's: words are split by spaces, and later parts of a word begin with ##."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=cleanup)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", *SPECIALS], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens(["n't", "'s", "do not", " ' ", "##"])
    return _finish(tokenizer)


def suffixed() -> Tokenizer:
    """Make a tokenizer like CLIP's: the last part of a word ends with </w>."""
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIALS, end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return _finish(tokenizer)


def plain() -> Tokenizer:
    """A tokenizer without a decoder: tokens are joined by spaces."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "": 3}, unk_token="<unk>"))
    return _finish(tokenizer)


def _with(decoder: decoders.Decoder) -> Tokenizer:
    return sentencepiece(decoder)


_KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "sentencepiece": sentencepiece,
    "wordpiece": wordpiece,
    "wordpiece-raw": lambda: wordpiece(cleanup=False),
    "gemma": lambda: _with(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])),
    "bytes-first": lambda: _with(
        decoders.Sequence(
            [decoders.ByteFallback(), decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
        )
    ),
    "metaspace": lambda: _with(decoders.Metaspace()),
    "metaspace-kept": lambda: _with(decoders.Metaspace(prepend_scheme="never")),
    "bytes-metaspace": lambda: _with(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
    "plain": plain,
    "fuse": lambda: _with(decoders.Fuse()),  # from here on of no family
    "suffixed": suffixed,
    "replace-late": lambda: _with(decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " ")])),
    "strip-each": lambda: _with(decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)])),
}
FAMILIES = tuple(name for name in _KINDS if name not in ("fuse", "suffixed", "replace-late", "strip-each"))
OTHERS = ("fuse", "suffixed", "replace-late", "strip-each")


@cache
def trained(name: str) -> Tokenizer:
    """The tokenizer of this name, trained once."""
    return _KINDS[name]()


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that is there."""
    found = tokenizer.token_to_id(token)
    assert found is not None, token
    return int(found)
