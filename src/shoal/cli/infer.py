"""``shoal infer``: score a few texts, or files of any size, on a server or in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shoal.console import ERR, plain, print_answers, print_blocks, show_rows
from shoal.errors import InputError, ServerError, SetupError
from shoal.options import Json, Protocol

if TYPE_CHECKING:
    from shoal.bulk.endpoint import Endpoint
    from shoal.bulk.infer import Summary
    from shoal.bulk.scoring import Feed
    from shoal.tables import Row, Table

MAX_SHOWN = 1000  # rows of a table or of one JSON array, which are held in memory


def infer(
    values: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT | INPUT=VALUE",
            help="Texts; or inputs by name, as X=[5.1,3.5] or X=@file.npy; or a whole @request.json.",
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--input", "-i", metavar="FILE", help="A .txt (a text per line), .csv, .jsonl, .parquet, .xlsx, .npy; or -."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="A .csv, .jsonl, .parquet or .npy to write."),
    ] = None,
    form: Annotated[
        Literal["table", "csv", "jsonl"], typer.Option("--format", help="What is printed on standard output.")
    ] = "table",
    input_format: Annotated[Literal["txt", "csv", "jsonl"], typer.Option(help="Of standard input.")] = "txt",
    text_column: Annotated[
        str, typer.Option(metavar="NAME", help="The column of texts. Default: `text`, or the input's name.")
    ] = "",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="INPUT=VALUE", help="An input that is the same for every row; repeat it."),
    ] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option(
            "--column",
            metavar="INPUT=NAME,...",
            help="An input's column, where the name differs; several are joined to a vector. Repeat it.",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="The server. Default: 127.0.0.1 at the protocol's usual port."),
    ] = None,
    protocol: Annotated[Protocol, typer.Option(help="How to ask the server.")] = "grpc",
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="For one request; of a stream, for each answer.")
    ] = 60.0,
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="The model. Default: the only ensemble, or the only model, of repository or server."
        ),
    ] = "",
    is_local: Annotated[
        bool, typer.Option("--local", help="Without a server: the repository in this process.")
    ] = False,
    placement: Annotated[
        Literal["server", "client"],
        typer.Option(help="client: Python components run here, the other models on the server."),
    ] = "server",
    repository: Annotated[Path, typer.Option(help="For --local and --placement client.")] = Path("build/repository"),
    batch_size: Annotated[int | None, typer.Option(min=1, help="Rows per request.")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Requests in flight.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over, discarding what was written there.")] = False,
    is_stream: Annotated[
        bool,
        typer.Option("--stream", help="Print each answer as it comes, for a model that answers one row in pieces."),
    ] = False,
    is_full: Annotated[bool, typer.Option("--full", help="Print every number of vectors.")] = False,
    is_curl: Annotated[
        bool, typer.Option("--curl", help="Print the request as a command of curl's; send nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Ask a model: values given here, on standard input, or in a file; run the same command again to resume."""
    from shoal.bulk.infer import infer_to_file, infer_to_stream, make_feed, make_format
    from shoal.bulk.values import read_rows
    from shoal.tables import TEXT

    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: active waiting is very slow beside other work
    _check_choices(values, source, placement, output, is_local=is_local)
    if source and source.endswith(".npy"):
        values, source = [f"@{source}"], None
    if is_stream:
        _check_stream(values, {"--input": source, "--output": output, "--curl": is_curl, "--format": form != "table"})
    with ExitStack() as held:
        where = "local" if is_local else placement
        table = None if values else held.enter_context(_open_table(source, f".{input_format}"))
        origin = Path(source) if source not in (None, "-") else None
        if output and origin and output.exists() and output.samefile(origin):
            raise InputError(f"{output} is the input.", "Name another file to write.")
        spoken = "http" if is_curl else protocol
        try:
            chosen = held.enter_context(
                _open_model(
                    model, where, repository, url, spoken, timeout, max_rows=batch_size, num_callers=concurrency
                )
            )
        except ServerError as error:
            if not is_curl:
                raise
            raise ServerError(
                error.what, "curl speaks HTTP: give the HTTP address, which shoal serve prints."
            ) from None
        if table is None:
            from shoal.bulk.arguments import make_table

            table = make_table(values or (), chosen)
        given, fed = _distinct(map(_parse_setting, settings or ())), _distinct(map(_parse_column, columns or ()))
        constants = {name: _one_row(name, read_rows(chosen.find_input(name), value)) for name, value in given.items()}
        feed = make_feed(chosen, table, text_column=text_column, columns=fed, constants=constants)
        if is_curl:
            typer.echo(_write_curl(table, chosen, feed, url))
            return
        if is_stream:
            _print_stream(table, chosen, feed, as_json=as_json)
            return
        is_text = list(feed.columns) == [chosen.text_input]
        if is_text and (constants or not values):  # a trial request before many, which would all fail in the same way
            chosen = chosen.rehearsed(feed.constants, must_answer=not fed)
        if output:
            scored_by = {"server": url or "here"} if where == "server" else {"repository": _digest(repository)}
            answers = {spec.name: [spec.dtype, *spec.dims] for spec in chosen.outputs}
            job = {
                "model": chosen.name, "place": where, **scored_by, "batch_size": chosen.max_rows, "answers": answers,
                "input_format": table.source.kind, "text_column": text_column or TEXT, "set": given, "column": fed,
            }  # fmt: skip
            written = make_format(output.suffix.lower(), table, chosen, origin)
            with show_rows() as show, _say_what_is_kept(output):
                summary = infer_to_file(
                    table, chosen, feed, written, output, settings=job, on_rows=show, is_fresh=fresh
                )
        elif form == "table" or as_json:
            summary = _show(table, chosen, feed, as_json=as_json, is_full=is_full)
        else:
            with show_rows() as show:
                stream = make_format(f".{form}", table, chosen)
                summary = infer_to_stream(table, chosen, feed, stream, sys.stdout.buffer, show)
    if summary.num_failed:
        ERR.print(f"{summary.num_failed:,} of {summary.num_rows:,} rows have an error.", style="red")
        raise typer.Exit(1)


