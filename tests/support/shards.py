"""Bulk runs over folders of files."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from shoal.cli import main
from tests.support.bulk import WORDS

SHOAL = [sys.executable, "-c", "from shoal.cli import main; main()"]


def write_inputs(folder: Path, kind: str, sizes: list[int]) -> str:
    """Files with numbered rows; the last row of the last one is bad. Return their pattern."""
    folder.mkdir(parents=True, exist_ok=True)
    draw, number = random.Random(0), 0
    for at, size in enumerate(sizes):
        rows = [{"id": number + n, "text": " ".join(draw.choices(WORDS, k=draw.randint(1, 9)))} for n in range(size)]
        number += size
        path = folder / f"{at}{kind}"
        if kind == ".parquet":
            import pyarrow
            from pyarrow import parquet

            table = pyarrow.Table.from_pylist(rows, pyarrow.schema([("id", "int64"), ("text", "string")]))
            parquet.write_table(table, path, row_group_size=50)
        elif kind == ".csv":
            path.write_text("id,text\n" + "".join(f'{r["id"]},"{r["text"]}\n."\n' for r in rows), encoding="utf-8")
        elif kind == ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        else:
            path.write_text("".join(f"{row['id']} {row['text']}\n" for row in rows), encoding="utf-8")
    return str(folder / f"*{kind}")


def command(forest: Path, pattern: str, out: Path | str, *more: str) -> list[str]:
    options = ["--local", "--repository", str(forest), "--input", pattern, "--output", str(out), "--shard-rows", "100"]
    return [*SHOAL, "infer", *options, *more]


def run(forest: Path, pattern: str, out: Path | str, *more: str) -> subprocess.CompletedProcess[str]:
    """Run the command in this process; its workers are processes all the same."""
    line, errors, code = command(forest, pattern, out, *more), StringIO(), 0
    with redirect_stdout(StringIO()), redirect_stderr(errors), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["shoal", *line[len(SHOAL) :]])
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(line, code, stderr=errors.getvalue())


def read_files(out: Path) -> dict[str, bytes]:
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]


def wait_until(is_so: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)
