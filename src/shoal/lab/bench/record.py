"""Figures of loads, their medians over repeats, the record of a benchmark, and a comparison of pipelines."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from statistics import median
from typing import Any, Generic, NamedTuple, TypeVar

import shoal
from shoal.lab.bench.steps import StepFigures
from shoal.system.machine import describe_machine, library_versions

LIBRARIES = ("numpy", "torch", "tokenizers", "treelite", "tritonclient", "nvidia-pytriton")
_EQUAL = 1.05  # rates within this ratio count as equal, even if the repeats varied less


@dataclass(frozen=True)
class BenchSettings:
    """Settings: each load is measured for ``seconds``, after ``warm_seconds``; all loads are run ``repeats`` times."""

    seconds: float = 4.0
    warm_seconds: float = 1.0
    repeats: int = 3


class Cell(NamedTuple):
    """Parameters of a closed loop: ``callers`` in parallel, each of which sends requests of ``batch`` rows."""

    batch: int
    callers: int

    def __str__(self) -> str:
        rows, callers = ("" if number == 1 else "s" for number in self)
        return f"{self.batch} row{rows}, {self.callers} caller{callers}"


class TokenCell(NamedTuple):
    """Parameters of a load on a language model: tokens per prompt and answer, prompts per request, parallel requests.

    A number of tokens is 0 if the prompts are given, or if the model alone decides how long an answer is.
    """

    input_tokens: int
    output_tokens: int
    batch: int
    concurrency: int

    def __str__(self) -> str:
        batch = f" {self.batch} prompts," if self.batch > 1 else ""
        streams = f"{self.concurrency} stream{'' if self.concurrency == 1 else 's'}"
        return f"{self.input_tokens or 'given'} in, {self.output_tokens or 'any'} out,{batch} {streams}"


@dataclass(frozen=True)
class Figures:
    """Results of one load on one pipeline.

    ``server_cpu``, ``client_cpu`` and ``other_cpu`` are the shares of all cores' time that the server with its stub
    processes, this process, and all other programs used; only the client's is known for a server that runs already.
    ``server_ms`` is Triton's mean time for a request of the whole
    pipeline. ``local_ms`` is the mean time per request of the steps in the client, with the placement ``hybrid``; then
    ``server_ms`` is None. ``steps`` has the models that the server ran, in the order of the pipeline.
    """

    rows_per_s: float
    requests: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    server_cpu: float | None
    client_cpu: float
    other_cpu: float | None
    server_ms: float | None
    local_ms: float | None
    steps: Mapping[str, StepFigures]

    @property
    def cpu(self) -> float | None:
        """Share of all cores' time that was used, by any process; None if it is not known."""
        if self.server_cpu is None or self.other_cpu is None:
            return None
        return self.server_cpu + self.client_cpu + self.other_cpu


@dataclass(frozen=True)
class TokenFigures:
    """Results of one load on a language model.

    ``first_*`` is the time from the request to the first token, ``between_*`` the time from one token to the next (None
    if each answer has one piece), ``whole_*`` the time from the request to the end. ``input_tokens`` and
    ``output_tokens`` are medians of the server's counts per answer. ``client_cores`` is the mean number of cores that
    this process used.
    """

    tokens_per_s: float
    requests: float
    input_tokens: float
    output_tokens: float
    first_p50_ms: float
    first_p90_ms: float
    first_p99_ms: float
    between_p50_ms: float | None
    between_p90_ms: float | None
    between_p99_ms: float | None
    whole_p50_ms: float
    client_cores: float


_SPREADS = {  # the figures whose minimum and maximum are in the record
    Figures: ("rows_per_s", "p50_ms", "p90_ms", "p99_ms"),
    TokenFigures: ("tokens_per_s", "first_p50_ms", "between_p50_ms"),
}
_RATIOS = {Figures: ("rows_per_s", "p50_ms"), TokenFigures: ("tokens_per_s", "first_p50_ms", "between_p50_ms")}
C = TypeVar("C", Cell, TokenCell)
F = TypeVar("F", Figures, TokenFigures)


