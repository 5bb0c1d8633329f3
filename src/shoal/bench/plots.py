"""Plots of a record: throughput and latency by request size, and the time of a request per step."""

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
    """Write ``STEM-throughput.svg``, ``STEM-latency.svg`` and ``STEM-steps.svg``.

    Raises:
        SetupError: matplotlib is not installed.
    """
    with needs("draw"):
        import matplotlib
        import matplotlib.style
    drawn = {"throughput": _throughput, "latency": _latency, "steps": _steps}
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
    _finish(axis, record, "throughput", "rows/s: median and range of repeats")
    return figure


def _latency(record: Record) -> Any:
    """Plot latency by request size, one line per repository: the median, and a band up to the 99th percentile."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, 4), layout="compressed", facecolor="white")
    axis = figure.subplots()
    for number, entry in enumerate(record["repositories"]):
        fewest: dict[int, Mapping[str, Any]] = {}
        for load in sorted(record["loads"], key=lambda load: load["callers"]):
            if load["repository"] == entry["label"]:
                fewest.setdefault(load["batch"], load)
        batches = sorted(fewest)
        p50, p90, p99 = ([fewest[batch]["median"][f"p{n}_ms"] for batch in batches] for n in (50, 90, 99))
        colour, marker = _LINES[number % len(_LINES)], _MARKERS[number % len(_MARKERS)]
        axis.fill_between(batches, p50, p99, color=colour, alpha=0.15, linewidth=0)
        axis.plot(batches, p90, color=colour, linewidth=0.8, linestyle="--")
        axis.plot(batches, p50, color=colour, marker=marker, label=entry["label"])
    axis.set_yscale("log")
    _finish(axis, record, "latency with the fewest callers", "ms: median, p90 (dashed), p99 (band)")
    return figure


def _finish(axis: Any, record: Record, what: str, unit: str) -> None:
    """Give a plot by request size its axes, and a title that says what was measured, on what and in which precision."""
    batches = sorted({load["batch"] for load in record["loads"]})
    axis.set_xscale("log", base=2)
    axis.set_xticks(batches, [str(batch) for batch in batches])
    axis.minorticks_off()
    if axis.get_yscale() == "linear":
        axis.set_ylim(bottom=0)
    axis.set(xlabel="rows per request", ylabel=unit)
    title = f"{record['repositories'][0]['model']}: {what}\n{_describe(record)}"
    axis.set_title(title, loc="left", fontsize=9)
    axis.grid(axis="y", color="#E6E6E6", linewidth=0.6)
    axis.legend(frameon=False)


def _describe(record: Record) -> str:
    machine = record["machine"]
    gpu = f", {machine['num_gpus']} x {machine['gpu']}" if "gpu" in machine else ""
    dtypes = ", ".join(dict.fromkeys(entry["dtype"] for entry in record["repositories"]))
    return f"{machine['cpu']}, {machine['cores']} cores{gpu}; {dtypes}; {record['date']}"


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
    figure.suptitle(f"Steps of {record['repositories'][0]['model']}; {_describe(record)}", fontsize=9)
    handles, names = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
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
        names, left = [*names, "in the client"], [*left, local]
        axis.barh([len(names) - 1], [local], color=_PARTS["infer_ms"][1], height=0.7)
    for place, total in enumerate(left):  # also of steps too short to be seen
        axis.text(total, place, f" {total:.3g} ms", va="center", fontsize=8)
    axis.margins(x=0.25)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlabel("ms per request (mean)")
