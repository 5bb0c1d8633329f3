"""``preprocess.json``: all settings for converting a text to model inputs, as one artifact.

A forest records the SHA-256 of this file: with another file, the forest's input columns would be meaningless.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from reprlib import repr as shorten
from typing import Any

from shoal.errors import ArtifactError
from shoal.kit.blocks import find_fault
from shoal.kit.component.files import MAKE_AGAIN, check_file, find_repeated, is_number, read_object, refusal, sha256
from shoal.kit.text.tokens import LENGTHS, WIDTH_MULTIPLE
from shoal.kit.text.words import NUM_STATISTICS

FORMAT = 1
NUM_LISTED = 100  # length of each word list: the published recipe's N
NUM_FEATURES = NUM_STATISTICS + 2 * NUM_LISTED
MAX_WIDTH = 255 * WIDTH_MULTIPLE  # on a GPU, where the width in steps is copied as one byte
_KIND, _SETTING = "preprocessing bundle", "postprocessing setting"


@dataclass(frozen=True)
class Bundle:
    """Settings in ``preprocess.json``: word lists, means and standard deviations of the features, tokenizer settings.

    ``frequent`` and ``rare`` are the 100 most and 100 least frequent words of the training corpus, in the order of
    their feature columns. ``mean`` and ``std`` have one value per feature, from the training texts (a zero ``std`` is
    stored as 1).

    Raises:
        ArtifactError: a field is invalid; the error names it.
    """

    vocabulary_sha256: str
    is_lowercase: bool
    max_length: int
    stop_words: tuple[str, ...]
    frequent: tuple[str, ...]
    rare: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    format: int = FORMAT

    def __post_init__(self) -> None:
        for fault in _find_faults(vars(self)):
            raise ArtifactError(f"preprocess.json: {fault}.", MAKE_AGAIN)

    @property
    def host_reason(self) -> str:
        """Reason, as a clause, why texts are read on the host only; empty if a GPU can read them."""
        if not self.is_lowercase:
            return "texts that keep upper case are read on the host only"
        return f"on a GPU at most {MAX_WIDTH} tokens are read" if self.max_length > MAX_WIDTH else ""

    def dumps(self) -> str:
        """Return the file's text; the same bundle gives the same bytes."""
        return json.dumps(asdict(self), indent=1, sort_keys=True, ensure_ascii=False) + "\n"

    @classmethod
    def load(cls, path: Path) -> Bundle:
        """Read ``preprocess.json``.

        Raises:
            ArtifactError: the file is not a ``preprocess.json``, or a field is invalid.
        """
        entries = read_object(path, _KIND, [field.name for field in fields(cls)])
        entries = {name: tuple(value) if isinstance(value, list) else value for name, value in entries.items()}
        for fault in _find_faults(entries):
            raise refusal(path, _KIND, fault)
        return cls(**entries)

    def check_vocabulary(self, path: Path) -> None:
        """Check that ``path`` is the vocabulary that this bundle was made with.

        Raises:
            ArtifactError: ``path`` is another vocabulary.
        """
        check_file(path, "vocabulary")
        if (found := sha256(path)) != self.vocabulary_sha256:
            raise ArtifactError(
                f"{path.name} is not the one preprocess.json was made with"
                f" (expected sha256 {self.vocabulary_sha256[:12]}, found {found[:12]}), in {path.parent}.",
                f"Copy both from one folder. {MAKE_AGAIN}",
            )


def _find_faults(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the faults of the fields of preprocess.json. Use only the first: later checks rely on earlier ones."""
    if type(values["format"]) is not int or values["format"] != FORMAT:
        yield f"it has format {shorten(values['format'])}; this shoal reads {FORMAT}"
    digest, is_lowercase, length = (values[name] for name in ("vocabulary_sha256", "is_lowercase", "max_length"))
    if not isinstance(digest, str) or set(digest) - set("0123456789abcdef"):
        yield f"vocabulary_sha256 is {shorten(digest)}, expected hexadecimal digits"
    if not isinstance(is_lowercase, bool):
        yield f"is_lowercase is {shorten(is_lowercase)}, expected true or false"
    if type(length) is not int or length not in LENGTHS:
        yield f"max_length is {shorten(length)}, expected a whole number from {LENGTHS[0]} to {LENGTHS[-1]:,}"
    for name, size in (("stop_words", None), ("frequent", NUM_LISTED), ("rare", NUM_LISTED)):
        yield from _find_odd_words(name, values[name], size)
    if both := sorted(set(values["frequent"]) & set(values["rare"])):
        yield f"it lists {shorten(both[0])} as both frequent and rare"
    for name in ("mean", "std"):
        if isinstance(values[name], tuple) and len(values[name]) != NUM_FEATURES:
            yield f"{name} has {len(values[name])} entries, expected {NUM_FEATURES}"
    if fault := find_fault(values["mean"], values["std"], largest=LENGTHS[-1]):
        yield fault


def _find_odd_words(name: str, words: Any, size: int | None) -> Iterator[str]:
    if not isinstance(words, tuple):
        yield f"{name} is {shorten(words)}, expected a list of words"
    elif size is not None and len(words) != size:
        yield f"{name} has {len(words)} entries, expected {size}"
    elif odd := [word for word in words if not _is_word(word)]:
        yield f"{name} holds {shorten(odd[0])}, expected words"
    elif len(set(words)) != len(words):
        yield f"{name} holds {shorten(find_repeated(words))} twice"


def _is_word(word: Any) -> bool:
    """Whether ``word`` is a string without whitespace that UTF-8 can encode."""
    return isinstance(word, str) and word.split() == [word] and word.encode(errors="ignore").decode() == word


def read_weight(path: Path) -> float:
    """Read the encoder's default weight in the blend, between 0 and 1, from ``postprocess.json``.

    Raises:
        ArtifactError: the file is not a valid ``postprocess.json``, or the weight is not a number from 0 to 1.
    """
    weight = read_object(path, _SETTING, ["bert_weight"])["bert_weight"]
    if not is_number(weight) or not 0 <= weight <= 1:
        raise refusal(path, _SETTING, f"bert_weight is {shorten(weight)}, expected a number from 0 to 1")
    return float(weight)
