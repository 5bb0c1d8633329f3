"""Tokenizer of a language model, with the settings that transformers reads from the other files of its folder.

``tokenizer.json`` alone is not always the whole tokenizer: added tokens, and the tokens that count as special, may be
named by ``tokenizer_config.json``, ``special_tokens_map.json`` and ``added_tokens.json``. They are read as transformers
5.23 reads them, in ``PreTrainedTokenizerBase._from_pretrained`` and ``TokenizersBackend``.

Some of its tokenizer classes take only the vocabulary from ``tokenizer.json``, and make the other parts themselves,
such as ``LlamaTokenizer``, which thereby obeys ``legacy`` and ``add_prefix_space``. Where the file's parts are not
already those of the class, transformers itself reads the folder.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import SetupError
from shoal.kit.component.files import read_json, refusal
from shoal.kit.text.tokenizer_files import read_tokenizer

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
SPECIAL_TOKENS, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Classes of transformers 5.23 that make these parts of a tokenizer themselves, with the normalizer and pre-tokenizers
# that they make; None: those depend on settings.
_BYTES = {"type": "ByteLevel", "add_prefix_space": False}
_NFC = {"type": "NFC"}
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CLASSES: dict[str, tuple[Any, list[Any]] | None] = {
    "CodeGenTokenizer": (None, [_BYTES]),
    "GPT2Tokenizer": (None, [_BYTES]),
    "GPTNeoXTokenizer": (_NFC, [_BYTES]),
    "CohereTokenizer": (_NFC, [{"type": "Digits", "individual_digits": True}, _BYTES]),
    "Qwen2Tokenizer": (
        _NFC,
        [
            {"type": "Split", "pattern": {"Regex": _QWEN2}, "behavior": "Isolated", "invert": False},
            {**_BYTES, "use_regex": False},
        ],
    ),
    "GemmaTokenizer": (
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        [{"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}],
    ),
    **dict.fromkeys(
        ("CodeLlamaTokenizer", "LlamaTokenizer", "OpenAIGPTTokenizer", "Qwen3_5Tokenizer", "XGLMTokenizer")
    ),
}
_OF_MODELS = {  # classes of model types, whatever class a folder names
    "qwen2": "Qwen2Tokenizer",
    "hyperclovax_vision_v2": "GPT2Tokenizer",
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp"), "Qwen3_5Tokenizer"),
}
_END, _META = "<|endoftext|>", {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_GPT2 = dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END)
_DEFAULTS: dict[str, dict[str, str]] = {  # named tokens of these classes
    "CodeGenTokenizer": _GPT2,
    "CodeLlamaTokenizer": _META,
    "CohereTokenizer": {
        **{f"{name}_token": f"<{name.upper()}>" for name in ("unk", "pad", "cls", "sep")},
        **{"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "mask_token": "<MASK_TOKEN>"},
    },
    "GPT2Tokenizer": _GPT2,
    "GPTNeoXTokenizer": {**_GPT2, "pad_token": "<|padding|>"},
    "GemmaTokenizer": {f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")},
    "LlamaTokenizer": _META,
    "OpenAIGPTTokenizer": {"unk_token": "<unk>"},
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), _END),
    "Qwen3_5Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), _END),
    "XGLMTokenizer": {**_META, "sep_token": "</s>", "cls_token": "<s>", "pad_token": "<pad>"},
}
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_settings(folder: Path) -> dict[str, Any]:
    """Return ``tokenizer_config.json``, or an empty object, with what ``special_tokens_map.json`` adds to it.

    As in transformers, the latter does not count where the former has all added tokens (``added_tokens_decoder``), and
    tokens that no file names are those of the tokenizer's class.

    Raises:
        ArtifactError: a file is not a JSON object.
    """
    path, others = folder / TOKENIZER_CONFIG, folder / SPECIAL_TOKENS
    settings = read_json(path, "tokenizer's configuration") if path.is_file() else {}
    if "added_tokens_decoder" not in settings and others.is_file():
        settings |= read_json(others, "special tokens")
    return _DEFAULTS.get(_name_class(settings), {}) | settings


def find_specials(settings: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Return the texts of the named special tokens (``bos_token``, ...) of ``settings``, which ``path`` has.

    Raises:
        ArtifactError: a token is neither a text nor an object with one.
    """
    found = {}
    others = [name for name, token in settings.items() if name.endswith("_token") and isinstance(token, str)]
    for name in dict.fromkeys([*NAMES, *others]):
        if token := settings.get(name):
            text = token.get("content") if isinstance(token, dict) else token
            if not isinstance(text, str):
                raise refusal(path, "tokenizer's configuration", f"{name} is {token!r}, expected a text")
            found[name] = text
    return found


