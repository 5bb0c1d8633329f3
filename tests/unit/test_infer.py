"""``shoal infer`` of any model: inputs by name, as values, files and columns; without a server."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from shoal.cli import app
from shoal.cli.console import OUT
from shoal.clients.local import load
from shoal.errors import ShoalError

CODE = """
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import numpy as np
from shoal import Component


class Sums(Component):
    def run(self, batch):
        scaled = batch["X"] * batch.get("SCALE", np.float32(1))
        return {"SUM": scaled.sum(axis=1, keepdims=True), "EACH": scaled}


TritonPythonModel = Sums.for_triton()
"""
SUM = '"SUM": scaled.sum(axis=1, keepdims=True), '
PAIR = """
import numpy as np
from shoal import Component


class Pair(Component):
    def run(self, batch):
        return {"SAME": np.array([[a == b] for a, b in zip(batch["QUERY"][:, 0], batch["PASSAGE"][:, 0])])}


TritonPythonModel = Pair.for_triton()
"""
LOUD = """
import numpy as np
from shoal import Component


class Loud(Component):
    def run(self, batch):
        texts = [text.decode().upper() for text in batch["excerpt"][:, 0]]
        if "NOTHING" in texts:
            return None
        if "FAULT" in texts:
            texts[7]
        return {"LOUD": np.array(texts, dtype=object)[:, None], "SAME": np.array(texts)[:, None]}


