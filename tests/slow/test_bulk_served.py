"""Files scored by a real server, which goes away in the middle and comes back."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from shoal.cli import app
from shoal.clients.bulk.files import partial_path
from shoal.clients.bulk.shards.folders import open_folder
from shoal.clients.bulk.shards.report import find_faults
from shoal.clients.local import Pipeline
from shoal.errors import InputError, ServerError
from shoal.serving.server.launch import find_ports, serve
from tests.support.bulk import write_texts


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_server_that_goes_away_in_the_middle(protocol: str, forest: Path, tmp_path: Path, scorer: Pipeline) -> None:
    source, out = write_texts(tmp_path / "in.csv", 3_000), tmp_path / "out.csv"
    http, grpc, _ = find_ports(0, 0, 0)
    url = f"127.0.0.1:{grpc if protocol == 'grpc' else http}"
    command = [
        "infer", "-i", str(source), "-o", str(out), "--url", url, "--protocol", protocol, "--model", "forest"
    ]  # fmt: skip
    with serve(forest, http_port=http, grpc_port=grpc) as server:

        def kill() -> None:
            while not (partial_path(out).exists() and partial_path(out).stat().st_size > 20_000):
                time.sleep(0.01)
            server._process.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        run = CliRunner().invoke(app, command)
        killer.join()
    assert isinstance(run.exception, ServerError), run.output
    assert url in str(run.exception)
    said = f"Finished rows are in {partial_path(out)}: run the same command (without --fresh) to resume."
    assert said in run.stderr.replace("\n", "")
    assert not out.exists()
    with serve(forest, http_port=http, grpc_port=grpc):
        run = CliRunner().invoke(app, command)
    assert run.exit_code == 0, run.output
    with source.open(encoding="utf-8", newline="") as file:
        texts = [row["text"] for row in csv.DictReader(file)]
    with out.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["id"]) for row in rows] == list(range(3_000))
    expected = np.concatenate([scorer(excerpt=texts[k : k + 500])["SCORE"][:, 0] for k in range(0, 3_000, 500)])
    assert [np.float32(row["score"]) for row in rows] == expected.tolist()


def test_a_server_that_goes_away_beneath_shards(forest: Path, tmp_path: Path, scorer: Pipeline) -> None:
    """The run ends; another does the rest, and the rows are those of one process, in order."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    lines = [json.dumps({"id": n, "text": f"The cat is {n} years old."}) for n in range(6_000)]
    source.write_text("\n".join(lines), encoding="utf-8")
    http, grpc, _ = find_ports(0, 0, 0)
    command = [sys.executable, "-c", "from shoal.cli import main; main()", "infer", "-i", str(source), "-o", str(out)]
    command += ["--url", f"127.0.0.1:{grpc}", "--model", "forest", "--shard-rows", "500", "--workers", "2"]
    with (
        serve(forest, http_port=http, grpc_port=grpc) as server,
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as run,
    ):
        while len([*out.glob("part-*")]) < 2:
            time.sleep(0.01)
        server._process.kill()
        _, said = run.communicate(timeout=300)
    assert run.returncode == 1
    assert f"127.0.0.1:{grpc}" in said
    assert "Traceback" not in said
    assert 2 <= len([*out.glob("part-*")]) < 12
    with serve(forest, http_port=http, grpc_port=grpc):
        again = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert list(find_faults(open_folder(str(out)))) == []
    rows = [json.loads(line) for path in sorted(out.glob("part-*")) for line in path.read_bytes().splitlines()]
    assert [row["id"] for row in rows] == list(range(6_000))
    assert np.float32(rows[4321]["score"]) == scorer(excerpt=[rows[4321]["text"]])["SCORE"][0, 0]


def test_choice_of_the_model(forest: Path) -> None:
    """A server started by hand keeps the list of its models to itself."""
    with serve(forest) as server:
        run = CliRunner().invoke(app, ["infer", "A text.", "--url", server.grpc_url])
        assert isinstance(run.exception, InputError)
        assert str(run.exception).endswith("Which model is meant? Name it, as in --model NAME")
        run = CliRunner().invoke(app, ["infer", "A text.", "--url", server.grpc_url, "--model", "cuml"])
        assert str(run.exception).startswith("Model cuml takes no text; 'A text.' needs a name. Name each input: ")
