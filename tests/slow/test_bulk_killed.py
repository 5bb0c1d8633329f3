"""Bulk work as a program: interrupted, killed, and gone on with."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.cli import app
from shoal.clients.bulk.files import partial_path
from shoal.clients.bulk.scoring import WINDOW, local
from shoal.clients.local import Pipeline
from shoal.errors import ShoalError
from tests.conftest import Scale
from tests.support.bulk import Stopped, infer_arguments, run, write_texts

SHOAL = [sys.executable, "-c", "from shoal.cli import main; main()"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_texts(tmp_path_factory.mktemp("in") / "in.csv", 5 * WINDOW + 7)
    with path.open("ab") as file:
        file.write(b"bad,\xff\n")
    return path


def command(forest: Path, source: Path, output: Path) -> list[str]:
    return [*SHOAL, *infer_arguments(forest, source, output)]


def test_ctrl_c_says_how_to_go_on(forest: Path, tmp_path: Path) -> None:
    source, out = write_texts(tmp_path / "in.csv", 100_000), tmp_path / "out.csv"
    interruptible = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore SIGINT
    with subprocess.Popen(
        command(forest, source, out), stderr=subprocess.PIPE, text=True, preexec_fn=interruptible
    ) as running:
        wait_until(lambda: partial_path(out).exists() and partial_path(out).stat().st_size > 20_000)
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 130, errors
    said = f"Interrupted. Finished rows are in {partial_path(out)}: run the same command (without --fresh) to resume."
    assert said in errors
    assert "Traceback" not in errors
    assert not out.exists()


def test_killed_at_random_points(forest: Path, tmp_path: Path, scale: Scale, record: Callable[..., None]) -> None:
    """Order kept, memory flat, and byte for byte what an unbroken run writes."""
    num_rows, num_kills = scale(6_000, 1_000_000), scale(3, 20)
    source = write_texts(tmp_path / "in.csv", num_rows)
    start = time.monotonic()
    with subprocess.Popen(command(forest, source, tmp_path / "whole.csv")) as running:
        memory = watch_memory(running, partial_path(tmp_path / "whole.csv"))
    seconds = time.monotonic() - start
    assert running.returncode == 0

    out, draw, kills = tmp_path / "out.csv", random.Random(1), 0
    while not out.exists():
        with subprocess.Popen(command(forest, source, out)) as running:
            if kills < num_kills:
                with suppress(subprocess.TimeoutExpired):
                    # As it starts, as it passes over what is done, at work, or as the output is put in place.
                    running.wait(draw.uniform(1, 1.5 * seconds / num_kills + 1))
                running.kill()
                kills += 1
    assert kills == num_kills or not scale.is_full
    assert out.read_bytes() == (tmp_path / "whole.csv").read_bytes()
    ids = [int(line.split(b",", 1)[0]) for line in out.read_bytes().splitlines()[1:]]
    assert ids == list(range(num_rows))
    assert memory["growth_mib"] < 50
    record(
        "a file of a million rows, killed twenty times",
        rows=num_rows,
        kills=kills,
        rows_per_second=round(num_rows / seconds, 1),
        **memory,
    )


def watch_memory(running: subprocess.Popen[bytes], journal: Path) -> dict[str, float]:
    """Resident memory of a process: when its first windows are written, and at most after that, in MiB."""
    readings: list[float] = []
    while running.poll() is None:
        if journal.exists() and journal.stat().st_size > 10_000:
            readings.append(resident_mib(running.pid))
        time.sleep(0.05)
    kept = [reading for reading in readings if reading]
    first, most = kept[0], max(kept)
    return {"first_mib": round(first, 1), "most_mib": round(most, 1), "growth_mib": round(most - first, 1)}


def resident_mib(pid: int) -> float:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def wait_until(is_so: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_finished_journal_is_only_written_out(forest: Path, source: Path, tmp_path: Path, scorer: Pipeline) -> None:
    """A run that was killed while it put the output in place."""
    out = tmp_path / "out.csv"
    with pytest.raises(Stopped):
        run(local(scorer), source, out, stop_after=5 * WINDOW + 8)
    run(local(scorer), source, tmp_path / "whole.csv")
    out.write_bytes(b"what was there before")
    assert run(local(scorer), source, out).num_rows == 5 * WINDOW + 8
    assert out.read_bytes() == (tmp_path / "whole.csv").read_bytes()
    result = CliRunner().invoke(
        app, ["infer", "--local", "--repository", str(forest), "-i", str(source), "-o", str(out)]
    )
    assert isinstance(result.exception, ShoalError)
