"""``shoal infer``: write the answers of all rows to standard output or to a file."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from shoal.cli.console import ERR, plain, show_rows
from shoal.errors import ArtifactError, ServerError, SetupError

if TYPE_CHECKING:
    from shoal.cli.infer_options import Asked
    from shoal.clients.bulk.inputs import Feed
    from shoal.clients.bulk.rows import Row, Rows
    from shoal.clients.bulk.scoring import Endpoint, Summary
    from shoal.clients.bulk.tables import Table


def write_stream(table: Table[Row], model: Endpoint, feed: Feed, asked: Asked) -> Summary:
    """Write every row to standard output, as CSV or JSON Lines."""
    from shoal.clients.bulk.files import infer_to_stream
    from shoal.clients.bulk.output_formats import make_format

    with show_rows() as show:
        return infer_to_stream(
            table, model, feed, make_format(f".{asked.form}", table, model.spec), sys.stdout.buffer, show
        )


def write_file(table: Table[Row], model: Endpoint, feed: Feed, asked: Asked) -> Summary:
    """Write every row to the output; a run with the same options resumes where the last one stopped."""
    from shoal.clients.bulk.files import infer_to_file
    from shoal.clients.bulk.output_formats import make_format
    from shoal.clients.bulk.parquet import ParquetOrigin
    from shoal.clients.bulk.tables import TEXT
    from shoal.clients.client.calls import find_text_input

    output = Path(str(asked.output))
    origin = ParquetOrigin.of_file(Path(asked.source)) if asked.source and asked.source != "-" else None
    form = make_format(output.suffix.lower(), table, model.spec, origin)
    columns = {"input_format": table.source.kind, "text_column": asked.text_column or TEXT}
    job = asked.describe(model.spec, model.max_rows, **columns)
    empty: Counter[str] = Counter()
    with show_rows() as show, _say_what_is_kept(output):
        column = feed.columns.get(find_text_input(model.spec))
        table = replace(table, rows=_watch(table.rows, column, empty))
        summary = infer_to_file(table, model, feed, form, output, settings=job, on_rows=show, is_fresh=asked.fresh)
    ERR.print(plain(f"{summary.num_rows:,} rows are in {output}."), soft_wrap=True)
    if empty:
        said = f"{empty['rows']:,} of them have an empty text; the first is {table.where(empty['first'])}."
        ERR.print(plain(said), soft_wrap=True)
    return summary


def _watch(rows: Rows, column: object, empty: Counter[str]) -> Rows:
    """Yield ``rows``; count those whose text is empty in ``empty``, which also gets the number of the first one."""
    for number, row in rows:
        text = row.get(column) if isinstance(row, dict) and isinstance(column, str) else None
        if isinstance(text, str) and not text.strip():
            empty["rows"] += 1
            empty.setdefault("first", number)
        yield number, row


@contextmanager
def _say_what_is_kept(output: Path) -> Iterator[None]:
    from shoal.clients.bulk.files import partial_path

    kept = partial_path(output)
    said = f"Finished rows are in {kept}: run the same command (without --fresh) to resume."
    try:
        yield
    except KeyboardInterrupt:
        ERR.print(f"Interrupted. {plain(said)}", soft_wrap=True)
        raise typer.Exit(130) from None
    except (ArtifactError, ServerError, SetupError):
        if kept.exists():
            ERR.print(plain(said), soft_wrap=True)
        raise
