"""Readers of the files of a Hugging Face folder: of ``tokenizer.json``, and of what a library opens by itself.

A chain of replacements in a ``tokenizer.json`` can double a text often, so its growth is bounded. Each part is a list
of pieces, which run one after the other. A piece multiplies what it reads by its factor, and reads what an earlier
piece wrote only if they have a character in common: ten pieces that each write out another ligature make no text ten
times as long, but ten pieces that each double the letter a make it 1,024 times as long.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import ArtifactError
from shoal.kit.component.files import describe_bytes, read_json, read_text, refusal
from shoal.system.files import MAX_LARGE_TEXT, describe_special, parse_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
MAX_GROWTH, MAX_PIECES, MAX_PADDING = 256, 1000, 2**20
_EMPTY = re.compile(r"[*?|^$]|\\[bBAGzZ]|\{[0,]|\A\Z")  # signs of an expression that may match between characters
_TAKE_ALL = "Take all files of the same model."
_OWN_CONFIG = "Take the model's own config.json; a model that really has as many cannot be served."
_TOKENIZER = "fast tokenizer of Hugging Face's"
_READ_WHOLE = re.compile(r".*(config|tokenizer|special_tokens|added_tokens|vocab|merges|chat_template|index|\.model$)")
_COUNT, _MAX_COUNT = re.compile(r"layers?$|heads?$|^num_\w+_blocks$"), 4096
_EXPERTS, _MAX_EXPERTS = re.compile(r"experts$"), 2**16  # Doge has 16,384
_SIZE, _MAX_SIZE = re.compile(r"size$|dim$|rank$|position|embeddings$|^[nd]_"), 2**24  # Llama 4 reads 10 Mi tokens


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a ``tokenizer.json``.

    Raises:
        ArtifactError: the file is missing, or does not contain a fast tokenizer of Hugging Face's.
    """
    from tokenizers import Tokenizer

    text = read_text(path, _TOKENIZER, MAX_LARGE_TEXT)
    try:
        check_growth(parse_json(text), path)
        return Tokenizer.from_str(text)
    except ArtifactError:
        raise
    except BaseException as error:  # the library has no exception class for unreadable files, and panics at some
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise refusal(path, _TOKENIZER, describe_bytes(text[:32].encode()) or str(error)) from error


def check_growth(tokenizer: Any, path: Path) -> None:
    """Check that the tokenizer in the file ``path`` does not make texts many times as long.

    Raises:
        ArtifactError: it does, or has another form.
    """
    try:
        why = find_growth(tokenizer)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        why = f"its pieces have another form: {error!r}"
    if why:
        raise refusal(path, _TOKENIZER, why)


def check_folder(folder: Path) -> None:
    """Check the files of a Hugging Face folder before a library opens them, and the sizes in its ``config.json``.

    Raises:
        ArtifactError: one is a pipe, a device or a text of more than 64 MiB; or a size is out of every model's range.
    """
    for path in sorted(folder.iterdir()):
        if path.is_dir() or not path.exists():
            continue
        status = path.stat()
        if kind := describe_special(status.st_mode):
            raise ArtifactError(f"{path} cannot be read: it is {kind}, not a regular file.", _TAKE_ALL)
        if _READ_WHOLE.match(path.name) and status.st_size > MAX_LARGE_TEXT:
            what = f"it has {status.st_size:,} bytes, and at most {MAX_LARGE_TEXT:,} are read"
            raise ArtifactError(f"{path} cannot be read: {what}.", _TAKE_ALL)
    path = folder / "config.json"
    for name, value in _find_sizes(read_json(path, "model configuration")) if path.exists() else ():
        most = _MAX_COUNT if _COUNT.search(name) else _MAX_EXPERTS if _EXPERTS.search(name) else _MAX_SIZE
        if value > most:
            shown = f"{value:,}" if value < 10**30 else "a number of more than 30 digits"
            raise ArtifactError(f"{path} has {name} {shown}, and at most {most:,} is accepted.", _OWN_CONFIG)


def _find_sizes(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    waiting = [config]
    while waiting:
        for name, value in waiting.pop().items():
            if isinstance(value, dict):
                waiting.append(value)
            elif type(value) is int and any(sizes.search(name) for sizes in (_COUNT, _EXPERTS, _SIZE)):
                yield name, value


def find_growth(tokenizer: Mapping[str, Any]) -> str:
    """Return how texts grow beyond the bound, as a clause; empty if they do not.

    Raises:
        LookupError, TypeError, ValueError: a part has another form than that of ``tokenizers``.
    """
    for part in PARTS:
        pieces = list(_find_pieces(tokenizer.get(part)))
        growth = _find_longest(pieces[:MAX_PIECES])
        if growth > MAX_GROWTH:
            return f"its {part} makes texts up to {growth:.3g} times as long, and at most {MAX_GROWTH} is accepted"
        if len(pieces) > MAX_PIECES:
            return f"its {part} has {len(pieces):,} pieces, and at most {MAX_PIECES:,} are accepted"
    padding = tokenizer.get("padding") or {}
    strategy = padding.get("strategy")
    sizes = [padding.get("pad_to_multiple_of"), strategy.get("Fixed") if isinstance(strategy, dict) else None]
    if any(size is not None and size > MAX_PADDING for size in sizes):
        return f"it pads texts to more than {MAX_PADDING:,} tokens"
    return ""


def _find_pieces(part: Any) -> Iterator[Mapping[str, Any]]:
    waiting = [part]
    while waiting:
        piece = waiting.pop()
        if piece and piece.get("type") == "Sequence":
            waiting += [inner for value in piece.values() if isinstance(value, list) for inner in reversed(value)]
        elif piece:
            yield piece


def _find_longest(pieces: list[Mapping[str, Any]]) -> float:
    """Return the greatest product of factors of pieces that read what the one before wrote."""
    before: list[tuple[set[str] | None, float]] = []  # what each piece wrote (None: anything), and its product
    for piece in pieces:
        factor, reads, writes = _describe(piece)
        products = [n for w, n in before if w is None or reads is None or not w.isdisjoint(reads)]
        before.append((writes, max(1.0, factor) * max(products, default=1.0)))
    return max((product for _, product in before), default=1.0)


def _describe(piece: Mapping[str, Any]) -> tuple[float, set[str] | None, set[str] | None]:
    """Return a piece's factor, and the characters that it reads and writes; None for any."""
    match piece:
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
            factor = len(content) / len(pattern) if pattern else 1 + len(content)
            return factor, set(pattern) or None, set(content) if pattern else None
        case {"type": "Replace", "pattern": {"Regex": str(pattern)}, "content": str(content)}:
            return len(content) + bool(_EMPTY.search(pattern)), None, None
        case {"type": "TemplateProcessing", "single": single, "pair": pair}:
            names = [[item["Sequence"]["id"] for item in form if "Sequence" in item] for form in (single, pair)]
            return max(form.count(name) for form in names for name in "AB"), None, None
        case {"type": "Precompiled", "precompiled_charsmap": str(charsmap)}:
            # A trie with its size before it, then the replacements, each with NUL behind it (sentencepiece).
            data = base64.b64decode(charsmap)
            texts = data[4 + int.from_bytes(data[:4], "little") :].decode("utf-8", "replace").split("\0")
            return max(map(len, texts)), None, None
        case {"type": "ByteLevel"} | {"type": "BPEDecoder", "suffix": ""} | {"type": "CTC", "word_delimiter_token": ""}:
            return 2, None, None
    return 1, None, None
