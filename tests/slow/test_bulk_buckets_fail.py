"""Sharded runs over an object store that loses answers, and that refuses."""

from __future__ import annotations

import subprocess
from pathlib import Path

from shoal.clients.bulk.shards.folders import open_folder
from shoal.clients.bulk.shards.report import find_faults
from tests.support.buckets import Store, download, upload
from tests.support.shards import command, run, write_inputs


def test_two_runs_of_every_shard_and_lost_answers(store: Store, forest: Path, tmp_path: Path) -> None:
    """The store has taken a put, and its answer is lost: of the plan, of outputs, of records and of the totals."""
    pattern = upload(write_inputs(tmp_path / "in", ".jsonl", [600]), "s3://bucket/in")
    assert run(forest, pattern, "s3://bucket/whole").returncode == 0
    store.lost = "/out/"
    runs = [subprocess.Popen(command(forest, pattern, "s3://bucket/out")) for _ in range(2)]
    assert [each.wait(120) for each in runs] == [0, 0]
    assert {"/bucket/out/_plan.json", "/bucket/out/part-00003.jsonl", "/bucket/out/_SUCCESS.json"} <= {*store.seen}
    assert run(forest, pattern, "s3://bucket/out").returncode == 0  # removes the marks of a run that ended later
    assert download("s3://bucket/out") == download("s3://bucket/whole")


def test_a_store_that_refuses(store: Store, forest: Path, tmp_path: Path) -> None:
    pattern = write_inputs(tmp_path / "in", ".jsonl", [300])
    store.refused = "part-00001"
    done = run(forest, pattern, "s3://bucket/out")
    assert done.returncode == 1
    assert "s3://bucket/out/part-00001.jsonl cannot be read or written" in done.stderr
    assert "Traceback" not in done.stderr
    assert "part-00000.jsonl" in download("s3://bucket/out")
    store.refused = "/none/"
    assert run(forest, pattern, "s3://bucket/out").returncode == 0
    assert list(find_faults(open_folder("s3://bucket/out"))) == []
    done = run(forest, "s3://missing/*.jsonl", "s3://bucket/out2")
    assert (done.returncode, "s3://missing cannot be read or written" in done.stderr) == (1, True), done.stderr
