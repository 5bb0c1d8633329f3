"""`shoal bench` of servers that run already: their rows, steps and token ids, several in turns, and what goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.authoring.composition.compose import compose
from shoal.errors import InputError, ServerError
from shoal.lab.bench import measure
from shoal.lab.tiny_llm import make_tiny
from tests.support.bench import write_repository
from tests.support.commands import Shoal
from tests.support.service import SHOAL, Service

QUICK = ("--seconds", "0.3", "--repeats", "2", "--json")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_repository(tmp_path_factory.mktemp("bench") / "repository", seconds="0.01")


@pytest.fixture(scope="module")
def service(repository: Path) -> Iterator[Service]:
    with Service(repository, repository.parent / "log") as running:
        yield running


def by_subject(record: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    return {(load["repository"], load["batch"]): load["median"] for load in record["loads"] if load["callers"] == 1}


def test_rows_and_steps_of_a_running_server(service: Service, repository: Path, shoal: Shoal) -> None:
    """Over both protocols, beside the same repository on a server of its own."""
    subjects = [f"grpc={service.grpc}", f"http=http://{service.http}", f"own={repository}"]
    sizes = ("--inputs", repository / "rows.csv", "--batches", "1,4", "--concurrency", "1")
    record = json.loads(shoal("bench", *subjects, *sizes, *QUICK))
    found = by_subject(record)
    assert {label for label, _ in found} == {"grpc", "http", "own"}
    for (label, batch), figures in found.items():
        assert list(figures["steps"]) == ["quick", "slow"]
        assert 10 < figures["steps"]["slow"]["infer_ms"] < figures["p50_ms"]
        assert (
            0.8 * batch < figures["steps"]["slow"]["rows_per_execution"] <= batch
        )  # the service asks it for a row too
        assert (figures["server_cpu"] is None) == (label != "own")
    ratios = {(entry["repository"], entry["to"], entry["batch"]): entry["ratios"] for entry in record["ratios"]}
    assert len(ratios) == 4
    assert all(0.2 < ratio["rows_per_s"][0] < 5 for ratio in ratios.values())
    assert not [note for note in record["notes"] if "differ" in note]


def test_components_in_the_client(service: Service, repository: Path, shoal: Shoal) -> None:
    asked = ("bench", repository, "--url", service.grpc, "--placement", "server,client")
    record = json.loads(shoal(*asked, "--inputs", repository / "rows.csv", "--batches", "1", *QUICK))
    found = by_subject(record)
    assert found["client", 1]["steps"] == {}
    assert found["client", 1]["local_ms"] > 10
    assert list(found["server", 1]["steps"]) == ["quick", "slow"]
    assert found["server", 1]["local_ms"] is None


def test_answers_that_differ_are_named(service: Service, tmp_path: Path, shoal: Shoal) -> None:
    other = write_repository(tmp_path / "other", seconds="0")
    code = other / "slow" / "1" / "model.py"
    code.write_text(code.read_text(encoding="utf-8").replace('batch["X"]', 'batch["X"] + 2'), encoding="utf-8")
    sizes = ("--inputs", other / "rows.csv", "--batches", "1", "--concurrency", "1")
    record = json.loads(shoal("bench", f"a={service.grpc}", f"b={other}", *sizes, *QUICK))
    said = [note for note in record["notes"] if "differ" in note]
    assert said == ["The answers of b differ from those of a, first at 1 row, 1 caller: Y by up to 2."]


def test_a_key(repository: Path, tmp_path: Path, shoal: Shoal) -> None:
    keys, key = tmp_path / "keys.toml", tmp_path / "key"
    key.write_text(shoal("keys", "new", "mine", "--file", keys), encoding="utf-8")
    sizes = ("--inputs", repository / "rows.csv", "--batches", "1", "--concurrency", "1", *QUICK)
    with Service(repository, tmp_path / "log", "--keys", keys) as running:
        with pytest.raises(ServerError, match="key"):
            shoal("bench", running.grpc, *sizes)
        for url in (running.grpc, f"http://{running.http}"):
            record = json.loads(shoal("bench", url, *sizes, "--api-key-file", key))
            assert list(record["loads"][0]["median"]["steps"]) == ["quick", "slow"]


def test_a_server_that_goes_away_within_a_round(
    repository: Path, tmp_path: Path, shoal: Shoal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one is measured, and nothing is said of the speed of the one that is gone."""
    monkeypatch.setattr(measure, "_RECOVERY", 1.0)  # seconds: this one does not come back
    sizes = ("--inputs", repository / "rows.csv", "--batches", "1", "--concurrency", "1")
    with Service(repository, tmp_path / "log") as running:
        threading.Timer(4, running.stop).start()
        asked = ("bench", f"gone={running.grpc}", f"own={repository}", *sizes, "--seconds", "3", "--repeats", "1")
        record = json.loads(shoal(*asked, "--json"))
    assert {label for label, _ in by_subject(record)} == {"own"}
    assert any(note.startswith("gone failed at 1 row, 1 caller, and is left out there: ") for note in record["notes"])


