"""The command line: what it prints, and how it fails."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal import cli
from shoal.errors import InputError, ShoalError
from shoal.serving.client import Client
from shoal.serving.server import Server
from shoal.training import train as training
from shoal.training.corpus import Corpus
from tests.conftest import TINY

Shoal = Callable[..., str]


@pytest.fixture
def shoal() -> Shoal:
    """Run a command in this process; what it printed on standard output."""

    def run(*arguments: object) -> str:
        result = CliRunner().invoke(cli.app, [str(a) for a in arguments])
        if isinstance(result.exception, ShoalError):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result.stdout

    return run


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train for a moment only, on shoal's own passages."""
    monkeypatch.setitem(training.PRESETS, "quick", TINY)
    monkeypatch.delenv("SHOAL_DATA_DIR", raising=False)


def test_help_names_every_command(shoal: Shoal) -> None:
    text = shoal("--help")
    for command in ("train", "compose", "serve", "infer", "quickstart", "doctor", "graph"):
        assert command in text


def test_train_and_compose(shoal: Shoal, tmp_path: Path) -> None:
    printed = shoal("train", "--out", tmp_path / "artifacts")
    assert "RMSE on unseen texts: encoder" in printed
    assert "these scores are a demonstration" in printed
    assert f"artifacts: {tmp_path / 'artifacts'}" in printed
    report = json.loads(shoal("train", "--out", tmp_path / "artifacts", "--json"))
    assert report["seed"] == 0
    repository = tmp_path / "repository"
    printed = shoal("compose", "ensemble_all", repository, "--artifacts", tmp_path / "artifacts")
    assert f"next: shoal serve {repository}\n" in printed
    printed = shoal("compose", "ensemble_all", repository, "--artifacts", tmp_path / "artifacts", "--target", "26.06")
    assert f"next: shoal serve {repository} --print" in printed
    assert "tritonserver:26.06-py3" in shoal("serve", repository, "--print")


def test_a_cross_validation_of_a_file_of_ones_own(
    shoal: Shoal, tiny_bert: Path, passages: Corpus, tmp_path: Path
) -> None:
    lines = (json.dumps({"passage": t, "grade": g}) for t, g in zip(passages.texts, passages.targets, strict=True))
    (tmp_path / "my.jsonl").write_text("\n".join(lines), encoding="utf-8")
    columns = ["--data", tmp_path / "my.jsonl", "--text-column", "passage", "--target-column", "grade"]
    train = (
        "train", *columns, "--folds", 2, "--epochs", 0.5, "--batch-size", 8, "--learning-rate", 1e-3, "--dropout", 0.1,
        "--accumulation", 2, "--gradient-checkpointing", "--dtype", "fp32", "--seed", 3, "--encoder", tiny_bert,
        "--out", tmp_path / "artifacts",
    )  # fmt: skip
    printed = shoal(*train)
    assert re.search(r"weight of the encoder in the blend: [01]\.\d\d\n", printed)
    assert "2-fold cross-validation" in printed
    assert "mean of training rows" in printed
    assert f"report: {tmp_path / 'artifacts' / 'report.html'}" in printed
    report = json.loads((tmp_path / "artifacts" / "report.json").read_text(encoding="utf-8"))
    assert (report["seed"], report["preset"]["num_folds"], report["corpus"]["name"]) == (3, 2, "my.jsonl")
    assert report["preset"]["encoder"] == {
        "max_epochs": 0.5, "max_steps": None, "batch_size": 8, "learning_rate": 1e-3, "weight_decay": 0.01,
        "warm_up": 0.1, "evaluations": 3, "patience": 3, "dropout": 0.1, "accumulation": 2,
        "gradient_checkpointing": True, "dtype": "fp32",
    }  # fmt: skip
    assert shoal(*train, "--json").startswith("{")  # at once: it has been trained already
    with pytest.raises(
        InputError, match=r"holds a finished training that had other settings: seed 3, now 4\. Name ano"
    ):
        shoal(*train, "--seed", 4)
    with pytest.raises(InputError, match="were trained on 100 of the 100 texts"):
        shoal("evaluate", tmp_path / "artifacts", *columns)
    printed = shoal("evaluate", tmp_path / "artifacts", *columns, "--seen", "include")
    assert "100 texts of my.jsonl" in printed
    assert "100 of them were trained on: this is no measurement of new texts." in printed
    result = json.loads(shoal("evaluate", tmp_path / "artifacts", *columns, "--seen", "include", "--json"))
    assert {entry["name"] for entry in result["predictions"]} >= {"encoder", "forest", "blend"}


def test_training_options_that_are_none(shoal: Shoal, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"There is no preset 'huge'\. Known: quick, full\."):
        shoal("train", "--preset", "huge")
    with pytest.raises(InputError, match=r"There is no --dtype 'fp8'\. Known: auto, fp32, bf16\."):
        shoal("train", "--dtype", "fp8")
    with pytest.raises(InputError, match="There is no file for column 'passage'"):
        shoal("train", "--text-column", "passage", "--out", tmp_path / "artifacts")


