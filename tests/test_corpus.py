from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.errors import ArtifactError, InputError, SetupError
from shoal.training import corpus as corpora
from shoal.training.corpus import Corpus, find_corpus, read_clear, read_stop_words
from shoal.training.train import PRESETS, split


def test_the_passages_are_graded_and_varied(passages: Corpus) -> None:
    rows = [json.loads(line) for line in (corpora.ASSETS / "passages.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == len(passages) == 100
    assert {row["grade"] for row in rows} == set(range(3, 13))
    assert len({row["genre"] for row in rows}) >= 6
    assert len({row["text"] for row in rows}) == 100
    assert passages.is_demonstration
    assert passages.targets[0] == 1.5  # grade 3, the easiest
    assert passages.targets[-1] == pytest.approx(-2.1)


def test_stop_words_are_sorted_and_plain() -> None:
    words = read_stop_words()
    assert list(words) == sorted(set(words))
    assert all(word.isascii() and word.islower() and word.isalpha() for word in words)
    assert {"the", "of", "don", "t"} <= set(words)


def workbook(path: Path, rows: list[list[object]]) -> Path:
    import openpyxl

    book = openpyxl.Workbook()
    for row in rows:
        book.active.append(row)
    book.save(path)
    return path


def test_clear_columns_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[list[object]] = [
        ["ID", "BT_easiness", "Excerpt"],
        [1, -0.5, "A text."],
        [None, None, None],
        [2, 1, "B."],
    ]
    path = workbook(tmp_path / corpora.CLEAR_FILE, rows)
    for found in (read_clear(path), find_corpus(path)):
        assert found.texts == ("A text.", "B.")
        assert found.targets.tolist() == [-0.5, 1.0]
        assert not found.is_demonstration
    monkeypatch.setenv(corpora.DATA_DIR, str(tmp_path))
    assert find_corpus().sha256 == read_clear(path).sha256
    monkeypatch.delenv(corpora.DATA_DIR)
    assert find_corpus().is_demonstration


def test_corpora_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArtifactError, match=r"There is no x\.xlsx in .* Name the file with --data"):
        read_clear(tmp_path / "x.xlsx")
    with pytest.raises(ArtifactError, match=r"has no column Excerpt\. Its columns: ID, Text\."):
        read_clear(workbook(tmp_path / "y.xlsx", [["ID", "Text"]]))
    (tmp_path / "z.xlsx").write_text("a,b", encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"z\.xlsx is no Excel workbook"):
        read_clear(tmp_path / "z.xlsx")
    with pytest.raises(ArtifactError, match="has no column Excerpt"):
        read_clear(workbook(tmp_path / "empty.xlsx", []))
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(SetupError, match=r"openpyxl is not installed\. Type: pip install 'shoal\[train\]'"):
        read_clear(tmp_path / "y.xlsx")


@pytest.mark.corpus
def test_the_real_corpus(corpus: Corpus) -> None:
    assert len(corpus) == 4724
    assert corpus.targets.std() == pytest.approx(1.034, abs=1e-3)


def test_hashes_see_every_text_and_target(passages: Corpus) -> None:
    other = replace(passages, targets=passages.targets + 1e-9)
    assert passages.sha256 == passages.take(range(100)).sha256
    assert len({passages.sha256, other.sha256, passages.take(range(99)).sha256}) == 3


def test_split_keeps_rows_apart(passages: Corpus) -> None:
    known, held_out = split(passages, PRESETS["quick"], seed=0)
    assert (len(known), len(held_out)) == (80, 20)
    assert not set(known.texts) & set(held_out.texts)
    assert split(passages, PRESETS["quick"], seed=0)[1].texts == held_out.texts
    assert split(passages, PRESETS["quick"], seed=1)[1].texts != held_out.texts
    with pytest.raises(InputError, match="shoal passages has 9 texts; training needs at least 10"):
        split(passages.take(range(9)), PRESETS["quick"], seed=0)
