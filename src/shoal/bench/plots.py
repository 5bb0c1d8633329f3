"""Plots of a record: throughput by request size, and the time of a request per step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.bench.figures import Cell
from shoal.bench.tables import Record, shown_loads
from shoal.errors import needs

# Okabe & Ito, "Color Universal Design" (2008): distinguishable with every kind of colour vision.
_LINES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#767676")
_MARKERS = ("o", "s", "D", "^", "v")
_PARTS = {
    "queue_ms": ("queue", "#D0D0D0"),
    "input_ms": ("input", "#56B4E9"),
    "infer_ms": ("compute", "#0072B2"),
    "output_ms": ("output", "#E69F00"),
}
_WIDTH = 8.0  # inches


def draw(record: Record, stem: Path) -> list[Path]:
    """Write ``STEM-throughput.svg`` and ``STEM-steps.svg``.

    Raises:
        SetupError: matplotlib is not installed.
    """
    with needs("draw"):
        import matplotlib
        import matplotlib.style
    drawn = {"throughput": _throughput, "steps": _steps}
    with matplotlib.style.context(["default", {"axes.spines.right": False, "axes.spines.top": False, "font.size": 9}]):
        return [_save(figure(record), stem.with_name(f"{stem.name}-{name}.svg")) for name, figure in drawn.items()]


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    return path


def _throughput(record: Record) -> Any:
    """Plot the best rate by request size, one line per repository, with the range of the repeats."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, 4), layout="compressed", facecolor="white")
    axis = figure.subplots()
    for number, entry in enumerate(record["repositories"]):
        best = _best_by_batch(record, entry["label"])
        colour, marker = _LINES[number % len(_LINES)], _MARKERS[number % len(_MARKERS)]
        low, high = zip(*(load["min_max"]["rows_per_s"] for load in best.values()), strict=True)
        axis.fill_between(list(best), low, high, color=colour, alpha=0.2, linewidth=0)
        rates = [load["median"]["rows_per_s"] for load in best.values()]
        axis.plot(list(best), rates, color=colour, marker=marker, label=entry["label"])
    batches = sorted({load["batch"] for load in record["loads"]})
    axis.set_xscale("log", base=2)
    axis.set_xticks(batches, [str(batch) for batch in batches])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.set(xlabel="rows per request", ylabel="rows/s (median, range of the repeats)")
    axis.grid(axis="y", color="#E6E6E6", linewidth=0.6)
    axis.legend(frameon=False)
    return figure


def _best_by_batch(record: Record, label: str) -> dict[int, Mapping[str, Any]]:
    best: dict[int, Mapping[str, Any]] = {}
    for load in record["loads"]:
        if load["repository"] == label:
            known = best.setdefault(load["batch"], load)
            if load["median"]["rows_per_s"] > known["median"]["rows_per_s"]:
                best[load["batch"]] = load
    return dict(sorted(best.items()))


def _steps(record: Record) -> Any:
    """Plot one row of axes per repository, one axis per shown load, one bar per step."""
    from matplotlib.figure import Figure

    shown = {entry["label"]: shown_loads(record, entry["label"]) for entry in record["repositories"]}
    columns = max(map(len, shown.values()))
    most = max(len(load["median"]["steps"]) for loads in shown.values() for load in loads)
    size = (_WIDTH, 0.3 + len(shown) * (1.1 + 0.3 * (most + 1)))
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    grid = figure.subplots(len(shown), columns, squeeze=False)
    for axes, (label, loads) in zip(grid, shown.items(), strict=True):
        for axis, load in zip(axes, loads, strict=False):
            _draw_bars(axis, load)
            axis.set_title(f"{label}: {Cell(load['batch'], load['callers'])}", fontsize=9)
        for axis in axes[len(loads) :]:
            axis.set_axis_off()
    handles, names = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(names), frameon=False)
    return figure


def _draw_bars(axis: Any, load: Mapping[str, Any]) -> None:
    steps = load["median"]["steps"]
    names = list(steps)
    local = load["median"]["local_ms"]
    places = range(len(names))
    left = [0.0] * len(names)
    for key, (part, colour) in _PARTS.items():
        widths = [steps[name][key] for name in names]
        axis.barh(places, widths, left=left, color=colour, height=0.7, label=part)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    if local is not None:
        names = [*names, "in the client"]
        axis.barh([len(names) - 1], [local], color=_PARTS["infer_ms"][1], height=0.7)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlabel("ms per request (mean)")
