"""Results of one load: of a single run, and over its repeats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import Any, NamedTuple

from shoal.bench.steps import StepFigures


class Cell(NamedTuple):
    """Parameters of a closed loop: ``callers`` in parallel, each with requests of ``batch`` rows."""

    batch: int
    callers: int

    def __str__(self) -> str:
        rows, callers = ("" if number == 1 else "s" for number in self)
        return f"{self.batch} row{rows}, {self.callers} caller{callers}"


@dataclass(frozen=True)
class Figures:
    """Results of one load on one pipeline.

    ``server_cpu``, ``client_cpu`` and ``other_cpu`` are shares of all cores' time: of the server with its stubs, of
    this process, and of whatever else ran meanwhile. ``server_ms`` is what Triton counts for a request of the whole
    pipeline, ``local_ms`` what it took in the client's own steps (``hybrid``). ``steps`` are the models that the server
    ran, in the order of the pipeline.
    """

    rows_per_s: float
    requests: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    server_cpu: float
    client_cpu: float
    other_cpu: float
    server_ms: float | None
    local_ms: float | None
    steps: Mapping[str, StepFigures]

    @property
    def cpu(self) -> float:
        """Share of all cores' time that was used, by any process."""
        return self.server_cpu + self.client_cpu + self.other_cpu


@dataclass(frozen=True)
class Measured:
    """Results of one load on one pipeline, with repeats."""

    label: str
    cell: Cell
    repeats: tuple[Figures, ...]

    @property
    def median(self) -> Figures:
        """Median of each figure, taken separately."""
        return medians(self.repeats)

    def spread(self, figure: str) -> tuple[float, float]:
        """Return the minimum and the maximum over the repeats."""
        values = [getattr(figures, figure) for figures in self.repeats]
        return min(values), max(values)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form for the record."""
        spreads = {name: self.spread(name) for name in ("rows_per_s", "p50_ms", "p90_ms", "p99_ms")}
        return {
            "repository": self.label,
            **self.cell._asdict(),
            "median": rounded(asdict(self.median)),
            "min_max": rounded(spreads),
            "repeats": [rounded(asdict(figures)) for figures in self.repeats],
        }


def medians(repeats: Sequence[Figures]) -> Figures:
    """Return the median of each figure over the repeats, including those of the steps."""
    numbers = {f.name: _median(getattr(r, f.name) for r in repeats) for f in fields(Figures) if f.name != "steps"}
    steps = {
        name: StepFigures(**{f.name: _median(getattr(r.steps[name], f.name) for r in repeats) for f in fields(step)})  # type: ignore[arg-type]
        for name, step in repeats[0].steps.items()
        if all(name in r.steps for r in repeats)
    }
    return Figures(**numbers, steps=steps)  # type: ignore[arg-type]


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def rounded(value: Any) -> Any:
    """Round floats to three decimals, or below 1 to four significant digits, to keep records readable."""
    if isinstance(value, Mapping):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(entry) for entry in value]
    if isinstance(value, float):
        return round(value, 3) if abs(value) >= 1 else float(f"{value:.4g}")
    return value
