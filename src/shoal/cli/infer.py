"""``shoal infer``: score a few texts, or files of any size, on a server or in this process."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shoal.cli.console import ERR, plain
from shoal.cli.infer_options import Asked, check_options, check_stream
from shoal.cli.records import takes_record
from shoal.errors import ArtifactError, InputError

if TYPE_CHECKING:
    from shoal.clients.bulk.inputs import Feed
    from shoal.clients.bulk.rows import Row
    from shoal.clients.bulk.scoring import Endpoint
    from shoal.clients.bulk.tables import Table


@takes_record(Asked)
def infer(context: typer.Context, asked: Asked) -> None:
    """Send values from arguments, standard input or a file to a model; run the same command again to resume."""
    source = context.get_parameter_source("form")
    asked = asked.resolve_output(has_form=source is not None and source.name != "DEFAULT")
    check_options(context, asked)
    if asked.has_folder:
        from shoal.cli.folders import score_folder

        score_folder(asked)
        return
    from shoal.cli.infer_shown import answer_text, exit_if_failed, print_curl, print_stream, show

    if answer_text(asked):
        return
    if asked.source and asked.source.endswith(".npy"):
        asked = replace(asked, values=[f"@{asked.source}"], source=None)
    if asked.is_stream:
        check_stream(asked)
    with _open(asked) as (table, endpoint, feed):
        if asked.is_curl:
            print_curl(table, feed, asked)
            return
        if asked.is_stream:
            print_stream(table, endpoint, feed, as_json=asked.as_json)
            return
        _rehearse(asked, endpoint, feed)
        if asked.file or not asked.is_shown:
            from shoal.cli.writing import write_file, write_stream

            write = write_file if asked.file else write_stream
            summary = write(table, endpoint, feed, asked)
        else:
            summary = show(table, endpoint, feed, as_json=asked.as_json, is_full=asked.is_full)
    exit_if_failed(summary.num_failed, summary.num_rows, summary.first_error)


@contextmanager
def _open(asked: Asked) -> Iterator[tuple[Table[Row], Endpoint, Feed]]:
    """Open the rows and the model, and find which columns its inputs are."""
    from shoal.clients.bulk.inputs import make_feed, make_table, read_constants
    from shoal.clients.bulk.scoring import open_model
    from shoal.clients.bulk.tables import open_stream, scan_table
    from shoal.clients.client.calls import find_text_input
    from shoal.kit.component.spec import STRING

    with ExitStack() as held:
        _check_source(asked)
        is_piped = not asked.values and asked.source in (None, "-")
        table = None if asked.values or is_piped else held.enter_context(scan_table(Path(str(asked.source))))
        sizes = {"max_rows": asked.batch_size, "num_callers": asked.concurrency}
        opened = open_model(asked.model, asked.where, asked.repository, asked.connect(), **sizes)
        endpoint = held.enter_context(opened)
        spec = endpoint.spec
        if is_piped:
            kind = asked.input_format or ("txt" if any(each.dtype == STRING for each in spec.inputs) else "")
            table = held.enter_context(open_stream(sys.stdin.buffer, kind and f".{kind}"))
        table = table or make_table(asked.values or (), spec)
        constants = read_constants(asked.constants, spec)
        first, table = _with_rows(table, asked, find_text_input(spec))
        options: dict[str, Any] = {"text_column": asked.text_column, "columns": asked.fed, "constants": constants}
        feed = make_feed(spec, table, **options, first=first)
        if feed.note:
            ERR.print(plain(f"note: {feed.note}"), soft_wrap=True)
        yield table, endpoint, feed


def _with_rows(table: Table[Row], asked: Asked, name: str) -> tuple[Row, Table[Row]]:
    """Return the first row, and the table with it: a lost input must not look like a success.

    ``name`` is that of the input of texts: lines of CSV with such a column are not meant as texts.
    """
    if (first := next(table.rows, None)) is None:
        fix = 'Give rows in it, or texts: shoal infer "A text."; or INPUT=VALUE'
        raise ArtifactError(
            "The arguments have no rows." if asked.values else f"{table.source.name} has no rows.",
            "--set is for every row, and makes none: shoal infer INPUT=VALUE" if asked.constants else fix,
        )
    if table.source.kind == ".txt" and not asked.values and isinstance(first[1], dict):
        names = re.split('[,;\t"]+', str(first[1]["text"]).lower())
        if {"text", name.lower()} & {*names}:
            said = f"note: {first[1]['text']!r} looks like the header of CSV, and is scored as a text."
            ERR.print(plain(f"{said} For CSV: --input-format csv, or a file named .csv"), soft_wrap=True)
    return first[1], replace(table, rows=chain([first], table.rows))


def _rehearse(asked: Asked, endpoint: Endpoint, feed: Feed) -> None:
    """Send a trial request before many texts, which would all fail in the same way."""
    from shoal.clients.bulk.scoring import rehearse
    from shoal.clients.client.calls import find_text_input

    is_text = list(feed.columns) == [find_text_input(endpoint.spec)]
    if is_text and (feed.constants or not asked.values):
        rehearse(endpoint, feed.constants, must_answer=not asked.fed)


def _check_source(asked: Asked) -> None:
    if not asked.values and asked.source is None and (sys.stdin is None or sys.stdin.isatty()):
        raise InputError(
            "There is nothing to ask.", 'Give a text: shoal infer "A text."; or INPUT=VALUE; or --input FILE'
        )
