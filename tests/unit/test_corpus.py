from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ArtifactError, InputError
from shoal.readability import corpus as corpora
from shoal.readability.corpus import Corpus, find_corpus, fingerprint, read_corpus, read_passages, read_stop_words
from shoal.readability.download import CLEAR_FILE
from shoal.readability.folds import make_folds
from shoal.readability.train import PRESETS, split
from tests.support.tables import KINDS, XML, write_table

TWO: list[list[Any]] = [["A text.", -0.5], ["B.", 1]]


def test_the_passages_are_graded_and_varied(passages: Corpus) -> None:
    rows = [json.loads(line) for line in (corpora.ASSETS / "passages.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == len(passages) == 100
    assert {row["grade"] for row in rows} == set(range(3, 13))
    assert len({row["genre"] for row in rows}) >= 6
    assert len({row["text"] for row in rows}) == 100
    assert passages.is_demonstration
    assert passages.targets[0] == 1.5  # grade 3, the easiest
    assert passages.targets[-1] == pytest.approx(-2.1)
    assert passages.sha256 == "40afa2dc7eb272c10d14fd62d18759b1444c28a6584e3cf80689e815ba1f4415"


def test_stop_words_are_sorted_and_plain() -> None:
    words = read_stop_words()
    assert list(words) == sorted(set(words))
    assert all(word.isascii() and word.islower() and word.isalpha() for word in words)
    assert {"the", "of", "don", "t"} <= set(words)


# --- columns -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("text", "target", "name"), corpora.LAYOUTS)
def test_columns_are_found_by_their_names(kind: str, text: str, target: str, name: str, tmp_path: Path) -> None:
    path = write_table(tmp_path / f"x{kind}", ["ID", target, text], [[1, -0.5, "A text."], [2, 1.0, "B."]])
    for found in (read_corpus(path), find_corpus(path)):
        assert found.name == (name or f"x{kind}")
        assert found.texts == ("A text.", "B.")
        assert found.targets.tolist() == [-0.5, 1.0]
        assert found.targets.dtype == np.dtype(np.float64)
        assert not found.is_demonstration
        assert (found.formulas, found.genres) == ({}, ())


def test_the_first_known_pair_wins(tmp_path: Path) -> None:
    path = write_table(tmp_path / "x.csv", ["text", "excerpt", "target"], [["a", "A", 1], ["b", "B", 2]])
    assert read_corpus(path).texts == ("A", "B")


@pytest.mark.parametrize(
    ("named", "texts", "targets"),
    [
        ({"text_column": "essay", "target_column": "score"}, ("e", "f"), [1.0, 2.0]),
        ({"text_column": "essay"}, ("e", "f"), [3.0, 4.0]),
        ({"target_column": "score"}, ("t", "u"), [1.0, 2.0]),
        ({"text_column": "text", "target_column": "target"}, ("t", "u"), [3.0, 4.0]),
        ({"text_column": "target", "target_column": "score"}, ("3", "4"), [1.0, 2.0]),
    ],
)
def test_columns_that_are_named_come_first(
    named: dict[str, Any], texts: tuple[str, ...], targets: list[float], tmp_path: Path
) -> None:
    rows = [["e", 1, "t", 3], ["f", 2, "u", 4]]
    found = read_corpus(write_table(tmp_path / "x.csv", ["essay", "score", "text", "target"], rows), **named)
    assert (found.name, found.texts, found.targets.tolist()) == ("x.csv", texts, targets)


@pytest.mark.parametrize(
    ("columns", "named", "message"),
    [
        (["id", "x" * 99], {}, "x.csv has no columns of texts and targets by known names. Its columns: 'id', "
         f"'{'x' * 17}...{'x' * 18}'. Name both with --text-column and --target-column."),
        (["Excerpt", "a"], {}, "x.csv has no columns of texts and targets by known names. Its columns: 'Excerpt', 'a'. "
         "Name both with --text-column and --target-column."),
        (["essay", "a"], {"text_column": "essay"}, "x.csv has no columns of texts and targets by known names. Its "
         "columns: 'essay', 'a'. Name both with --text-column and --target-column."),
        (["target", "a"], {"text_column": "target"}, "x.csv has no columns of texts and targets by known names. Its "
         "columns: 'target', 'a'. Name both with --text-column and --target-column."),
        (["text", "target"], {"text_column": "Essay"},
         "x.csv has no column 'Essay'. Its columns: 'text', 'target'. Name one of them."),
        (["text", "target"], {"target_column": "score"},
         "x.csv has no column 'score'. Its columns: 'text', 'target'. Name one of them."),
    ],
)  # fmt: skip
def test_columns_that_are_not_there(columns: list[str], named: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_table(tmp_path / "x.csv", columns, TWO)
    with pytest.raises(ArtifactError) as caught:
        read_corpus(path, **named)
    assert str(caught.value) == message


def test_one_column_cannot_be_both(tmp_path: Path) -> None:
    path = write_table(tmp_path / "x.csv", ["text", "target"], TWO)
    with pytest.raises(InputError, match=r"^Column 'text' cannot be both text and target\. Name two columns\.$"):
        read_corpus(path, text_column="text", target_column="text")


# --- rows --------------------------------------------------------------------------------------------------------

TEXT, TARGET = "row 4, column 'text': ", "row 4, column 'target': "
FILL, FIX = " Fill it in, or take the row out.", " Fix it, or take the row out."
LONG = "many words " * 1000
BAD_ROWS = [
    (".xlsx", None, 1, TEXT + "the text is missing: None." + FILL),
    (".csv", " \t\n", 1, TEXT + "the text is missing: ' \\t\\n'." + FILL),
    (".xlsx", 7, 1, TEXT + "7 is not a text. Name another column, or fix the row."),
    (".jsonl", ["a"], 1, TEXT + "['a'] is not a text. Name another column, or fix the row."),
    (".jsonl", "\ud800" + LONG, 1, TEXT + "'\\ud800many words ... words many words ' has the lone surrogate "
     "'\\ud800' at character 1. Write the text again, or take the row out."),
    (".xlsx", "a", None, TARGET + "the target is missing: None." + FILL),
    (".csv", "a", "", TARGET + "the target is missing: ''." + FILL),
    (".csv", "a", LONG, TARGET + "the target 'many words many w... words many words ' is not a number." + FIX),
    (".csv", "a", "1,5", TARGET + "the target '1,5' is not a number (decimals take a point)." + FIX),
    (".csv", "a", "1_000", TARGET + "the target '1_000' is not a number." + FIX),
    (".xlsx", "a", True, TARGET + "the target True is not a number." + FIX),
    (".jsonl", "a", [1], TARGET + "the target [1] is not a number." + FIX),
    (".jsonl", "a", 10**400, TARGET + f"the target 1{'0' * 17}...{'0' * 19} is not a number." + FIX),
    (".csv", "a", "nan", TARGET + "the target 'nan' is not finite." + FIX),
    (".jsonl", "a", float("nan"), TARGET + "the target nan is not finite." + FIX),
    (".parquet", "a", -float("inf"), TARGET + "the target -inf is not finite." + FIX),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "target", "message"), BAD_ROWS)
def test_rows_that_cannot_be_used(kind: str, text: object, target: object, message: str, tmp_path: Path) -> None:
    num_before = 2 if kind in (".csv", ".xlsx") else 3  # their header is row 1
    rows = [["good", float(number)] for number in range(num_before)]
    path = tmp_path / f"x{kind}"
    if kind == ".jsonl":  # as a careless writer would: lone surrogates, NaN
        path.write_text(
            "\n".join(json.dumps({"text": a, "target": b}) for a, b in [*rows, [text, target]]), encoding="utf-8"
        )
        message = message.replace("row", "line", 1)
    else:
        write_table(path, ["text", "target"], [*rows, [text, target]])
    with pytest.raises(ArtifactError) as caught:
        read_corpus(path)
    assert str(caught.value) == f"x{kind}, {message}"


def test_numbers_of_any_kind(tmp_path: Path) -> None:
    rows: list[list[Any]] = [["a", " -1.5 "], ["b", 2], [" c ", "1e-3"]]
    assert read_corpus(write_table(tmp_path / "x.xlsx", ["text", "target"], rows)).targets.tolist() == [-1.5, 2, 0.001]
    rows = [["a", Decimal("0.5")], ["b", Decimal("1.25")]]
    found = read_corpus(write_table(tmp_path / "x.parquet", ["text", "target"], rows))
    assert (found.targets.tolist(), found.texts) == ([0.5, 1.25], ("a", "b"))


@pytest.mark.parametrize("kind", KINDS)
def test_blank_rows_are_skipped(kind: str, tmp_path: Path) -> None:
    columns = ["ID", "BT_easiness", "Excerpt"]
    path = write_table(tmp_path / f"x{kind}", columns, [[1, -0.5, "A text."], [None] * 3, [2, 1.0, "B."]])
    if kind in (".jsonl", ".parquet"):  # where a row of nothing is still a row
        with pytest.raises(ArtifactError, match="2, column 'Excerpt': the text is missing: None"):
            read_corpus(path)
    else:
        assert read_corpus(path).texts == ("A text.", "B.")


def test_tables_that_teach_nothing(tmp_path: Path) -> None:
    cases: list[tuple[list[list[Any]], str]] = [
        ([], "x.csv has no rows below its header. Name a file with texts and targets."),
        ([["a", 1], ["b", "1.0"]], "x.csv: all targets in column 'target' are 1. Give texts whose targets differ."),
    ]
    for rows, message in cases:
        with pytest.raises(ArtifactError) as caught:
            read_corpus(write_table(tmp_path / "x.csv", ["text", "target"], rows))
        assert str(caught.value) == message


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(
    texts=st.lists(XML.filter(str.strip), min_size=2, max_size=6),
    first=st.integers(-10, 10).map(lambda number: number / 8),
)
def test_every_kind_of_file_gives_the_same_corpus(
    kind: str, tmp_path_factory: pytest.TempPathFactory, texts: list[str], first: float
) -> None:
    targets = [first + number for number in range(len(texts))]
    rows = list(zip(texts, targets, strict=True))
    path = write_table(tmp_path_factory.mktemp("corpus") / f"x{kind}", ["text", "target"], rows)
    assert read_corpus(path).sha256 == Corpus("", tuple(texts), np.array(targets)).sha256


# --- formulas, genres, groups ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_formulas_and_genres_are_taken_along(kind: str, tmp_path: Path) -> None:
    columns = ["text", "target", "CAREC", "CML2RI", "SMOG Readability", "Categ"]
    rows = [["a", 1.0, 0.5, 7, 9.0, "Lit"], ["b", 2.0, 0.25, 8, None, "Info"], ["c", 3.0, -1.5, 9, 1.0, "Lit"]]
    found = read_corpus(write_table(tmp_path / f"x{kind}", columns, rows))
    assert {name: values.tolist() for name, values in found.formulas.items()} == {
        "CAREC": [0.5, 0.25, -1.5],
        "CML2RI": [7.0, 8.0, 9.0],
    }  # one of the third is missing
    assert found.genres == ("Lit", "Info", "Lit")
    some = found.take([2, 0])
    assert (some.texts, some.targets.tolist(), some.genres) == (("c", "a"), [3.0, 1.0], ("Lit", "Lit"))
    assert some.formulas["CAREC"].tolist() == [-1.5, 0.5]
    assert (some.name, some.sha256) == (found.name, Corpus("", ("c", "a"), np.array([3.0, 1.0])).sha256)
    assert len(found.take([])) == 0
    rows[1][-1] = None
    assert read_corpus(write_table(tmp_path / f"x{kind}", columns, rows)).genres == ()


def test_the_same_text_in_other_dress_is_one_group() -> None:
    texts = ("One  text.", "other", "ONE\ntext. ", "\ufb01n", "Straße", "one text", "FIN", "one\u00a0TEXT.", "STRASSE")
    corpus = Corpus("", texts, np.arange(9.0))
    assert corpus.groups.tolist() == [0, 1, 0, 2, 3, 4, 2, 0, 3]
    assert corpus.groups.dtype == np.int64
    prints = [fingerprint(text) for text in texts]
    assert [prints.index(one) for one in prints] == [0, 1, 0, 3, 4, 5, 3, 0, 4]
    assert fingerprint(" One\r\nTEXT. ") == hashlib.sha256(b"one text.").hexdigest()[:16]
    assert corpus.take([]).groups.tolist() == []
    assert len(fingerprint("\ud800")) == 16


def test_hashes_see_every_text_and_target(passages: Corpus) -> None:
    other = replace(passages, targets=passages.targets + 1e-9)
    assert passages.sha256 == passages.take(range(100)).sha256
    assert len({passages.sha256, other.sha256, passages.take(range(99)).sha256}) == 3


# --- where a corpus comes from -----------------------------------------------------------------------------------


def test_the_folder_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(corpora.DATA_DIR, str(tmp_path))
    with pytest.raises(ArtifactError) as caught:
        find_corpus(download=True)  # a folder that is named is meant
    assert str(caught.value) == (
        f"There is neither CLEAR_corpus_final.xlsx nor train.csv in {tmp_path}. "
        "Name the file with --data, or unset SHOAL_DATA_DIR."
    )
    write_table(tmp_path / "train.csv", ["id", "excerpt", "target"], [[1, "a", 1], [2, "b", 2]])
    assert find_corpus().name == "CommonLit"
    assert find_corpus(text_column="id").texts == ("1", "2")
    write_table(tmp_path / CLEAR_FILE, ["Excerpt", "BT_easiness"], TWO)
    assert find_corpus().name == "CLEAR corpus"
    with pytest.raises(ArtifactError, match=r"^There is no file .*x\.csv\."):
        find_corpus(tmp_path / "x.csv")
    monkeypatch.delenv(corpora.DATA_DIR)
    assert find_corpus().sha256 == read_passages().sha256
    with pytest.raises(InputError, match=r"^There is no file for column 'essay'\. Name it with --data\.$"):
        find_corpus(text_column="essay")


def test_a_missing_file_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_table(tmp_path / CLEAR_FILE, ["Excerpt", "BT_easiness"], TWO)
    monkeypatch.setattr(corpora, "download_clear", lambda on_progress: path)  # tested by itself
    monkeypatch.delenv(corpora.DATA_DIR, raising=False)
    monkeypatch.chdir(tmp_path)
    assert find_corpus(Path("clear")).name == find_corpus(download=True).name == "CLEAR corpus"
    (tmp_path / "clear").write_text("mine", encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"^clear is not one of \.csv, "):
        find_corpus(Path("clear"))


@pytest.mark.corpus
def test_the_real_corpus(corpus: Corpus) -> None:
    assert len(corpus) == 4724
    assert corpus.targets.std() == pytest.approx(1.034, abs=1e-3)
    assert corpus.sha256 == "830a27dbb12bf8e8444cb5a06c19cb94500ed2ceb95ba2eda85724ec2d16b145"
    assert tuple(corpus.formulas) == corpora.FORMULAS
    assert int(corpus.groups.max()) + 1 == 4723  # one text is there twice, but for its case or spacing


def test_split_keeps_rows_apart(passages: Corpus) -> None:
    known, held_out = split(passages, PRESETS["quick"], seed=0)
    assert (len(known), len(held_out)) == (80, 20)
    assert not set(known) & set(held_out)
    assert split(passages, PRESETS["quick"], seed=0)[1].tolist() == held_out.tolist()
    assert split(passages, PRESETS["quick"], seed=1)[1].tolist() != held_out.tolist()
    with pytest.raises(InputError, match="shoal passages has 9 different texts; training needs 10"):
        split(passages.take(range(9)), PRESETS["quick"], seed=0)


def test_texts_of_one_group_stay_together(tmp_path: Path) -> None:
    """Equal texts and equal names join: a text by two authors makes one group of all that either has written."""
    names = ["Ann", "Ben", "Ann", "Cyd", "Dan", "Ben", "Eve"]
    texts = ["a", "b", "c", "D", "e", "d", "f"]
    rows = [[text, float(number), name] for number, (text, name) in enumerate(zip(texts, names, strict=True))]
    path = write_table(tmp_path / "x.csv", ["text", "target", "author"], rows)
    corpus = read_corpus(path, group_column="author")
    assert corpus.groups.tolist() == [0, 1, 0, 1, 2, 1, 3]
    assert corpus.take([4, 5, 1]).groups.tolist() == [0, 1, 1]
    assert corpus.sha256 != read_corpus(path).sha256
    with pytest.raises(InputError, match=r"x\.csv has 4 different groups; 2 folds need at least 10"):
        make_folds(corpus, 2, seed=0)
    with pytest.raises(ArtifactError, match=r"x\.csv has no column 'writer'"):
        read_corpus(path, group_column="writer")
    path.write_text("text,target,author\na,1,Ann\nb,2,\n", encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"row 3, column 'author': the group is missing"):
        read_corpus(path, group_column="author")


@pytest.mark.parametrize("seed", range(3))
def test_folds_keep_groups_together(seed: int) -> None:
    random = np.random.default_rng(seed)
    texts, names = tuple(f"text {k}" for k in range(200)), tuple(f"name {k}" for k in random.integers(0, 40, 200))
    corpus = Corpus("", texts, np.arange(200.0), group_names=names)
    folds = make_folds(corpus, 5, seed=seed)
    assert sorted(row for _, unseen in folds for row in unseen) == [*range(200)]
    for known, unseen in folds:
        assert not {names[row] for row in known} & {names[row] for row in unseen}
