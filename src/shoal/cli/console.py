"""Shared parts of the commands: options, output to the console, tables and progress."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from shoal.errors import InputError, printable
from shoal.system.progress import OnProgress

if TYPE_CHECKING:
    from shoal.clients.client.copies import Copies


class _Console(Console):
    """Console that escapes control characters and line ends: names from files print no line or colour of their own.

    What has several lines is printed line by line, or as a ``Text``.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


OUT, ERR = _Console(highlight=False, emoji=False), _Console(stderr=True, highlight=False, emoji=False)
LINE_EVERY = 60.0  # seconds
MIN_TEXT_WIDTH = 20  # characters of a text in a table, however narrow the terminal is


def plain(text: str) -> str:
    """Escape Rich markup in ``text``."""
    from rich.markup import escape

    return escape(text)


@contextmanager
def show_progress() -> Iterator[OnProgress]:
    """Show progress, and yield a callback that takes a stage, its steps done, and its total of steps (0: unknown).

    On a terminal, each stage has a bar. Elsewhere, a line is printed for each stage, and one per minute in a long
    stage.
    """
    from rich import progress as bars  # takes long to import

    if not ERR.is_terminal:
        yield _Lines().show
        return
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=ERR) as progress:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage)
            current = progress.tasks[tasks[stage]]
            # A stage ends by reporting 1 of 1; a bar that has counted steps keeps its own total.
            if (done, total) == (1, 1) and (current.total or 0) > 1 and current.finished:
                return
            progress.update(tasks[stage], completed=done, total=total or None)

        yield show


@dataclass
class _Lines:
    stage: str = ""
    printed_at: float = 0.0

    def show(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self.stage:
            ERR.print(f"{stage} ...", soft_wrap=True)
        elif done and done != total and now - self.printed_at >= LINE_EVERY:
            ERR.print(f"{stage}: {done:,}" + (f" of {total:,}" if total else ""), soft_wrap=True)
        else:
            return
        self.stage, self.printed_at = stage, now


@contextmanager
def show_rows() -> Iterator[Callable[[int, float | None], None]]:
    """Show progress in rows. The total is estimated from the fraction of the input that has been read."""
    with show_progress() as show:
        yield lambda done, fraction: show("rows", done, max(done, round(done / fraction)) if fraction else 0)


def print_table(
    given: Sequence[str], names: Sequence[str], rows: Iterable[tuple[Sequence[Any], Sequence[str]]], title: str = ""
) -> None:
    """Print one line per row: the inputs, shortened to the width that remains, and the answers in full."""
    found = [(shown, answers) for shown, answers in rows]
    widths = [max([len(name), *(len(answers[at]) for _, answers in found)]) for at, name in enumerate(names)]
    room = max(MIN_TEXT_WIDTH, (OUT.width - 1 - sum(width + 3 for width in widths)) // max(1, len(given)) - 3)
    table = Table(
        *(Column(name, no_wrap=True, overflow="ellipsis") for name in given),
        *(Column(name, justify="right", min_width=width) for name, width in zip(names, widths, strict=True)),
        title=title or None,
    )
    for shown, answers in found:
        table.add_row(*(_short_text(value, room) for value in shown), *(Text(printable(text)) for text in answers))
    if sum(widths) + 3 * (len(names) + len(given)) + MIN_TEXT_WIDTH * len(given) > OUT.width:
        print_blocks((*given, *names), ((*(_short_text(v, OUT.width) for v in shown), *a) for shown, a in found))
    else:
        OUT.print(table)


def print_blocks(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows that are too wide for a table: a line per value, and a blank line after each row."""
    for row in rows:
        for name, value in zip(names, row, strict=True):
            OUT.print(f"{name}: {value}", soft_wrap=True, markup=False)  # Rich parses long texts slowly
        OUT.print()


def _short_text(text: Any, room: int) -> Text:
    shown = text.decode("utf-8", "backslashreplace") if isinstance(text, bytes) else str(text)
    line = Text(printable(" ".join(shown[: 4 * room].split())))
    line.truncate(room, overflow="ellipsis")
    return line


def print_copies(copies: Copies) -> None:
    """Print the copies between host and device by model, tensor and direction, and each model's counts of batches."""
    table = Table("model", "edge", "direction", *(Column(name, justify="right") for name in ("copies", "bytes", "ms")))
    for copy in copies:
        traffic = copy.traffic
        numbers = (f"{traffic.copies:,}", f"{traffic.num_bytes:,}", f"{traffic.seconds * 1000:,.1f}")
        table.add_row(copy.model, *copy.edge, *numbers)
    OUT.print(table if table.row_count else "Nothing was copied between host and device.")
    for model, events in copies.events.items():
        counts = ", ".join(f"{number:,} {event.replace('_', ' ')}" for event, number in events.items())
        OUT.print(f"{model}: {counts}", soft_wrap=True)


def print_json(value: Any, default: Callable[[Any], Any] | None = None) -> None:
    """Print JSON on standard output; lone surrogates are escaped, and ``default`` converts values of other types."""
    text = json.dumps(value, indent=1, ensure_ascii=False, default=default)
    is_writable = not any("\ud800" <= character <= "\udfff" for character in text)
    typer.echo(text if is_writable else json.dumps(value, indent=1, default=default))


# Options

COMMON = "Common options"
Json = Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel=COMMON)]
Placement = Annotated[
    Literal["cpu", "hybrid", "gpu"] | None,
    typer.Option(
        help="Where the models run, instead of where each one's own configuration says; hybrid: pre- and postprocessing"
        " in the client, the models on the GPU."
    ),
]
Protocol: TypeAlias = Literal["grpc", "http"]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        "--column",
        metavar="INPUT=NAME,...",
        help="The column of an input, if it has another name; several columns form a vector. May be repeated.",
    ),
]
Url = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        rich_help_panel=COMMON,
        help="The server; with TLS: grpcs://HOST:PORT, https://HOST:PORT. Default: 127.0.0.1, at the usual port.",
    ),
]


