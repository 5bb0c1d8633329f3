"""Placement hybrid on a real server, its models on the host; and the copies in the server's metrics."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from shoal.authoring.composition.compose import compose
from shoal.authoring.repository.manifest import read_manifest
from shoal.authoring.repository.plan import Plan
from shoal.cli import app
from shoal.clients.client.client import Client
from shoal.clients.local import Pipeline, load
from shoal.errors import InputError, ServerError
from shoal.kit.component.ledger import BATCHES, ROWS
from shoal.serving.server.launch import Server
from tests.support.hybrid import TEXTS, settled

OUTPUTS = ("SCORE", "BERT_SCORE", "FOREST_SCORE")


class Counting:
    """A client that counts its requests by model."""

    def __init__(self, client: Client) -> None:
        self.client, self.calls = client, list[str]()

    def infer(self, model: str, inputs: Any = None, /, **options: Any) -> Any:
        self.calls.append(model)
        return self.client.infer(model, inputs, **options)


@pytest.fixture(scope="module")
def hybrid(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = Plan(placement="hybrid", gpus=())
    return compose("ensemble_all", tmp_path_factory.mktemp("hybrid") / "repository", artifacts=artifacts, plan=plan)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_hybrid_gives_the_same_scores(hybrid: Path, server: Server, pipeline: Pipeline, protocol: str) -> None:
    folder = hybrid / "ensemble_all"
    url = server.grpc_url if protocol == "grpc" else server.http_url
    with Client(url, protocol=protocol) as client:
        counting = Counting(client)
        mine = load(folder, remote=counting)
        for inputs in ({"excerpt": TEXTS}, {"excerpt": TEXTS[:1], "BERT_WEIGHT": [0.9]}):
            expected = pipeline(**inputs)
            for got in (mine(**inputs), client.infer("ensemble_all", **inputs)):
                assert all(np.array_equal(got[name], expected[name]) for name in OUTPUTS)
        mine.close()
        assert counting.calls[0] == "ensemble_all"  # which asks whether it is the same repository
        assert sorted(counting.calls[1:]) == ["bert-large", "bert-large", "cuml", "cuml"]
        with pytest.raises(InputError, match=r"excerpt\[0\] is not valid UTF-8"):
            load(folder, remote=client)(excerpt=[b"\xff"])


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_server_with_another_repository(
    hybrid: Path, server: Server, artifacts: Path, tmp_path: Path, protocol: str
) -> None:
    """One default weight is another: every tensor would fit, and the scores would be wrong."""
    mine = shutil.copytree(artifacts, tmp_path / "artifacts")
    (mine / "postprocess.json").write_text('{"bert_weight": 0.25}', encoding="utf-8")
    other = compose("ensemble_all", tmp_path / "r", artifacts=mine, plan=Plan(placement="hybrid", gpus=()))
    ours, theirs = (read_manifest(folder)["identity"][:12] for folder in (other, hybrid))
    url = server.grpc_url if protocol == "grpc" else server.http_url
    with Client(url, protocol=protocol) as client:
        with pytest.raises(InputError) as refused:
            load(other / "ensemble_all", remote=client)
        assert str(refused.value) == (
            f"The server has another repository: {theirs}, not {ours}."
            " Compose on both sides from the same artifacts, with the same version of shoal."
        )
        where = {"shoal_repository": read_manifest(hybrid)["identity"]}
        assert client.infer("ensemble_all", excerpt=TEXTS, parameters=where)["SCORE"].shape == (4, 1)


def test_the_servers_metrics_carry_the_ledger(hybrid: Path, server: Server) -> None:
    before = settled(server)
    with Client(server.grpc_url) as client:
        client.infer("ensemble_all", excerpt=TEXTS)
    moved = settled(server) - before
    for model in ("preprocess", "bert-large", "cuml", "postprocess"):
        assert moved.events[model] == {BATCHES: 1, ROWS: 4}
    assert list(moved) == []  # on the host nothing crosses
    run = CliRunner().invoke(app, ["copies", str(hybrid / "ensemble_all"), "--url", server.metrics_url])
    assert run.exit_code == 0
    assert "Nothing was copied between host and device." in run.output
    assert "preprocess: " in run.output


def test_a_server_that_is_not_there(hybrid: Path) -> None:
    with pytest.raises(ServerError, match=r"No Triton answers at 127\.0\.0\.1:9 .* Give its metrics address"):
        CliRunner().invoke(
            app, ["copies", str(hybrid / "ensemble_all"), "--url", "127.0.0.1:9"], catch_exceptions=False
        )
