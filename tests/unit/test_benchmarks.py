"""The writer of the benchmarks' records."""

from __future__ import annotations

import json

from benchmarks.records import dumps


def test_records_are_compact_json() -> None:
    record = {
        "date": "2026-11-25",
        "machine": {"cpu": "x" * 60, "cores": 2, "flags": "y" * 60},
        "rounds": [{"rate": 1.5, "p99_ms": None}, {"rate": 1e-07, "p99_ms": 2}],
        "seconds": [*range(100)],
        "empty": [{}, [], "", ["é", True] * 30],
    }
    text = dumps(record)
    assert json.loads(text) == record
    assert max(map(len, text.splitlines())) <= 120
    assert ' "rounds": [{"rate": 1.5, "p99_ms": null}, {"rate": 1e-07, "p99_ms": 2}],' in text.splitlines()
    assert len(text.splitlines()) == 25
    long = dumps({"rows": [{"row": row} for row in range(20)]})
    assert long.splitlines()[2:4] == ['  {"row": 0},', '  {"row": 1},'], "a line for each row"