@dataclass(frozen=True)
class Measured(Generic[C, F]):
    """Results of all repeats of one load (``cell``) on one pipeline or model (``label``)."""

    label: str
    cell: C
    repeats: tuple[F, ...]

    @property
    def median(self) -> F:
        """Median over the repeats, of each figure separately."""
        middle: F = _take_median(self.repeats)
        return middle

    def spread(self, figure: str) -> tuple[float, float] | None:
        """Return a figure's minimum and maximum over the repeats; None if the figure is None in all of them."""
        values = [value for each in self.repeats if (value := getattr(each, figure)) is not None]
        return (min(values), max(values)) if values else None

    def as_dict(self) -> dict[str, Any]:
        """Return the results as JSON values for the record."""
        spreads = {name: self.spread(name) for name in _SPREADS[type(self.repeats[0])]}
        return {
            "repository": self.label,
            **self.cell._asdict(),
            "median": rounded(asdict(self.median)),
            "min_max": rounded(spreads),
            "repeats": [rounded(asdict(figures)) for figures in self.repeats],
        }


def _take_median(values: Sequence[Any]) -> Any:
    """Return the median of numbers, or the medians of each field of figures, or of each key that all mappings have."""
    first = values[0]
    if isinstance(first, Figures | TokenFigures | StepFigures):
        medians = {f.name: _take_median([getattr(value, f.name) for value in values]) for f in fields(first)}
        return replace(first, **medians)
    if isinstance(first, Mapping):
        names = [name for name in first if all(name in value for value in values)]
        return {name: _take_median([value[name] for value in values]) for name in names}
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


def start_record(settings: BenchSettings, measured: Sequence[Measured[Any, Any]], *libraries: str) -> dict[str, Any]:
    """Return what the records of all benchmarks have: date, machine, versions, settings and loads, as JSON values."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "versions": {"shoal": shoal.__version__, **library_versions(*LIBRARIES, *libraries)},
        "settings": asdict(settings),
        "loads": [entry.as_dict() for entry in measured],
    }


def compare(measured: Sequence[Measured[Cell, Figures]]) -> list[str]:
    """Compare the repositories with the best one under each load, in one sentence for each other repository.

    The best has the lowest p50 latency with one caller and single rows, and the most rows/s under other loads. Two
    repositories count as equal if the ranges of their repeats overlap, or their medians differ by less than 5 %.
    """
    cells = list(dict.fromkeys(entry.cell for entry in measured))
    labels = list(dict.fromkeys(entry.label for entry in measured))
    if len(labels) < 2:
        return []
    return [words for cell in cells for words in _compare_at(cell, [e for e in measured if e.cell == cell])]


def _compare_at(cell: Cell, entries: Sequence[Measured[Cell, Figures]]) -> Iterator[str]:
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


def find_ratios(measured: Sequence[Measured[C, F]]) -> list[dict[str, Any]]:
    """Compare each subject with the first one under each load, by the ratios of their figures within each repeat."""
    found = []
    by_cell: dict[C, list[Measured[C, F]]] = {}
    for entry in measured:
        by_cell.setdefault(entry.cell, []).append(entry)
    for cell, (first, *others) in by_cell.items():
        for other in others:
            ratios: dict[str, Any] = {}
            for name in _RATIOS[type(first.repeats[0])]:
                pairs = [
                    (getattr(a, name), getattr(b, name)) for a, b in zip(first.repeats, other.repeats, strict=False)
                ]
                if known := [b / a for a, b in pairs if a and b]:
                    ratios[name] = [median(known), min(known), max(known)]
            found.append({"repository": other.label, "to": first.label, **cell._asdict(), "ratios": rounded(ratios)})
    return found


def _overlap(first: tuple[float, float] | None, second: tuple[float, float] | None) -> bool:
    return bool(first and second and first[0] <= second[1] and second[0] <= first[1])
