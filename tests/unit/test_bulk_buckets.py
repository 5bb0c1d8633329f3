"""Sharded runs with inputs and outputs in object storage: moto's S3, with faults planted before and after it."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from typer.testing import CliRunner

from shoal.bulk.shards import folders
from shoal.bulk.shards.folders import find_inputs, open_folder, open_input
from shoal.bulk.shards.report import find_faults, read_status
from shoal.cli import app
from shoal.errors import ArtifactError, InputError, ShoalError
from tests.unit.test_bulk_shards import command, read_files, run, write_inputs

pytestmark = pytest.mark.usefixtures("may_start_processes")


class Store:
    """S3 in this process. Of each file whose name contains ``lost``, the answer to its first put is lost; puts of files
    whose names contain ``refused`` are refused.
    """

    def __init__(self) -> None:
        import boto3
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.lost = self.refused = "/none/"
        self.seen: list[str] = []
        self._app: Any = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        url = f"http://127.0.0.1:{self._server.server_port}"
        keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
        self.environ = {**keys, "AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true"}
        boto3.client(
            "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b"
        ).create_bucket(Bucket="bucket")

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Any:
        path = environ["PATH_INFO"]
        if environ["REQUEST_METHOD"] == "PUT" and self.refused in path:
            start_response("403 Forbidden", [("Content-Length", "0")])
            return [b""]
        answer = self._app(environ, start_response)
        if environ["REQUEST_METHOD"] == "PUT" and self.lost in path and path not in self.seen:
            self.seen.append(path)
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        return answer

    def end(self) -> None:
        urlopen(f"{self.environ['AWS_ENDPOINT_URL']}/moto-api/reset", b"").close()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    made = Store()
    for name, value in made.environ.items():
        monkeypatch.setenv(name, value)
    folders._open_store.cache_clear()
    yield made
    made.end()
    folders._open_store.cache_clear()


def upload(pattern: str, url: str) -> str:
    """Put the files of a pattern into a folder; return their pattern there."""
    folder = open_folder(url)
    for name, _ in find_inputs(pattern):
        folder.put(Path(name).name, Path(name))
    return f"{url}/{Path(pattern).name}"


def download(url: str) -> dict[str, bytes]:
    folder = open_folder(url)
    return {entry.name: folder.read(entry.name) or b"" for entry in folder.entries()}


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".parquet"])
def test_a_run_in_object_storage_is_that_of_folders(kind: str, forest: Path, tmp_path: Path) -> None:
    local = write_inputs(tmp_path / "in", kind, [230, 3, 210])
    assert run(forest, local, tmp_path / "out").returncode == 0
    pattern = upload(local, "s3://bucket/some/in")
    done = run(forest, pattern, "s3://bucket/some/out", "--workers", "2")
    assert done.returncode == 0, done.stderr
    here, there = read_files(tmp_path / "out"), download("s3://bucket/some/out")
    assert there.keys() == here.keys()
    assert [name for name in here if here[name] != there[name]] == ["_plan.json"]  # has the names of the inputs
    folder = open_folder("s3://bucket/some/out")
    assert list(find_faults(folder)) == []
    assert (read_status(folder)["rows"], read_status(folder)["is_complete"]) == (443, True)
    for at, out in enumerate(("s3://bucket/some/out", str(tmp_path / "out"))):
        merged = ["infer", "--merge", out, "--output", str(tmp_path / f"{at}{kind}")]
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


@pytest.mark.usefixtures("store")
def test_an_input_that_was_removed_or_changed(tmp_path: Path) -> None:
    from shoal.bulk.shards.parts import open_parts
    from shoal.bulk.shards.plan import ShardReader, make_plan

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
    inputs.put("0.jsonl", content + b"{}\n")
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


def test_object_storage_needs_a_folder(tmp_path: Path) -> None:
    for arguments in (
        ["--input", "s3://bucket/a.jsonl"],
        ["--input", "s3://bucket/a.jsonl", "--output", str(tmp_path / "b.jsonl")],
        ["--input", str(tmp_path), "--output", "s3://bucket/b.jsonl"],
    ):
        found = CliRunner().invoke(app, ["infer", *arguments]).exception
        assert isinstance(found, ShoalError)
        assert "is in object storage, which needs an output folder" in str(found)
