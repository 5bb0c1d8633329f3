"""``shoal infer``: score a few texts, or files of any size, on a server or in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.console import ERR, plain, print_answers, print_json, show_rows
from shoal.errors import InputError, ServerError, SetupError
from shoal.options import Json

if TYPE_CHECKING:
    from shoal.bulk.endpoint import Endpoint
    from shoal.bulk.infer import Summary
    from shoal.tables import Table
    from shoal.tables.common import Row

STREAM_FORMATS = ("table", "csv", "jsonl")
PLACEMENTS = ("server", "client")
MAX_SHOWN = 1000  # rows of a table or of one JSON array, which are held in memory


def infer(
    texts: Annotated[list[str] | None, typer.Argument(help="Texts; without any, --input or standard input.")] = None,
    source: Annotated[
        str | None, typer.Option("--input", "-i", help="A .txt (a text per line), .csv, .jsonl, .parquet, .xlsx; or -.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A .csv, .jsonl or .parquet to write.")] = None,
    form: Annotated[str, typer.Option("--format", help="On standard output: table, csv or jsonl.")] = "table",
    input_format: Annotated[str, typer.Option(help="Of standard input: txt, csv or jsonl.")] = "txt",
    text_column: Annotated[str, typer.Option(help="The input's column of texts.")] = "text",
    values: Annotated[
        list[str] | None, typer.Option("--set", help="Another input, the same for each text: BERT_WEIGHT=0.7.")
    ] = None,
    columns: Annotated[
        list[str] | None, typer.Option("--column", help="Another input, from a column: BERT_WEIGHT=my_column.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="The server; else 127.0.0.1 at the protocol's usual port.")] = None,
    protocol: Annotated[str, typer.Option(help="grpc or http.")] = "grpc",
    timeout: Annotated[float, typer.Option(help="Seconds that a request may take.")] = 60.0,
    model: Annotated[
        str, typer.Option(help="The model; else the repository's or the server's only ensemble, or only model.")
    ] = "",
    is_local: Annotated[
        bool, typer.Option("--local", help="Without a server: the repository in this process.")
    ] = False,
    placement: Annotated[
        str, typer.Option(help="server, or client: Python components here, the other models on the server.")
    ] = "server",
    repository: Annotated[Path, typer.Option(help="For --local and --placement client.")] = Path("build/repository"),
    batch_size: Annotated[int | None, typer.Option(min=1, help="Texts of a request.")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Requests at a time.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over, discarding what was written there.")] = False,
    as_json: Json = False,
) -> None:
    """Score texts: given here, from standard input, or from a file; run the same command again to resume."""
    from shoal.bulk.infer import infer_to_file, infer_to_stream, make_feed, make_format

    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: active waiting is very slow beside other work
    _check_choices(form, protocol, placement, output, is_local=is_local)
    with ExitStack() as held:
        table = held.enter_context(_open_table(texts, source, f".{input_format}"))
        origin = Path(source) if source not in (None, "-") and not texts else None
        if output and origin and output.exists() and output.samefile(origin):
            raise InputError(f"{output} is the input.", "Name another file to write.")
        where = "local" if is_local else placement
        chosen = held.enter_context(
            _open_model(model, where, repository, url, protocol, timeout, max_rows=batch_size, num_callers=concurrency)
        )
        constants, fed = _distinct(map(_parse_number, values or ())), _distinct(map(_parse_column, columns or ()))
        feed = make_feed(chosen, table, text_column=text_column, columns=fed, constants=constants)
        if constants or not texts:  # a trial request before many, which would all fail in the same way
            chosen = chosen.rehearsed(feed.constants, must_answer=not fed)
        if output:
            scored_by = {"server": url or "here"} if where == "server" else {"repository": _digest(repository)}
            answers = {spec.name: [spec.dtype, *spec.dims] for spec in chosen.outputs}
            job = {
                "model": chosen.name, "place": where, **scored_by, "batch_size": chosen.max_rows, "answers": answers,
                "input_format": table.source.kind, "text_column": text_column, "set": constants, "column": fed,
            }  # fmt: skip
            written = make_format(output.suffix.lower(), table, chosen, origin)
            with show_rows() as show, _say_what_is_kept(output):
                summary = infer_to_file(
                    table, chosen, feed, written, output, settings=job, on_rows=show, is_fresh=fresh
                )
        elif form == "table" or as_json:
            summary = _show(table, chosen, feed, text_column, as_json=as_json)
        else:
            with show_rows() as show:
                stream = make_format(f".{form}", table, chosen)
                summary = infer_to_stream(table, chosen, feed, stream, sys.stdout.buffer, show)
    if summary.num_failed:
        ERR.print(f"{summary.num_failed:,} of {summary.num_rows:,} rows have an error.", style="red")
        raise typer.Exit(1)


def _show(table: Table[Row], model: Endpoint, feed: Any, text_column: str, *, as_json: bool) -> Summary:
    """Print a few rows as a table or as one JSON array."""
    from shoal.bulk.infer import Summary
    from shoal.bulk.output_formats import answered, as_text
    from shoal.bulk.scoring import score

    rows: list[Any] = []
    for window in score(table.rows, model, feed):
        rows += window
        if len(rows) > MAX_SHOWN:
            raise InputError(
                f"More than {MAX_SHOWN:,} rows are too many to show.", "Write them: --output FILE, or --format jsonl"
            )
    failed = sum(isinstance(scored.answer, str) for scored in rows)
    if as_json:
        print_json([answered(scored) for scored in rows], as_text)
    else:
        print_answers(list(model.columns.values()), [(answered(s).get(text_column), s.answer) for s in rows])
    return Summary(len(rows), failed)


def _check_choices(form: str, protocol: str, placement: str, output: Path | None, *, is_local: bool) -> None:
    from shoal.bulk.infer import OUTPUT_KINDS

    for option, value, known in (
        ("--format", form, STREAM_FORMATS),
        ("--protocol", protocol, ("grpc", "http")),
        ("--placement", placement, PLACEMENTS),
    ):
        if value not in known:
            raise InputError(f"Unknown {option} {value!r}.", f"Known: {', '.join(known)}.")
    if is_local and placement == "client":
        raise InputError("--local and --placement client exclude each other.", "Leave one out.")
    if output and output.suffix.lower() not in OUTPUT_KINDS:
        raise InputError(f"{output} is not one of {', '.join(OUTPUT_KINDS)}.", "Give the output one of these endings.")


@contextmanager
def _open_table(texts: Sequence[str] | None, source: str | None, stream_kind: str) -> Iterator[Table[Row]]:
    from shoal.tables import TEXT, Table, as_cell, open_stream, scan_table
    from shoal.tables.common import Source

    if texts and source:
        raise InputError("There are texts and an --input.", "Leave one out.")
    if texts:
        rows = ((number, {TEXT: as_cell(text)}) for number, text in enumerate(texts, start=1))
        yield Table(Source("arguments", ".txt"), (TEXT,), rows, lambda: None)
    elif source is None and (sys.stdin is None or sys.stdin.isatty()):
        raise InputError("There are no texts.", 'Give some: shoal infer "A text.", or --input FILE')
    elif source in (None, "-"):
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


def _parse_number(setting: str) -> tuple[str, float]:
    name, _, value = setting.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise InputError(f"--set {setting!r} is not NAME=NUMBER.", "For example: --set BERT_WEIGHT=0.7") from None


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
