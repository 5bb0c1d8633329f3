"""Servers that a test needs for itself: it kills them, counts from their start, or they do not start."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.authoring.composition.compose import compose
from shoal.authoring.composition.warmup import NUM_CALLS
from shoal.authoring.repository.manifest import MANIFEST
from shoal.clients.client.client import Client
from shoal.clients.client.copies import read_metrics
from shoal.clients.local import Pipeline
from shoal.errors import ServerError
from shoal.kit.component.ledger import BATCHES, ROWS
from shoal.serving.server.launch import serve
from tests.conftest import verified
from tests.support.faults import BUNDLE, ENCODER, EVERYWHERE, FOREST, MODELS, WEIGHT  # fmt: skip
from tests.support.hybrid import TEXTS, settled
from tests.support.links import linked, said_of
from tests.support.once import ROOT
from tests.support.skeletons import MEMBERS
from tests.support.ways import failure, url_of, write_models


@pytest.fixture
def models(tmp_path: Path) -> Path:
    write_models(tmp_path / "repository")
    return tmp_path / "repository"


def test_a_server_that_is_killed(models: Path) -> None:
    with serve(models) as running, ThreadPoolExecutor(2) as callers:
        ways = ("grpc", "http")  # each waits, one of them in the queue
        failures = []
        for way in ways:
            failures.append(callers.submit(failure, way, url_of(running, way), inputs={"X": [5.0]}))
            time.sleep(1)  # its queue holds one
        running._process.kill()
        for way, words in zip(ways, failures, strict=True):
            start = (
                f"The connection to the server at {url_of(running, way)} broke during a request (connection closed)."
            )
            assert words.result().startswith(start)


def test_a_model_with_a_dead_process(models: Path) -> None:
    with serve(models) as running:
        for way in ("http", "grpc"):
            url = url_of(running, way)
            said = failure(way, url, inputs={"X": [-1.0]})
            assert said == f"The process of model slow at {url} has died. Restart the server; its log says why it died."


def test_instances_of_a_model_add_up(artifacts: Path, tmp_path: Path) -> None:
    repository = compose("ensemble_all", tmp_path / "r", artifacts=artifacts)
    config = repository / "preprocess" / "config.pbtxt"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace("instance_group {", "instance_group {\n  count: 2"), encoding="utf-8")
    with serve(repository) as server, Client(server.grpc_url) as client, ThreadPoolExecutor(4) as callers:
        before = settled(server)  # each instance has been warmed up
        list(callers.map(lambda _: client.infer("ensemble_all", excerpt=TEXTS), range(24)))
        moved = settled(server) - before
    assert moved.events["preprocess"][ROWS] == 24 * len(TEXTS)
    assert moved.events["postprocess"][ROWS] == 24 * len(TEXTS)


def test_the_server_calls_every_model_before_the_first_request(repository: Path) -> None:
    wanted = dict.fromkeys(MEMBERS, NUM_CALLS)
    with serve(repository) as server:
        counted: dict[str, int] = {}
        deadline = time.monotonic() + 30
        while counted != wanted and time.monotonic() < deadline:  # stubs report their counters once per second
            time.sleep(0.2)
            counted = {model: counts[BATCHES] for model, counts in read_metrics(server.metrics_url).events.items()}
    assert counted == wanted


def test_leaf_folders_copied_by_hand_serve_too(artifacts: Path, tmp_path: Path, pipeline: Pipeline) -> None:
    """The README's way without `shoal compose`: cp -r under the model's name, each artifact to its place."""
    leaves = {
        "preprocess": "preprocess/readability",
        "postprocess": "postprocess/readability",
        "bert-large": "models/bert-large",
        "cuml": "models/cuml",
        "ensemble_all": "ensembles/ensemble_all",
    }
    for name, leaf in leaves.items():
        subprocess.run(["cp", "-r", ROOT / leaf, tmp_path / name], check=True)
    for name, files in {
        "preprocess": ["preprocess.json", "vocab.txt"],
        "bert-large": ["model.pt"],
        "cuml": ["checkpoint.tl"],
    }.items():
        subprocess.run(["cp", *(artifacts / file for file in files), tmp_path / name / "1"], check=True)
    with serve(tmp_path) as running, Client(running.grpc_url) as client:
        got = client.infer("ensemble_all", excerpt=TEXTS)
    # without a warm-up the first batch is answered before TorchScript optimises the encoder
    assert np.allclose(got["SCORE"], pipeline(excerpt=TEXTS)["SCORE"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("stop", [signal.SIGINT, *verified(signal.SIGTERM)])
def test_serve_until_interrupted(repository: Path, tmp_path: Path, stop: signal.Signals) -> None:
    program = [sys.executable, "-c", "from shoal.cli import main; main()"]
    ports = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")
    with subprocess.Popen(
        [*program, "serve", repository, *ports, "--log", tmp_path / "triton.log"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        line = running.stdout.readline()
        assert line.startswith("ready: http 127.0.0.1:")
        said = [running.stdout.readline().strip() for _ in range(6)]
        assert f'shoal infer --model ensemble_all --url {line.split()[4]} "A text."' in said
        assert any(
            words.startswith("ensemble_all(excerpt: STRING [1], BERT_WEIGHT: FP32 [1] = None) -> ") for words in said
        )
        with Client(line.split()[4]) as client:
            assert client.is_ready("ensemble_all")
        running.send_signal(stop)
        _, errors = running.communicate(timeout=30)
    assert running.returncode == 0
    assert "for development and tests" in errors
    assert f"{stop.name}: stopping." in errors
    assert "Started HTTPService" in (tmp_path / "triton.log").read_text(encoding="utf-8")


def test_a_port_that_is_taken_is_named_at_once(repository: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        began = time.monotonic()
        shoal = [sys.executable, "-c", "import shoal.cli; shoal.cli.main()"]
        result = subprocess.run(
            [*shoal, "serve", repository, "--http-port", "0", "--grpc-port", str(port), "--metrics-port", "0"],
            capture_output=True,
            text=True,
            check=False,
        )
    assert time.monotonic() - began < 5
    assert result.returncode == 1
    assert f"error: Port {port} cannot be used: Address already in use." in result.stderr
    assert "Stop what listens there (ss -ltnp shows it), or choose another: --" in result.stderr
    assert "Traceback" not in result.stderr


SERVED = [
    ("checkpoint.tl", FOREST[0]), ("model.pt", ENCODER[1]),
    *verified(("checkpoint.tl", FOREST[3]), ("preprocess.json", BUNDLE[0]), ("vocab.txt", EVERYWHERE[5]),
              ("postprocess.json", WEIGHT[0])),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fault"), SERVED)
def test_a_bad_artifact_ends_the_start(repository: Path, tmp_path: Path, name: str, fault: tuple[Any, ...]) -> None:
    model = MODELS[name]
    hand = linked(repository, tmp_path / "hand", f"{model}/1/{name}", fault[1])
    (hand / MANIFEST).unlink()
    with pytest.raises(ServerError) as refused:
        serve(hand)
    assert refused.value.what.startswith("Triton did not start: failed to load '")
    assert f"failed to load '{model}' version 1: Internal: ArtifactError: " in refused.value.what
    assert said_of(hand / model / "1" / name, fault[2]).removeprefix("it is ") in refused.value.what
    assert "\n" not in refused.value.what
