"""Console output of the command line: standard output and error, tables, progress."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

if TYPE_CHECKING:
    from shoal.client.copies import Copies

OUT, ERR = Console(highlight=False), Console(stderr=True, highlight=False)
LINE_EVERY = 60.0  # seconds
MIN_TEXT_WIDTH = 20  # of a text in a table, on however narrow a terminal


def plain(text: str) -> str:
    """Escape Rich markup in ``text``."""
    from rich.markup import escape

    return escape(text)


@contextmanager
def show_progress() -> Iterator[Any]:
    """Show progress: a bar per stage on a terminal; elsewhere a line per stage, and one per minute in a long one."""
    if not ERR.is_terminal:
        yield _Lines().show
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=ERR) as progress:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage)
            current = progress.tasks[tasks[stage]]
            # A stage ends by reporting 1 of 1; a bar that has counted steps keeps its own total.
            if (done, total) == (1, 1) and (current.total or 0) > 1 and current.finished:
                return
            progress.update(tasks[stage], completed=done, total=total)

        yield show


@dataclass
class _Lines:
    stage: str = ""
    printed_at: float = 0.0

    def show(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self.stage:
            ERR.print(f"{stage} ...", soft_wrap=True)
        elif 0 < done < total and now - self.printed_at >= LINE_EVERY:
            ERR.print(f"{stage}: {done:,} of {total:,}", soft_wrap=True)
        else:
            return
        self.stage, self.printed_at = stage, now


@contextmanager
def show_rows() -> Iterator[Any]:
    """Show progress in rows: a bar with rate and time left on a terminal; elsewhere the same as a line per minute."""
    if not ERR.is_terminal:
        yield _RowLines().show
        return
    columns = (
        TextColumn("{task.fields[rows]:,} rows"),
        BarColumn(),
        TextColumn("{task.fields[rate]:,.0f} rows/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=ERR) as progress:
        task = progress.add_task("", total=None, rows=0, rate=0.0)
        pace = _Pace()

        def show(done: int, fraction: float | None) -> None:
            total = None if fraction is None else 1.0
            progress.update(task, completed=fraction or 0.0, total=total, rows=done, rate=pace.rate(done))

        yield show


@dataclass
class _Pace:
    """Rows per second since the first report, without the rows of an earlier run."""

    began: float = 0.0
    before: int = 0

    def rate(self, done: int) -> float:
        now = time.monotonic()
        if not self.began:
            self.began, self.before = now, done
        return (done - self.before) / max(now - self.began, 1e-3)


class _RowLines:
    def __init__(self) -> None:
        self._pace, self._printed_at = _Pace(), time.monotonic()
        self._first: float | None = None  # of the input, answered by an earlier run

    def show(self, done: int, fraction: float | None) -> None:
        rate, now = self._pace.rate(done), time.monotonic()
        self._first = fraction if self._first is None else self._first
        if now - self._printed_at < LINE_EVERY:
            return
        self._printed_at = now
        said = f"{done:,} rows, {rate:,.0f} rows/s"
        if fraction and self._first is not None and fraction > self._first:
            left = (now - self._pace.began) * (1 - fraction) / (fraction - self._first)
            said += f", about {left / 60:,.0f} min left"
        ERR.print(said, soft_wrap=True)


def print_table(
    given: Sequence[str], names: Sequence[str], rows: Iterable[tuple[Sequence[Any], Sequence[str]]], title: str = ""
) -> None:
    """Print one line per row: what was given, shortened to the width that the answers leave, and the answers, whole."""
    found = [(shown, answers) for shown, answers in rows]
    widths = [max([len(name), *(len(answers[at]) for _, answers in found)]) for at, name in enumerate(names)]
    room = max(MIN_TEXT_WIDTH, (OUT.width - 1 - sum(width + 3 for width in widths)) // max(1, len(given)) - 3)
    table = Table(
        *(Column(name, no_wrap=True, overflow="ellipsis") for name in given),
        *(Column(name, justify="right", min_width=width) for name, width in zip(names, widths, strict=True)),
        title=title or None,
    )
    for shown, answers in found:
        table.add_row(*(_short_text(value, room) for value in shown), *map(plain, answers))
    if sum(widths) + 3 * (len(names) + len(given)) + MIN_TEXT_WIDTH * len(given) > OUT.width:
        print_blocks((*given, *names), ((*(_short_text(v, OUT.width) for v in shown), *a) for shown, a in found))
    else:
        OUT.print(table)


def print_blocks(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows that are too wide for a table: a line per value, and a blank line after each row."""
    for row in rows:
        for name, value in zip(names, row, strict=True):
            OUT.print(f"{name}: {plain(str(value))}", soft_wrap=True)
        OUT.print()


def _short_text(text: Any, room: int) -> Text:
    shown = text.decode("utf-8", "backslashreplace") if isinstance(text, bytes) else str(text)
    line = Text(" ".join(shown[: 4 * room].encode("utf-8", "backslashreplace").decode().split()))
    line.truncate(room, overflow="ellipsis")
    return line


def print_copies(copies: Copies) -> None:
    """Print host-device copies, one line per edge, and the event counts of each model."""
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
