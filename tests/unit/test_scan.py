"""Tables read to the end whatever stands in them: rows and cells that cannot be read are values."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ArtifactError
from shoal.tables import NotUtf8, open_stream, open_table, scan_table


def scan(path: Path) -> list[tuple[int, Any]]:
    with scan_table(path) as table:
        return [(number, str(row) if isinstance(row, ArtifactError) else row) for number, row in table.rows]


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(b'a,b\n1,2,3\n\n"x"y,2\n,\ncaf\xe9,ok\n3,"open\n')
    rows = scan(path)
    assert [number for number, _ in rows] == [2, 4, 5, 6, 7]
    assert rows[0][1] == "x.csv, row 2 has 3 fields, the header 2. Quote texts that have commas."
    assert rows[1][1].startswith("x.csv, row 4 is not CSV: ',' expected after '\"'.")
    assert rows[2][1] == {"a": "", "b": ""}
    assert rows[3][1] == {"a": NotUtf8(b"caf\xe9"), "b": "ok"}
    assert type(rows[3][1]["a"]) is NotUtf8
    assert rows[4][1].startswith("x.csv, row 7 is not CSV: unexpected end of data.")
    with open_table(path) as table, pytest.raises(ArtifactError, match=r"^x\.csv, row 2 has 3 fields"):
        list(table.rows)


def test_a_quote_that_is_never_closed_costs_its_own_row_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text('a,b\n1,"open\n' + "".join(f"{n},text {n}\n" for n in range(2, 50)), encoding="utf-8")
    rows = scan(path)
    assert rows[0][1].startswith("x.csv, row 2 is not CSV: unexpected end of data.")
    assert [row for _, row in rows[1:]] == [{"a": str(n), "b": f"text {n}"} for n in range(2, 50)]
    assert [number for number, _ in rows] == list(range(2, 51))


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
    path.write_bytes(b'[1]\n{"a": "\xff", "b": 1}\nno\n{"a": 1, "a": 2}\n')
    rows = scan(path)
    assert rows[0] == (1, 'x.jsonl, line 1 is not a JSON object: [1]. Write it as {"column": value}.')
    assert rows[1] == (2, {"a": NotUtf8(b"\xff"), "b": 1})
    assert rows[2][1].startswith("x.jsonl, line 3 is not JSON: Expecting value")
    assert rows[3][1] == "x.jsonl, line 4 has more than one column 'a'. Give each its own name."
    path.write_bytes(b"no\n" * 1000)
    with pytest.raises(ArtifactError, match=r"^x\.jsonl, line 1 is not JSON"):  # not what its name says
        scan(path)


def test_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\ntw\xffo\nthree")
    assert [row["text"] for _, row in scan(path)] == ["one", "", b"tw\xffo", "three"]
    path.write_bytes(b"")
    assert scan(path) == []


def test_how_much_has_been_read(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("a line\n" * 100_000, encoding="utf-8")
    with scan_table(path) as table:
        fractions = [table.fraction_read() for _ in table.rows]
    known = [fraction for fraction in fractions if fraction is not None]
    assert known == sorted(known)
    assert known[0] < 0.05
    assert known[-1] == 1.0


@pytest.mark.parametrize("change", ["grown", "replaced", "touched"])
def test_a_file_that_changes_meanwhile(tmp_path: Path, change: str) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a\n1\n2\n", encoding="utf-8")
    with scan_table(path) as table:
        next(table.rows)
        if change == "grown":
            with path.open("a", encoding="utf-8") as file:
                file.write("3\n")
        elif change == "replaced":
            (tmp_path / "y").write_bytes(path.read_bytes())
            (tmp_path / "y").replace(path)
        else:
            os.utime(path, ns=(0, 0))
        with pytest.raises(ArtifactError, match=r"^x\.csv changed while it was read\. Run it again when nothing"):
            list(table.rows)


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
