"""``shoal bench``: measure pipelines on a real server, and advise on what would make them faster."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from itertools import product
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
from shoal.errors import InputError, ServerError, ShoalError

if TYPE_CHECKING:
    from shoal.clients.client.tls import Access
    from shoal.lab.bench.record import BenchSettings
    from shoal.system.progress import OnProgress

QUICK = (1, 8, 32)  # rows per request


@dataclass(frozen=True)
class BenchAsked:
    """Options of one ``shoal bench``, as they were given."""

    repositories: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Repositories of one pipeline, such as build/cpu build/gpu. Default: a running language model."
        ),
    ] = None
    model: Annotated[str, typer.Option(help="The ensemble, if a repository has several; or the language model.")] = ""
    rows: Annotated[
        Path | None,
        typer.Option("--inputs", help="Rows: a .csv, .jsonl, .parquet or .xlsx. Default: shoal's own texts."),
    ] = None
    text_column: Annotated[
        str, typer.Option(help="The column of texts. Default: `text`, or the column of the input's name.")
    ] = ""
    columns: Columns = None
    protocol: Annotated[Protocol, typer.Option(help="Protocol of the requests.")] = "grpc"
    batches: Annotated[str, typer.Option(help="Rows per request: 1,8,64. Default: 1, 2, 4 ... 512.")] = ""
    callers: Annotated[
        str, typer.Option(help="Callers in parallel: 1,16. Default: 1 and 16 for single rows, 2 for larger requests.")
    ] = ""
    url: Url = ""
    api_key: ApiKey = ""
    ca_cert: CaCert = ""
    client_cert: ClientCert = ""
    input_tokens: Annotated[str, typer.Option(help="Tokens per prompt of a language model. Default: 32.")] = ""
    output_tokens: Annotated[str, typer.Option(help="Tokens per answer of a language model. Default: 8,32,128.")] = ""
    streams: Annotated[str, typer.Option(help="Parallel streams of a language model. Default: 1,16.")] = ""
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
    """Measure pipelines on a real server: latency, throughput, and the time of each step.

    Without a repository, measure a running language model of `shoal serve` or Triton: time to the first token, time
    between tokens, tokens per second.
    """
    from shoal.lab.bench.record import BenchSettings
    from shoal.lab.bench.run import make_folder, write

    if asked.out:
        make_folder(asked.out)  # fail before measuring if it cannot be written
    times = (1.0, 0.3, 2) if asked.is_quick else (4.0, 1.0, 3)
    source = context.get_parameter_source("protocol")
    is_http = asked.url.startswith(("http://", "https://")) and source is not None and source.name == "DEFAULT"
    settings = BenchSettings(
        "http" if is_http else asked.protocol, asked.seconds or times[0], times[1], asked.repeats or times[2]
    )
    _refuse_options(context, asked)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop the servers in order, as on Ctrl-C
    with show_progress() as show:
        measure = _measure_rows if asked.repositories else _measure_tokens
        record = measure(asked, settings, show)
    files, missing = write(record, asked.out) if asked.out else ([], "")
    if asked.as_json:
        print_json(record)
        if missing:
            ERR.print(plain(missing), soft_wrap=True)
        return
    _print(record, is_report=asked.is_report)
    for path in files:
        OUT.print(f"written: {path}", soft_wrap=True, markup=False)
    if missing:
        OUT.print(plain(missing), soft_wrap=True)


def _refuse_options(context: typer.Context, asked: BenchAsked) -> None:
    """Refuse options of the other kind of measurement: of repositories, or of a running language model."""
    of_rows = {
        "--inputs": asked.rows,
        "--batches": asked.batches,
        "--callers": asked.callers,
        "--report": asked.is_report,
    }
    sizes = {"--input-tokens": asked.input_tokens, "--output-tokens": asked.output_tokens}
    of_tokens = {"--url": asked.url, **sizes, "--streams": asked.streams}
    if wrong := [name for name, value in (of_tokens if asked.repositories else of_rows).items() if value]:
        raise InputError(
            f"{wrong[0]} is {'not ' if asked.repositories else ''}for repositories.",
            "Measure a running server: shoal serve REPOSITORY; then shoal bench --output-tokens 32"
            if asked.repositories
            else f"Name one: shoal bench build/repository {wrong[0]} ...",
        )
    if asked.repositories:
        refuse_ignored(
            context, "--api-key-file --ca-cert --client-cert", "with repositories, whose servers want no key"
        )
    if not asked.rows:
        refuse_ignored(context, "--text-column --column", "without --inputs")


def _measure_rows(asked: BenchAsked, settings: BenchSettings, show: OnProgress) -> dict[str, Any]:
    from shoal.cli.applications import sample_texts
    from shoal.lab.bench.run import BATCHES
    from shoal.lab.bench.run import bench as run_bench

    return run_bench(
        asked.repositories or (),
        settings,
        rows=asked.rows or sample_texts,
        model=asked.model,
        text_column=asked.text_column,
        columns=parse_pairs("--column", asked.columns, form="INPUT=COLUMN", example="x=a,b,c"),
        batches=_parse_numbers(asked.batches, "--batches", "1,8,64"),
        callers=_parse_numbers(asked.callers, "--callers", "1,16"),
        usual=QUICK if asked.is_quick else BATCHES,
        on_progress=show,
    )


def _measure_tokens(asked: BenchAsked, settings: BenchSettings, show: OnProgress) -> dict[str, Any]:
    from shoal.lab.bench.generation import bench_tokens
    from shoal.lab.bench.record import TokenCell

    lengths = (
        _parse_numbers(asked.input_tokens or "32", "--input-tokens", "32"),
        _parse_numbers(asked.output_tokens or "8,32,128", "--output-tokens", "8,32,128"),
        _parse_numbers(asked.streams or "1,16", "--streams", "1,16"),
    )
    access: Access = {"api_key": asked.api_key, "ca_cert": asked.ca_cert, "client_cert": asked.client_cert}
    cells = [TokenCell(*numbers) for numbers in product(*lengths)]
    try:
        return bench_tokens(asked.url, cells, settings, model=asked.model, on_progress=show, **access)
    except ServerError:
        if not asked.url or not _is_other_api(asked.url, access):
            raise
        raise InputError(
            f"The server at {asked.url} answers OpenAI's API, and not Triton's.",
            "Only servers of Triton and of shoal serve are measured so: serve its model with: shoal serve MODEL",
        ) from None


def _is_other_api(url: str, access: Access) -> bool:
    """Whether a server lists models as OpenAI's API does, and not as shoal serve does."""
    from shoal.clients.client.operators import read_page

    try:
        models = json.loads(read_page(url, "/v1/models", **access))["data"]
        return bool(models) and not any(each["owned_by"] == "shoal" for each in models)
    except (ShoalError, ValueError, KeyError, TypeError):
        return False


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
