from __future__ import annotations

import math
import os
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.clients.bulk.rows import shorten, shorten_all
from shoal.clients.bulk.tables import open_table
from shoal.errors import ArtifactError, SetupError
from tests.support.tables import KINDS, XML, write_table


def read(path: Path) -> list[tuple[int, dict[str, Any]]]:
    with open_table(path) as table:
        return list(table.rows)


# What each kind can hold: XML has neither control characters nor a carriage return of its own.
TEXT = st.text(st.characters(codec="utf-8"), max_size=30)
NUMBER = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
ROUNDED = NUMBER.map(lambda number: float(f"{number:.15g}")).filter(math.isfinite)  # openpyxl writes 16 digits
CELLS: Mapping[str, tuple[st.SearchStrategy[Any], ...]] = {
    ".csv": (TEXT,),
    ".jsonl": (st.none() | st.booleans() | NUMBER | TEXT | st.lists(TEXT),),
    ".parquet": (st.none() | TEXT, st.none() | st.floats(allow_nan=False), st.none() | st.booleans()),
    ".xlsx": (st.none() | st.booleans() | ROUNDED | XML,),
}


@st.composite
def tables(draw: st.DrawFn, kind: str) -> tuple[list[str], list[list[Any]]]:
    named = XML.filter(str.strip)
    if kind == ".csv":  # in which they may separate columns
        named = named.filter(lambda name: not set(name) & set("|;\t"))
    columns = draw(st.lists(named, min_size=1, max_size=4, unique=True))
    cells = [draw(st.sampled_from(CELLS[kind])) for _ in columns]  # Parquet's columns have a type each
    return columns, draw(st.lists(st.tuples(*cells).map(list), min_size=1, max_size=6))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30)