def _read_api_key(file: str) -> str:
    """Return the key in a file or, without one, in ``SHOAL_API_KEY``; an option's callback.

    Raises:
        InputError: the file cannot be read, or the key is damaged.
    """
    from shoal.clients.keys import VARIABLE, check_key
    from shoal.system.files import read_text

    try:
        text = read_text(file) if file else os.environ.get(VARIABLE, "")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InputError(f"--api-key-file {file} cannot be read: {reason}.", "Give the file with the key.") from None
    return check_key(text, file or VARIABLE) if file or text else ""


ApiKey = Annotated[
    str,
    typer.Option(
        "--api-key-file",
        metavar="FILE",
        help="A file with the key for the server. Default: the key in SHOAL_API_KEY, if it is set.",
        callback=_read_api_key,
        rich_help_panel=COMMON,
    ),
]


CaCert = Annotated[
    str,
    typer.Option(
        "--ca-cert",
        metavar="FILE",
        rich_help_panel=COMMON,
        help="For grpcs:// and https://: a file with the certificates to trust, in PEM. Default: public authorities.",
    ),
]
ClientCert = Annotated[
    str,
    typer.Option(
        "--client-cert",
        metavar="FILE",
        help="For grpcs:// and https://: a file with your certificate and its key.",
        rich_help_panel=COMMON,
    ),
]


def check_target(target: str | None) -> str | None:
    """Check a target, and tell if its release is newer than what is known; an option's callback."""
    from shoal.authoring.environment.targets import LATEST, NEWEST, parse_release

    if target and parse_release(target) > NEWEST:
        told = f"Release {target} is not known: it is taken to be like {LATEST}, the newest that is."
        ERR.print(f"[yellow]warning:[/] {told}", soft_wrap=True)
    return target


Target = Annotated[
    str,
    typer.Option(
        metavar="RELEASE", help="embedded, or a release of NVIDIA's container such as 26.06.", callback=check_target
    ),
]
Gpu = Annotated[
    str,
    typer.Option(
        metavar="NUMBERS", help="Pin the models to these GPUs: 0,1 (none: placement hybrid with the models on the CPU)."
    ),
]
Reserved = Annotated[int, typer.Option("--reserve-requests", help="Requests in flight for which memory is reserved.")]


def parse_pairs(option: str, given: Iterable[str] | None, *, form: str = "NAME=VALUE", example: str) -> dict[str, str]:
    """Parse pairs such as ``NAME=VALUE`` that are given for ``option``, each name once.

    Raises:
        InputError: a pair has no name or no ``=``, or a name is given twice.
    """
    pairs: dict[str, str] = {}
    for text in given or ():
        name, sign, value = text.partition("=")
        if not (name and sign):
            raise InputError(f"{option} {text!r} is not {form}.", f"For example: {option} {example}")
        if name in pairs:
            raise InputError(f"{option} {name}=... is given twice.", "Give it once.")
        pairs[name] = value
    return pairs


def refuse_ignored(context: typer.Context, options: str, why: str, fix: str = "Leave it out.") -> None:
    """Refuse options that would have no effect; ``why`` ends the message: ``--url has no effect with --local.``

    ``options`` are names of options or arguments, separated by spaces. What is not on the command line is not refused.

    Raises:
        InputError: one of the options is on the command line.
    """
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE" and {*parameter.opts} & {*options.split()}:
            shown = parameter.opts[0] if parameter.param_type_name == "option" else parameter.opts[0].upper()
            raise InputError(f"{shown} has no effect {why}.", fix)
