"""Labelled texts to train on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from shoal.errors import ArtifactError, needs

ASSETS = Path(__file__).parent / "assets"
CLEAR_FILE = "CLEAR_corpus_final.xlsx"
DATA_DIR = "SHOAL_DATA_DIR"
# The shipped passages know grades only. This line puts them on the corpus's scale, where teachers' ratings run from
# about 1.5 (easy) to -2.5 (hard).
EASIEST_GRADE, EASIEST_SCORE, SCORE_PER_GRADE = 3, 1.5, -0.4


@dataclass(frozen=True)
class Corpus:
    """Texts and their targets, FP64 ``[len(texts)]``; higher is easier to read.

    ``sha256`` is that of texts and targets, whatever file they came from. ``is_demonstration`` marks data too small
    for its scores to mean anything.
    """

    name: str
    texts: tuple[str, ...]
    targets: np.ndarray[Any, np.dtype[np.float64]]
    is_demonstration: bool = False

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def sha256(self) -> str:
        """A hash over every text and target, in order."""
        lines = (json.dumps([text, target]) for text, target in zip(self.texts, self.targets.tolist(), strict=True))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def take(self, rows: Sequence[int] | np.ndarray[Any, Any]) -> Corpus:
        """The rows with these numbers, in their order."""
        index = np.asarray(rows)
        return Corpus(self.name, tuple(self.texts[i] for i in index), self.targets[index], self.is_demonstration)


def find_corpus(path: Path | None = None) -> Corpus:
    """The file at ``path``; else the CLEAR corpus in the folder that SHOAL_DATA_DIR names; else shoal's own passages.

    Raises:
        ArtifactError: ``path`` or the folder is named and holds no corpus.
    """
    if path is None and os.environ.get(DATA_DIR):
        path = Path(os.environ[DATA_DIR]) / CLEAR_FILE
    return read_passages() if path is None else read_clear(path)


def read_passages() -> Corpus:
    """The hundred passages that come with shoal, graded 3-12; a demonstration."""
    rows = [json.loads(line) for line in (ASSETS / "passages.jsonl").read_text(encoding="utf-8").splitlines()]
    grades = np.array([row["grade"] for row in rows], np.float64)
    targets = EASIEST_SCORE + SCORE_PER_GRADE * (grades - EASIEST_GRADE)
    return Corpus("shoal passages", tuple(row["text"] for row in rows), targets, is_demonstration=True)


def read_clear(path: Path) -> Corpus:
    """The CLEAR corpus: columns ``Excerpt`` and ``BT_easiness`` of the workbook's first sheet.

    Crossley et al., "A large-scaled corpus for assessing text readability", Behavior Research Methods (2022).

    Raises:
        ArtifactError: the file is not there or has no such columns.
        SetupError: openpyxl is not installed.
    """
    with needs("train"):
        import openpyxl
        from openpyxl.utils.exceptions import InvalidFileException
    if not path.is_file():
        raise ArtifactError(
            f"There is no {path.name} in {path.parent}.", f"Name the file with --data, or unset {DATA_DIR}."
        )
    try:
        workbook = openpyxl.load_workbook(path, read_only=True)
    except (InvalidFileException, BadZipFile):
        raise ArtifactError(f"{path.name} is no Excel workbook.", f"Name the corpus's {CLEAR_FILE}.") from None
    try:
        rows = workbook.worksheets[0].iter_rows(values_only=True)
        header = list(next(rows, ()))
        missing = [column for column in ("Excerpt", "BT_easiness") if column not in header]
        if missing:
            raise ArtifactError(
                f"{path.name} has no column {missing[0]}.", f"Its columns: {', '.join(map(str, header))}."
            )
        text, target = header.index("Excerpt"), header.index("BT_easiness")
        pairs = [(row[text], row[target]) for row in rows if row[text] is not None and row[target] is not None]
    finally:
        workbook.close()
    return Corpus("CLEAR corpus", tuple(str(t) for t, _ in pairs), np.array([float(v) for _, v in pairs]))


def read_stop_words() -> tuple[str, ...]:
    """shoal's own English stop words; ``assets/README.md`` has their recipe."""
    return tuple((ASSETS / "stop_words.txt").read_text(encoding="utf-8").split())
