"""Tables of a benchmark's record for the terminal, and a Markdown page of the whole record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.lab.bench.record import Cell, TokenCell

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Sheet:
    """A table; the first ``texts`` columns hold text, the others numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    texts: int = 1


def make_sheets(record: Record) -> list[Sheet]:
    """Make the tables: repositories, latency, throughput and steps; or tokens; and the ratios of several subjects."""
    ratios = [_ratios(record)] if record.get("ratios") else []
    if record.get("unit") == "tokens":
        return [_tokens(record), *ratios]
    return [_repositories(record), _latency(record), _throughput(record), *ratios, *_steps(record)]


def _ratios(record: Record) -> Sheet:
    """Show how many times the first subject's figures the others have, within a round."""
    names = {"rows_per_s": "rows/s", "p50_ms": "p50"}
    if record.get("unit") == "tokens":
        names = {"tokens_per_s": "tokens/s", "first_p50_ms": "first p50", "between_p50_ms": "next p50"}
    rows = []
    for entry in record["ratios"]:
        cell = Cell(entry["batch"], entry["callers"]) if "callers" in entry else _token_cell(entry)
        shown = [_ratio(*entry["ratios"][name]) if name in entry["ratios"] else "-" for name in names]
        rows.append((entry["repository"], str(cell), *shown))
    title = f"Times {record['ratios'][0]['to']}'s, in the same round: median (smallest-greatest)"
    return Sheet(title, ("", "load", *names.values()), tuple(rows), 2)


def _ratio(middle: float, least: float, most: float) -> str:
    return f"{middle:.2f}" if least == most else f"{middle:.2f} ({least:.2f}-{most:.2f})"


def _token_cell(entry: Record) -> TokenCell:
    return TokenCell._make(entry[name] for name in TokenCell._fields)


def remarks(record: Record) -> list[str]:
    """Return the sentences to print with the tables: which rows were sent, how repositories compare, and warnings."""
    if "inputs" not in record:  # made by the benchmark itself
        return [*record["comparison"], *record["notes"]]
    inputs = record["inputs"]
    sizes = ", ".join(f"{name} {size:.0f} bytes" for name, size in inputs["mean_bytes_a_row"].items())
    rows = f"{inputs['num_rows']:,} different rows of {inputs['source']}" + (
        f"; mean of a row: {sizes}" if sizes else ""
    )
    return [f"{rows}.", *record["comparison"], *record["notes"]]


def _repositories(record: Record) -> Sheet:
    keys = ("label", "repository", "model", "placement", "dtype", "target")
    rows = (tuple(str(entry[key]) for key in keys) for entry in record["repositories"])
    return Sheet("Repositories", ("", *keys[1:]), tuple(rows), len(keys))


def _latency(record: Record) -> Sheet:
    columns = ("", "p50 ms", "p90 ms", "p99 ms", "slowest ms", "p50 from", "to", "rows/s")
    rows = []
    for load in record["loads"]:
        if (load["batch"], load["callers"]) == (1, 1):
            middle = load["median"]
            slowest = max(figures["max_ms"] for figures in load["repeats"])  # a stall is rare: the median would hide it
            figures = [middle["p50_ms"], middle["p90_ms"], middle["p99_ms"], slowest, *load["min_max"]["p50_ms"]]
            rows.append((load["repository"], *map(_ms, figures), _rate(middle["rows_per_s"])))
    return Sheet("Latency of one caller with one row", columns, tuple(rows))


def _throughput(record: Record) -> Sheet:
    columns = ("", "rows", "callers", "rows/s", "from", "to", "p50 ms", "p99 ms", "server", "client", "others")
    rows = []
    for load in record["loads"]:
        middle = load["median"]
        rates = [middle["rows_per_s"], *load["min_max"]["rows_per_s"]]
        times = [middle["p50_ms"], middle["p99_ms"]]
        shares = [middle["server_cpu"], middle["client_cpu"], middle["other_cpu"]]
        numbers = (str(load["batch"]), str(load["callers"]))
        rows.append((load["repository"], *numbers, *map(_rate, rates), *map(_ms, times), *map(_share, shares)))
    return Sheet(
        "Throughput by rows per request, with the CPU shares of server, client and others", columns, tuple(rows)
    )


