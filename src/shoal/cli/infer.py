"""``shoal infer``: score a few texts, or files of any size, on a server or in this process."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.text import Text

from shoal.cli.console import (
    ERR,
    ApiKey,
    CaCert,
    ClientCert,
    Json,
    Protocol,
    Url,
    parse_pairs,
    print_blocks,
    print_table,
    refuse_ignored,
)
from shoal.errors import ArtifactError, InputError, ServerError, SetupError, ShoalError, printable

if TYPE_CHECKING:
    from shoal.clients.bulk.inputs import Feed
    from shoal.clients.bulk.rows import Row
    from shoal.clients.bulk.scoring import Endpoint, Scored, Summary
    from shoal.clients.bulk.tables import Table
    from shoal.clients.client.client import Client
    from shoal.clients.client.tls import Access
    from shoal.kit.component.spec import ModelSpec

MAX_SHOWN = 1000  # rows of a table or of one JSON array, which are held in memory
_SHOWN = 3  # numbers of a long vector


def infer(
    context: typer.Context,
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
            "--input",
            "-i",
            metavar="FILE",
            help="A .txt (a text per line), .csv, .jsonl, .parquet, .xlsx, .npy; or - for stdin.",
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="A .csv, .jsonl, .parquet or .npy to write; or a folder or s3:// URL, for many workers.",
        ),
    ] = None,
    form: Annotated[
        Literal["table", "csv", "jsonl"], typer.Option("--format", help="Format of the answers on standard output.")
    ] = "table",
    input_format: Annotated[Literal["txt", "csv", "jsonl"], typer.Option(help="Format of standard input.")] = "txt",
    text_column: Annotated[
        str, typer.Option(metavar="NAME", help="The column of texts. Default: `text`, or the input's name.")
    ] = "",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="INPUT=VALUE", help="An input that is the same for every row; may be repeated."),
    ] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option(
            "--column",
            metavar="INPUT=NAME,...",
            help="The column of an input, if it has another name; several columns form a vector. May be repeated.",
        ),
    ] = None,
    url: Url = "",
    api_key: ApiKey = "",
    ca_cert: CaCert = "",
    client_cert: ClientCert = "",
    protocol: Annotated[Protocol, typer.Option(help="How to ask the server.")] = "grpc",
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time-out of a request; with --stream, of each answer.")
    ] = 60.0,
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="The model. Default: the only ensemble, or the only model, of repository or server."
        ),
    ] = "",
    is_local: Annotated[
        bool, typer.Option("--local", help="Run the repository in this process, without a server.")
    ] = False,
    placement: Annotated[
        Literal["server", "client"],
        typer.Option(help="client: Python components run here, the other models on the server."),
    ] = "server",
    repository: Annotated[Path, typer.Option(help="For --local and --placement client.")] = Path("build/repository"),
    batch_size: Annotated[int | None, typer.Option(min=1, help="Rows per request.")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Requests in flight.")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over, and discard the answers of earlier runs.")
    ] = False,
    shard_rows: Annotated[
        int, typer.Option(min=1, metavar="ROWS", help="Rows per file of an output folder, about.")
    ] = 100_000,
    workers: Annotated[int, typer.Option(min=1, help="Processes that score an output folder.")] = 1,
    worker: Annotated[
        str, typer.Option(metavar="I/N", help="Score the files I, I+N, ... of an output folder that N commands share.")
    ] = "0/1",
    ray: Annotated[
        str, typer.Option(metavar="ADDRESS", help="The --workers of an output folder are on this Ray cluster; or auto.")
    ] = "",
    status: Annotated[str | None, typer.Option(metavar="FOLDER", help="Print how far an output folder is.")] = None,
    verify: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Read a complete output folder and its inputs again.")
    ] = None,
    merge: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Join a complete output folder to one --output FILE.")
    ] = None,
    is_stream: Annotated[
        bool,
        typer.Option("--stream", help="Print each answer as it comes, for a model that answers one row in pieces."),
    ] = False,
    is_full: Annotated[bool, typer.Option("--full", help="Print all numbers of long vectors.")] = False,
    is_curl: Annotated[
        bool, typer.Option("--curl", help="Print the request as a curl command instead of sending it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Send values from arguments, standard input or a file to a model; run the same command again to resume."""
    from shoal.cli.folders import check_no_urls, is_folder, look_at_folder, score_folder
    from shoal.cli.writing import write_file, write_stream
    from shoal.clients.bulk.inputs import make_feed, make_table, read_constants
    from shoal.clients.bulk.scoring import open_model, rehearse
    from shoal.clients.bulk.shards.shard_task import ScoringJob
    from shoal.clients.bulk.tables import TEXT
    from shoal.clients.client.calls import find_text_input
    from shoal.clients.client.client import Client

    if {status, verify, merge} != {None}:
        look_at_folder(context, status, verify, merge, output, as_json=as_json)
        return
    has_folder = output is not None and is_folder(output)
    file = None if output is None or has_folder else Path(output)
    if not has_folder:
        check_no_urls(source, output)
    _check_choices(values, source, placement, file, is_local=is_local)
    if is_local:
        refuse_ignored(
            context,
            f"{'' if is_curl else '--url'} --api-key-file --ca-cert --client-cert --protocol --timeout",
            "with --local, which asks no server",
        )
    elif placement == "server":
        refuse_ignored(context, "--repository", "without --local or --placement client")
    if output is None:
        refuse_ignored(context, "--fresh", "without --output")
    if has_folder:
        refuse_ignored(context, "--input-format --stream --curl --json --full", "with an --output folder")
    else:
        refuse_ignored(context, "--shard-rows --workers --worker --ray", "without an --output folder")
    if (output or as_json) and not has_folder:
        refuse_ignored(context, "--format", f"with {'--output, whose ending is the format' if output else '--json'}")
    if output and as_json:
        refuse_ignored(context, "--json", "with --output, whose ending is the format")
    if values or source not in (None, "-"):
        refuse_ignored(context, "--input-format", "without standard input")
    if is_stream or is_curl:
        refuse_ignored(context, "--batch-size --concurrency", f"with {'--stream' if is_stream else '--curl'}")
    if is_curl:
        refuse_ignored(context, "--output --json --full --format", "with --curl")
        refuse_ignored(
            context,
            "--api-key-file",
            "on the command that --curl prints",
            'Add to it: --header "Authorization: Bearer $SHOAL_API_KEY"',
        )
        if protocol == "grpc":
            refuse_ignored(context, "--protocol", "with --curl, whose request is HTTP")
    access: Access = {"api_key": api_key, "ca_cert": ca_cert, "client_cert": client_cert}
    given = parse_pairs("--set", settings, form="INPUT=VALUE", example="BERT_WEIGHT=0.7")
    fed = parse_pairs("--column", columns, form="INPUT=COLUMN", example="BERT_WEIGHT=my_column")
    where = "local" if is_local else placement
    if output is not None and has_folder:
        connect = partial(Client, url, protocol=protocol, timeout=timeout, **access)
        job = ScoringJob(model, where, repository, connect, batch_size, concurrency, text_column, fed, given)
        by, shape = (url or "here") if where == "server" else _identify(repository), form.replace("table", "")
        score_folder(output, source, job, by, shape, shard_rows, workers, worker, ray, is_fresh=fresh)
        return
    others = (output, settings, columns, text_column, is_local, is_stream, is_curl, placement == "client")
    if values and _is_text(values) and not any(others) and (form == "table" or as_json):
        with Client(url, protocol=protocol, timeout=timeout, **access) as client:
            if _answer_text(client, model, values[0], as_json=as_json, is_full=is_full):
                return
    if source and source.endswith(".npy"):
        values, source = [f"@{source}"], None
    if is_stream:
        _check_stream(values, {"--input": source, "--output": output, "--curl": is_curl, "--format": form != "table"})
    with ExitStack() as held:
        table = None if values else held.enter_context(_open_table(source, f".{input_format}"))
        spoken = "http" if is_curl else protocol
        endpoint = held.enter_context(
            open_model(
                model,
                where,
                repository,
                partial(Client, url, protocol=spoken, timeout=timeout, **access),
                max_rows=batch_size,
                num_callers=concurrency,
            )
        )
        spec = endpoint.spec
        table = table or make_table(values or (), spec)
        constants = read_constants(given, spec)
        feed = make_feed(spec, table, text_column=text_column, columns=fed, constants=constants)
        if is_curl:
            _print_curl(table, feed, url, {"--cacert": ca_cert, "--cert": client_cert})
            return
        if is_stream:
            _print_stream(table, endpoint, feed, as_json=as_json)
            return
        is_text = list(feed.columns) == [find_text_input(spec)]
        if is_text and (constants or not values):  # a trial request before many, which would all fail in the same way
            rehearse(endpoint, constants, must_answer=not fed)
        if file:
            scored_by = {"server": url or "here"} if where == "server" else {"repository": _identify(repository)}
            answers = {tensor.name: [tensor.dtype, *tensor.dims] for tensor in spec.outputs}
            kept = {
                "model": spec.name, "place": where, **scored_by, "batch_size": endpoint.max_rows, "answers": answers,
                "input_format": table.source.kind, "text_column": text_column or TEXT, "set": given, "column": fed,
            }  # fmt: skip
            summary = write_file(table, endpoint, feed, file, source, kept, is_fresh=fresh)
        elif form == "table" or as_json:
            summary = _show(table, endpoint, feed, as_json=as_json, is_full=is_full)
        else:
            summary = write_stream(table, endpoint, feed, form)
    _exit_if_failed(summary.num_failed, summary.num_rows)


