"""Log of a service: Triton's log is forwarded line by line, and truncated when it gets long."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from shoal.serving.gateway import logs


def test_a_long_log_is_emptied_and_followed_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_MOST_BYTES", 100)
    caplog.set_level(logging.INFO, "shoal")
    path = tmp_path / "triton.log"
    tail = logs.Tail(path, lambda line: line.replace("LINE", "line"))
    tail.read()  # it is not there yet
    expected: list[str] = []
    for number in range(20):
        with path.open("a") as file:  # as Triton does
            file.write(f"LINE {number}\nhalf of ")
        tail.read()
        expected += [f"line {number}" if number == 0 else f"half of line {number}"]
        assert path.stat().st_size <= 100 + len("line 10\nhalf of ")
    assert [record.message for record in caplog.records] == expected
    assert path.stat().st_size < 100


def test_what_triton_says_of_its_start_is_in_the_file_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton prints its options as a table, over several lines."""
    row = "| server_version                   | 2.51.0 |"
    monkeypatch.setattr(logs, "_has_gpu", lambda: False)
    try:
        logs.configure(tmp_path / "service.log")
        for line in (
            "+----------------------------------+--------+",
            row,
            "I1125 10:00:00.000001 1 server.cc:631] loaded",
            "W1125 10:00:00.000001 1 server.cc:632] slow",
            "printed by a model",
            "Error: Failed to initialize NVML",
        ):
            logs.forward(line)
    finally:
        logging.basicConfig(force=True)
    written = (tmp_path / "service.log").read_text(encoding="utf-8")
    assert row in written
    shown = capfd.readouterr().err
    assert row not in shown
    for line in ("loaded", "NVML"):
        assert line in written
        assert line not in shown
    assert "slow" in shown
    assert "printed by a model" in shown
