"""``shoal bench``: measure pipelines on a real server, and advise on what would make them faster."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table
from rich.text import Text

from shoal.cli.console import (
    ERR,
    OUT,
    ApiKey,
    CaCert,
    ClientCert,
    Columns,
    Json,
    Protocol,
    Url,
    parse_pairs,
    plain,
    print_json,
    refuse_ignored,
    show_progress,
)
from shoal.cli.records import takes_record
from shoal.errors import InputError

if TYPE_CHECKING:
    from shoal.clients.client.tls import Access
    from shoal.system.progress import OnProgress

QUICK = (1, 8, 32)  # rows per request


@dataclass(frozen=True)
class BenchAsked:
    """Options of one ``shoal bench``, as they were given."""

    subjects: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SUBJECT]...",
            help="Repositories, as build/cpu, and running servers, as HOST:PORT; or NAME= either, for the tables."
            " Default: the server at --url.",
        ),
    ] = None
    model: Annotated[
        list[str] | None,
        typer.Option(help="The model, if a subject has several; repeat it to name one for each subject."),
    ] = None
    rows: Annotated[
        Path | None,
        typer.Option(
            "--inputs", help="Rows or prompts: a .csv, .jsonl, .parquet or .xlsx. Default: shoal's own texts."
        ),
    ] = None
    text_column: Annotated[
        str, typer.Option(help="The column of texts. Default: `text`, or the column of the input's name.")
    ] = ""
    columns: Columns = None
    protocol: Annotated[Protocol, typer.Option(help="Protocol of the requests.")] = "grpc"
    batches: Annotated[
        str, typer.Option(help="Rows, or prompts, per request: 1,8,64. Default: 1, 2, 4 ... 512 rows; 1 prompt.")
    ] = ""
    concurrency: Annotated[
        str,
        typer.Option(
            help="Requests at a time: 1,16. Default: 1 and 16 for single rows and for tokens, 2 for larger requests."
        ),
    ] = ""
    url: Url = ""
    api_key: ApiKey = ""
    ca_cert: CaCert = ""
    client_cert: ClientCert = ""
    placement: Annotated[
        str,
        typer.Option(
            help="Where the Python components of a repository's pipeline run: server, client, or both in turns,"
            " server,client. Default: as composed."
        ),
    ] = ""
    input_tokens: Annotated[str, typer.Option(help="Tokens per prompt of a language model. Default: 32.")] = ""
    output_tokens: Annotated[str, typer.Option(help="Tokens per answer of a language model. Default: 8,32,128.")] = ""
    tokenizer: Annotated[
        str, typer.Option(help="Folder of a language model's tokenizer, to count tokens that its server does not.")
    ] = ""
    seconds: Annotated[float | None, typer.Option(min=0.1, help="Seconds per load, after its warm-up. Default: 4.")] = (
        None
    )
    repeats: Annotated[int | None, typer.Option(min=1, help="How often each load is measured. Default: 3.")] = None
    is_quick: Annotated[
        bool,
        typer.Option("--quick", help="A first look: requests of 1, 8 and 32 rows, each measured twice for 1 second."),
    ] = False
    is_report: Annotated[
        bool, typer.Option("--report", help="Name the bottleneck, what would help, and what would not.")
    ] = False
    out: Annotated[Path | None, typer.Option(help="Write bench-DATE.json, .md and pictures to this folder.")] = None
    as_json: Json = False


@takes_record(BenchAsked)
def bench(context: typer.Context, asked: BenchAsked) -> None:
    """Measure models on a real server, several in turns: latency, throughput, the time of each step; or tokens.

    A repository is served for the measurement; a running server may be any Triton, shoal serve, or a server with
    OpenAI's API. Language models are measured in tokens: time to the first token, time between tokens, tokens per
    second.
    """
    from shoal.lab.bench.run import make_folder, write

    if asked.out:
        make_folder(asked.out)  # fail before measuring if it cannot be written
    if not asked.rows:
        refuse_ignored(context, "--text-column --column", "without --inputs")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop the servers in order, as on Ctrl-C
    with show_progress() as show:
        record = _measure(context, asked, show)
    files, missing = write(record, asked.out) if asked.out else ([], "")
    if asked.as_json:
        print_json(record)
        if missing:
            ERR.print(plain(missing), soft_wrap=True)
    else:
        _print(record, is_report=asked.is_report)
        for path in files:
            OUT.print(f"written: {path}", soft_wrap=True, markup=False)
        if missing:
            OUT.print(plain(missing), soft_wrap=True)
    if record["is_interrupted"]:
        raise typer.Exit(130)


def _measure(context: typer.Context, asked: BenchAsked, show: OnProgress) -> dict[str, Any]:
    from shoal.cli.applications import sample_texts
    from shoal.lab.bench.record import BenchSettings
    from shoal.lab.bench.run import BATCHES, Loads, Source, find_unit
    from shoal.lab.bench.run import bench as run_bench
    from shoal.lab.bench.target import PLACEMENTS, Servers, find_targets, names_server

    times = (1.0, 0.3, 2) if asked.is_quick else (4.0, 1.0, 3)
    source = context.get_parameter_source("protocol")
    wanted = asked.protocol if source is not None and source.name != "DEFAULT" else ""
    settings = BenchSettings(asked.seconds or times[0], times[1], asked.repeats or times[2])
    access: Access = {"api_key": asked.api_key, "ca_cert": asked.ca_cert, "client_cert": asked.client_cert}
    placements = asked.placement.split(",") if asked.placement else []
    if wrong := [each for each in placements if each not in PLACEMENTS]:
        raise InputError(f"--placement {wrong[0]!r} is not server or client.", "For example: --placement server,client")
    loads = Loads(
        _parse_numbers(asked.batches, "--batches", "1,8,64"),
        _parse_numbers(asked.concurrency, "--concurrency", "1,16"),
        _parse_numbers(asked.input_tokens, "--input-tokens", "32"),
        _parse_numbers(asked.output_tokens, "--output-tokens", "8,32,128"),
        QUICK if asked.is_quick else BATCHES,
    )
    columns = parse_pairs("--column", asked.columns, form="INPUT=COLUMN", example="x=a,b,c")
    rows = Source(sample_texts, asked.rows, asked.text_column, columns, asked.tokenizer)
    if asked.subjects and not asked.url and not any(map(names_server, asked.subjects)):
        refuse_ignored(
            context, "--api-key-file --ca-cert --client-cert", "with repositories, whose servers want no key"
        )
    targets = find_targets(asked.subjects or (), asked.model or (), Servers(asked.url, wanted, access), placements)
    if (unit := find_unit(targets, rows)) != "rows":
        refuse_ignored(context, "--report", f"with {targets[0].name}, which is measured in {unit}")
    return run_bench(targets, settings, rows, loads, on_progress=show)


def _parse_numbers(text: str, option: str, example: str) -> tuple[int, ...]:
    """Parse ``1,8`` as whole numbers above 0; an empty text gives no numbers."""
    try:
        numbers = tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        numbers = (0,)
    if any(number < 1 for number in numbers):
        raise InputError(
            f"{option} {text!r} is not a list of whole numbers above 0.", f"For example: {option} {example}"
        )
    return numbers


def _print(record: dict[str, Any], *, is_report: bool) -> None:
    from shoal.lab.bench.tables import make_sheets, remarks

    for sheet in make_sheets(record):
        columns = [
            Column(
                name, justify="left" if place < sheet.texts else "right", no_wrap=place < sheet.texts, overflow="fold"
            )
            for place, name in enumerate(sheet.columns)
        ]
        table = Table(*columns, title=sheet.title, title_justify="left", box=SIMPLE_HEAD, padding=0)
        for row in sheet.rows:
            table.add_row(*map(Text, row))
        OUT.print(table)
    for sentence in remarks(record):
        OUT.print(sentence, soft_wrap=True, markup=False)
    for label, advice in record["advice"].items() if is_report else ():
        OUT.print()
        OUT.print(label, soft_wrap=True, markup=False)
        for entry in advice:
            _print_advice(entry)


def _print_advice(advice: dict[str, Any]) -> None:
    sign = "[green]+[/]" if advice["helps"] else "[yellow]-[/]"
    OUT.print(f"{sign} {plain(advice['what'])} {plain(advice['why'])}", soft_wrap=True)
    if advice["lines"]:
        OUT.print(f"    in {plain(advice['model'])}/config.pbtxt, instead of its present settings:", soft_wrap=True)
    for line in advice["lines"].splitlines():
        OUT.print(f"      {line}", soft_wrap=True, markup=False)
