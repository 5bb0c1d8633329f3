"""What a record says, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

# What is compared: the kind of load, the figure, who with whom, and whether more is better.
RATIOS = (
    ("batch", "rows_per_s", "ours", "bare", True),
    ("batch", "rows_per_s", "ours", "recipe", True),
    ("callers", "rows_per_s", "ours", "litserve", True),
    ("callers", "rows_per_s", "ours", "pytriton", True),
    ("callers", "p50_ms", "ours", "litserve", False),
    ("callers", "p50_ms", "ours", "pytriton", False),
    ("callers", "p99_ms", "ours", "litserve", False),
    ("callers", "p99_ms", "ours", "pytriton", False),
    ("one", "p50_ms", "ours", "recipe", False),
    ("open", "p50_ms", "ours", "litserve", False),
    ("open", "p50_ms", "ours", "pytriton", False),
    ("open", "p99_ms", "ours", "litserve", False),
    ("open", "p99_ms", "ours", "pytriton", False),
)
KINDS = {
    "batch": "requests of {batch} texts, in turns",
    "callers": "{callers} callers of single texts",
    "one": "one caller of single texts",
    "open": "single texts arriving at 70 % of each system's own rate",
}
NAMES = {
    "ours": "shoal, served",
    "bare": "bare models",
    "recipe": "recipe",
    "litserve": "LitServe",
    "pytriton": "PyTriton",
}


def ratios(rounds: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The median over the rounds of each ratio within a round, of the systems that took part."""
    found = []
    for kind, figure, one, other, is_more_better in RATIOS:
        values = [
            turn[kind][one][figure] / turn[kind][other][figure]
            for turn in rounds
            if {one, other} <= turn.get(kind, {}).keys()
        ]
        if values:
            shown = {"min": round(min(values), 4), "median": round(median(values), 4), "max": round(max(values), 4)}
            better = "more" if is_more_better else "less"
            found.append({"load": kind, "figure": figure, "of": one, "to": other, "better": better, **shown})
    return found


def medians(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median over the rounds of every figure, in the rounds' own shape."""
    first = rounds[0]
    return {
        key: medians([turn[key] for turn in rounds])
        if isinstance(value, Mapping)
        else round(median(turn[key] for turn in rounds), 5)
        for key, value in first.items()
    }


def to_markdown(record: Mapping[str, Any]) -> str:
    """Tables: figures a load, ratios, and where the time goes."""
    machine, encoder, tokens = record["machine"], record["encoder"], record["tokens"]
    lines = [
        f"# Readability, {encoder['name']} encoder, {record['date']}",
        "",
        f"{machine['cpu']}, {machine['cores']} cores ({machine['flags']}); "
        f"{encoder['layers']} layers of {encoder['hidden']}, {encoder['weights']}, served in {encoder['dtype']}; "
        f"{record['corpus']}, {tokens['true_tokens_a_sample']} tokens a text; {len(record['rounds'])} rounds.",
        "",
        *_loads(record),
        *_ratios(record["ratios"]),
        *_steps(record),
        *_checks(record.get("checks", {})),
    ]
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    cells = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return [*("| " + " | ".join(_show(cell) for cell in row) + " |" for row in cells), ""]


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _loads(record: Mapping[str, Any]) -> list[str]:
    """A row a load and system: texts a second by the median round, latencies over all rounds."""
    rows = []
    for kind, words in KINDS.items():
        for name, figures in record["medians"].get(kind, {}).items():
            latencies = record["pooled"].get(kind, {}).get(name, {})
            shown = [latencies.get(figure, "") for figure in ("p50_ms", "p99_ms", "p99_over_p50", "requests")]
            rows.append([f"{words.format(**record['settings'])}: {NAMES[name]}", figures["rows_per_s"], *shown])
    return _table(["load", "texts/s", "p50 ms", "p99 ms", "p99 / p50", "requests"], rows)


def _ratios(found: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        [
            f"{r['load']}, {r['figure']}: {NAMES[r['of']]} / {NAMES[r['to']]}",
            r["median"],
            r["min"],
            r["max"],
            r["better"],
        ]
        for r in found
    ]
    return _table(["ratio within a round", "median", "least", "greatest", "better is"], rows)


def _steps(record: Mapping[str, Any]) -> list[str]:
    steps, rates, tokens = record["medians"]["steps"], record["medians"]["matrix_tflop_per_s"], record["tokens"]
    best = max(rates.values())
    rows = [
        *([name.removesuffix("_a_sample").replace("_", " "), value] for name, value in steps.items() if "ms" in name),
        ["share of all but the encoder", steps["share_of_all_but_the_encoder"]],
        ["encoder, TFLOP/s on true tokens", steps["encoder_tflop_per_s"]],
        *([f"matrix product {shape}, TFLOP/s", rate] for shape, rate in rates.items()),
        ["encoder / best matrix rate", steps["encoder_tflop_per_s"] / best],
        *([f"padding {way}", share] for way, share in tokens["padding_share"].items()),
    ]
    return _table(["in process, a text", "value"], rows)


def _checks(checks: Mapping[str, Any]) -> list[str]:
    return (
        _table(["scores", "value"], [[name.replace("_", " "), value] for name, value in checks.items()])
        if checks
        else []
    )
