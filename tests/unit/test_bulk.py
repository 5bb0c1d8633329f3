"""Bulk work in this process: files in, files out, rows with errors, and runs that go on."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from shoal.cli import app
from shoal.clients.bulk.files import partial_path
from shoal.clients.bulk.scoring import local
from shoal.clients.local import Pipeline
from shoal.errors import ShoalError
from tests.support.bulk import read_rows, run, write_texts

Infer = Callable[..., Result]
BYTES_TOO_MANY = "excerpt[0] has 70000 bytes; at most 65536 are allowed."
NOT_UTF8 = "excerpt[0] is not valid UTF-8: byte 0xff at position 1. Encode the text as UTF-8."


@pytest.fixture
def infer(forest: Path) -> Infer:
    """``shoal infer --local`` in this process."""

    def run_command(*arguments: object, stdin: bytes | None = None) -> Result:
        given = [str(a) for a in ("infer", "--local", "--repository", forest, *arguments)]
        return CliRunner().invoke(app, given, input=stdin)

    return run_command


def fault(result: Result) -> str:
    assert isinstance(result.exception, ShoalError), result.output
    return str(result.exception)


# --- every kind of file ------------------------------------------------------------------------------------------

LINES: list[dict[str, Any]] = [
    {"id": 1, "text": "The cat sat.", "nested": {"a": [1]}},
    {"id": 2.5, "text": "x" * 70_000},
    {"text": "", "id": None},
    {"text": None},
    {"text": 7},
    {"text": "a\ud800"},
    {"text": "漢字 🐟 שלום\0"},
]


def test_json_lines_keep_all_they_had(tmp_path: Path, infer: Infer, scorer: Pipeline) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [json.dumps(line).encode() for line in LINES]
    source.write_bytes(b"\n".join([*lines, b'{"text": "a\xff"}', b"no json", b'{"id": 9}']))
    result = infer("-i", source, "-o", out)
    assert result.exit_code == 1
    assert "7 of 10 rows have an error." in result.stderr
    rows = [json.loads(line) for line in out.read_bytes().splitlines()]
    scores = scorer(excerpt=["The cat sat.", "", LINES[6]["text"]])["SCORE"][:, 0]
    assert [np.float32(rows[n]["score"]) for n in (0, 2, 6)] == scores.tolist()
    for row, line in zip(rows, LINES, strict=False):
        assert {**line, **{k: v for k, v in row.items() if k in ("score", "error")}} == row
    must_be = "it must be a string. Give str or UTF-8 bytes."
    assert [row.get("error", "")[: len(BYTES_TOO_MANY)] for row in rows[:2]] == ["", BYTES_TOO_MANY]
    assert [row.get("error") for row in rows[3:6]] == [
        f"excerpt[0] is None; {must_be}",
        f"excerpt[0] is 7; {must_be}",
        "excerpt[0] holds the lone surrogate U+D800 at position 1."
        " Such a string has no UTF-8 form; decode its source with errors='replace'.",
    ]
    assert rows[7] == {"text": "a\\xff", "error": NOT_UTF8}
    assert rows[8]["error"].startswith("in.jsonl, line 9 is not JSON: ")
    assert rows[9] == {"id": 9, "error": f"excerpt[0] is None; {must_be}"}
    assert not partial_path(out).exists()


def test_csv_keeps_bytes_as_they_came(tmp_path: Path, infer: Infer) -> None:
    source, out = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_bytes(b'name,text\ncaf\xe9,A cat.\nb,a\xff\nc,1,2\n"d" e,f\ng\n\n"two\nlines","a ""word"""\n')
    assert infer("-i", source, "-o", out).exit_code == 1
    with out.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["name", "text", "score", "error"]
    assert [row[:2] for row in rows] == [
        ["caf\udce9", "A cat."], ["b", "a\udcff"], ["", ""], ["", ""], ["g", ""], ["two\nlines", 'a "word"'],
    ]  # fmt: skip
    assert [bool(row[2]) for row in rows] == [True, False, False, False, False, True]
    assert [row[3].split(".")[0] for row in rows[1:5]] == [
        NOT_UTF8.split(".")[0],
        "in",
        "in",
        "excerpt[0] is None; it must be a string",
    ]
    assert rows[2][3] == "in.csv, row 4 has 3 fields, the header 2. Quote texts that have commas."
    assert rows[3][3].startswith("in.csv, row 5 is not CSV: ")


