"""`shoal bench` as it is typed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal import cli
from shoal.authoring.composition.compose import compose
from shoal.authoring.repository.plan import Plan
from shoal.lab.bench.run import write
from shoal.lab.bench.tables import write_page
from tests.support.bench import BATCHING, check_record, put, run, write_repository
from tests.support.bulk import MODEL_FOLDERS

ORDER = ["throughput", "latency"]  # of the pictures on the page


def test_the_command(forest: Path, hybrid_forest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two placements in turns, in three loads."""
    out = tmp_path / "out"
    command = ["bench", forest, hybrid_forest, "--quick", "--seconds", 0.3, "--batches", "1,8", "--concurrency", "4"]
    result = CliRunner().invoke(cli.app, list(map(str, [*command, "--report", "--out", out])))
    assert result.exit_code == 0, result.output
    printed = result.stdout
    for words in ("Latency of one caller", "Throughput by rows", "Steps of hybrid", "The step to look"):
        assert words in printed
    (data,) = out.glob("bench-*.json")
    record = json.loads(data.read_text(encoding="utf-8"))
    check_record(record)
    assert str(tmp_path) not in data.read_text(encoding="utf-8")
    page = data.with_suffix(".md").read_text(encoding="utf-8")
    assert page == write_page(
        record, sorted(out.glob("*.svg"), key=lambda path: ORDER.index(path.stem.rpartition("-")[2]))
    )
    assert "| repository | 8 | 4 | " in page
    assert "## What would help hybrid, and what would not" in page
    assert {path.name.rpartition("-")[2] for path in out.glob("*.svg")} == {"throughput.svg", "latency.svg"}
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    files, missing = write(record, tmp_path / "without")
    assert missing == "There are no pictures: matplotlib is not installed. Type: pip install 'shoal[draw]'"
    assert [path.suffix for path in files] == [".json", ".md"]


@pytest.mark.parametrize(
    ("kind", "seconds", "more"),
    [
        ("batching", "0.01", ""),  # whatever the rows
        ("instances", "0.02 * len(batch['X'])", BATCHING),  # for every row
    ],
)
def test_following_the_advice_helps(tmp_path: Path, kind: str, seconds: str, more: str) -> None:
    """Twice as fast or more, by sleeping, which takes no processor."""
    repository = write_repository(tmp_path / "repository", seconds=seconds, more=more)
    before, advice = run(repository)
    (proposed,) = [entry for entry in advice if entry["lines"]]
    assert (proposed["kind"], proposed["model"]) == (kind, "slow")
    (bottleneck,) = [entry for entry in advice if entry["kind"] == "bottleneck"]
    assert bottleneck["what"] == "The step to look at is slow."
    config = repository / "slow" / "config.pbtxt"
    config.write_text(put(config.read_text(encoding="utf-8"), proposed["lines"]), encoding="utf-8")
    after, advice = run(repository)
    for _ in range(2):  # the machine may have stalled meanwhile
        if after < 1.3 * before:
            after, advice = run(repository)
    assert after >= 1.3 * before
    assert kind == "instances" or "batching" not in {entry["kind"] for entry in advice}  # more instances still help


@pytest.fixture(scope="module")
def hybrid_forest(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("forests") / "hybrid"
    return compose("forest", out, artifacts=artifacts, projects=[MODEL_FOLDERS], plan=Plan(placement="hybrid", gpus=()))
