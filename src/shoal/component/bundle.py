"""``preprocess.json``: everything that turns a text into model inputs, as one artifact.

The file's sha256 ties a forest to the bundle it was trained with: its columns mean nothing under another one. Here is
too how any artifact is read: one that cannot be used is refused with what stands there and what was expected.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from reprlib import repr as shorten
from typing import Any

from shoal.errors import ArtifactError

FORMAT = 1
NUM_LISTED = 100  # length of each word list: the published recipe's N
NUM_STATISTICS = 7  # the columns before the two lists of shares
NUM_FEATURES = NUM_STATISTICS + 2 * NUM_LISTED
MAKE_AGAIN = "Make it again: shoal train --out FOLDER"
_KIND, _SETTING = "preprocessing bundle", "postprocessing setting"
LENGTHS = range(3, 65_537)  # [CLS], a token and [SEP]; texts of more than 65,536 bytes are refused
GREATEST = 3.4e38  # FP32's
_SIGNS = {  # what often lies where an artifact should, by its first bytes
    b"\x89PNG": "a PNG image",
    b"PK\x03\x04": "a zip archive",
    b"\x1f\x8b": "a gzip archive",
    b"\x7fELF": "a program",
    b"%PDF": "a PDF",
    b"\x80": "a Python pickle",
    b"version https://git-lfs": "a pointer of Git LFS, not the file itself",
    b"<": "a web page or XML",
}


@dataclass(frozen=True)
class Bundle:
    """Word lists, normaliser and tokenizer settings.

    ``frequent`` and ``rare`` are the 100 most and least frequent words of the training corpus, in the order of their
    columns; ``mean`` and ``std`` are the training set's, one of each for every feature (a zero ``std`` is stored as 1).

    Raises:
        ArtifactError: a field is not what it must be; it is named.
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

    def dumps(self) -> str:
        """The file's text: the same bundle gives the same bytes."""
        return json.dumps(asdict(self), indent=1, sort_keys=True, ensure_ascii=False) + "\n"

    @classmethod
    def load(cls, path: Path) -> Bundle:
        """Read ``preprocess.json``.

        Raises:
            ArtifactError: it is not such a file, or a field is not what it must be.
        """
        entries = read_object(path, _KIND, [field.name for field in fields(cls)])
        entries = {name: tuple(value) if isinstance(value, list) else value for name, value in entries.items()}
        for fault in _find_faults(entries):
            raise refusal(path, _KIND, fault)
        return cls(**entries)

    def check_vocabulary(self, path: Path) -> None:
        """Check that ``path`` is the vocabulary this bundle was made with.

        Raises:
            ArtifactError: it is another one.
        """
        check_file(path, "vocabulary")
        if (found := sha256(path)) != self.vocabulary_sha256:
            raise ArtifactError(
                f"{path.name} is not the one preprocess.json was made with"
                f" (expected sha256 {self.vocabulary_sha256[:12]}, found {found[:12]}), in {path.parent}.",
                f"Copy both from one folder. {MAKE_AGAIN}",
            )


