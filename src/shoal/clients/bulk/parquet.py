"""Read Parquet files in bounded memory, whole or by row groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Self

from shoal.clients.bulk.rows import NotUtf8, Rows, RowSource, check_distinct
from shoal.errors import ArtifactError, needs
from shoal.system.files import open_regular

BUFFER = 2**20  # bytes of a column that are read at a time; without it, all of a row group's
_BATCH_ROWS = 1024  # rows in memory at a time


def open_parquet(file: BinaryIO, name: str, stack: ExitStack) -> Any:
    """Open a ``pyarrow.parquet.ParquetFile``, which reads a little of each column at a time.

    Raises:
        ArtifactError: the file is not a Parquet file, or two of its columns have one name.
        SetupError: pyarrow is not installed.
    """
    with needs("files"):
        import pyarrow
        from pyarrow import parquet
    try:
        table = stack.enter_context(parquet.ParquetFile(file, pre_buffer=False, buffer_size=BUFFER))
        columns = tuple(table.schema_arrow.names)
    except (pyarrow.ArrowException, OSError):
        raise ArtifactError(f"{name} is not a Parquet file.", "Give the file the ending of what it is.") from None
    check_distinct(columns, name)
    return table


def parquet_rows(table: Any, source: RowSource, groups: range | None = None) -> Rows:
    """Yield the rows of an open Parquet file, or of some of its row groups.

    Raises:
        ArtifactError: the file is damaged; the rows before the damage have been yielded.
    """
    import pyarrow

    columns = table.schema_arrow.names
    groups = range(table.metadata.num_row_groups) if groups is None else groups
    number = sum(table.metadata.row_group(group).num_rows for group in range(groups.start))
    try:
        for batch in table.iter_batches(batch_size=_BATCH_ROWS, row_groups=list(groups), use_threads=False):
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


def _to_python(scalar: Any) -> Any:
    """Convert an Arrow scalar to a Python value, or to text if no type holds it (nanoseconds, the year 10000)."""
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


class ParquetOrigin:
    """Parquet files or row groups whose rows are read a second time, when their answers are written beside them.

    Each of ``openers`` opens a file and names its row groups; None is all of them. All files have the same schema.
    """

    def __init__(self, openers: Sequence[Callable[[ExitStack], tuple[BinaryIO, range | None]]]) -> None:
        self._openers = openers

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """Return the origin that is a whole file."""
        return cls([lambda stack: (stack.enter_context(open_regular(path)), None)])

    def schema(self) -> Any:
        """Return the Arrow schema."""
        with ExitStack() as stack:
            return open_parquet(self._openers[0](stack)[0], "The input", stack).schema_arrow

    def batches(self, size: int) -> Iterator[Any]:
        """Yield the rows as Arrow record batches of at most ``size`` rows."""
        for opener in self._openers:
            with ExitStack() as stack:
                file, groups = opener(stack)
                table = open_parquet(file, "The input", stack)
                chosen = None if groups is None else list(groups)
                yield from table.iter_batches(batch_size=size, row_groups=chosen, use_threads=False)
