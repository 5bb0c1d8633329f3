"""`shoal bench`: what it asks with, what it makes of the figures, and the command on a real server."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from shoal import cli
from shoal.cli.applications import sample_texts
from shoal.errors import ArtifactError, InputError, ShoalError
from shoal.kit.component.spec import ModelSpec, TensorSpec
from shoal.lab.bench.inputs import read_inputs
from shoal.lab.bench.record import Cell, Figures, Measured, compare, rounded
from shoal.lab.bench.run import Loads, find_cells
from shoal.lab.bench.target import find_targets
from shoal.readability.corpus import DATA_DIR
from tests.support.bench import LOAD, table, write_repository
from tests.support.once import ROOT

TEXT = TensorSpec("TEXT", "TYPE_STRING", (1,))
WEIGHT = TensorSpec("WEIGHT", "TYPE_FP32", (1,), is_optional=True)
SPEC = ModelSpec("m", (TEXT, WEIGHT), (), 8)


@pytest.fixture(autouse=True)
def _passages(monkeypatch: pytest.MonkeyPatch) -> None:
    """shoal's own texts, whatever else is here."""
    monkeypatch.delenv(DATA_DIR, raising=False)


# --- rows --------------------------------------------------------------------------------------------------------


def test_rows_of_a_file(tmp_path: Path) -> None:
    by_name = read_inputs(SPEC, table(tmp_path / "a.csv", "TEXT,WEIGHT,other\na,0.5,x\nété,1,y\n"))
    assert by_name.num_rows == 2
    assert {name: a.tolist() for name, a in by_name.take(1, 3).items()} == {
        "TEXT": [["été".encode()], [b"a"], ["été".encode()]],
        "WEIGHT": [[1.0], [0.5], [1.0]],
    }
    assert by_name.text_bytes == {"TEXT": 3.0}
    other = read_inputs(SPEC, table(tmp_path / "b.jsonl", '{"passage": "a"}\n{"passage": "b"}\n'), "passage")
    assert other.arrays.keys() == {"TEXT"}
    unbatched = replace(other, is_batched=False)  # max_batch_size 0: no dimension of rows
    assert unbatched.take(3, 1)["TEXT"].tolist() == [b"b"]


def test_columns_of_an_array(tmp_path: Path) -> None:
    spec = replace(SPEC, inputs=(TensorSpec("X", "TYPE_FP32", (2,)),))
    inputs = read_inputs(spec, table(tmp_path / "a.csv", "a,b\n1,2\n3,4\n"))
    assert inputs.take(0, 2)["X"].tolist() == [[1, 2], [3, 4]]
    assert inputs.note == "X takes the columns in their order: --column X=a,b"
    wide = table(tmp_path / "b.csv", "a,b,c\n1,2,3\n")
    with pytest.raises(
        ShoalError, match=r"X has 2 places, and the table 3 columns .* leave 1 out of: --column X=a,b,c"
    ):
        read_inputs(spec, wide)
    assert read_inputs(spec, wide, columns={"X": "c,a"}).take(0, 1)["X"].tolist() == [[3, 1]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("other\na\n", r"a\.csv has no column 'text'; it has 'other'\. Name the column of the texts: --text-column"),
        ("TEXT,WEIGHT\na,1\nb,\n", r"a\.csv, row 3 has nothing in column 'WEIGHT'"),
        ("TEXT\n", r"a\.csv has no rows"),
        ("TEXT,WEIGHT\na,heavy\n", "WEIGHT cannot be read as TYPE_FP32"),
    ],
)
def test_files_that_cannot_be_asked_with(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ShoalError, match=message):
        read_inputs(SPEC, table(tmp_path / "a.csv", text))


def test_texts_of_any_number_and_inputs_that_may_all_be_left_out(tmp_path: Path) -> None:
    path = table(tmp_path / "a.csv", "TEXT\na\nb\n")
    any_number = replace(SPEC, inputs=(replace(TEXT, dims=(-1,)),))
    assert read_inputs(any_number, path).take(0, 2)["TEXT"].tolist() == [[b"a"], [b"b"]]
    with pytest.raises(InputError, match=r"a\.csv has no column for any of m's inputs: 'WEIGHT'"):
        read_inputs(replace(SPEC, inputs=(WEIGHT,)), path)


def test_shoals_own_texts_fill_one_text_alone() -> None:
    inputs = read_inputs(SPEC, sample_texts)
    assert (inputs.num_rows, inputs.source) == (100, "shoal passages")
    number = TensorSpec("N", "TYPE_INT64", (1,))
    for needed in ((TEXT, number), (number,)):
        with pytest.raises(InputError, match=r"m needs .*; shoal's own texts can only fill a single text input\. Give"):
            read_inputs(replace(SPEC, inputs=needed), sample_texts)


def test_one_column_does_not_fill_two_texts(tmp_path: Path) -> None:
    two = replace(SPEC, inputs=(TEXT, replace(TEXT, name="TITLE")))
    with pytest.raises(ArtifactError, match="no column 'TITLE'"):
        read_inputs(two, table(tmp_path / "a.csv", "text\na\n"))


# --- figures -----------------------------------------------------------------------------------------------------


