"""Tables for tests, of every kind of file."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

KINDS = (".csv", ".jsonl", ".parquet", ".xlsx")


def write_table(path: Path, columns: Sequence[object], rows: Sequence[Sequence[Any]]) -> Path:
    """The rows in the file's own kind, by the libraries that people write such files with."""
    if path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([columns, *rows])
    elif path.suffix == ".jsonl":
        lines = (json.dumps(dict(zip(columns, row, strict=False)), ensure_ascii=False) for row in rows)
        path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    elif path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        values = [[row[place] for row in rows] for place in range(len(columns))]
        parquet.write_table(pyarrow.table(values, names=[str(name) for name in columns]), path)
    else:
        import openpyxl

        book = openpyxl.Workbook()
        for row in [columns, *rows]:
            book.active.append(row)
        for cell in (cell for line in book.active.iter_rows() for cell in line if isinstance(cell.value, str)):
            cell.data_type = "s"  # texts that begin with "=" are texts
        book.save(path)
    return path


XML = st.text(st.characters(codec="utf-8", exclude_categories=["C"]) | st.just("\n"), min_size=1, max_size=30)
