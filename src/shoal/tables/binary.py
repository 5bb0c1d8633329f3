"""Readers of Parquet and Excel."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, BinaryIO

from shoal.errors import ArtifactError, needs
from shoal.tables.common import NotUtf8, Opened, Source, by_name, check_distinct, name_columns, no_rows

_BATCH_ROWS = 1024  # of a Parquet file in memory at a time
BUFFER = 2**20  # bytes of a Parquet column that are read at a time; without it, all of a row group's


def open_parquet(file: BinaryIO, source: Source, stack: ExitStack) -> Opened:
    """Open the columns and rows of a Parquet file, in batches."""
    with needs("files"):
        import pyarrow
        from pyarrow import parquet
    try:
        table = stack.enter_context(parquet.ParquetFile(file, pre_buffer=False, buffer_size=BUFFER))
        columns = tuple(table.schema_arrow.names)
    except (pyarrow.ArrowException, OSError):
        raise ArtifactError(
            f"{source.name} is not a Parquet file.", "Give the file the ending of what it is."
        ) from None
    check_distinct(columns, source.name)
    number = 0

    def rows() -> Iterator[tuple[int, dict[str, Any]]]:
        nonlocal number
        try:
            for batch in table.iter_batches(batch_size=_BATCH_ROWS, use_threads=False):
                named = list(zip(columns, batch.columns, strict=True))
                for place in range(batch.num_rows):
                    row = {name: _to_python(column[place]) for name, column in named}
                    number += 1
                    yield number, row
        except (pyarrow.ArrowException, OSError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise ArtifactError(
                f"{source.name} is damaged at row {number + 1} or after: {reason}.", "Write or copy it again."
            ) from None

    return Opened(columns, rows(), lambda: number / max(1, table.metadata.num_rows))


def _to_python(scalar: Any) -> Any:
    """Return the value; as text where no Python type holds it, such as nanoseconds or the year 10000."""
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return NotUtf8(scalar.cast("binary").as_py())
    except (ValueError, OverflowError, LookupError):
        return _as_shown(scalar) if scalar.type.num_fields else scalar.cast("string").as_py()


def _as_shown(scalar: Any) -> str:
    """Format a nested value as Arrow does, for contents that no Python type holds."""
    import pyarrow

    return " ".join(pyarrow.array([scalar], scalar.type).to_string().split())


def open_xlsx(file: BinaryIO, source: Source, stack: ExitStack) -> Opened:
    """Open the columns and rows of a workbook's first sheet."""
    with needs("files"):
        import openpyxl
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of styles, which do not affect values
            workbook = openpyxl.load_workbook(file, read_only=True, data_only=True)
        stack.callback(workbook.close)
        sheet = workbook.worksheets[0]
    except Exception:  # zipfile's, the XML parser's, KeyError, ...: openpyxl has no error of its own for this
        raise ArtifactError(
            f"{source.name} is not an Excel workbook.", "Give the file the ending of what it is."
        ) from None
    sheet.reset_dimensions()  # some programs write a size that is less than the sheet's
    records = _sheet_rows(sheet, source)
    first = next(records, None)
    if first is None:
        raise no_rows(source)
    named = name_columns(first[1], source)
    return Opened(tuple(named), ((number, by_name(cells, named)) for number, cells in records))


def _sheet_rows(sheet: Any, source: Source) -> Iterator[tuple[int, Sequence[Any]]]:
    number = 0
    try:
        for number, cells in enumerate(sheet.iter_rows(values_only=True), start=1):
            yield number, cells
    except Exception as error:  # as when opening it
        raise ArtifactError(
            f"{source.name} is damaged after row {number}: {error}.", "Save or copy it again."
        ) from None