def test_ctrl_c_leaves_what_was_measured(service: Service, repository: Path, tmp_path: Path) -> None:
    command = ["bench", service.grpc, "--inputs", repository / "rows.csv", "--batches", "1", "--concurrency", "1"]
    more = ["--seconds", "1", "--repeats", "50", "--out", tmp_path]
    with subprocess.Popen([*SHOAL, *map(str, [*command, *more])], stdout=subprocess.PIPE, text=True) as running:
        time.sleep(15)  # of 100 s and more
        os.kill(running.pid, signal.SIGINT)
        printed, _ = running.communicate(timeout=30)
    assert running.returncode == 130
    assert "Latency of one caller" in printed
    assert "Interrupted: " in printed
    (data,) = tmp_path.glob("*.json")
    assert 1 <= len(json.loads(data.read_text(encoding="utf-8"))["loads"][0]["repeats"]) < 50


def test_models_of_texts_and_of_token_ids(tmp_path: Path, shoal: Shoal) -> None:
    """The same weights in three ways to ask: the texts of two of them are the same."""
    tiny = make_tiny(tmp_path / "tiny")
    repository = compose("llm", tmp_path / "llm", weights=tiny)
    lengths = ("--input-tokens", "9", "--output-tokens", "6", "--concurrency", "2", *QUICK)
    with Service(repository, tmp_path / "log") as running:
        texts = (f"grpc={running.grpc}", f"v1=http://{running.http}/v1")
        record = json.loads(shoal("bench", *texts, "--model", "llm", *lengths))
        ids = json.loads(shoal("bench", running.grpc, "--model", "llm-hf", *lengths))
        with pytest.raises(InputError, match=r"measured in different units: grpc in tokens, ids in token ids"):
            shoal("bench", texts[0], f"ids={running.grpc}", "--model", "llm", "--model", "llm-hf", *lengths)
    for load in (*record["loads"], *ids["loads"]):
        assert load["median"]["output_tokens"] == 6
        assert abs(load["median"]["input_tokens"] - 9) <= 3  # one word may be three tokens
    assert ids["loads"][0]["median"]["input_tokens"] == 9
    assert not [note for note in record["notes"] if "differ" in note]


def test_several_prompts_in_a_request(tmp_path: Path, shoal: Shoal) -> None:
    tiny = make_tiny(tmp_path / "tiny")
    repository = compose("llamav2", tmp_path / "llamav2", weights=tiny)
    asked = ("bench", repository, "--input-tokens", "9", "--output-tokens", "6", "--concurrency", "1", *QUICK)
    with pytest.raises(InputError, match="do not say how many tokens they have"):
        shoal(*asked)
    record = json.loads(shoal(*asked, "--batches", "1,3", "--tokenizer", tiny))
    rates = {load["batch"]: load["median"] for load in record["loads"]}
    assert rates[3]["input_tokens"] == rates[1]["input_tokens"]
    assert rates[3]["output_tokens"] == rates[1]["output_tokens"] == 6