def _exit_if_failed(num_failed: int, num_rows: int) -> None:
    if num_failed:
        ERR.print(f"{num_failed:,} of {num_rows:,} rows have an error.", style="red")
        raise typer.Exit(1)


# --- what is asked --------------------------------------------------------------------------------------------------


def _check_choices(
    values: Sequence[str] | None, source: str | None, placement: str, output: Path | None, *, is_local: bool
) -> None:
    if values and source:
        raise InputError(
            f"There are values, such as {values[0]!r}, and an --input.",
            "Leave one out; an input that is the same for every row of the file: --set INPUT=VALUE",
        )
    if is_local and placement == "client":
        raise InputError("--local and --placement client exclude each other.", "Leave one out.")
    if output:
        from shoal.clients.bulk.output_formats import OUTPUT_KINDS

        if output.suffix.lower() not in OUTPUT_KINDS:
            kinds = ", ".join(OUTPUT_KINDS)
            raise InputError(f"{output} is not one of {kinds}.", "Give the output one of these endings.")
        if output.exists() and source and Path(source).exists() and output.samefile(source):
            raise InputError(f"{output} is the input.", "Name another file to write.")


def _check_stream(values: Sequence[str] | None, others: dict[str, object]) -> None:
    given = [option for option, value in others.items() if value]
    if given:
        raise InputError(f"--stream and {given[0]} exclude each other.", "Give the row as arguments: INPUT=VALUE")
    if not values:
        raise InputError("--stream takes one row.", 'Give a text: shoal infer --stream "A text."; or INPUT=VALUE')


