"""Tables are read to the end whatever they contain: unreadable rows and cells become values."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from shoal.clients.bulk.rows import NotUtf8
from shoal.clients.bulk.tables import open_stream, open_table, scan_table
from shoal.errors import ArtifactError


def scan(path: Path) -> list[tuple[int, Any]]:
    with scan_table(path) as table:
        return [(number, str(row) if isinstance(row, ArtifactError) else row) for number, row in table.rows]


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(b'a,b\n1,2,3\n\n"x"y,2\n,\ncaf\xe9,ok\n')
    rows = scan(path)
    assert [number for number, _ in rows] == [2, 4, 5, 6]
    assert rows[0][1] == "x.csv, row 2 has 3 fields, the header 2. Quote texts that have commas."
    assert rows[1][1].startswith("x.csv, row 4 is not CSV: ',' expected after '\"'.")
    assert rows[2][1] == {"a": "", "b": ""}
    assert rows[3][1] == {"a": NotUtf8(b"caf\xe9"), "b": "ok"}
    assert type(rows[3][1]["a"]) is NotUtf8
    with open_table(path) as table, pytest.raises(ArtifactError, match=r"^x\.csv, row 2 has 3 fields"):
        list(table.rows)


def test_a_quote_that_is_never_closed_ends_the_reading(tmp_path: Path) -> None:
    """It makes one cell of all that follows."""
    path = tmp_path / "x.csv"
    path.write_text('a,b\n1,one\n2,"open\n' + "".join(f"{n},text {n}\n" for n in range(3, 50)), encoding="utf-8")
    with scan_table(path) as table:
        assert next(table.rows) == (2, {"a": "1", "b": "one"})
        with pytest.raises(ArtifactError, match=r"^x\.csv, row 3 is not CSV: unexpected end of data\. A quote is ope"):
            next(table.rows)


def test_columns_without_a_name_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text(",text,\n0,a,x\n", encoding="utf-8")
    assert scan(path) == [(2, {"column 1": "0", "text": "a", "column 3": "x"})]
    with open_table(path) as table:
        assert (table.columns, list(table.rows)) == (("text",), [(2, {"text": "a"})])


def test_parquet_values_that_python_cannot_hold(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "x.parquet"
    columns = {
        "far": pyarrow.array([10_000_000], pyarrow.date32()),
        "long": pyarrow.array([2**62], pyarrow.duration("s")),
        "bad": pyarrow.array([b"a\xff"], pyarrow.binary()).view(pyarrow.string()),
        "nested": pyarrow.array([[1]], pyarrow.list_(pyarrow.timestamp("ns"))),
    }
    parquet.write_table(pyarrow.table(columns), path)
    ((number, row),) = scan(path)
    assert (number, row["bad"], type(row["bad"])) == (1, b"a\xff", NotUtf8)
    assert all(isinstance(row[name], str) for name in ("far", "long"))
    with scan_table(path) as table:
        assert [table.fraction_read() for _ in table.rows] == [1.0]


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": "\xff", "b": 1}\n[1]\nno\n{"a": 1, "a": 2}\n')
    rows = scan(path)
    assert rows[0] == (1, {"a": NotUtf8(b"\xff"), "b": 1})
    assert rows[1] == (2, 'x.jsonl, line 2 is not a JSON object: [1]. Write it as {"column": value}.')
    assert rows[2][1].startswith("x.jsonl, line 3 is not JSON: Expecting value")
    assert rows[3][1] == "x.jsonl, line 4 has more than one column 'a'. Give each its own name."
    path.write_bytes(b'no\n{"a": 1}\n')
    with pytest.raises(ArtifactError, match=r"^x\.jsonl, line 1 is not JSON"):  # which has the columns
        scan(path)


def test_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\ntw\xffo\nthree")
    assert [row["text"] for _, row in scan(path)] == ["one", "", b"tw\xffo", "three"]
    path.write_bytes(b"")
    assert scan(path) == []


def test_fraction_read(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("a line\n" * 100_000, encoding="utf-8")
    with scan_table(path) as table:
        fractions = [table.fraction_read() for _ in table.rows]
    known = [fraction for fraction in fractions if fraction is not None]
    assert known == sorted(known)
    assert known[0] < 0.05
    assert known[-1] == 1.0


def test_pipes() -> None:
    with open_stream(io.BytesIO(b"a,b\n1,2\n"), ".csv") as table:
        assert (table.columns, list(table.rows)) == (("a", "b"), [(2, {"a": "1", "b": "2"})])
        assert table.where(2) == "standard input, row 2"
        assert table.fraction_read() is None
    with (
        pytest.raises(
            ArtifactError, match=r"^\.parquet cannot be read from standard input\. Known: \.txt, \.jsonl, \.c"
        ),
        open_stream(io.BytesIO(b""), ".parquet"),
    ):
        pass