@given(data=st.data())
def test_tables_round_trip(kind: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    columns, rows = data.draw(tables(kind))
    path = write_table(tmp_path_factory.mktemp("rows") / f"x{kind}", columns, rows)
    with open_table(path) as table:
        assert table.columns == tuple(columns)
        found = list(table.rows)
    first = 1 if kind in (".jsonl", ".parquet") else 2
    expected = [
        (number, dict(zip(columns, row, strict=True)))
        for number, row in enumerate(rows, first)
        if kind in (".jsonl", ".parquet") or any(c is not None and str(c).strip() for c in row)
    ]
    assert found == expected
    assert [[type(v) for v in row.values()] for _, row in found if kind == ".parquet"] == [
        [type(v) for v in row.values()] for _, row in expected if kind == ".parquet"
    ]


def test_csv_as_people_have_it(tmp_path: Path) -> None:
    path = tmp_path / "X.CSV"
    big = "long " * 50_000  # more than csv's own limit
    path.write_bytes(
        f'\ufeff,text,target\r\n0,"two\r\nlines, ""quoted""",1\r\n\r\n,,\r\n1,{big},\r\n2,short\n'.encode()
    )
    with open_table(path) as table:
        assert table.columns == ("text", "target")  # the first has no name, as pandas writes an index
        assert table.where(5) == "X.CSV, row 5"
        assert list(table.rows) == [
            (2, {"text": 'two\r\nlines, "quoted"', "target": "1"}),
            (5, {"text": big, "target": ""}),
            (6, {"text": "short", "target": None}),
        ]


def test_json_lines_as_people_have_them(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes('\ufeff\n{"a": "\u2028", "b": NaN}\r\n  \n{"c": [1]}'.encode())
    with open_table(path) as table:
        assert table.columns == ("a", "b")
        assert table.where(4) == "x.jsonl, line 4"
        (first, one), second = table.rows
    assert (first, one["a"], str(one["b"])) == (2, "\u2028", "nan")
    assert second == (4, {"c": [1]})


def test_excel_as_people_have_it(tmp_path: Path) -> None:
    import openpyxl

    path = write_table(tmp_path / "x.xlsx", [None, "text", 2022, "  "], [[1, "a"], [], [2, "b", 3.5, "aside"]])
    book = openpyxl.load_workbook(path)
    book.create_sheet("Key").append(["not", "this"])
    book.active["C6"] = "=1+1"
    book.save(path)
    assert read(path) == [(2, {"text": "a", "2022": None}), (4, {"text": "b", "2022": 3.5})]  # the sum was never made
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    sheet = parts["xl/worksheets/sheet1.xml"].replace(b"<f>1+1</f><v />", b"<f>1+1</f><v>2</v>")
    assert sheet != parts["xl/worksheets/sheet1.xml"]
    wrong = sheet.replace(b'<dimension ref="A1:D6"', b'<dimension ref="A1"')
    assert wrong != sheet
    with zipfile.ZipFile(path, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, wrong if name.endswith("sheet1.xml") else part)
    assert read(path)[1:] == [(4, {"text": "b", "2022": 3.5}), (6, {"text": None, "2022": 2})]


def test_a_long_parquet_file_is_read_in_batches(tmp_path: Path) -> None:
    path = write_table(tmp_path / "x.parquet", ["text"], [[f"text {n}"] for n in range(2500)])
    assert read(path) == [(n + 1, {"text": f"text {n}"}) for n in range(2500)]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.csv", 'text;"a;b"\n"The cat; the dog";1\n'),
        ("x.csv", "text\ta;b\nThe cat; the dog\t1\n"),
        ("x.TSV", "text\ta;b\nThe cat; the dog\t1\n"),
        ("x.csv", 'text,"a;b"\nThe cat; the dog,1\n'),
    ],
)
def test_separators_of_columns(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert read(tmp_path / name) == [(2, {"text": "The cat; the dog", "a;b": "1"})]


def test_commas_in_names_of_a_tsv(tmp_path: Path) -> None:
    (tmp_path / "x.tsv").write_text("text, raw\tprice\nThe cat, the dog\t1\n", encoding="utf-8")
    assert read(tmp_path / "x.tsv") == [(2, {"text, raw": "The cat, the dog", "price": "1"})]


def test_a_quoted_header_of_one_column(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text('"text|id;more"\nThe cat; the dog\n', encoding="utf-8")
    assert read(tmp_path / "x.csv") == [(2, {"text|id;more": "The cat; the dog"})]


BROKEN = {
    "x.ods": (b"", "x.ods is not one of .csv, .jsonl, .parquet, .xlsx, .txt. Save it as one of these."),
    "bars.csv": (
        b"text|id\na|1\n",
        "bars.csv has 'text|id' as its header: | separates no columns. Separate them by commas or tabs or semicolons;"
        " or quote the name.",
    ),
    "none": (b"", "none is not one of .csv, .jsonl, .parquet, .xlsx, .txt. Save it as one of these."),
    "a.csv": (b"", "a.csv is empty. Name a file with a header and rows."),
    "b.csv": (b"\na,b\n", "b.csv has no header: its first row is blank. Name its columns in the first row."),
    "c.csv": (b"a,b,a\n", "c.csv has more than one column 'a'. Give each its own name."),
    "d.csv": (b"a,b\n\n1,2,3\n", "d.csv, row 3 has 3 fields, the header 2. Quote texts that have commas."),
    "e.csv": (
        b'a,b\n1,"x"y\n',
        "e.csv, row 2 is not CSV: ',' expected after '\"'. Quote texts that have quotes, and double those.",
    ),
    "f.csv": (
        b'a,b\n1,2\n3,"open\n4,5\n',
        "f.csv, row 3 is not CSV: unexpected end of data. A quote is opened and never closed: close it, or double it.",
    ),
    "g.csv": (b'a,b\n"1\n",caf\xe9\n', "g.csv, row 2 is not UTF-8: it has the byte 0xe9. Save the file as UTF-8."),
    "h.csv": ("a,b\n".encode("utf-16"), "h.csv, row 1 is not UTF-8: it has the byte 0xff. Save the file as UTF-8."),
    "a.jsonl": (b"\n \n", "a.jsonl is empty. Name a file with a header and rows."),
    "b.jsonl": (
        b'{"a": 1}\n\n{"a": 1,}\n',
        "b.jsonl, line 3 is not JSON: ",  # the parser's words differ between versions of Python
    ),
    "c.jsonl": (b'{"a": 1}\n[1, 2]\n', 'c.jsonl, line 2 is not a JSON object: [1, 2]. Write it as {"column": value}.'),
    "d.jsonl": (b'{"a": 1, "a": 2}\n', "d.jsonl, line 1 has more than one column 'a'. Give each its own name."),
    "e.jsonl": (b'{"a": "\xff"}\n', "e.jsonl, line 1 is not UTF-8: it has the byte 0xff. Save the file as UTF-8."),
    "f.jsonl": (b'{"a": ' + b"[" * 200_000 + b"\n", "f.jsonl, line 1 is not JSON: maximum recursion depth exceeded"),
    "g.jsonl": (b'{"a": ' + b"1" * 5000 + b"}\n", "g.jsonl, line 1 is not JSON: Exceeds the limit (4300 digits)"),
    "h.jsonl": (b"x\n", "h.jsonl, line 1 is not JSON: Expecting value at character 1. Write one JSON object per line."),
    "a.parquet": (b"", "a.parquet is not a Parquet file. Give the file the ending of what it is."),
    "b.parquet": (b"a,b\n1,2\n", "b.parquet is not a Parquet file. Give the file the ending of what it is."),
    "a.xlsx": (b"", "a.xlsx is not an Excel workbook. Give the file the ending of what it is."),
    "b.xlsx": (b"a,b\n1,2\n", "b.xlsx is not an Excel workbook. Give the file the ending of what it is."),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_say_where(name: str, tmp_path: Path) -> None:
    content, message = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ArtifactError) as caught:
        read(tmp_path / name)
    assert str(caught.value).startswith(message)
    assert str(caught.value) == message or not message.endswith(".")
    assert "\n" not in str(caught.value)


def test_sheets_without_a_table(tmp_path: Path) -> None:
    import openpyxl

    openpyxl.Workbook().save(tmp_path / "x.xlsx")
    with pytest.raises(ArtifactError, match=r"^x\.xlsx is empty\. Name a file with a header and rows\.$"):
        read(tmp_path / "x.xlsx")
    cases: list[tuple[list[list[Any]], str]] = [
        ([[None, None], ["a", 1]], "x.xlsx has no header: its first row is blank. Name its columns in the first row."),
        ([["a", 1, "1"]], "x.xlsx has more than one column '1'. Give each its own name."),
    ]
    for rows, message in cases:
        path = write_table(tmp_path / "x.xlsx", rows[0], rows[1:])
        with pytest.raises(ArtifactError) as caught:
            read(path)
        assert str(caught.value) == message
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("word/document.xml", "<w/>")
    with pytest.raises(ArtifactError, match=r"^x\.xlsx is not an Excel workbook\."):
        read(path)


def test_files_damaged_in_the_middle(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    path = write_table(tmp_path / "x.xlsx", ["a"], [["b"], ["c"]])
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    parts["xl/worksheets/sheet1.xml"] = parts["xl/worksheets/sheet1.xml"].replace(b"</sheetData>", b"")
    with zipfile.ZipFile(path, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, part)
    with pytest.raises(ArtifactError, match=r"^x\.xlsx is damaged after row 3: .*\. Save or copy it again\.$"):
        read(path)

    bad = pyarrow.array([b"ok", b"\xff"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"a": bad}), tmp_path / "x.parquet")
    with pytest.raises(ArtifactError, match=r"^x\.parquet, row 2 is not UTF-8: it has the byte 0xff\."):
        read(tmp_path / "x.parquet")

    path = write_table(tmp_path / "y.parquet", ["a"], [[f"text {n}"] for n in range(3000)])
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + bytes(len(whole) - 2000) + whole[-1996:])
    with pytest.raises(
        ArtifactError, match=r"^y\.parquet is damaged at row 1 or after: .*\. Write or copy it again\.$"
    ):
        read(path)
    twice = pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"])
    parquet.write_table(twice, path)
    with pytest.raises(ArtifactError, match=r"^y\.parquet has more than one column 'a'\. Give each its own name\.$"):
        read(path)


@pytest.fixture
def unprivileged() -> Iterator[None]:
    """Not root, who may read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    long = tmp_path / ("x" * 300 + ".csv")
    for path, message in (
        (tmp_path / "x.csv", f"There is no file {tmp_path / 'x.csv'}. Check the file's name."),
        (tmp_path / "folder.csv", f"{tmp_path}/folder.csv is a folder. Name a file in it: {', '.join(KINDS)}, .txt."),
        (long, f"{long} cannot be read: File name too long. Copy it to where you can read it."),
    ):
        with pytest.raises(ArtifactError) as caught:
            read(path)
        assert str(caught.value) == message


def test_unreadable_files(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path = write_table(tmp_path / "x.csv", ["a"], [["b"]])
    path.chmod(0)
    request.getfixturevalue("unprivileged")
    with pytest.raises(ArtifactError, match=r"x\.csv cannot be read: Permission denied\. Copy it to where you can"):
        read(path)


@pytest.mark.parametrize(("kind", "library"), [(".parquet", "pyarrow"), (".xlsx", "openpyxl")])
def test_libraries_that_are_not_there(kind: str, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_table(tmp_path / f"x{kind}", ["a"], [["b"]])
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(SetupError, match=rf"^{library} is not installed\. Type: pip install 'shoal\[files\]'$"):
        read(path)


def test_messages_shorten_values() -> None:
    assert shorten("short") == "'short'"
    assert len(shorten("a text " * 1000)) == 40
    assert shorten_all(["a", "b"]) == "'a', 'b'"
    assert shorten_all([]) == "none"
