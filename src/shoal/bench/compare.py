"""Comparison of several repositories: the winner under each load, and its margin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoal.bench.figures import Cell, Measured

_EQUAL = 1.05  # rates within this ratio count as equal, even if the repeats varied less


def compare(measured: Sequence[Measured]) -> list[str]:
    """Write one sentence per load and repository that compares the repository with the best one.

    Repositories are compared by p50 with one caller and single rows, by rows/s under other loads. Two whose ranges
    overlap, or whose medians differ by less than 5 %, count as equal.
    """
    cells = list(dict.fromkeys(entry.cell for entry in measured))
    labels = list(dict.fromkeys(entry.label for entry in measured))
    if len(labels) < 2:
        return []
    return [sentence for cell in cells for sentence in _of(cell, [entry for entry in measured if entry.cell == cell])]


def _of(cell: Cell, entries: Sequence[Measured]) -> Iterator[str]:
    is_latency = cell == Cell(1, 1)
    figure, unit = ("p50_ms", "ms") if is_latency else ("rows_per_s", "rows/s")
    values = {entry.label: getattr(entry.median, figure) for entry in entries}
    best = (min if is_latency else max)(entries, key=lambda entry: values[entry.label])
    for entry in entries:
        if entry is best:
            continue
        mine, other = values[entry.label], values[best.label]
        shown = f"{mine:.1f} {unit} against {best.label}'s {other:.1f}"
        ratio = max(mine, other) / max(min(mine, other), 1e-9)
        if ratio < _EQUAL or _overlap(entry.spread(figure), best.spread(figure)):
            yield f"{entry.label} and {best.label} do not differ measurably at {cell}: {shown}."
        else:
            worse = "slower" if is_latency else "less"
            yield f"{entry.label} does not win at {cell}: {shown}, {ratio:.1f} times {worse}."


def _overlap(first: tuple[float, float], second: tuple[float, float]) -> bool:
    return first[0] <= second[1] and second[0] <= first[1]
