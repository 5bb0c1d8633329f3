"""The second pipeline: made by its own script in a copy of its folder; then served, checked, shown and measured."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import shoal
from shoal.authoring.check.families import check
from shoal.authoring.repository.config import read_config
from shoal.cli import app
from shoal.clients.local import Pipeline
from shoal.serving.server.launch import Server
from tests.support.once import ROOT

EXAMPLE = ROOT / "examples" / "triage"
LABELS = ("billing", "technical", "other")
COMMANDS = Path(sys.executable).parent
FLOOR = {"trees": 0.45, "encoder": 0.75, "vote": 0.75}  # a tensor that is wired wrongly gives a third


@dataclass(frozen=True)
class Built:
    """The copied example after its script ran, and what that printed."""

    folder: Path
    printed: str

    @property
    def repository(self) -> Path:
        return self.folder / "build" / "repository"

    def shoal(self, *arguments: Any) -> str:
        with contextlib.chdir(self.folder):
            result = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout


def run(folder: Path, *command: Any) -> str:
    environment = {**os.environ, "PATH": f"{COMMANDS}:{os.environ['PATH']}", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    pytest.importorskip("lightgbm")
    folder = tmp_path_factory.mktemp("examples") / "triage"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("build", "__pycache__"))
    return Built(folder, run(folder, folder / "build.sh"))


@pytest.fixture(scope="module")
def held_out() -> list[dict[str, str]]:
    with (EXAMPLE / "messages.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))[3::4]


@pytest.fixture(scope="module")
def pipeline(built: Built) -> Iterator[Pipeline]:
    loaded = shoal.load(built.repository / "triage")
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def server(built: Built) -> Iterator[Server]:
    with shoal.serve(built.repository) as running:
        yield running


def share_right(answer: Mapping[str, Any], rows: list[dict[str, str]]) -> float:
    return float(
        np.mean([topic.decode() == row["label"] for topic, row in zip(answer["TOPIC"][:, 0], rows, strict=True)])
    )


def test_the_messages_are_240_different_ones(held_out: list[dict[str, str]]) -> None:
    with (EXAMPLE / "messages.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert Counter(row["label"] for row in rows) == dict.fromkeys(LABELS, 80)
    assert Counter(row["label"] for row in held_out) == dict.fromkeys(LABELS, 20)
    assert len({" ".join(re.findall(r"\w+", row["text"].lower())) for row in rows}) == 240


def test_its_models_answer_unseen_messages(built: Built) -> None:
    """Compare with what the script printed: the two models by their own libraries, the vote by the pipeline."""
    right = dict(re.findall(r"(\w+): (\d+) of 60 held-out messages right", built.printed))
    assert {who: int(number) / 60 > FLOOR[who] for who, number in right.items()} == dict.fromkeys(FLOOR, True), right


def test_check_finds_nothing(built: Built) -> None:
    for place in (built.folder / "build", built.repository):
        assert check(place) == []


def test_all_that_know_the_classes_agree_on_their_order(built: Built) -> None:
    models = {name: read_config(built.repository / name) for name in ("topic", "trees", "verdict")}
    for config in models.values():
        assert json.loads(config.spec.parameters["labels"]) == [*LABELS]


def test_the_server_answers_what_this_process_does(
    server: Server, pipeline: Pipeline, held_out: list[dict[str, str]]
) -> None:
    texts = [row["text"] for row in held_out]
    here = pipeline(MESSAGE=texts)
    with shoal.Client(server.grpc_url) as client:
        served = client.infer("triage", MESSAGE=texts)
        alone = client.infer("triage", MESSAGE=texts[:1], outputs=["CONFIDENCE"])
    assert {name: array.dtype for name, array in served.items()} == {"TOPIC": np.object_, "CONFIDENCE": np.float32}
    np.testing.assert_array_equal(served["TOPIC"], here["TOPIC"])
    np.testing.assert_allclose(served["CONFIDENCE"], here["CONFIDENCE"], atol=1e-5)
    np.testing.assert_allclose(alone["CONFIDENCE"], here["CONFIDENCE"][:1], atol=1e-5)
    assert share_right(served, held_out) > FLOOR["vote"]


def test_refused_requests_leave_it_serving(server: Server) -> None:
    """Triton before 26.02 does not survive an ensemble in which one of several first steps refuses a request."""
    for url, protocol in ((server.grpc_url, "grpc"), (server.http_url, "http")):
        with shoal.Client(url, protocol=protocol, timeout=20) as client:
            for _ in range(100):
                with pytest.raises(shoal.InputError, match="not valid UTF-8"):
                    client.infer("triage", MESSAGE=[b"\xff"])
            assert client.infer("triage", MESSAGE=["no wifi since noon"])["TOPIC"].tolist() == [[b"technical"]]


def test_the_vote_is_of_its_two_models(built: Built, pipeline: Pipeline, held_out: list[dict[str, str]]) -> None:
    """Seven parts encoder and three parts trees: the same, made of single models."""
    texts = [row["text"] for row in held_out]

    def ask(model: str, **inputs: Any) -> Mapping[str, Any]:
        loaded = shoal.load(built.repository / model)
        answer = loaded(**inputs)
        loaded.close()
        return answer

    tokens, words = ask("tokens", TEXT=texts), ask("words", TEXT=texts)
    topic = ask("topic", INPUT__0=tokens["input_ids"], INPUT__1=tokens["attention_mask"])["OUTPUT__0"]
    trees = ask("trees", input__0=words["COUNTS"])["output__0"]
    for chances in (topic, trees):
        np.testing.assert_allclose(chances.sum(axis=1), 1, atol=1e-5)
    blended = 0.7 * topic + 0.3 * trees
    answer = pipeline(MESSAGE=texts)
    np.testing.assert_allclose(answer["CONFIDENCE"][:, 0], blended.max(axis=1), atol=1e-5)
    assert [topic.decode() for topic in answer["TOPIC"][:, 0]] == [LABELS[k] for k in blended.argmax(axis=1)]


def test_its_tools_know_it(built: Built) -> None:
    """Drawn, described, asked from the command line in files."""
    drawn = built.shoal("graph", built.repository, "--model", "triage")
    assert drawn.count('["') == 7
    described = json.loads(built.shoal("describe", built.repository, "--model", "triage", "--json"))
    assert {step["name"] for step in described["steps"]} == {
        "checked_text",
        "tokens",
        "topic",
        "words",
        "trees",
        "vote",
        "verdict",
    }
    (built.folder / "two.csv").write_text("text,id\nYou charged me twice!,1\nno wifi since noon,2\n", encoding="utf-8")
    built.shoal("infer", "--local", "--repository", built.repository, "--input", "two.csv", "--output", "answers.csv")
    with (built.folder / "answers.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["id"], row["topic"]) for row in rows] == [("1", "billing"), ("2", "technical")]
    assert all(1 / 3 < float(row["confidence"]) <= 1 for row in rows)


def test_bench_measures_it(built: Built) -> None:
    measured = json.loads(
        built.shoal(
            "bench", built.repository, "--inputs", "messages.csv", "--batches", "4", "--concurrency", "1",
            "--seconds", "0.5", "--repeats", "1", "--json",
        )
    )  # fmt: skip
    assert "vote" in json.dumps(measured)
