"""Sharded runs with inputs and outputs in object storage."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.cli import app
from shoal.clients.bulk.shards.folders import find_inputs, open_folder, open_input
from shoal.clients.bulk.shards.report import find_faults, read_status
from shoal.errors import ArtifactError, InputError, ShoalError
from tests.support.buckets import download, upload
from tests.support.shards import read_files, run, write_inputs

pytestmark = pytest.mark.usefixtures("may_start_processes")


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("kind", [".jsonl", ".parquet"])
def test_a_run_in_object_storage_is_that_of_folders(kind: str, forest: Path, tmp_path: Path) -> None:
    local = write_inputs(tmp_path / "in", kind, [230, 3, 210])
    assert run(forest, local, tmp_path / "out").returncode == 0
    pattern = upload(local, "s3://bucket/some/in")
    done = run(forest, pattern, "s3://bucket/some/out", "--workers", "2")
    assert done.returncode == 0, done.stderr
    here, there = read_files(tmp_path / "out"), download("s3://bucket/some/out")
    assert there.keys() == here.keys()
    assert [name for name in here if name.startswith("part-") and here[name] != there[name]] == []
    folder = open_folder("s3://bucket/some/out")
    assert list(find_faults(folder)) == []
    assert (read_status(folder)["rows"], read_status(folder)["is_complete"]) == (443, True)
    for at, out in enumerate(("s3://bucket/some/out", str(tmp_path / "out"))):
        merged = ["shards", "merge", out, "--output", str(tmp_path / f"{at}{kind}")]
        assert CliRunner().invoke(app, merged).exit_code == 0
    assert (tmp_path / f"0{kind}").read_bytes() == (tmp_path / f"1{kind}").read_bytes()
    # Without --fresh nothing is left to do; with it, everything is done again.
    before = {entry.name: entry.modified for entry in folder.entries()}
    assert run(forest, pattern, "s3://bucket/some/out").returncode == 0
    assert {entry.name: entry.modified for entry in folder.entries()} == before
    assert run(forest, pattern, "s3://bucket/some/out", "--fresh").returncode == 0
    assert download("s3://bucket/some/out") == there
    folder.remove("part-00001" + kind)
    assert f"part-00001{kind} is missing" in list(find_faults(folder))


@pytest.mark.usefixtures("store")
def test_an_input_that_was_removed_or_changed(tmp_path: Path) -> None:
    from shoal.clients.bulk.shards.parts import open_parts
    from shoal.clients.bulk.shards.plan import ShardReader, make_plan

    upload(write_inputs(tmp_path / "in", ".jsonl", [30]), "s3://bucket/in")
    folder = open_folder("s3://bucket/out")
    plan = make_plan(folder, "s3://bucket/in/*.jsonl", 10, {})
    inputs = open_folder("s3://bucket/in")
    content = inputs.read("0.jsonl") or b""
    parts = ShardReader(folder).find(1).parts
    assert 5 < len(list(open_parts(parts, plan.kind, plan.columns).rows)) < 15
    inputs.remove("0.jsonl")
    with pytest.raises(ArtifactError, match=r"There is no file s3://bucket/in/0\.jsonl"):
        list(open_parts(parts, plan.kind, plan.columns).rows)
    inputs.put("0.jsonl", content)
    with open_input("s3://bucket/in/0.jsonl") as file:
        file.read(1)
        inputs.remove("0.jsonl")
        inputs.put("0.jsonl", content + b"{}\n")
        with pytest.raises(ArtifactError, match=r"0\.jsonl changed while it was read"):
            file.seek(0, os.SEEK_END), file.seek(0), file.read()
    with pytest.raises(ArtifactError, match=r"0\.jsonl changed since the plan: it had"):
        list(open_parts(parts, plan.kind, plan.columns).rows)
    with pytest.raises(InputError, match=r"The inputs changed since s3://bucket/out was begun: s3://bucket/in/0"):
        make_plan(folder, "s3://bucket/in/*.jsonl", 10, {})
    with pytest.raises(InputError, match="is in the output folder"):
        make_plan(open_folder("s3://bucket/in"), "s3://bucket/in/*.jsonl", 10, {})


@pytest.mark.usefixtures("store")
def test_patterns() -> None:
    folder = open_folder("s3://bucket/")
    names = ["a.txt", "in/b.txt", "in/c d#1%20é?.txt", "in/deep/er/e.txt", "in/f.csv"]
    for name in names:
        assert folder.put(name, name.encode())
        assert not folder.put(name, b"other")
        assert folder.read(name) == name.encode()
    for pattern, found in {
        "*.txt": ["a.txt"],
        "in/*.txt": names[1:3],
        "in/**/*.txt": names[1:4],
        "**": names,
        "in/b.txt": ["in/b.txt"],
        "in/[b-c]*": names[1:3],
        "in/deep/*": [],
    }.items():
        if found:
            expected = [(f"s3://bucket/{name}", len(name.encode())) for name in found]
            assert find_inputs(f"s3://bucket/{pattern}") == expected, pattern
        else:
            with pytest.raises(InputError, match="No file has the name"):
                find_inputs(f"s3://bucket/{pattern}")
    with open_input("s3://bucket/in/b.txt") as file:
        assert (file.seek(3), file.read(), file.seek(-5, os.SEEK_END), file.read(2)) == (3, b"b.txt", 3, b"b.")
    with pytest.raises(InputError, match="names no file of a bucket"):
        find_inputs("s3://bucket")


def test_other_urls_are_no_local_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("s3a://bucket/out", "S3://bucket/out", "hdfs://out", "s3:///out"):
        for options in (["--input", "*.jsonl", "--output", url], ["--input", url, "--output", "out"]):
            found = CliRunner().invoke(app, ["infer", "--local", *options]).exception
            assert isinstance(found, ShoalError), options
        assert "Known: s3://" in str(CliRunner().invoke(app, ["shards", "status", url]).exception)
    assert [*tmp_path.iterdir()] == []


def test_object_storage_needs_a_folder(tmp_path: Path) -> None:
    for arguments in (
        ["--input", "s3://bucket/a.jsonl"],
        ["--input", "s3://bucket/a.jsonl", "--output", str(tmp_path / "b.jsonl")],
        ["--input", str(tmp_path), "--output", "s3://bucket/b.jsonl"],
    ):
        found = CliRunner().invoke(app, ["infer", *arguments]).exception
        assert isinstance(found, ShoalError)
        assert "is in object storage, which needs an output folder" in str(found)
