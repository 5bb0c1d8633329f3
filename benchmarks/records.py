"""Compact JSON of records: lines are filled up to 120 characters, and each row of a table has its own line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_LINE = 120  # characters


def write_record(name: str, record: Mapping[str, Any]) -> Path:
    """Write ``record`` to ``benchmarks/results/NAME-DATE.json``; DATE is its entry ``date``. Return the path."""
    path = RESULTS / f"{name}-{record['date']}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(dumps(record) + "\n", encoding="utf-8")
    return path


def dumps(value: Any, indent: str = "") -> str:
    """Format ``value`` as JSON."""
    line = json.dumps(value)
    if not isinstance(value, dict | list | tuple) or len(indent) + len(line) <= _LINE:
        return line
    inner = indent + " "
    if isinstance(value, dict):
        entries = [f"{json.dumps(key)}: {dumps(entry, inner)}" for key, entry in value.items()]
    else:
        entries = [dumps(entry, inner) for entry in value]
    lines = [inner + entries[0]]
    for entry in entries[1:]:
        is_row = isinstance(value, list | tuple) and entry[0] in "{["
        if is_row or "\n" in lines[-1] + entry or len(lines[-1]) + len(entry) + 3 > _LINE:
            lines[-1] += ","
            lines.append(inner + entry)
        else:
            lines[-1] += f", {entry}"
    return "\n".join([line[0], *lines, indent + line[-1]])