def test_loads(forest: Path, tmp_path: Path) -> None:
    targets = find_targets([forest])
    assert find_cells(targets, Loads(usual=(1, 4, 512, 1024))) == [Cell(1, 1), Cell(1, 16), Cell(4, 2), Cell(512, 2)]
    assert find_cells(targets, Loads((8, 4), (3, 1))) == [
        *(Cell(1, 1), Cell(4, 1), Cell(4, 3)),
        *(Cell(8, 1), Cell(8, 3)),
    ]
    repository = write_repository(tmp_path / "unbatched", seconds="0")
    for path in repository.glob("*/config.pbtxt"):
        path.write_text(path.read_text(encoding="utf-8").replace("max_batch_size: 4", ""), encoding="utf-8")
    assert find_cells([*targets, *find_targets([repository])], Loads(usual=(1, 2))) == [Cell(1, 1), Cell(1, 16)]
    assert str(Cell(1, 16)) == "1 row, 16 callers"


def repeated(label: str, cell: Cell, *rates: float) -> Measured[Cell, Figures]:
    return Measured(label, cell, tuple(replace(LOAD, rows_per_s=rate, p50_ms=1000 / rate) for rate in rates))


def test_medians_and_spreads() -> None:
    measured = repeated("cpu", Cell(8, 2), 30.0, 10.0, 20.0)
    assert (measured.median.rows_per_s, measured.spread("rows_per_s")) == (20.0, (10.0, 30.0))
    assert measured.median.steps == LOAD.steps
    assert measured.as_dict()["min_max"]["p50_ms"] == [33.333, 100.0]
    assert rounded({"a": [0.000123456, 12.34567], "b": (None, 3)}) == {"a": [0.0001235, 12.346], "b": [None, 3]}


def test_losing_repositories_are_named_per_load() -> None:
    one, many = Cell(1, 1), Cell(32, 2)
    measured = [
        *(repeated("cpu", one, 100, 101), repeated("cpu", many, 200, 210)),
        *(repeated("gpu", one, 50, 51), repeated("gpu", many, 800, 900)),
        *(repeated("hybrid", one, 99, 108), repeated("hybrid", many, 750, 810)),
    ]
    assert compare(measured) == [
        "cpu and hybrid do not differ measurably at 1 row, 1 caller: 10.0 ms against hybrid's 9.7.",
        "gpu does not win at 1 row, 1 caller: 19.8 ms against hybrid's 9.7, 2.0 times slower.",
        "cpu does not win at 32 rows, 2 callers: 205.0 rows/s against gpu's 850.0, 4.1 times less.",
        "hybrid and gpu do not differ measurably at 32 rows, 2 callers: 780.0 rows/s against gpu's 850.0.",
    ]
    assert compare(measured[:2]) == []


# --- the command -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere"], r"There is no repository /nowhere\. Make one"),
        (
            ["ensemble_all"],
            r"A pipeline is measured from its repository, shoal bench REPOSITORY, and the model of a running server",
        ),
        (["{forest}", "--batches", "1,few"], r"--batches '1,few' is not a list of whole numbers above 0\. For example"),
        (["{forest}", "--concurrency", "0"], "--concurrency '0' is not a list of whole numbers above 0"),
        (["{forest}", "--batches", "1024"], r"forest in .* takes 1 to 512 rows per request, not 1024\. Give sizes"),
        (["{forest}", "--model", "nope"], "There is no model nope"),
        (["{forest}", "--inputs", "/nowhere.csv"], r"There is no file /nowhere\.csv\."),
        (["{forest}", "--inputs", "{other}/rows.csv"], r"rows\.csv has no column 'text'; it has 'X'"),
        (["{forest}", "{forest}"], "A repository is named twice"),
        (["a={forest}", "a={other}"], "Two columns would have one name"),
        (["{forest}", "--output-tokens", "8"], "--output-tokens is for models that make tokens, and forest answers in"),
        (["{forest}", "--placement", "gpu"], "--placement 'gpu' is not server or client"),
        (["{forest}", "{forest}", "{other}", "--model", "a", "--model", "b"], "There are 2 models for 3 subjects"),
        (["localhost:1"], "No Triton answers at localhost:1"),
        (["{forest}", "{other}"], "both in .* takes different inputs from forest in"),
        (["{other}"], "both needs 'X'; shoal's own texts can only fill a single text input"),
    ],
)
def test_repositories_that_cannot_be_measured(forest: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    other = write_repository(tmp_path / "other", seconds="0")
    filled = [argument.format(forest=forest, other=other) for argument in arguments]
    with pytest.raises(ShoalError, match=message):
        CliRunner().invoke(cli.app, ["bench", *filled], catch_exceptions=False)


def test_the_commands_of_the_page_are_commands() -> None:
    page = (ROOT / "docs" / "bench.md").read_text(encoding="utf-8")
    commands = re.findall(r"^ *shoal bench (.*)$", page, re.MULTILINE)
    assert len(commands) >= 3
    command: Any = typer.main.get_group(cli.app).commands.get("bench")
    for arguments in commands:
        command.make_context("bench", shlex.split(arguments))  # an option that is none would be an error
    help_text = CliRunner().invoke(cli.app, ["bench", "--help"], env={"COLUMNS": "200"}).stdout
    for option in re.findall(r"`(--[a-z-]+)", page):
        assert option in help_text, option