def test_plain_text_is_a_text_a_line(tmp_path: Path, infer: Infer) -> None:
    source = tmp_path / "in.txt"
    source.write_bytes("One.\r\n\nTwo\u2028lines.\n".encode())
    assert infer("-i", source, "-o", tmp_path / "out.jsonl").exit_code == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    assert [row["text"] for row in rows] == ["One.", "", "Two\u2028lines."]


def test_parquet_keeps_its_types(tmp_path: Path, infer: Infer, scorer: Pipeline) -> None:
    import datetime

    import pyarrow
    from pyarrow import parquet

    source, out = tmp_path / "in.parquet", tmp_path / "out.parquet"
    columns = {
        "when": pyarrow.array([datetime.datetime(2026, 1, 1), None, None], pyarrow.timestamp("ns", "UTC")),
        "text": pyarrow.array(["A cat.", None, "A dog."]),
        "kind": pyarrow.array(["a", "b", "a"]).dictionary_encode(),
        "raw": pyarrow.array([b"\xff", b"", None]),
    }
    parquet.write_table(pyarrow.table(columns), source)
    assert infer("-i", source, "-o", out).exit_code == 1
    before, after = parquet.read_table(source), parquet.read_table(out)
    assert after.select(list(columns)).equals(before)
    assert after.schema.field("score").type == pyarrow.float32()
    scores = scorer(excerpt=["A cat.", "A dog."])["SCORE"][:, 0].tolist()
    assert after["score"].to_pylist() == [scores[0], None, scores[1]]
    assert after["error"].to_pylist() == [
        None, "excerpt[0] is None; it must be a string. Give str or UTF-8 bytes.", None,
    ]  # fmt: skip
    assert infer("-i", out, "-o", tmp_path / "x.csv", "--text-column", "kind").exit_code == 1
    assert infer("-i", source, "-o", tmp_path / "x.csv").exit_code == 1
    assert "2026-01-01T00:00:00+00:00,A cat.,a,\\xff," in (tmp_path / "x.csv").read_text(encoding="utf-8")


def test_other_rows_become_parquet_with_the_types_they_have(tmp_path: Path, infer: Infer) -> None:
    import pyarrow
    from pyarrow import parquet

    source, out = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    rows: list[dict[str, Any]] = [
        {"text": "a", "int": 1, "num": 1, "bool": True, "mix": 1, "big": 2**53 + 1, "huge": 2**70, "none": None},
        {"text": "b", "int": 2**60, "num": 0.5, "bool": None, "mix": "x", "big": 0.5, "nested": {"é": [1]}},
    ]
    source.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert infer("-i", source, "-o", out).exit_code == 0
    table = parquet.read_table(out)
    kinds = {field.name: str(field.type) for field in table.schema}
    assert kinds == {
        "text": "string", "int": "int64", "num": "double", "bool": "bool", "mix": "string", "big": "string",
        "huge": "string", "none": "string", "nested": "string", "score": "float", "error": "string",
    }  # fmt: skip
    assert table["mix"].to_pylist() == ["1", "x"]
    assert table["big"].to_pylist() == [str(2**53 + 1), "0.5"]
    assert table["nested"].to_pylist() == [None, '{"é": [1]}']
    assert pyarrow.types.is_float32(table["score"].type)


CELL = st.text(st.characters(codec="utf-8"), max_size=12)


