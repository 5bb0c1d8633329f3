"""Options of ``shoal infer``, and which of them exclude others."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shoal.cli.console import ApiKey, CaCert, ClientCert, Columns, Json, Protocol, Url, parse_pairs, refuse_ignored
from shoal.errors import InputError

if TYPE_CHECKING:
    from shoal.clients.bulk.shards.shard_task import ScoringJob
    from shoal.clients.client.tls import Access
    from shoal.kit.component.spec import ModelSpec


@dataclass(frozen=True)
class Asked:
    """Options of one ``shoal infer``, as they were given."""

    values: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT | INPUT=VALUE",
            help="Texts; or inputs by name, as X=[5.1,3.5] or X=@file.npy; or a whole @request.json.",
        ),
    ] = None
    source: Annotated[
        str | None,
        typer.Option(
            "--input",
            "-i",
            metavar="FILE",
            help="A .txt (a text per line), .csv, .jsonl, .parquet, .xlsx, .npy; or - for stdin.",
        ),
    ] = None
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "--out",
            "-o",
            metavar="FILE",
            help="A .csv, .jsonl, .parquet or .npy to write; - for stdout, as CSV unless --format says otherwise; or a "
            "folder or s3:// URL, for many workers.",
        ),
    ] = None
    form: Annotated[
        Literal["table", "csv", "jsonl"], typer.Option("--format", help="Format of the answers on standard output.")
    ] = "table"
    input_format: Annotated[
        Literal["txt", "csv", "jsonl"] | None,
        typer.Option(
            help="Format of standard input. Default: txt; for a model without a text input csv, or jsonl if it begins "
            "with {."
        ),
    ] = None
    text_column: Annotated[
        str, typer.Option(metavar="NAME", help="The column of texts. Default: `text`, or the input's name.")
    ] = ""
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="INPUT=VALUE", help="An input that is the same for every row; may be repeated."),
    ] = None
    columns: Columns = None
    url: Url = ""
    api_key: ApiKey = ""
    ca_cert: CaCert = ""
    client_cert: ClientCert = ""
    protocol: Annotated[Protocol, typer.Option(help="How to ask the server.")] = "grpc"
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time-out of a request; with --stream, of each answer.")
    ] = 60.0
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="The model. Default: the only ensemble, or the only model, of repository or server."
        ),
    ] = ""
    is_local: Annotated[bool, typer.Option("--local", help="Run the repository in this process, without a server.")] = (
        False
    )
    placement: Annotated[
        Literal["server", "client"],
        typer.Option(help="client: Python components run here, the other models on the server."),
    ] = "server"
    repository: Annotated[Path, typer.Option(help="For --local and --placement client.")] = Path("build/repository")
    batch_size: Annotated[int | None, typer.Option(min=1, help="Rows per request.")] = None
    concurrency: Annotated[int | None, typer.Option(min=1, help="Requests in flight.")] = None
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over, and discard the answers of earlier runs.")] = False
    shard_rows: Annotated[
        int, typer.Option(min=1, metavar="ROWS", help="Rows per file of an output folder, about.")
    ] = 100_000
    workers: Annotated[int, typer.Option(min=1, help="Processes that score an output folder.")] = 1
    worker: Annotated[
        str, typer.Option(metavar="I/N", help="Score the files I, I+N, ... of an output folder that N commands share.")
    ] = "0/1"
    ray: Annotated[
        str, typer.Option(metavar="ADDRESS", help="The --workers of an output folder are on this Ray cluster; or auto.")
    ] = ""
    is_stream: Annotated[
        bool,
        typer.Option("--stream", help="Print each answer as it comes, for a model that answers one row in pieces."),
    ] = False
    is_full: Annotated[bool, typer.Option("--full", help="Print all numbers of long vectors.")] = False
    is_curl: Annotated[
        bool, typer.Option("--curl", help="Print the request as a curl command instead of sending it.")
    ] = False
    as_json: Json = False

    def resolve_output(self, *, has_form: bool) -> Asked:
        """Return the options for an output ``-``, standard output: in CSV, unless they have another form."""
        if self.output != "-":
            return self
        is_table = not (has_form or self.as_json or self.is_stream or self.is_curl)
        return replace(self, output=None, form="csv" if is_table else self.form)

    @property
    def where(self) -> str:
        """Return the place where the models run: ``local``, ``server`` or ``client``."""
        return "local" if self.is_local else self.placement

    @property
    def has_folder(self) -> bool:
        """Whether the output is a folder, by its name: it has no ending."""
        return self.output is not None and not (Path(self.output).suffix or Path(self.output).is_file())

    @property
    def file(self) -> Path | None:
        """The file to write, if any."""
        return None if self.output is None or self.has_folder else Path(self.output)

    @property
    def is_shown(self) -> bool:
        """Whether answers are shown as a table or as one JSON array."""
        return self.form == "table" or self.as_json

    @cached_property
    def constants(self) -> dict[str, str]:
        """Values of the inputs that are the same for every row, by name."""
        return parse_pairs("--set", self.settings, form="INPUT=VALUE", example="BERT_WEIGHT=0.7")

    @cached_property
    def fed(self) -> dict[str, str]:
        """Columns of inputs that have another name, by the input's name."""
        example = "BERT_WEIGHT=my_column; the column of the texts: --text-column my_column"
        return parse_pairs("--column", self.columns, form="INPUT=COLUMN", example=example)

    @property
    def scored_by(self) -> str:
        """Identity of the server, or of the repository; of one that shoal did not compose, its path."""
        if self.where == "server":
            return self.url or "here"
        from shoal.authoring.repository.manifest import read_manifest

        return str(read_manifest(self.repository).get("identity") or self.repository.resolve())

    def connect(self) -> Any:
        """Return a function that opens a client of the server."""
        from shoal.clients.client.client import Client

        access: Access = {"api_key": self.api_key, "ca_cert": self.ca_cert, "client_cert": self.client_cert}
        spoken = "http" if self.is_curl else self.protocol
        return partial(Client, self.url, protocol=spoken, timeout=self.timeout, **access)

    def make_job(self) -> ScoringJob:
        """Return the model and the options, as processes that score shards receive them."""
        from shoal.clients.bulk.shards.shard_task import ScoringJob

        columns: dict[str, Any] = {"text_column": self.text_column, "columns": self.fed, "constants": self.constants}
        sizes = self.batch_size, self.concurrency
        return ScoringJob(self.model, self.where, self.repository, self.connect(), *sizes, **columns)

    def describe(self, spec: ModelSpec, max_rows: int | None, **others: str) -> dict[str, Any]:
        """Return what a later run must have in common with this one to resume it."""
        answers = {tensor.name: [tensor.dtype, *tensor.dims] for tensor in spec.outputs}
        by = "server" if self.where == "server" else "repository"
        scored = {"model": spec.name, "place": self.where, by: self.scored_by, "batch_size": max_rows}
        return {**scored, "answers": answers, **others, "set": self.constants, "column": self.fed}


