"""Plots of a benchmark's record: throughput and latency by rows per request; and the style of all plots."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import needs
from shoal.lab.bench.tables import Record

if TYPE_CHECKING:
    from typing import BinaryIO

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe & Ito, "Color Universal Design" (2008): distinguishable with every kind of colour vision.
_LINES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#767676")
_MARKERS = ("o", "s", "D", "^", "v")
_WIDTH = 8.0  # inches
_STYLE = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 9,
    "font.size": 9,
    "legend.frameon": False,
    "svg.hashsalt": "shoal",  # the same numbers give the same bytes
    "text.parse_math": False,  # a dollar in a name is a dollar
}


@contextmanager
def drawing(extra: str = "draw") -> Iterator[None]:
    """Apply the style of shoal's plots, independent of any matplotlibrc, inside the context.

    Raises:
        SetupError: matplotlib is not installed; ``extra`` of shoal brings it.
    """
    with needs(extra):
        import matplotlib.style
    with matplotlib.style.context(["default", _STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a word in a script the font lacks
        yield


def make_figure(width: float, height: float, columns: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    """Make a figure, in inches, without pyplot, and its axes side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="compressed", facecolor="white")
    axes = figure.subplots(1, columns, squeeze=False, **options)
    return figure, list(axes.ravel())


def save(figure: Figure, file: Path | BinaryIO) -> None:
    """Write a figure as SVG."""
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})


def draw(record: Record, stem: Path) -> list[Path]:
    """Draw the plots ``STEM-throughput.svg`` and ``STEM-latency.svg``, where STEM is ``stem``; return their paths.

    Raises:
        SetupError: matplotlib is not installed.
    """
    with drawing():
        return [_draw(record, stem.with_name(f"{stem.name}-{name}.svg"), name) for name in ("throughput", "latency")]


def draw_precisions(plan: Record, path: Path) -> None:
    """Draw what `shoal tune` measured: rows per second of each precision, by rows per request."""
    shown = [each for each in plan["candidates"] if "rows_per_s" in each]
    with drawing():
        figure, (axis,) = make_figure(_WIDTH / 2, 3)
        for number, each in enumerate(shown):
            rates, color, marker = each["rows_per_s"], _LINES[number], _MARKERS[number]
            axis.plot([*rates], [*rates.values()], label=each["dtype"], color=color, marker=marker)
        axis.set(xlabel="rows per request", ylabel="rows/s, median")
        axis.set_ylim(bottom=0)
        axis.set_title(f"chosen: {plan['dtype']}", loc="left")
        axis.legend()
        save(figure, path)


def _draw(record: Record, path: Path, name: str) -> Path:
    """Plot throughput or latency (``name``) by rows per request, one line per repository; return ``path``.

    Throughput is the highest rate of any number of callers, with the range of its repeats. Latency is measured with the
    fewest callers: the median, the 90th percentile (dashed), and a band up to the 99th percentile.
    """
    figure, (axis,) = make_figure(_WIDTH, 4)
    for number, entry in enumerate(record["repositories"]):
        colour, marker = _LINES[number % len(_LINES)], _MARKERS[number % len(_MARKERS)]
        loads = [load for load in record["loads"] if load["repository"] == entry["label"]]
        batches = sorted({load["batch"] for load in loads})
        by_batch = [[load for load in loads if load["batch"] == batch] for batch in batches]
        if name == "throughput":
            shown = [max(same, key=lambda load: load["median"]["rows_per_s"]) for same in by_batch]
            line = [load["median"]["rows_per_s"] for load in shown]
            low, high = zip(*(load["min_max"]["rows_per_s"] for load in shown), strict=True)
        else:
            shown = [min(same, key=lambda load: load["callers"]) for same in by_batch]
            line, p90, p99 = ([load["median"][f"p{n}_ms"] for load in shown] for n in (50, 90, 99))
            low, high = tuple(line), tuple(p99)
            axis.plot(batches, p90, color=colour, linewidth=0.8, linestyle="--")
        axis.fill_between(batches, low, high, color=colour, alpha=0.2, linewidth=0)
        axis.plot(batches, line, color=colour, marker=marker, label=entry["label"])
    if name == "throughput":
        _finish(axis, record, "throughput", "rows/s: median and range of repeats")
    else:
        axis.set_yscale("log")
        _finish(axis, record, "latency with the fewest callers", "ms: median, p90 (dashed), p99 (band)")
    save(figure, path)
    return path


def _finish(axis: Any, record: Record, what: str, unit: str) -> None:
    """Set the axes, and a title that says what was measured, on which machine and in which precision."""
    batches = sorted({load["batch"] for load in record["loads"]})
    axis.set_xscale("log", base=2)
    axis.set_xticks(batches, [str(batch) for batch in batches])
    axis.minorticks_off()
    if axis.get_yscale() == "linear":
        axis.set_ylim(bottom=0)
    axis.set(xlabel="rows per request", ylabel=unit)
    title = f"{record['repositories'][0]['model']}: {what}\n{_describe(record)}"
    axis.set_title(title, loc="left")
    axis.grid(axis="y", color="#E6E6E6", linewidth=0.6)
    axis.legend()


def _describe(record: Record) -> str:
    machine = record["machine"]
    gpu = f", {machine['num_gpus']} x {machine['gpu']}" if "gpu" in machine else ""
    dtypes = ", ".join(dict.fromkeys(entry["dtype"] for entry in record["repositories"]))
    return f"{machine['cpu']}, {machine['cores']} cores{gpu}; {dtypes}; {record['date']}"