@settings(max_examples=50)
@given(rows=st.lists(st.tuples(CELL, CELL), min_size=1, max_size=5))
def test_csv_round_trips_any_text(
    rows: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory, scorer: Pipeline
) -> None:
    folder = tmp_path_factory.mktemp("csv")
    with (folder / "in.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("text", "other"), *rows])
    assert run(local(scorer), folder / "in.csv", folder / "out.csv").num_failed == 0
    with (folder / "out.csv").open(encoding="utf-8", newline="") as file:
        assert [tuple(row[:2]) for row in csv.reader(file)][1:] == rows


# --- standard input and output -----------------------------------------------------------------------------------


def test_pipes(infer: Infer) -> None:
    result = infer("--format", "jsonl", stdin=b"One.\n\nTwo.\n")
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["text"] for row in rows] == ["One.", "", "Two."]
    result = infer("--format", "csv", "--input-format", "jsonl", stdin=b'{"text": "One.", "n": 1}\n')
    assert result.stdout.splitlines()[0] == "text,n,score,error"
    assert infer("--input", "-", "--json", stdin=b"One.\n").stdout.startswith('[{"text": "One.", "score": ')
    assert infer("--input-format", "parquet", stdin=b"").exit_code == 2
    assert "More than 1,000 rows are too many to show" in fault(infer(stdin=b"a\n" * 1500))


@pytest.mark.parametrize("options", [(), ("--format", "jsonl"), ("--output", "out.csv"), ("--curl",)])
def test_an_input_without_rows_is_an_error(tmp_path: Path, infer: Infer, options: tuple[str, ...]) -> None:
    (tmp_path / "in.csv").write_text("text,id\n")
    options = tuple(str(tmp_path / each) if each == "out.csv" else each for each in options)
    assert fault(infer("-i", tmp_path / "in.csv", *options)).startswith("in.csv has no rows. Give rows in it")
    assert fault(infer(*options, stdin=b"")).startswith("standard input has no rows.")
    assert not (tmp_path / "out.csv").exists()


def test_texts_given_with_the_command(infer: Infer, tmp_path: Path) -> None:
    (tmp_path / "q.txt").touch()
    assert "q.txt is a file. Name its input: excerpt=@/" in fault(infer(f"@{tmp_path}/q.txt"))
    result = infer("A cat.", "x" * 70_000)
    assert result.exit_code == 1
    assert "A cat." in result.stdout
    assert f"row 2: {BYTES_TOO_MANY}" in result.stderr


# --- what is refused before a row is read ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.csv", "id,body\n1,a\n", (), "a.csv has no column 'text'; it has 'id', 'body'. Name the column of the te"),
        ("a.csv", "text,score\na,1\n", (), "a.csv has a column 'score', where an answer would go. Rename that column."),
        ("a.csv", "text\na\n", ("--set", "W=1"), "There is no input W. Known: excerpt."),
        (
            "a.csv",
            "text\na\n",
            ("--column", "excerpt=text", "--text-column", "text"),
            "The input excerpt is given twice.",
        ),
        ("a.csv", "text\na\n", ("--column", "W"), "--column 'W' is not INPUT=COLUMN."),
        ("a.csv", "text\na\n", ("--placement", "client"), "--local and --placement client exclude each other."),
        ("a.pdf", "%PDF", (), "a.pdf is not one of .csv, .jsonl, .parquet, .xlsx, .txt."),
        ("a.parquet", "text\na\n", (), "a.parquet is not a Parquet file. Give the file the ending of what it is."),
        ("a.jsonl", "text\na\n", (), "a.jsonl, line 1 is not JSON: "),
    ],
)
def test_refused_before_the_first_row(
    tmp_path: Path, infer: Infer, name: str, content: str, options: tuple[str, ...], message: str
) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert fault(infer("-i", tmp_path / name, "-o", tmp_path / "out.csv", *options)).startswith(message)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_outputs_that_are_refused(tmp_path: Path, infer: Infer) -> None:
    source = write_texts(tmp_path / "in.csv", 3)
    nowhere = tmp_path / "nodir"
    for option in ("--output", "--out"):
        said = fault(infer("-i", source, option, nowhere / "out.csv"))
        assert f"There is no folder {nowhere}. Type: mkdir -p {nowhere}" in said
    assert "out.txt is not one of .csv, .jsonl, .parquet" in fault(infer("-i", source, "-o", tmp_path / "out.txt"))
    assert f"{source} is the input." in fault(infer("-i", source, "-o", source, "--fresh"))
    (tmp_path / "out.csv").write_text("mine", encoding="utf-8")
    assert "out.csv exists; it will not be replaced." in fault(infer("-i", source, "-o", tmp_path / "out.csv"))
    assert infer("-i", source, "-o", tmp_path / "out.csv", "--fresh").exit_code == 0
    (tmp_path / "folder.csv").mkdir()
    assert f"{tmp_path / 'folder.csv'} is a folder." in fault(
        infer("-i", source, "-o", tmp_path / "folder.csv", "--fresh")
    )
    (tmp_path / "link.csv").symlink_to(tmp_path / "linked.csv")
    assert infer("-i", source, "-o", tmp_path / "link.csv").exit_code == 0
    assert (tmp_path / "link.csv").is_symlink()
    assert len((tmp_path / "linked.csv").read_bytes().splitlines()) == 4