def check_options(context: typer.Context, asked: Asked) -> None:
    """Refuse options that exclude each other or would have no effect.

    Raises:
        InputError: there are such options.
    """
    if not asked.has_folder:
        _check_no_urls(asked.source, asked.output)
    _check_choices(asked)
    for is_so, options, *why in _find_ignored(asked):
        if is_so:
            refuse_ignored(context, options, *why)
    _ = asked.constants, asked.fed  # mistakes in them are reported before anything is opened


def _find_ignored(asked: Asked) -> Iterator[tuple[Any, ...]]:
    """Yield conditions, each with the options that then have no effect, why, and perhaps a fix."""
    server = f"{'' if asked.is_curl else '--url'} --api-key-file --ca-cert --client-cert --protocol --timeout"
    ending = f"with {'--output, whose ending is the format' if asked.output else '--json'}"
    header = 'Add to it: --header "Authorization: Bearer $SHOAL_API_KEY"'
    is_alone = asked.is_stream or asked.is_curl
    yield from (
        (asked.is_local, server, "with --local, which asks no server"),
        (asked.where == "server", "--repository", "without --local or --placement client"),
        (asked.output is None, "--fresh", "without --output"),
        (asked.has_folder, "--input-format --stream --curl --json --full", "with an --output folder"),
        (not asked.has_folder, "--shard-rows --workers --worker --ray", "without an --output folder"),
        ((asked.output or asked.as_json) and not asked.has_folder, "--format", ending),
        (asked.output, "--json", "with --output, whose ending is the format"),
        (asked.values or asked.source not in (None, "-"), "--input-format", "without standard input"),
        (is_alone, "--batch-size --concurrency", f"with {'--stream' if asked.is_stream else '--curl'}"),
        (asked.is_curl, "--output --json --full --format", "with --curl"),
        (asked.is_curl, "--api-key-file", "on the command that --curl prints", header),
        (asked.is_curl and asked.protocol == "grpc", "--protocol", "with --curl, whose request is HTTP"),
    )


def _check_choices(asked: Asked) -> None:
    output, source = asked.file, asked.source
    if asked.values and source:
        raise InputError(
            f"There are values, such as {asked.values[0]!r}, and an --input.",
            "Leave one out; an input that is the same for every row of the file: --set INPUT=VALUE",
        )
    if asked.is_local and asked.placement == "client":
        raise InputError("--local and --placement client exclude each other.", "Leave one out.")
    if output:
        from shoal.clients.bulk.output_formats import OUTPUT_KINDS

        if output.suffix.lower() not in OUTPUT_KINDS:
            kinds = ", ".join(OUTPUT_KINDS)
            raise InputError(f"{output} is not one of {kinds}.", "Give the output one of these endings.")
        if not output.parent.is_dir():
            raise InputError(
                f"There is no folder {output.parent}.", f"Type: mkdir -p {shlex.quote(str(output.parent))}"
            )
        if output.exists() and source and Path(source).exists() and output.samefile(source):
            raise InputError(f"{output} is the input.", "Name another file to write.")


def check_stream(asked: Asked) -> None:
    """Refuse what a stream of answers to one row cannot have.

    Raises:
        InputError: there is no row, or an option of many rows.
    """
    others = {"--input": asked.source, "--output": asked.output, "--curl": asked.is_curl}
    given = [option for option, value in {**others, "--format": asked.form != "table"}.items() if value]
    if given:
        raise InputError(f"--stream and {given[0]} exclude each other.", "Give the row as arguments: INPUT=VALUE")
    if not asked.values:
        raise InputError("--stream takes one row.", 'Give a text: shoal infer --stream "A text."; or INPUT=VALUE')


def _check_no_urls(*files: str | None) -> None:
    """Refuse object storage where there is no output folder.

    Raises:
        InputError: a file is in object storage.
    """
    from shoal.clients.bulk.shards.folders import is_url

    for file in files:
        if is_url(file or ""):
            raise InputError(
                f"{file} is in object storage, which needs an output folder.", "Its name has no ending: --output FOLDER"
            )
