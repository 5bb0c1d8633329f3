"""Training corpora: labelled texts, found and read from files."""

from __future__ import annotations

import hashlib
import json
import math
import os
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from shoal.clients.bulk.rows import shorten, shorten_all
from shoal.clients.bulk.tables import open_table
from shoal.errors import ArtifactError, InputError
from shoal.readability.download import CLEAR_FILE, download_clear
from shoal.system.progress import OnProgress

ASSETS = Path(__file__).parent / "assets"
KAGGLE_FILE = "train.csv"  # of the CommonLit Readability Prize
DATA_DIR = "SHOAL_DATA_DIR"
CLEAR = Path("clear")  # in place of a file: download the CLEAR corpus
# The shipped passages have only grades. This line maps them to the corpus's scale, where teachers' ratings range from
# about 1.5 (easy) to -2.5 (hard).
EASIEST_GRADE, EASIEST_SCORE, SCORE_PER_GRADE = 3, 1.5, -0.4
# Columns of texts and of targets, and the name of a corpus that has both; empty: the file's name.
LAYOUTS = (("Excerpt", "BT_easiness", "CLEAR corpus"), ("excerpt", "target", "CommonLit"), ("text", "target", ""))
# Columns that the CLEAR corpus has beside its texts: published readability formulas, and the genre, Lit or Info.
FORMULAS = (
    "Flesch-Reading-Ease",
    "Flesch-Kincaid-Grade-Level",
    "Automated Readability Index",
    "SMOG Readability",
    "New Dale-Chall Readability Formula",
    "CAREC",
    "CAREC_M",
    "CML2RI",
)
GENRE = "Categ"

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Corpus:
    """Texts and their targets, FP64 ``[len(texts)]``; in the CLEAR corpus, a higher target means an easier text.

    ``sha256`` is the hash of texts and targets, independent of the file. ``is_demonstration`` marks data too small for
    scores to mean anything. ``formulas`` has the values of published readability formulas by the formula's name, FP64
    ``[len(texts)]`` each; ``genres`` has one genre per text. Both are empty if the file has none. ``group_names``
    has one name per text, such as its author's, if texts of the same name are to be kept together; empty otherwise.
    """

    name: str
    texts: tuple[str, ...]
    targets: Floats
    is_demonstration: bool = False
    formulas: Mapping[str, Floats] = field(default_factory=dict)
    genres: tuple[str, ...] = ()
    group_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def sha256(self) -> str:
        """SHA-256 of all texts and targets, in order, and of ``group_names``."""
        columns = [self.texts, self.targets.tolist(), *([self.group_names] if self.group_names else [])]
        lines = (json.dumps(row) for row in zip(*columns, strict=True))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @property
    def num_words(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Number of whitespace-separated words of each text: INT64 ``[len(texts)]``."""
        return np.array([len(text.split()) for text in self.texts], np.int64)

    @cached_property
    def groups(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Group of each text, INT64 ``[len(texts)]``: texts that differ only in case and whitespace, or have one name.

        Groups are numbered from 0 in order of appearance. A split must not divide a group between training rows and
        held-out rows.
        """
        numbers: dict[str, int] = {}
        same = np.array([numbers.setdefault(_normalise(text), len(numbers)) for text in self.texts], np.int64)
        if not self.group_names:
            return same
        from scipy.sparse import coo_matrix
        from scipy.sparse.csgraph import connected_components

        _, named = np.unique(self.group_names, return_inverse=True)
        size = len(numbers) + int(named.max()) + 1
        edges = coo_matrix((np.ones(len(same)), (same, len(numbers) + named)), shape=(size, size))
        _, found = connected_components(edges, directed=False)
        _, firsts, places = np.unique(found[same], return_index=True, return_inverse=True)
        return np.argsort(np.argsort(firsts))[places]

    @property
    def kind(self) -> str:
        """Word for what a split keeps together, for messages."""
        return "groups" if self.group_names else "texts"

    def take(self, rows: Sequence[int] | np.ndarray[Any, Any]) -> Corpus:
        """Return a corpus of the rows with these numbers, in the given order."""
        index = np.asarray(rows, np.int64)
        return Corpus(
            self.name,
            tuple(self.texts[i] for i in index),
            self.targets[index],
            self.is_demonstration,
            {name: values[index] for name, values in self.formulas.items()},
            tuple(self.genres[i] for i in index) if self.genres else (),
            tuple(self.group_names[i] for i in index) if self.group_names else (),
        )


def fingerprint(text: str) -> str:
    """Return a text's fingerprint: 16 hex digits, the same for texts that differ only in case and whitespace.

    These are the first digits of the SHA-256 of the UTF-8 text, after NFKC, case folding and collapsing whitespace. Two
    given texts have the same fingerprint with a probability of 2^-64; one of them is then not used in an evaluation.
    """
    return hashlib.sha256(_normalise(text).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _normalise(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


# --- finding a corpus --------------------------------------------------------------------------------------------


def find_corpus(
    path: Path | None = None,
    *,
    text_column: str | None = None,
    target_column: str | None = None,
    group_column: str | None = None,
    download: bool = False,
    may_be_constant: bool = False,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> Corpus:
    """Read the corpus at ``path``, else the corpus in the folder SHOAL_DATA_DIR, else shoal's own passages.

    The folder contains the CLEAR corpus, or ``train.csv`` of Kaggle's CommonLit Readability Prize. If ``path`` is
    ``clear``, the CLEAR corpus is downloaded once and read. If ``download`` is True, it takes the place of shoal's own
    passages. The other parameters are those of `read_corpus`.

    Raises:
        ArtifactError: there is no corpus at ``path`` or in the folder, or it is damaged.
        InputError: a column is named, but there is no file.
        SetupError: a library is not installed, or the corpus cannot be downloaded.
    """
    if path is None and os.environ.get(DATA_DIR):
        path = _find_in(Path(os.environ[DATA_DIR]))
    if (path is None and download) or (path == CLEAR and not CLEAR.is_file()):
        path = download_clear(on_progress=on_progress)
    if path is not None:
        return read_corpus(
            path,
            text_column=text_column,
            target_column=target_column,
            group_column=group_column,
            may_be_constant=may_be_constant,
        )
    for column in (text_column, target_column, group_column):
        if column is not None:
            raise InputError(f"There is no file for column {shorten(column)}.", "Name it with --data.")
    return read_passages()


def _find_in(folder: Path) -> Path:
    for name in (CLEAR_FILE, KAGGLE_FILE):
        if (folder / name).is_file():
            return folder / name
    raise ArtifactError(
        f"There is neither {CLEAR_FILE} nor {KAGGLE_FILE} in {folder}.",
        f"Name the file with --data, or unset {DATA_DIR}.",
    )


def read_passages() -> Corpus:
    """Read the hundred passages shipped with shoal, of school grades 3 to 12; they are only for demonstrations."""
    rows = [json.loads(line) for line in (ASSETS / "passages.jsonl").read_text(encoding="utf-8").splitlines()]
    grades = np.array([row["grade"] for row in rows], np.float64)
    targets = EASIEST_SCORE + SCORE_PER_GRADE * (grades - EASIEST_GRADE)
    return Corpus("shoal passages", tuple(row["text"] for row in rows), targets, is_demonstration=True)


def read_stop_words() -> tuple[str, ...]:
    """Read shoal's own English stop words; ``assets/README.md`` describes how they were chosen."""
    return tuple((ASSETS / "stop_words.txt").read_text(encoding="utf-8").split())


# --- reading a file ----------------------------------------------------------------------------------------------


def read_corpus(
    path: Path,
    *,
    text_column: str | None = None,
    target_column: str | None = None,
    group_column: str | None = None,
    may_be_constant: bool = False,
) -> Corpus:
    """Read the texts and targets of a CSV, JSON Lines, Parquet or Excel file, through ``shoal.clients.bulk.tables``.

    If a column is not given, known names are tried: ``Excerpt`` and ``BT_easiness`` (the CLEAR corpus: Crossley et al.,
    "A large-scaled corpus for assessing text readability", Behavior Research Methods, 2022), ``excerpt`` and ``target``
    (Kaggle's CommonLit Readability Prize), or ``text`` and ``target``. The columns in ``FORMULAS`` and ``GENRE`` are
    read too, except columns with a missing value and formulas with a value that is not finite. Texts with the same
    value in ``group_column`` are of one group.

    Raises:
        ArtifactError: the file cannot be read, lacks these columns, or has no rows; a row has no text or no finite
            target, or no value in ``group_column``; or all targets are the same, and ``may_be_constant`` is False.
        InputError: text and target are the same column.
        SetupError: the library for the file's kind is not installed.
    """
    texts: list[str] = []
    targets: list[float] = []
    with open_table(path) as table:
        name, text, target = _find_columns(table.columns, path, text_column, target_column, group_column)
        names: list[str] = []
        others: dict[str, list[Any]] = {column: [] for column in (*FORMULAS, GENRE) if column in table.columns}
        for number, row in table.rows:
            texts.append(_read_text(row.get(text), f"{table.where(number)}, column {text!r}"))
            targets.append(_read_target(row.get(target), f"{table.where(number)}, column {target!r}"))
            if group_column is not None:
                names.append(_read_group(row.get(group_column), f"{table.where(number)}, column {group_column!r}"))
            for column, values in others.items():
                values.append(row.get(column))
    if not texts:
        raise ArtifactError(f"{path.name} has no rows below its header.", "Name a file with texts and targets.")
    if min(targets) == max(targets) and not may_be_constant:
        raise ArtifactError(
            f"{path.name}: all targets in column {target!r} are {targets[0]:g}.", "Give texts whose targets differ."
        )
    genres = others.pop(GENRE, [])
    are_genres = all(isinstance(genre, str) and genre.strip() for genre in genres)
    return Corpus(
        name,
        tuple(texts),
        np.array(targets, np.float64),
        formulas=_read_formulas(others),
        genres=tuple(genres) if are_genres else (),
        group_names=tuple(names),
    )


def _find_columns(
    columns: Sequence[str],
    path: Path,
    text_column: str | None,
    target_column: str | None,
    group_column: str | None = None,
) -> tuple[str, str, str]:
    """Return the corpus's name, its text column and its target column."""
    for named in (text_column, target_column, group_column):
        if named is not None and named not in columns:
            raise ArtifactError(
                f"{path.name} has no column {shorten(named)}. Its columns: {shorten_all(columns)}.", "Name one of them."
            )
    if text_column is not None and text_column == target_column:
        raise InputError(f"Column {shorten(text_column)} cannot be both text and target.", "Name two columns.")
    if text_column is None and target_column is None:
        for text, target, name in LAYOUTS:
            if text in columns and target in columns:
                return name or path.name, text, target
    else:
        texts = [text_column] if text_column is not None else [text for text, _, _ in LAYOUTS]
        targets = [target_column] if target_column is not None else [target for _, target, _ in LAYOUTS]
        for text, target in ((text, target) for text in texts for target in targets):
            if text in columns and target in columns and text != target:
                return path.name, text, target
    raise ArtifactError(
        f"{path.name} has no columns of texts and targets by known names. Its columns: {shorten_all(columns)}.",
        "Name both with --text-column and --target-column.",
    )


def _read_text(value: object, where: str) -> str:
    if value is None or (isinstance(value, str) and not value.strip()):
        raise ArtifactError(f"{where}: the text is missing: {shorten(value)}.", "Fill it in, or take the row out.")
    if not isinstance(value, str):
        raise ArtifactError(f"{where}: {shorten(value)} is not a text.", "Name another column, or fix the row.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ArtifactError(
            f"{where}: {shorten(value)} has the lone surrogate {value[error.start]!r} at character {error.start + 1}.",
            "Write the text again, or take the row out.",
        ) from None
    return value


def _read_group(value: object, where: str) -> str:
    found = "" if value is None else str(value).strip()
    if not found:
        raise ArtifactError(f"{where}: the group is missing: {shorten(value)}.", "Fill it in, or take the row out.")
    return found


def _read_target(value: object, where: str) -> float:
    if value is None or (isinstance(value, str) and not value.strip()):
        raise ArtifactError(f"{where}: the target is missing: {shorten(value)}.", "Fill it in, or take the row out.")
    number = _to_number(value)
    if number is None or not math.isfinite(number):
        what = "is not a number" if number is None else "is not finite"
        what += " (decimals take a point)" if isinstance(value, str) and "," in value else ""
        raise ArtifactError(f"{where}: the target {shorten(value)} {what}.", "Fix it, or take the row out.")
    return number


def _to_number(value: object) -> float | None:
    """Convert a number, or a string that contains a number as in CSV, to float; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, Real | Decimal | str):
        return None
    if isinstance(value, str) and "_" in value:  # Python's own way to write a million
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _read_formulas(columns: Mapping[str, Iterable[Any]]) -> dict[str, Floats]:
    """Return the columns in which every value is a finite number."""
    read = {name: [_to_number(value) for value in values] for name, values in columns.items()}
    return {
        name: np.array(values, np.float64)
        for name, values in read.items()
        if all(value is not None and math.isfinite(value) for value in values)
    }