@pytest.mark.parametrize("kind", [".csv", ".jsonl", ".parquet"])
def test_rows_that_hold_what_the_output_has_no_place_for(kind: str, tmp_path: Path, infer: Infer) -> None:
    """Nothing that a row brought is taken for an answer."""
    source, out = tmp_path / "in.jsonl", tmp_path / f"out{kind}"
    lines = ['{"text": "a"}', '{"text": "b", "score": 5}', '{"text": "c", "error": "mine"}', '{"text": 7, "score": 5}']
    source.write_text("\n".join([*lines, '{"text": "d", "more": 1}', '{"text": "e"}']), encoding="utf-8")
    assert infer("-i", source, "-o", out).exit_code == 1
    rows = read_rows(out)
    assert [bool(row.get("score")) for row in rows] == [True, False, False, False, kind != ".csv", True]
    errors = [row.get("error") or "" for row in rows]
    assert errors[1] == "Row 2 has a column 'score' (5), " + (
        "which the first row lacks; CSV cannot hold it, .jsonl can." if kind == ".csv" else "where an answer would go."
    )
    assert errors[2].startswith("Row 3 has a column 'error' ('mine'), ")
    assert errors[3].startswith("Row 4 has a column 'score' (5), ")
    assert bool(errors[4]) == (kind == ".csv")
    assert errors[0] == errors[5] == ""


@pytest.mark.parametrize("kind", [".csv", ".jsonl", ".parquet"])
def test_invalid_utf8_in_other_columns(kind: str, tmp_path: Path, infer: Infer) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / f"out{kind}"
    source.write_bytes(b'{"text": "a", "m": {"x": "\\ud800"}, "\\ud801": 1}\n{"text": ["a"], "m": ["\xff"]}\n')
    assert infer("-i", source, "-o", out).exit_code == 1
    first, second = read_rows(out)
    assert float(first["score"]) == float(first["score"])
    assert second["error"] == "excerpt[0] is ['a']; it must be a string. Give str or UTF-8 bytes."


def test_requests_have_no_more_rows_than_the_model_takes(scorer: Pipeline) -> None:
    assert local(scorer, max_rows=513).max_rows == 512


def test_columns_without_a_name_and_numbers_for_all(tmp_path: Path, infer: Infer) -> None:
    (tmp_path / "in.csv").write_text(",text\n0,a\n", encoding="utf-8")
    assert infer("-i", tmp_path / "in.csv", "-o", tmp_path / "out.csv").exit_code == 0
    assert (tmp_path / "out.csv").read_text(encoding="utf-8").startswith("column 1,text,score,error\n0,a,")
    assert "--set W=... is given twice." in fault(infer("a", "--set", "W=1", "--set", "W=2"))


def test_json_for_any_text(infer: Infer) -> None:
    result = infer("--json", stdin=b"a\xff\nb\n")
    assert (result.exit_code, [row.get("error") for row in json.loads(result.stdout)]) == (1, [NOT_UTF8, None])
    result = infer("--json", "--input-format", "jsonl", stdin=b'{"text": "a\\ud800"}\n')
    assert json.loads(result.stdout)[0]["text"] == "a\ud800"