def _show(table: Table[Row], model: Endpoint, feed: Feed, *, as_json: bool, is_full: bool) -> Summary:
    """Print a few rows as a table or as one JSON array, a row per line."""
    from shoal.bulk.infer import Summary
    from shoal.bulk.output_formats import ERROR, answered, dump_json
    from shoal.bulk.scoring import score
    from shoal.bulk.values import show_value

    rows: list[Any] = []
    for window in score(table.rows, model, feed):
        rows += window
        if len(rows) > MAX_SHOWN:
            raise InputError(
                f"More than {MAX_SHOWN:,} rows are too many to show.", "Write them: --output FILE, or --format jsonl"
            )
    failed = sum(isinstance(scored.answer, str) for scored in rows)
    if as_json:
        typer.echo(b"[" + b",\n ".join(dump_json(answered(scored)).rstrip(b"\n") for scored in rows) + b"]")
    else:
        given = [
            column
            for columns in feed.columns.values()
            for column in ((columns,) if isinstance(columns, str) else columns)
        ]
        shown, added = partial(show_value, is_full=is_full), list(model.columns.values())
        if is_full:
            columns = (*given, *added, ERROR) if failed else (*given, *added)
            print_blocks(columns, ([shown(answered(s).get(name, "-")) for name in columns] for s in rows))
        else:
            print_answers(given, added, [(answered(s), s.answer) for s in rows], shown)
    return Summary(len(rows), failed)


def _print_stream(table: Table[Row], model: Endpoint, feed: Feed, *, as_json: bool) -> None:
    """Print the answers to the only row as they come: the text of a model that gives text alone, else JSON lines."""
    from shoal.bulk.output_formats import dump_json
    from shoal.bulk.scoring import stream

    specs = {spec.name: spec for spec in model.inputs}
    rows = [feed.inputs(row, specs) for _, row in table.rows if isinstance(row, dict)]
    if len(rows) != 1:
        raise InputError(f"--stream takes one row; there are {len(rows)}.", "Give one text, or one value per input.")
    is_text = [spec.kind for spec in model.outputs] == ["STRING [1]"] and not as_json
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


def _write_curl(table: Table[Row], model: Endpoint, feed: Feed, url: str | None) -> str:
    from shoal.bulk.arguments import write_curl

    specs = {spec.name: spec for spec in model.inputs}
    rows = [feed.inputs(row, specs) for _, row in table.rows if isinstance(row, dict)]
    return write_curl(url or "127.0.0.1:8000", model, {name: [row[name] for row in rows] for name in rows[0]})


