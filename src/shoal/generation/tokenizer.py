"""Tokenizer of a language model, with the settings that transformers reads from the other files of its folder.

``tokenizer.json`` alone is not always the whole tokenizer: added tokens, and the tokens that count as special, may be
named by ``tokenizer_config.json``, ``special_tokens_map.json`` and ``added_tokens.json``. They are read as transformers
5.23 reads them, in ``PreTrainedTokenizerBase._from_pretrained`` and ``TokenizersBackend``.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.component import read_json, read_tokenizer, refusal

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
SPECIAL_TOKENS, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_settings(folder: Path) -> dict[str, Any]:
    """Return ``tokenizer_config.json``, or an empty object, with what ``special_tokens_map.json`` adds to it.

    As in transformers, the latter does not count where the former has all added tokens (``added_tokens_decoder``).

    Raises:
        ArtifactError: a file is not a JSON object.
    """
    path, others = folder / TOKENIZER_CONFIG, folder / SPECIAL_TOKENS
    settings = read_json(path, "tokenizer's configuration") if path.is_file() else {}
    if "added_tokens_decoder" not in settings and others.is_file():
        settings |= read_json(others, "special tokens")
    return settings


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
    """
    from tokenizers import AddedToken

    tokenizer = read_tokenizer(folder / TOKENIZER)
    settings = read_settings(folder)
    path = folder / TOKENIZER_CONFIG
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
