"""``shoal infer`` without an output: one text, a few rows, a stream of answers, or a curl command."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from shoal.cli.console import ERR, print_blocks, print_table
from shoal.errors import ArtifactError, InputError, ServerError, SetupError, ShoalError, printable

if TYPE_CHECKING:
    from shoal.cli.infer_options import Asked
    from shoal.clients.bulk.inputs import Feed
    from shoal.clients.bulk.rows import Row
    from shoal.clients.bulk.scoring import Endpoint, Scored, Summary
    from shoal.clients.bulk.tables import Table
    from shoal.clients.client.client import Client
    from shoal.kit.component.spec import ModelSpec

MAX_SHOWN = 1000  # rows of a table or of one JSON array, which are held in memory
_SHOWN = 3  # numbers of a long vector


def exit_if_failed(num_failed: int, num_rows: int, first_error: str = "") -> None:
    """End the command with exit code 1 if rows have an error."""
    if num_failed:
        first = f" The first: {first_error}" if first_error else ""
        ERR.print(Text(printable(f"{num_failed:,} of {num_rows:,} rows have an error.{first}"), "red"), soft_wrap=True)
        raise typer.Exit(1)


def _is_text(values: Sequence[str]) -> bool:
    """Whether the arguments are one text: no file, nothing like its name, and no input with a value."""
    is_one = len(values) == 1 and "=" not in values[0] and not values[0].startswith("@")
    return is_one and not re.fullmatch(r"\S+\.\w+", values[0]) and not os.path.isfile(values[0])  # noqa: PTH113  # Path.is_file fails for a long text


def answer_text(asked: Asked) -> bool:
    """Send one text to a server, and print its answer or error.

    Return False if there are other options, or the model needs other inputs.
    """
    others = (asked.output, asked.settings, asked.columns, asked.text_column, asked.is_stream, asked.is_curl)
    if not asked.values or not _is_text(asked.values) or any(others) or asked.where != "server" or not asked.is_shown:
        return False
    with asked.connect()() as client:
        return _ask(client, asked, asked.values[0])


def _ask(client: Client, asked: Asked, text: str) -> bool:
    from shoal.clients.client.calls import find_text_input, to_rows

    model, as_json, is_full = asked.model, asked.as_json, asked.is_full
    spec = client.describe(model or client.default_model())
    name = find_text_input(spec)
    if spec.is_decoupled or any(not tensor.is_optional and tensor.name != name for tensor in spec.inputs) or not name:
        return False
    answer: dict[str, Any] | str
    try:
        (answer,) = to_rows(spec, client.infer(spec.name, {name: [text]}))
    except (ArtifactError, ServerError, SetupError):
        raise
    except ShoalError as error:
        answer = str(error)
    exit_if_failed(_print_answers([({"text": text}, answer)], ["text"], spec, as_json=as_json, is_full=is_full), 1)
    return True


def show(table: Table[Row], model: Endpoint, feed: Feed, *, as_json: bool, is_full: bool) -> Summary:
    """Print a few rows and their answers."""
    from shoal.clients.bulk.scoring import Summary, score

    rows: list[Scored] = []
    for window in score(table.rows, model, feed):
        rows += window
        if len(rows) > MAX_SHOWN:
            raise InputError(
                f"More than {MAX_SHOWN:,} rows are too many to show.", "Write them: --output FILE, or --format jsonl"
            )
    columns = [(names,) if isinstance(names, str) else names for names in feed.columns.values()]
    given = [name for names in columns for name in names]
    answered = [({} if isinstance(row, ArtifactError) else row, answer) for _, row, answer in rows]
    num_failed = _print_answers(answered, given, model.spec, as_json=as_json, is_full=is_full)
    return Summary(len(rows), num_failed)


def _print_answers(
    answers: Sequence[tuple[Mapping[str, Any], dict[str, Any] | str]],
    given: Sequence[str],
    spec: ModelSpec,
    *,
    as_json: bool,
    is_full: bool,
) -> int:
    """Print rows, each with its answer or error, and return the number of errors.

    They are printed as one JSON array or as a table: a line per row with its inputs and answers; below, the errors in
    red.
    """
    from shoal.clients.client.calls import name_columns

    errors = {number: answer for number, (_, answer) in enumerate(answers, start=1) if isinstance(answer, str)}
    rows = [{**row, **({"error": answer} if isinstance(answer, str) else answer)} for row, answer in answers]
    if as_json:
        from shoal.clients.bulk.output_formats import dump_json

        typer.echo(b"[" + b",\n ".join(dump_json(row).rstrip(b"\n") for row in rows) + b"]")
        return len(errors)
    found = {name for _, answer in answers if isinstance(answer, dict) for name in answer}
    added = [name for name in name_columns(spec).values() if name in found or not found]
    cells = [
        (
            [value if isinstance(value, bytes) else _show_value(value, is_full=is_full) for value in inputs],
            ["-" if name not in row else _show_value(row[name], is_full=is_full) for name in added],
        )
        for row, inputs in ((row, [row.get(name) for name in given]) for row in rows)
    ]
    if is_full:
        print_blocks((*given, *added), ((*inputs, *answers) for inputs, answers in cells))
    else:
        print_table(given, added, cells)
    for number, error in errors.items():
        ERR.print(Text(printable(f"row {number}: {error}"), style="red"), soft_wrap=True)
    return len(errors)


def _show_value(value: Any, *, is_full: bool = False) -> str:
    """Format a value for a table; a long vector becomes its first numbers and its shape."""
    if isinstance(value, float):
        return f"{value:.3f}"
    if not isinstance(value, list):
        return str(value)
    if is_full:
        return json.dumps(value, ensure_ascii=False)
    sizes, innermost = [len(value)], value
    while innermost and isinstance(innermost[0], list):
        innermost = innermost[0]
        sizes.append(len(innermost))
    shown = [_show_value(each) for each in innermost[: _SHOWN + 1]]
    if len(sizes) == 1 and len(innermost) == len(shown):
        return f"[{', '.join(shown)}]"
    return f"[{', '.join(shown[:_SHOWN])}, …] {'x'.join(map(str, sizes))}"


def print_stream(table: Table[Row], model: Endpoint, feed: Feed, *, as_json: bool) -> None:
    """Print the answers to the only row as they come: as text if the model's only output is a text, else as JSON."""
    from shoal.clients.bulk.output_formats import dump_json
    from shoal.clients.bulk.scoring import stream

    rows = [feed.inputs(row) for row in _only_dicts(table)]
    if len(rows) != 1:
        raise InputError(f"--stream takes one row; there are {len(rows)}.", "Give one text, or one value per input.")
    is_text = [spec.kind for spec in model.spec.outputs] == ["STRING [1]"] and not as_json
    has_begun = False
    try:
        for answer in stream(model, rows[0]):
            typer.echo("".join(answer.values()) if is_text else dump_json(answer), nl=False)
            has_begun = True
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    finally:
        if is_text and has_begun:
            typer.echo()


def print_curl(table: Table[Row], feed: Feed, asked: Asked) -> None:
    """Print the request for the rows as a curl command."""
    from shoal.clients.bulk.inputs import write_curl

    rows = [feed.inputs(row) for row in _only_dicts(table)]
    files = {"--cacert": asked.ca_cert, "--cert": asked.client_cert}
    command = write_curl(
        asked.url or "127.0.0.1:8000", feed.model, {name: [row[name] for row in rows] for name in rows[0]}
    )
    typer.echo(command + "".join(f" {option} {shlex.quote(path)}" for option, path in files.items() if path))


def _only_dicts(table: Table[Row]) -> list[Mapping[str, Any]]:
    return [row for _, row in table.rows if isinstance(row, dict)]
