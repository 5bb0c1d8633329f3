"""Files scored by a real server, which goes away in the middle and comes back."""

from __future__ import annotations

import csv
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from shoal.bulk.files import partial_path
from shoal.cli import app
from shoal.errors import InputError, ServerError
from shoal.local import Pipeline
from shoal.server.launch import find_ports, serve
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


def test_choice_of_the_model(forest: Path) -> None:
    """A server started by hand keeps the list of its models to itself."""
    with serve(forest) as server:
        run = CliRunner().invoke(app, ["infer", "A text.", "--url", server.grpc_url])
        assert isinstance(run.exception, InputError)
        assert str(run.exception).endswith("Which model is meant? Name it, as in --model NAME")
        run = CliRunner().invoke(app, ["infer", "A text.", "--url", server.grpc_url, "--model", "cuml"])
        assert str(run.exception).startswith("Model cuml takes no text; 'A text.' needs a name. Name each input: ")
