"""Markdown page of a record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.bench.tables import Record, Sheet, make_sheets, remarks


def write_page(record: Record, pictures: Sequence[Path] = ()) -> str:
    """Write the page: conditions, tables, links to the pictures beside it, and the advice on each repository."""
    names = ", ".join(entry["label"] for entry in record["repositories"])
    parts = [f"# {record['repositories'][0]['model']}: {names}", "\n".join(_what(record))]
    parts += map(_table, make_sheets(record))
    parts += [f"![{path.stem}]({path.name})" for path in pictures]
    for label, advice in record["advice"].items():
        listed = "\n".join(map(_item, advice))
        parts.append(f"## What would help {label}, and what would not\n\n{listed}")
    return "\n\n".join(parts) + "\n"


def _what(record: Record) -> Iterator[str]:
    machine, settings = record["machine"], record["settings"]
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    gpu = f", {machine['num_gpus']} x {machine['gpu']}" if "gpu" in machine else ""
    yield f"- {record['date']}, {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB{gpu}"
    yield f"- {machine['flags'] or 'no flags of note'}; Python {machine['python']}, {versions}"
    times = f"{settings['seconds']:g} s per load after {settings['warm_seconds']:g} s of warm-up"
    yield (
        f"- closed loop over {settings['protocol']}, {times}, {settings['repeats']} repeats in turn;"
        " medians, and the minimum and maximum of the repeats"
    )
    for sentence in remarks(record):
        yield f"- {sentence}"


def _table(sheet: Sheet) -> str:
    rule = [*["---"] * sheet.texts, *["---:"] * (len(sheet.columns) - sheet.texts)]
    lines = (f"| {' | '.join(cells)} |" for cells in (sheet.columns, rule, *sheet.rows))
    return f"## {sheet.title}\n\n" + "\n".join(lines)


def _item(advice: Mapping[str, Any]) -> str:
    indented = "".join(f"\n      {line}" for line in advice["lines"].splitlines())
    return f"- {advice['what']} {advice['why']}" + (f"{indented}\n" if indented else "")