def test_an_interruption_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "train", interrupted)
    result = CliRunner().invoke(cli.app, ["train", "--out", str(tmp_path / "out")])
    assert result.exit_code == 130
    assert "Interrupted. Nothing was saved." in result.stderr
    (tmp_path / ".out.training").mkdir()
    result = CliRunner().invoke(cli.app, ["train", "--out", str(tmp_path / "out")])
    assert f"What was saved is in {tmp_path / '.out.training'}: the same command goes on." in result.stderr


def test_graph(shoal: Shoal, repository: Path) -> None:
    text = shoal("graph", repository / "ensemble_all")
    assert text.startswith("flowchart TB\n")
    assert 's0 -->|"tree_feats<br/>FP32 [207]"| s2' in text


@pytest.mark.server
def test_infer(shoal: Shoal, server: Server) -> None:
    arguments = ["infer", "The cat sat.", "A [bold] text", "--url", server.grpc_url]
    table = shoal(*arguments)
    assert "The cat sat." in table
    assert "A [bold] text" in table
    assert all(name in table for name in ("score", "bert_score", "forest_score"))
    rows = json.loads(shoal(*arguments, "--set", "BERT_WEIGHT=1", "--json"))
    assert [row["score"] for row in rows] == [row["bert_score"] for row in rows]
    for fault, message in (
        (("--set", "BERT_WEIGHT"), "--set 'BERT_WEIGHT' is no NAME=NUMBER"),
        (("--set", "W=1"), "There is no input W"),
        (("--set", "BERT_WEIGHT=2"), r"BERT_WEIGHT\[0\] is 2"),
        (("--model", "nope"), "nope"),
        (("--model", "cuml"), "Model cuml takes no text"),
    ):
        with pytest.raises(ShoalError, match=message):
            shoal(*arguments, *fault)


@pytest.mark.server
def test_quickstart(shoal: Shoal, tmp_path: Path) -> None:
    printed = shoal("quickstart", "--out", tmp_path / "build")
    for words in ("text", "BERT score", "forest score", "blended score", "RMSE on unseen texts"):
        assert words in printed
    for name in ("artifacts", "repository", "report"):
        (line,) = [line for line in printed.splitlines() if line.startswith(f"{name}: ")]
        assert Path(line.split(": ")[1]).exists()
    assert len([line for line in printed.splitlines() if line.startswith("│")]) == 8


def test_quickstart_refuses_a_path_before_it_trains(shoal: Shoal, tmp_path: Path) -> None:
    with pytest.raises(ShoalError, match="Triton cannot bear the path"):
        shoal("quickstart", "--out", tmp_path / "a b")
    assert list(tmp_path.iterdir()) == []


def test_unknown_presets_are_named(shoal: Shoal) -> None:
    with pytest.raises(ShoalError, match=r"There is no preset 'huge'\. Known: quick"):
        shoal("train", "--preset", "huge")


def test_doctor(shoal: Shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = json.loads(shoal("doctor", "--json"))
    assert {f["check"] for f in findings} >= {"Python", "NumPy", "Triton", "stub", "shared memory", "port 8000"}
    assert "fault" not in {f["level"] for f in findings}
    assert "NumPy" in shoal("doctor")
    monkeypatch.setattr("shoal.doctor.np.__version__", "2.1.0")
    monkeypatch.setattr("shoal.doctor.find_ports", _taken)
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))
    monkeypatch.setenv("SHOAL_TRITONSERVER", "/nowhere")
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == 1
    for words in (
        "Type: pip install 'numpy<2'",
        "Port 8000 is taken.",
        "Name a tritonserver",
        "256 MiB",
    ):
        assert words in result.stdout


def _taken(port: int, *_: int) -> tuple[int, int, int]:
    raise ShoalError(f"Port {port} is taken.")


def test_shared_memory_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert "/dev/shm cannot be written" in result.stdout
    assert result.exit_code == 1


# --- as a program ------------------------------------------------------------------------------------------------


def test_errors_are_two_lines_and_exit_1() -> None:
    program = [sys.executable, "-c", "from shoal.cli import main; main()"]
    run = subprocess.run([*program, "serve", "/nowhere"], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stdout == ""
    assert run.stderr.splitlines()[-2:] == [
        "error: /nowhere is no model repository: it holds no MODEL/config.pbtxt.",
        "  Make one: shoal compose ENSEMBLE REPOSITORY --artifacts DIR",
    ]


@pytest.mark.server
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
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
        with Client(line.split()[4]) as client:
            assert client.is_ready("ensemble_all")
        running.send_signal(stop)
        _, errors = running.communicate(timeout=30)
    assert running.returncode == 0
    assert "for development and tests" in errors
    assert f"{stop.name}: stopping." in errors
    assert "Started HTTPService" in (tmp_path / "triton.log").read_text(encoding="utf-8")
