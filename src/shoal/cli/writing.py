"""``shoal infer``: write the answers of all rows to standard output or to a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shoal.cli.console import ERR, plain, show_rows
from shoal.errors import ArtifactError, ServerError, SetupError

if TYPE_CHECKING:
    from shoal.clients.bulk.inputs import Feed
    from shoal.clients.bulk.rows import Row
    from shoal.clients.bulk.scoring import Endpoint, Summary
    from shoal.clients.bulk.tables import Table


def write_stream(table: Table[Row], model: Endpoint, feed: Feed, form: str) -> Summary:
    """Write every row to standard output, as CSV or JSON Lines."""
    from shoal.clients.bulk.files import infer_to_stream
    from shoal.clients.bulk.output_formats import make_format

    with show_rows() as show:
        return infer_to_stream(table, model, feed, make_format(f".{form}", table, model.spec), sys.stdout.buffer, show)


def write_file(
    table: Table[Row],
    model: Endpoint,
    feed: Feed,
    output: Path,
    source: str | None,
    job: Mapping[str, Any],
    *,
    is_fresh: bool,
) -> Summary:
    """Write every row to ``output``; a run with the same ``job`` resumes where the last one stopped."""
    from shoal.clients.bulk.files import infer_to_file
    from shoal.clients.bulk.output_formats import make_format
    from shoal.clients.bulk.parquet import ParquetOrigin

    origin = ParquetOrigin.of_file(Path(source)) if source not in (None, "-") else None
    form = make_format(output.suffix.lower(), table, model.spec, origin)
    with show_rows() as show, _say_what_is_kept(output):
        return infer_to_file(table, model, feed, form, output, settings=job, on_rows=show, is_fresh=is_fresh)


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