def _check_choices(
    values: Sequence[str] | None, source: str | None, placement: str, output: Path | None, *, is_local: bool
) -> None:
    from shoal.bulk.infer import OUTPUT_KINDS

    if values and source:
        raise InputError(
            f"There are values, such as {values[0]!r}, and an --input.",
            "Leave one out; an input that is the same for every row of the file: --set INPUT=VALUE",
        )
    if is_local and placement == "client":
        raise InputError("--local and --placement client exclude each other.", "Leave one out.")
    if output and output.suffix.lower() not in OUTPUT_KINDS:
        raise InputError(f"{output} is not one of {', '.join(OUTPUT_KINDS)}.", "Give the output one of these endings.")


def _check_stream(values: Sequence[str] | None, others: dict[str, object]) -> None:
    given = [option for option, value in others.items() if value]
    if given:
        raise InputError(f"--stream and {given[0]} exclude each other.", "Give the row as arguments: INPUT=VALUE")
    if not values:
        raise InputError("--stream takes one row.", 'Give a text: shoal infer --stream "A text."; or INPUT=VALUE')


@contextmanager
def _open_table(source: str | None, stream_kind: str) -> Iterator[Table[Row]]:
    from shoal.tables import open_stream, scan_table

    if source is None and (sys.stdin is None or sys.stdin.isatty()):
        raise InputError(
            "There is nothing to ask.", 'Give a text: shoal infer "A text."; or INPUT=VALUE; or --input FILE'
        )
    if source in (None, "-"):
        with open_stream(sys.stdin.buffer, stream_kind) as table:
            yield table
    else:
        with scan_table(Path(str(source))) as table:
            yield table


@contextmanager
def _open_model(
    name: str, where: str, repository: Path, url: str | None, protocol: str, timeout: float, **limits: int | None
) -> Iterator[Endpoint]:
    from shoal.bulk.endpoint import SERVED_REQUESTS, local, served
    from shoal.client.client import Client
    from shoal.local import load

    with ExitStack() as held:
        client = None
        if where != "local":
            address = url or f"127.0.0.1:{8001 if protocol == 'grpc' else 8000}"
            client = held.enter_context(Client(address, protocol=protocol, timeout=timeout))
        if where == "server":
            assert client is not None
            yield served(client, name or client.default_model(), **limits)
            return
        pipeline = load(repository / name if name else repository, remote=client)
        held.callback(pipeline.close)
        if client:
            limits["num_callers"] = limits["num_callers"] or SERVED_REQUESTS
        yield local(pipeline, **limits)


def _digest(repository: Path) -> str:
    """Return a fingerprint of the repository: its identity or, if it was not composed, its files' digests."""
    from shoal.component.artifact_files import sha256
    from shoal.repository.manifest import read_manifest

    identity = read_manifest(repository).get("identity")
    files = sorted(path for path in repository.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return str(identity or [[str(path.relative_to(repository)), sha256(path)] for path in files])


def _distinct(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name, value in pairs:
        if name in given:
            raise InputError(f"The input {name} is given twice.", "Give it once.")
        given[name] = value
    return given


def _parse_setting(setting: str) -> tuple[str, str]:
    name, _, value = setting.partition("=")
    if not name or not value:
        raise InputError(f"--set {setting!r} is not INPUT=VALUE.", "For example: --set BERT_WEIGHT=0.7")
    return name, value


def _one_row(name: str, rows: list[Any]) -> Any:
    if len(rows) != 1:
        raise InputError(f"--set {name} gives {len(rows)} rows, not one value for all.", f"For example: --set {name}=0")
    return rows[0]


def _parse_column(setting: str) -> tuple[str, str]:
    name, _, column = setting.partition("=")
    if not name or not column:
        raise InputError(f"--column {setting!r} is not NAME=COLUMN.", "For example: --column BERT_WEIGHT=my_column")
    return name, column


@contextmanager
def _say_what_is_kept(output: Path) -> Iterator[None]:
    from shoal.bulk.journal import partial_path

    kept = partial_path(output)
    said = f"Finished rows are in {kept}: run the same command (without --fresh) to resume."
    try:
        yield
    except KeyboardInterrupt:
        ERR.print(f"Interrupted. {plain(said)}", soft_wrap=True)
        raise typer.Exit(130) from None
    except (ServerError, SetupError):
        if kept.exists():
            ERR.print(plain(said), soft_wrap=True)
        raise