TritonPythonModel = Loud.for_triton()
"""
CONFIGS = {
    "sums": ('max_batch_size: 8', "X:FP32:4 SCALE:FP32:1?", "SUM:FP32:1 EACH:FP32:4", CODE),
    "single": ("max_batch_size: 0", "X:FP32:2,2 SCALE:FP32:1?", "SUM:FP32:2,1 EACH:FP32:2,2", CODE),
    "vector": ("max_batch_size: 8", "X:FP32:-1", "EACH:FP32:-1", CODE.replace(SUM, "")),
    "five": ("max_batch_size: 8", "X:FP32:5", "EACH:FP32:5", CODE.replace(SUM, "")),
    "pair": ("max_batch_size: 8", "QUERY:STRING:1 PASSAGE:STRING:1", "SAME:BOOL:1", PAIR),
    "loud": ("max_batch_size: 8", "excerpt:STRING:1", "LOUD:STRING:1 SAME:STRING:1", LOUD),
}  # fmt: skip


def tensors(kind: str, declared: str) -> str:
    parts = []
    for tensor in declared.split():
        name, dtype, dims = tensor.rstrip("?").split(":")
        optional = " optional: true" if tensor.endswith("?") else ""
        parts.append(f'{{ name: "{name}" data_type: TYPE_{dtype} dims: [ {dims} ]{optional} }}')
    return f"{kind} [ {', '.join(parts)} ]"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tensors")
    for name, (batch, inputs, outputs, code) in CONFIGS.items():
        (root / name / "1").mkdir(parents=True)
        lines = [f'name: "{name}"', 'backend: "python"', batch, tensors("input", inputs), tensors("output", outputs)]
        (root / name / "config.pbtxt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (root / name / "1" / "model.py").write_text(code, encoding="utf-8")
    return root


@pytest.fixture
def infer(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)

    def run(model: str, *arguments: object, stdin: str | None = None) -> Result:
        given = ["infer", "--local", "--repository", repository, "--model", model, *arguments]
        return CliRunner().invoke(app, [str(a) for a in given], input=stdin, env={"COLUMNS": "100"})

    return run


Infer = Callable[..., Result]


def rows(result: Result) -> Any:
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


def fault(result: Result) -> str:
    assert isinstance(result.exception, ShoalError), result.output
    return str(result.exception)


def test_values_by_name(infer: Infer) -> None:
    assert rows(infer("sums", "X=[1,2,3,4]", "--json")) == [
        {"X": [1.0, 2.0, 3.0, 4.0], "sum": 10.0, "each": [1.0, 2.0, 3.0, 4.0]}
    ]
    two = rows(infer("sums", "X=[[1,2,3,4],[0,0,0,1]]", "SCALE=2", "--json"))
    assert [row["sum"] for row in two] == [20.0, 2.0]
    assert [row["sum"] for row in rows(infer("sums", "X=[1,2,3,4]", "SCALE=[1,2,3]", "--json"))] == [10, 20, 30]
    assert rows(infer("vector", "X=[1,2,3]", "--json"))[0]["each"] == [1, 2, 3]
    same = rows(infer("pair", "QUERY=a = b", "PASSAGE=a = b", "--json"))
    assert same == [{"QUERY": "a = b", "PASSAGE": "a = b", "same": True}]
    assert [r["same"] for r in rows(infer("pair", 'QUERY=["a","b"]', "PASSAGE=b", "--json"))] == [False, True]


def test_a_model_without_a_batch_dimension(infer: Infer) -> None:
    assert rows(infer("single", "X=[[1,2],[3,4]]", "--json"))[0]["sum"] == [[3.0], [7.0]]
    assert [row["sum"] for row in rows(infer("single", "X=[[[1,2],[3,4]],[[0,0],[0,1]]]", "--json"))] == [
        [[3.0], [7.0]],
        [[0.0], [1.0]],
    ]


def test_values_from_files(infer: Infer) -> None:
    np.save("x.npy", np.arange(4))
    np.save("xs.npy", np.arange(8, dtype=np.float64).reshape(2, 4))
    Path("x.json").write_text("[1, 2, 3, 4]", encoding="utf-8")
    Path("q.txt").write_text("ü", encoding="utf-8")
    tensor = {"name": "X", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
    Path("request.json").write_text(json.dumps({"inputs": [tensor]}), encoding="utf-8")
    assert [row["sum"] for row in rows(infer("sums", "X=@x.npy", "--json"))] == [6.0]
    assert [row["sum"] for row in rows(infer("sums", "X=@xs.npy", "--json"))] == [6.0, 22.0]
    for given in ("X=@x.json", "X=@request.json", "@request.json"):
        assert [row["sum"] for row in rows(infer("sums", given, "--json"))] == [10.0], given
    assert rows(infer("pair", "QUERY=@q.txt", "PASSAGE=ü", "--json"))[0]["same"] is True


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_columns_by_name(infer: Infer, kind: str, tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    data: list[dict[str, Any]] = [
        {"x": [1, 2, 3, 4], "scale": 1, "a": 1, "b": 2, "c": 3, "d": 4},
        {"x": [1, 2, 3, 5], "scale": 2, "a": 0, "b": 0, "c": 0, "d": 1},
    ]
    source = tmp_path / f"in.{kind}"
    if kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(data), source)
    elif kind == "jsonl":
        source.write_text("".join(json.dumps(row) + "\n" for row in data), encoding="utf-8")
    else:
        cells = [",".join(data[0]), *(",".join(f'"{cell}"' for cell in row.values()) for row in data)]
        source.write_text("\n".join(cells) + "\n", encoding="utf-8")
    for more, expected in (((), [10.0, 22.0]), (("--column", "X=a,b,c,d"), [10.0, 2.0])):
        out = tmp_path / f"out{len(more)}.jsonl"
        result = infer("sums", "-i", source, "-o", out, *more)
        assert result.exit_code == 0, result.output
        answers = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        assert [row["sum"] for row in answers] == expected
        assert answers[0]["each"] == [1, 2, 3, 4]


def test_bad_rows_among_good_ones(infer: Infer, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given = [[1, 2, 3, 4], [1, 2, 3], "many", None, [1, 2, "x", 4], [1, 2, 3, 5]]
    source.write_text("".join(json.dumps({"X": x}) + "\n" for x in given), encoding="utf-8")
    assert infer("sums", "-i", source, "-o", out).exit_code == 1
    answers = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [answers[at]["sum"] for at in (0, 5)] == [10, 11]
    for at, words in (
        (1, "Input X has shape [3], expected [4]"),
        (2, "X cannot be read as TYPE_FP32: 'many' is"),
        (3, "X"),
        (4, "X cannot be"),
    ):
        assert words in answers[at]["error"]


def test_npy_output(infer: Infer) -> None:
    np.save("xs.npy", np.arange(6, dtype=np.float32).reshape(2, 3))
    assert infer("vector", "X=@xs.npy", "-o", "out.npy").exit_code == 0
    got = np.load("out.npy")
    assert got.dtype == np.float32
    assert np.array_equal(got, np.arange(6).reshape(2, 3))
    assert "A .npy file holds one tensor; the model gives sum, each." in fault(
        infer("sums", "X=[1,2,3,4]", "-o", "o.npy")
    )


def test_texts_that_a_component_gives_as_str(infer: Infer, repository: Path) -> None:
    assert rows(infer("loud", "é", "--json")) == [{"text": "é", "loud": "É", "same": "É"}]
    with load(repository / "loud") as pipeline:
        answer = pipeline(excerpt=["a", "é"])
    for name in ("LOUD", "SAME"):
        assert answer[name].tolist() == [[b"A"], ["É".encode()]]


def test_faults_of_a_component_are_told_in_full(infer: Infer) -> None:
    (row,) = json.loads(infer("loud", "fault", "--json").stdout)
    why = "IndexError: list index out of range (loud/1/model.py, line 12)"
    assert row["error"] == f"Model loud failed on this request: {why}"
    (row,) = json.loads(infer("loud", "nothing", "--json").stdout)
    why = 'It has to return a dict of outputs: {"LOUD": array, "SAME": array}'
    assert row["error"] == f"run of model loud returned None. {why}"


def test_tables_are_short_and_full(infer: Infer) -> None:
    long = "X=" + json.dumps([k / 7 for k in range(30)])
    shown = infer("vector", long).stdout
    assert "[0.000, 0.143, 0.286, …] 30" in shown
    assert len(shown.splitlines()) == 5
    assert "0.5714" in infer("vector", long, "--full").stdout
    shown = infer("pair", "QUERY=one", "PASSAGE=two").stdout
    assert all(word in shown for word in ("QUERY", "PASSAGE", "one", "two", "False"))


def test_curl(infer: Infer) -> None:
    words = shlex.split(infer("sums", "X=[1,2,3,4]", "SCALE=2", "--curl").stdout)
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v2/models/sums/infer"]
    assert json.loads(words[-1]) == {
        "inputs": [
            {"name": "X", "shape": [1, 4], "datatype": "FP32", "data": [[1.0, 2.0, 3.0, 4.0]]},
            {"name": "SCALE", "shape": [1, 1], "datatype": "FP32", "data": [[2.0]]},
        ]
    }
    words = shlex.split(infer("pair", "QUERY=it's", "PASSAGE=b", "--curl").stdout)
    assert json.loads(words[-1])["inputs"][0] == {
        "name": "QUERY", "shape": [1, 1], "datatype": "BYTES", "data": [["it's"]],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("sums", ["X=[1,2]"], "Input X has shape [2], expected [4]. For example: X=[0.5,0.5,0.5,0.5]"),
        ("sums", ["X=abc"], "X cannot be read as TYPE_FP32: 'abc' is not a number. For example: X=[0.5,0.5,0.5,0.5]"),
        ("sums", ["x=[1,2,3,4]"], "There is no input x. Did you mean X?"),
        ("sums", ["SCALE=1"], "The input X is missing. For example: X=[0.5,0.5,0.5,0.5]"),
        ("sums", ["[1,2,3,4]"], "Model sums takes no text; '[1,2,3,4]' needs a name. Name each input: shoal infer X="),
        ("sums", ["X=@no.npy"], "There is no file no.npy."),
        ("sums", ["X=[[1,2,3,4],[1,2,3,4]]", "SCALE=[1,2,3]"], "X has 2 rows, another input 3."),
        ("pair", ["one", "two"], 'Model pair has several text inputs; \'one\' needs a name.'),
        ("pair", ["QUERY=a", "QUERY=b"], "The input QUERY is given twice."),
        ("pair", ["QUERY=a"], "The input PASSAGE is missing. For example: PASSAGE=text"),
        ("sums", ["X=[nan,1,1,1]"], "X cannot be read as TYPE_FP32: '[nan,1,1,1]' is not a number. In a list, these "),
        ("loud", ["no.txt"], "There is no file no.txt. For the rows of a file: --input FILE; for this very text: exc"),
        ("sums", ["no.CSV"], "There is no file no.CSV. For the rows of a file: --input FILE"),
    ],
)  # fmt: skip
def test_refused_arguments(infer: Infer, model: str, arguments: list[str], message: str) -> None:
    assert fault(infer(model, *arguments)).startswith(message)


def test_columns_that_are_missing(infer: Infer, tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text("a,b\n1,2\n", encoding="utf-8")
    message = (
        "in.csv has no column 'X'; it has 'a', 'b'. X has 4 places, and the table 2 columns of numbers. Add 2 more"
    )
    assert fault(infer("sums", "-i", source)).startswith(message)
    assert fault(infer("sums", "-i", source, "--column", "X=a,z")).startswith("in.csv has no column 'z'")
    assert infer("sums", "-i", source, "--set", "X=[NaN,1,1,1]").exit_code == 0


@pytest.mark.parametrize(
    ("model", "header", "row", "message"),
    [
        ("sums", "a,b,c,d", "1,2,3,4", "X has 4 places, and the table 4 columns of numbers. Name its columns in their "
         "order: --column X=a,b,c,d"),
        ("five", "a,b,c,d,e,f", "1,2,3,4,5,6", "X has 5 places, and the table 6 columns of numbers. Name 5 of them in "
         "their order; leave 1 out of: --column X=a,b,c,d,e,f"),
        ("five", "id,a,b,c,d,e", "u,1,2,3,4,5", "X has 5 places, and the table 5 columns of numbers. Name its columns "
         "in their order: --column X=a,b,c,d,e"),
        ("five", "a,b,c,d,e", "u,2,3,4,5", "X has 5 places, and the table 4 columns of numbers. Add 1 more to: "
         "--column X=b,c,d,e; or name a column of lists: --column X=a"),
        ("five", "lists", '"[1,2,3,4,5]"', "X has 5 places, and the table 0 columns of numbers. Name a column of "
         "lists: --column X=lists"),
        ("vector", "a,b c", "1,2", "it has 'a', 'b c'. Name its columns in their order: --column 'X=a,b c'"),
        ("five", "0.1,0.2,0.3,0.4,0.5", "1,2,3,4,5", "Its first line looks like values, not names: put a line with the "
         "names above it."),
        ("loud", "id,passage", "1,A text.", "'id', 'passage'. Name the column of the texts: --text-column passage"),
    ],
)  # fmt: skip
def test_columns_that_are_not_clear(infer: Infer, model: str, header: str, row: str, message: str) -> None:
    Path("in.csv").write_text(f"{header}\n{row}\n", encoding="utf-8")
    assert fault(infer(model, "-i", "in.csv")).endswith(message)
    if header == "a,b,c,d":
        assert fault(infer(model, "-i", "in.csv", "-o", "folder")).endswith("--column X=a,b,c,d")


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_columns_in_the_order_of_the_file(infer: Infer, kind: str) -> None:
    values = dict(zip("abcde", range(5), strict=True))
    if kind == "csv":
        Path("in.csv").write_text("a,b,c,d,e\n0,1,2,3,4\n", encoding="utf-8")
    elif kind == "jsonl":
        Path("in.jsonl").write_text(json.dumps(values) + "\n", encoding="utf-8")
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist([values]), "in.parquet")
    result = infer("five", "-i", f"in.{kind}", "-o", "out.jsonl")
    assert "note: X takes the columns in their order: --column X=a,b,c,d,e\n" in result.stderr
    assert json.loads(Path("out.jsonl").read_text(encoding="utf-8"))["each"] == [0, 1, 2, 3, 4]
    named = infer("sums", "-i", f"in.{kind}", "--column", "X=a,b,c,d", "--format", "csv")
    assert (named.exit_code, "note:" in named.stderr) == (0, False)


@pytest.mark.parametrize("text", ["a,b,c,d,e\n0,1,2,3,4\n", json.dumps(dict(zip("abcde", range(5), strict=True)))])
@pytest.mark.parametrize("options", [("-i", "-", "-o", "-"), ("-o", "-", "--format", "jsonl"), ("--json",)])
def test_tables_of_numbers_in_a_pipe(infer: Infer, text: str, options: tuple[str, ...]) -> None:
    result = infer("five", *options, stdin=text)
    assert (result.exit_code, "[0.0, 1.0, 2.0, 3.0, 4.0]" in result.stdout) == (0, True), result.stderr
    assert result.stdout.startswith("a,b,c,d,e,each,error\n" if "-i" in options else ("{", "["))
    assert not Path("-").exists()


def test_the_reason_if_rows_fail(infer: Infer) -> None:
    Path("in.csv").write_text('X\n"[1,2]"\n"[3,4]"\n', encoding="utf-8")
    for output in ("out.csv", "-"):
        result = infer("five", "-i", "in.csv", "-o", output)
        assert (
            "2 of 2 rows have an error. The first: in.csv, row 2: Input X has shape [2], expected [5]." in result.stderr
        )


@pytest.mark.parametrize(
    ("header", "options", "has_no_names"),
    [
        ("5.1,3.5,1.4,0.2", [], True),
        ("5.1,3.5,1.4,0.2", ["--column", "X=a,b,c,d"], True),
        ("5.1,3.5,1.4,1.4", [], True),
        ("0,1,2,3", [], False),
        ("a,3.5,1.4,0.2", [], False),
    ],
)
def test_a_row_of_numbers_in_place_of_names(
    infer: Infer, header: str, options: list[str], *, has_no_names: bool
) -> None:
    Path("in.csv").write_text(f"{header}\n1,2,3,4\n", encoding="utf-8")
    advice = "Its first line looks like values, not names: put a line with the names above it."
    assert fault(infer("sums", "-i", "in.csv", *options)).endswith(advice) == has_no_names


def test_a_value_for_all_rows_that_have_their_own(infer: Infer) -> None:
    Path("in.csv").write_text("excerpt\na\n", encoding="utf-8")
    message = "--set gives excerpt, and so does the column 'excerpt' of in.csv. Leave --set out, or give a file without"
    assert fault(infer("loud", "-i", "in.csv", "--set", "excerpt=b")).startswith(message)
    options = ("--set", "excerpt=b", "--column", "excerpt=excerpt")
    assert fault(infer("loud", "-i", "in.csv", *options)).startswith("The input excerpt is given twice.")
    Path("ids.csv").write_text("id\n7\n", encoding="utf-8")
    assert [row["loud"] for row in rows(infer("loud", "-i", "ids.csv", "--set", "excerpt=b", "--json"))] == ["B"]


def test_a_text_like_the_name_of_a_file(infer: Infer) -> None:
    assert [row["loud"] for row in rows(infer("loud", "excerpt=no.txt", "--json"))] == ["NO.TXT"]
    assert [row["loud"] for row in rows(infer("loud", "Node.js", "see a.txt", "--json"))] == ["NODE.JS", "SEE A.TXT"]
    for name in ("a.csv", "b.csv"):
        Path(name).write_text("excerpt\na\n", encoding="utf-8")
    assert fault(infer("loud", "a.csv", "b.csv")).startswith("a.csv is a file. For the rows of a file: --input FILE")


def test_empty_texts_are_counted(infer: Infer) -> None:
    Path("in.csv").write_text("excerpt,id\na,1\n,2\nb,3\n ,4\n", encoding="utf-8")
    said = infer("loud", "-i", "in.csv", "-o", "out.csv").stderr
    assert said.endswith("2 of them have an empty text; the first is in.csv, row 3.\n")
    assert "empty text" not in infer("loud", "-i", "in.csv", "-o", "ids.csv", "--text-column", "id").stderr


def test_lists_of_records_are_to_be_lines(infer: Infer) -> None:
    Path("in.json").write_text('[{"excerpt": "a"}]', encoding="utf-8")
    advice = "Write one object per line: jq -c '.[]' in.json > in.jsonl"
    assert fault(infer("loud", "-i", "in.json")).endswith(advice)
    Path("in.json").write_text("[[1]]", encoding="utf-8")
    assert fault(infer("sums", "-i", "in.json")).endswith("Give it as an input's value: NAME=@in.json")


def test_lines_of_csv_among_texts(infer: Infer) -> None:
    for first, is_header in (("id,excerpt", True), ('"Excerpt"', True), ("The excerpt, and more.", False)):
        Path("in.txt").write_text(f"{first}\n1,a\n", encoding="utf-8")
        said = infer("loud", "-i", "in.txt", "--format", "jsonl").stderr
        assert (
            "looks like the header of CSV, and is scored as a text. For CSV: --input-format csv" in said
        ) == is_header


def test_narrow_terminals_get_whole_numbers(infer: Infer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OUT, "_width", 30)
    assert infer("sums", "X=[1,2,3,4]").stdout.splitlines()[:3] == [
        "X: [1.000, 2.000, 3.000, 4.000]",
        "sum: 10.000",
        "each: [1.000, 2.000, 3.000, 4.000]",
    ]


def test_advice_that_first_users_needed(infer: Infer, tmp_path: Path) -> None:
    np.save("turned.npy", np.zeros((1, 2, 2, 4)))
    assert "X has shape [2, 2, 4], expected [4]" in fault(infer("sums", "X=@turned.npy"))
    Path("rows.json").write_text('{"QUERY": ["a", "b"], "PASSAGE": ["a", "a"]}', encoding="utf-8")
    assert [row["same"] for row in rows(infer("pair", "@rows.json", "--json"))] == [True, False]
    Path("q.txt").write_text("a\n", encoding="utf-8")
    assert rows(infer("pair", "QUERY=@q.txt", "PASSAGE=a", "--json"))[0]["same"] is True
    (tmp_path / "p.csv").write_text("other\na\nb\n", encoding="utf-8")
    message = fault(infer("pair", "-i", "p.csv", "--set", "QUERY=a"))
    assert message.endswith("Name it: --column PASSAGE=COLUMN, or give one value for all rows: --set PASSAGE=text")


def test_an_input_that_is_typed_and_set(infer: Infer) -> None:
    assert "The input QUERY is given twice. Give it once: as an argument, or by --set." in fault(
        infer("pair", "QUERY=a", "PASSAGE=a", "--set", "QUERY=b")
    )


def test_a_number_beyond_the_dtype(infer: Infer) -> None:
    assert "TYPE_FP32, which cannot hold all of these numbers" in fault(infer("sums", "X=[1, 2, 3, 1e39]"))


def test_images_and_files_without_a_name(infer: Infer) -> None:
    Path("cat.png").write_bytes(b"\x89PNG")
    advice = "Make an array of it, in the model's shape, such as numpy.save('cat.npy', "
    assert fault(infer("sums", "X=@cat.png")).startswith(f"cat.png is an image, not an array. {advice}")
    assert fault(infer("sums", "-i", "cat.png")).startswith("cat.png is not one of .csv, .jsonl")
    assert advice in fault(infer("sums", "-i", "cat.png"))
    Path("rows.json").write_text("[1]", encoding="utf-8")
    assert "not a request in KServe's form: a list without names." in fault(infer("sums", "@rows.json"))


def test_an_array_without_a_name_is_the_only_input(infer: Infer) -> None:
    np.save("x.npy", np.ones((2, 4)))
    for arguments in (("@x.npy",), ("--input", "x.npy")):
        assert [row["sum"] for row in rows(infer("sums", *arguments, "--json"))] == [4.0, 4.0]


def test_a_text_may_be_longer_than_a_path(infer: Infer) -> None:
    assert "needs a name" in fault(infer("pair", "a" * 5000))


def test_texts_are_of_the_only_input_that_is_left(infer: Infer) -> None:
    Path("texts.txt").write_text("a\nb\n", encoding="utf-8")
    assert [row["same"] for row in rows(infer("pair", "-i", "texts.txt", "--set", "QUERY=b", "--json"))] == [
        False,
        True,
    ]