def read_model_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a weights folder.

    Raises:
        ArtifactError: ``tokenizer.json`` is missing, or a file has another form.
        SetupError: transformers has to read it, and is not installed.
    """
    from tokenizers import AddedToken

    tokenizer = read_tokenizer(folder / TOKENIZER)
    settings = read_settings(folder)
    path = folder / TOKENIZER_CONFIG
    if name := _find_class(folder, settings, tokenizer):
        return _read_by_transformers(folder, name)
    try:
        extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
        extra = list(extra.values()) if isinstance(extra, dict) else extra
        extra = [str(token["content"] if isinstance(token, dict) else token) for token in extra]
        named = [*find_specials(settings, path).values()]
        known = tokenizer.get_added_tokens_decoder()
        as_they_are = {repr(token) for token in known.values()}
        added = _read_added(folder, settings, known, {*named, *extra})
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise refusal(path, "tokenizer's configuration", f"its tokens have another form: {error!r}") from error
    missing = []
    for token in added:
        token.special = token.special or token.content in named
        if repr(token) not in as_they_are:
            missing.append(token)
    there = {token.content for token in [*known.values(), *missing]}
    missing += [AddedToken(text, special=True) for text in dict.fromkeys([*named, *extra]) if text not in there]
    tokenizer.add_tokens(missing)
    return tokenizer


def _read_added(
    folder: Path, settings: Mapping[str, Any], known: Mapping[int, AddedToken], specials: Container[str]
) -> list[AddedToken]:
    """Return the added tokens: of tokenizer_config.json, by their ids, else of the two other files."""
    from tokenizers import AddedToken

    if "added_tokens_decoder" in settings:
        each = sorted(settings["added_tokens_decoder"].items(), key=lambda entry: int(entry[0]))
        return [
            AddedToken(token["content"], **{name: token[name] for name in _FLAGS if name in token}) for _, token in each
        ]
    others = folder / ADDED_TOKENS
    ids = read_json(others, "added tokens") if others.is_file() else {}
    found = {
        int(place): AddedToken(text, normalized=text not in specials, special=text in specials)
        for text, place in ids.items()
    }
    return [token for _, token in sorted((found | dict(known)).items())]


def _name_class(settings: Mapping[str, Any]) -> str:
    return str(settings.get("tokenizer_class") or "").removesuffix("Fast")


def _find_class(folder: Path, settings: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    """Return the class that makes other parts than those in ``tokenizer.json``; empty if the file is the tokenizer."""
    config = folder / "config.json"
    model = read_json(config, "model configuration").get("model_type") if config.is_file() else ""
    name = _OF_MODELS.get(str(model)) or _name_class(settings)
    if name not in _CLASSES:
        return ""
    usual = _CLASSES[name]
    if usual is None or settings.get("add_prefix_space"):
        return name
    normalizer, before = (
        {} if part is None else json.loads(part.__getstate__())
        for part in (tokenizer.normalizer, tokenizer.pre_tokenizer)
    )
    parts = before.get("pretokenizers", []) if before.get("type") == "Sequence" else [before]
    found = [{key: part.get(key) for key in as_made} for part, as_made in zip(parts, usual[1], strict=False)]
    is_usual = len(parts) == len(usual[1]) and found == usual[1] and (normalizer or None) == usual[0]
    return "" if is_usual else name


def _read_by_transformers(folder: Path, name: str) -> Tokenizer:
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError:
        raise SetupError(
            f"{folder / TOKENIZER_CONFIG} names {name}, with which transformers makes parts of the tokenizer"
            " itself, and it is not installed.",
            "Type: pip install 'shoal[llm]'. Or, to take tokenizer.json as it is, write"
            ' "tokenizer_class": "PreTrainedTokenizerFast" there.',
        ) from None
    try:
        read: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many kinds, by class
        raise refusal(folder / TOKENIZER_CONFIG, "tokenizer's configuration", f"transformers: {error}") from error
    found: Tokenizer = read.backend_tokenizer
    return found