def _find_faults(values: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a bundle's fields, whatever types they came in; later ones hold if earlier ones did."""
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
        yield from _find_odd_numbers(name, values[name])
    for column, (mean, std) in enumerate(zip(values["mean"], values["std"], strict=True)):
        if std <= 0:
            yield f"std of column {column} is {std:g}, expected a number above 0"
        elif (LENGTHS[-1] + abs(mean)) / std > GREATEST:
            yield f"mean {mean:g} and std {std:g} of column {column} give z-scores that are no FP32 numbers"


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
    """Whether it is one word, of characters that UTF-8 has."""
    return isinstance(word, str) and word.split() == [word] and word.encode(errors="ignore").decode() == word


def find_repeated(values: Iterable[str]) -> str:
    """The first value that stood there before; empty where each is there once."""
    seen: set[str] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return ""


def _find_odd_numbers(name: str, numbers: Any) -> Iterator[str]:
    if not isinstance(numbers, tuple):
        yield f"{name} is {shorten(numbers)}, expected a list of numbers"
    elif len(numbers) != NUM_FEATURES:
        yield f"{name} has {len(numbers)} entries, expected {NUM_FEATURES}"
    elif odd := [number for number in numbers if not is_number(number)]:
        yield f"{name} holds {shorten(odd[0])}, expected finite numbers"


def is_number(value: Any) -> bool:
    """Whether it is finite, and such that the sum with any count is; ``True`` is none."""
    return type(value) in (int, float) and abs(value) <= GREATEST  # false for NaN


def read_weight(path: Path) -> float:
    """The default weight that ``postprocess.json`` holds, between 0 and 1.

    Raises:
        ArtifactError: it is not such a file, or the weight is no such number.
    """
    weight = read_object(path, _SETTING, ["bert_weight"])["bert_weight"]
    if not is_number(weight) or not 0 <= weight <= 1:
        raise refusal(path, _SETTING, f"bert_weight is {shorten(weight)}, expected a number from 0 to 1")
    return float(weight)


# --- how any artifact is read ------------------------------------------------------------------------------------


def refusal(path: Path, kind: str, why: str) -> ArtifactError:
    """The error for an artifact that is not of its ``kind``."""
    return ArtifactError(f"{path} is not a {kind}: {why}.", MAKE_AGAIN)


def check_file(path: Path, kind: str) -> bytes:
    """Check that a file is there, can be read and is not empty; returns its first bytes.

    Raises:
        ArtifactError: it says what stands there.
    """
    try:
        if not path.is_file():
            raise refusal(path, kind, f"it is {describe_place(path)}")
        with path.open("rb") as file:
            begins = file.read(32)
    except OSError as error:
        raise refusal(path, kind, f"it cannot be read: {error.strerror}") from error
    if not begins:
        raise refusal(path, kind, "it is empty")
    return begins


def describe_place(path: Path) -> str:
    """What stands where a file should."""
    if path.is_symlink() and not path.exists():
        return f"a link to {path.readlink()}, which is not there"
    if path.is_dir():
        return "a folder"
    return "no regular file" if os.path.lexists(path) else "missing"


def describe_bytes(begins: bytes) -> str:
    """What a file that begins so may be, in words; empty where nothing is known of it."""
    return next((f"it is {what}" for sign, what in _SIGNS.items() if begins.startswith(sign)), "")


def read_text(path: Path, kind: str) -> str:
    """The text of an artifact in UTF-8.

    Raises:
        ArtifactError: there is no such file, or it is no text.
    """
    begins = check_file(path, kind)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        why = describe_bytes(begins) or f"it is not UTF-8: byte {error.object[error.start]:#04x} at {error.start}"
        raise refusal(path, kind, why) from error


def read_json(path: Path, kind: str, *, parse_constant: Callable[[str], Any] | None = None) -> dict[str, Any]:
    """The JSON object in a file, with no name twice; ``parse_constant`` as ``json.loads`` has it.

    Raises:
        ArtifactError: there is no such file, or it is no such object.
    """
    text = read_text(path, kind)
    try:
        value = json.loads(text, object_pairs_hook=_unite, parse_constant=parse_constant)
    except (ValueError, RecursionError) as error:
        is_other = not text.lstrip().startswith("{")
        raise refusal(path, kind, (is_other and describe_bytes(text[:32].encode())) or f"{error}") from error
    if not isinstance(value, dict):
        raise refusal(path, kind, f"it is the JSON value {shorten(value)}, expected an object")
    return value


def _unite(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if repeated := find_repeated(name for name, _ in pairs):
        raise ValueError(f"it holds {shorten(repeated)} twice")
    return dict(pairs)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it holds {name}, which is no number of JSON's")


def read_object(path: Path, kind: str, names: Iterable[str]) -> dict[str, Any]:
    """The JSON object in a file, which must hold these names and no others.

    Raises:
        ArtifactError: there is no such file, or it is no such object.
    """
    entries, wanted = read_json(path, kind, parse_constant=_refuse_constant), set(names)
    if missing := sorted(wanted - set(entries)):
        raise refusal(path, kind, f"it lacks {', '.join(missing)}")
    if unknown := sorted(set(entries) - wanted):
        raise refusal(path, kind, f"it holds {shorten(unknown[0])}, which this shoal does not know")
    return entries


def find_changed(folder: Path, files: Mapping[str, str]) -> list[str]:
    """Those of ``files``, name -> sha256, that are missing in ``folder`` or are not what they were."""
    return [name for name, kept in files.items() if not (folder / name).is_file() or sha256(folder / name) != kept]


def sha256(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