def _tokens(record: Record) -> Sheet:
    times = [f"{name}_p{q}_ms" for name in ("first", "between") for q in (50, 90, 99)]
    columns = ["in", "out", "streams", "tokens/s", "from", "to", "first p50", "p90", "p99", "next p50", "p90", "p99"]
    several = len(record["repositories"]) > 1
    has_batches = any(load["batch"] > 1 for load in record["loads"])
    rows = []
    for load in record["loads"]:
        middle = load["median"]
        counts = [f"{middle['input_tokens']:g}", f"{middle['output_tokens']:g}", str(load["concurrency"])]
        if has_batches:
            counts.insert(2, str(load["batch"]))
        if several:
            counts.insert(0, load["repository"])
        rates = [middle["tokens_per_s"], *load["min_max"]["tokens_per_s"]]
        shown = ["-" if middle[name] is None else _ms(middle[name]) for name in times]
        rows.append((*counts, *map(_rate, rates), *shown))
    if has_batches:
        columns.insert(2, "prompts")
    columns = ["", *columns] if several else columns
    models = ", ".join(dict.fromkeys(entry["model"] for entry in record["repositories"]))
    title = f"{models}: tokens in and out; ms to the first token, and to each next one"
    return Sheet(title, tuple(columns), tuple(rows), int(several))


def _shown_loads(record: Record, label: str) -> list[Mapping[str, Any]]:
    """Choose the loads whose steps are shown: single rows from the fewest and the most callers, and the best rate."""
    loads = [load for load in record["loads"] if load["repository"] == label]
    single = [load for load in loads if load["batch"] == 1]
    chosen = (
        min(single, key=lambda load: load["callers"]),
        max(single, key=lambda load: load["callers"]),
        max(loads, key=lambda load: load["median"]["rows_per_s"]),
    )
    return list({(load["batch"], load["callers"]): load for load in chosen}.values())


def _steps(record: Record) -> Iterator[Sheet]:
    columns = ("step", "queue", "input", "compute", "output", "rows/run", "ms/run", "busy", "CPU ms/row")
    for entry in record["repositories"]:
        for load in _shown_loads(record, entry["label"]):
            rows = tuple(_step_row(name, step) for name, step in load["median"]["steps"].items())
            cell = Cell(load["batch"], load["callers"])
            local = load["median"]["local_ms"]
            here = (("in the client", "-", "-", _ms(local), *["-"] * 5),) if local is not None else ()
            yield Sheet(f"Steps of {entry['label']}, ms per request: {cell}", columns, (*here, *rows))


def _step_row(name: str, step: Mapping[str, Any]) -> tuple[str, ...]:
    times = (step["queue_ms"], step["input_ms"], step["infer_ms"], step["output_ms"])
    cpu = "-" if step["cpu_ms"] is None else f"{step['cpu_ms']:.2f}"
    return (
        name,
        *map(_ms, times),
        _rate(step["rows_per_execution"]),
        _ms(step["execution_ms"]),
        _share(step["busy"]),
        cpu,
    )


def _ms(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:.2f}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def write_page(record: Record, pictures: Sequence[Path] = ()) -> str:
    """Return the Markdown page: conditions, tables, links to pictures in its folder, and advice for each repository."""
    names = ", ".join(entry["label"] for entry in record["repositories"])
    parts = [f"# {record['repositories'][0]['model']}: {names}", "\n".join(_list_conditions(record))]
    parts += map(_write_table, make_sheets(record))
    parts += [f"![{path.stem}]({path.name})" for path in pictures]
    for label, advice in record["advice"].items():
        listed = "\n".join(map(_write_advice, advice))
        parts.append(f"## What would help {label}, and what would not\n\n{listed}")
    return "\n\n".join(parts) + "\n"


def _list_conditions(record: Record) -> Iterator[str]:
    machine, settings = record["machine"], record["settings"]
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    gpu = f", {machine['num_gpus']} x {machine['gpu']}" if "gpu" in machine else ""
    yield f"- {record['date']}, {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB{gpu}"
    yield f"- {machine['flags'] or 'no flags of note'}; Python {machine['python']}, {versions}"
    times = f"{settings['seconds']:g} s per load after {settings['warm_seconds']:g} s of warm-up"
    yield (
        f"- closed loop, {times}, {settings['repeats']} repeats in turn;"
        " medians, and the minimum and maximum of the repeats"
    )
    for sentence in remarks(record):
        yield f"- {sentence}"


def _write_table(sheet: Sheet) -> str:
    rule = [*["---"] * sheet.texts, *["---:"] * (len(sheet.columns) - sheet.texts)]
    lines = (f"| {' | '.join(cells)} |" for cells in (sheet.columns, rule, *sheet.rows))
    return f"## {sheet.title}\n\n" + "\n".join(lines)


def _write_advice(advice: Mapping[str, Any]) -> str:
    indented = "".join(f"\n      {line}" for line in advice["lines"].splitlines())
    return f"- {advice['what']} {advice['why']}" + (f"{indented}\n" if indented else "")