@contextmanager
def _open_table(source: str | None, stream_kind: str) -> Iterator[Table[Row]]:
    from shoal.clients.bulk.tables import open_stream, scan_table

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


def _only_dicts(table: Table[Row]) -> list[Mapping[str, Any]]:
    return [row for _, row in table.rows if isinstance(row, dict)]


def _identify(repository: Path) -> str:
    """Return the repository's identity, or its path if shoal did not compose it."""
    from shoal.authoring.repository.manifest import read_manifest

    return str(read_manifest(repository).get("identity") or repository.resolve())


# --- one text ------------------------------------------------------------------------------------------------------


def _is_text(values: Sequence[str]) -> bool:
    """Whether the arguments are one text: no file, and no input with a value."""
    is_one = len(values) == 1 and "=" not in values[0] and not values[0].startswith("@")
    return is_one and not os.path.isfile(values[0])  # noqa: PTH113  # Path.is_file fails for a long text


def _answer_text(client: Client, model: str, text: str, *, as_json: bool, is_full: bool) -> bool:
    """Send one text to a server, and print its answer or error. Return False if the model needs other inputs."""
    from shoal.clients.client.calls import find_text_input, to_rows

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
    _exit_if_failed(_print_answers([({"text": text}, answer)], ["text"], spec, as_json=as_json, is_full=is_full), 1)
    return True


# --- what is printed ------------------------------------------------------------------------------------------------


def _show(table: Table[Row], model: Endpoint, feed: Feed, *, as_json: bool, is_full: bool) -> Summary:
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


def _print_stream(table: Table[Row], model: Endpoint, feed: Feed, *, as_json: bool) -> None:
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


def _print_curl(table: Table[Row], feed: Feed, url: str, files: Mapping[str, str]) -> None:
    from shoal.clients.bulk.inputs import write_curl

    rows = [feed.inputs(row) for row in _only_dicts(table)]
    command = write_curl(url or "127.0.0.1:8000", feed.model, {name: [row[name] for row in rows] for name in rows[0]})
    typer.echo(command + "".join(f" {option} {shlex.quote(path)}" for option, path in files.items() if path))
