"""`shoal tune` on trained artifacts: what it measures and chooses, and INT8 composed, in process and served."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from shoal.authoring.check.families import check
from shoal.authoring.composition.compose import compose
from shoal.authoring.repository.config import read_config
from shoal.authoring.repository.manifest import read_manifest
from shoal.authoring.repository.plan import Plan
from shoal.cli import app
from shoal.clients.client.client import Client
from shoal.clients.local import load
from shoal.errors import ArtifactError, InputError, ShoalError
from shoal.kit.component.files import sha256
from shoal.kit.encoders.quantize import FILE, INT8_FLAGS, add_errors, read_record
from shoal.lab.tune import PLAN, tune
from shoal.readability.corpus import Corpus
from shoal.readability.train import train
from shoal.readability.tuning import tune_artifacts
from shoal.serving.server.launch import serve
from shoal.system.machine import describe_machine
from tests.support.artifacts import TINY

INT8 = Plan(dtype="int8")


@pytest.fixture(scope="module")
def _int8_instructions() -> None:
    """Skip on processors on which INT8 is not measured."""
    if set(INT8_FLAGS).isdisjoint(describe_machine()["flags"].split()):
        pytest.skip(f"this processor has none of {', '.join(INT8_FLAGS)}")


@pytest.fixture(scope="module")
def tuned(
    _int8_instructions: None, artifacts: Path, passages: Corpus, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("tuned") / "plan"
    tune_artifacts(artifacts, passages, out, seconds=2)
    return out


@pytest.fixture
def own(tuned: Path, tmp_path: Path) -> Path:
    """A copy of the plan's folder, to be changed."""
    return Path(shutil.copytree(tuned, tmp_path / "own"))


@pytest.fixture(scope="module")
def int8(tuned: Path, artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("int8") / "repository"
    return compose("ensemble_all", where, artifacts=artifacts, plan=INT8, tuned=tuned / PLAN, accepts_error=True)


def _write(plan: Path, **changes: Any) -> Path:
    plan.write_text(json.dumps({**json.loads(plan.read_text(encoding="utf-8")), **changes}), encoding="utf-8")
    return plan


def test_what_was_measured(tuned: Path, artifacts: Path) -> None:
    plan = json.loads((tuned / PLAN).read_text(encoding="utf-8"))
    assert plan["models"] == {"bert-large": sha256(artifacts / "model.pt")}
    fp32, _, int8 = plan["candidates"]
    assert [each["dtype"] for each in plan["candidates"]] == ["fp32", "bf16", "int8"]
    assert (fp32["greatest"], fp32["error"]) == (0, 0)
    assert 0 < int8["mean"] <= int8["greatest"] < 1
    for facts in (fp32, int8):
        assert set(facts["rows_per_s"]) == {"1", "16", "64"}
        assert min(facts["rows_per_s"].values()) > 0
        assert facts["peak_mib"] > 100
    assert plan["dtype"] in {facts["dtype"] for facts in plan["candidates"] if facts.get("error", 1) <= 0.003}
    record = read_record(tuned / "bert-large" / "1" / FILE)
    assert (record.parent, record.calibrated_on) == (sha256(artifacts / "model.pt"), 40)  # half of the training texts
    assert (record.greatest, record.mean, record.error) == (int8["greatest"], int8["mean"], int8["error"])
    assert not [path for path in tuned.parent.iterdir() if path != tuned]  # nothing is left beside it


def test_int8_gives_the_same_bits_in_every_batch_and_host(int8: Path, passages: Corpus) -> None:
    texts = list(passages.texts[:20])
    with load(int8 / "ensemble_all") as pipeline:
        expected = pipeline(excerpt=texts)["BERT_SCORE"]
        np.testing.assert_array_equal(pipeline(excerpt=texts)["BERT_SCORE"], expected)
        assert pipeline(excerpt=texts[:1])["BERT_SCORE"][0] == expected[0]
    with serve(int8) as server, Client(server.grpc_url) as client:
        np.testing.assert_array_equal(client.infer("ensemble_all", excerpt=texts)["BERT_SCORE"], expected)


def test_int8_is_near_fp32(int8: Path, repository: Path, passages: Corpus) -> None:
    texts = list(passages.texts)
    with load(int8 / "ensemble_all") as one, load(repository / "ensemble_all") as other:
        found, expected = one(excerpt=texts)["BERT_SCORE"], other(excerpt=texts)["BERT_SCORE"]
    assert 0 < np.abs(found - expected).max() < 0.5
    assert np.corrcoef(found[:, 0], expected[:, 0])[0, 1] > 0.99


def test_the_repository_says_what_it_is(int8: Path) -> None:
    config = read_config(int8 / "bert-large")
    assert (config.backend, config.message.runtime, config.spec.filename) == ("openvino", "model.py", FILE)
    assert sorted(path.name for path in (int8 / "bert-large" / "1").iterdir()) == [FILE]
    assert read_manifest(int8)["precision"] == {"bert-large": {"dtype": "int8", "reason": "--dtype int8"}}
    assert not check(int8, target="embedded")


def test_the_container_serves_it_by_its_own_backend(tuned: Path, artifacts: Path, tmp_path: Path) -> None:
    plan = Plan(dtype="int8", target="26.06")
    where = tmp_path / "repository"
    compose("ensemble_all", where, artifacts=artifacts, plan=plan, tuned=tuned / PLAN, accepts_error=True)
    config = read_config(where / "bert-large")
    assert (config.backend, config.message.runtime, config.spec.filename) == ("openvino", "", FILE)
    assert not check(where, target="26.06")


@pytest.mark.parametrize(("error", "is_taken"), [(0.002, True), (0.0031, False), (None, False)])
def test_a_large_or_unknown_error_is_refused(
    error: float | None, is_taken: bool, own: Path, artifacts: Path, tmp_path: Path
) -> None:
    path = own / "bert-large" / "1" / FILE
    add_errors(path, replace(read_record(path), error=error))

    def make() -> None:
        compose("ensemble_all", tmp_path / "r", artifacts=artifacts, plan=INT8, tuned=own / PLAN, is_warmed_up=False)

    if is_taken:
        make()
    else:
        with pytest.raises(InputError, match="adds to the RMSE") as refused:
            make()
        assert "--accept-error" in refused.value.fix


def test_the_plan_decides_for_auto(own: Path, artifacts: Path, tmp_path: Path) -> None:
    plan = _write(own / PLAN, dtype="int8", reason="it was fast", machine={"cpu": "another processor"})
    where = tmp_path / "repository"
    compose("ensemble_all", where, artifacts=artifacts, tuned=plan, accepts_error=True, is_warmed_up=False)
    manifest = read_manifest(where)
    assert manifest["precision"]["bert-large"] == {"dtype": "int8", "reason": "it was fast"}
    assert any("another processor" in note for note in manifest["notes"])
    compose("ensemble_all", where, artifacts=artifacts, plan=Plan(dtype="fp32"), tuned=plan, is_warmed_up=False)
    assert read_manifest(where)["precision"]["bert-large"]["dtype"] == "fp32"


def test_a_file_of_another_encoder_is_refused(own: Path, artifacts: Path, tmp_path: Path) -> None:
    path = own / "bert-large" / "1" / FILE
    add_errors(path, replace(read_record(path), parent="0" * 64))
    with pytest.raises(ArtifactError, match="quantised from another encoder"):
        compose("ensemble_all", tmp_path / "r", artifacts=artifacts, plan=INT8, tuned=own / PLAN)
    plan = _write(own / PLAN, models={"bert-large": "0" * 64})
    with pytest.raises(InputError, match="made for another encoder"):
        compose("ensemble_all", tmp_path / "r", artifacts=artifacts, plan=INT8, tuned=plan)


def test_a_file_without_a_record_is_refused(own: Path, artifacts: Path, tmp_path: Path) -> None:
    path = own / "bert-large" / "1" / FILE
    model = onnx.load(str(path))
    del model.metadata_props[:]
    onnx.save(model, str(path))
    with pytest.raises(ArtifactError, match="no record of its calibration"):
        compose("ensemble_all", tmp_path / "r", artifacts=artifacts, plan=INT8, tuned=own / PLAN)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ArtifactError, match="cut off"):
        compose("ensemble_all", tmp_path / "r", artifacts=artifacts, plan=INT8, tuned=own / PLAN)
    path.unlink()
    with pytest.raises(ArtifactError, match="cannot be read"):
        compose("ensemble_all", tmp_path / "r", artifacts=artifacts, plan=INT8, tuned=own / PLAN)


def test_what_cannot_be_tuned(repository: Path, passages: Corpus, tmp_path: Path) -> None:
    texts = list(passages.texts)
    with pytest.raises(InputError, match="1 texts are both"):
        tune(repository, tmp_path / "a", texts[:2], calibration=texts[1:3])
    with pytest.raises(InputError, match="no output SCORES"):
        tune(repository, tmp_path / "a", texts, output="SCORES")
    with pytest.raises(InputError, match="no encoder in TorchScript"):
        tune(repository / "preprocess", tmp_path / "a", texts)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine", encoding="utf-8")
    with pytest.raises(InputError, match="shoal did not make it"):
        tune(repository, tmp_path / "mine", texts)


# --- the command, with an encoder of no size --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tiny_bert: Path, passages: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the artifacts ``a`` of a tiny encoder, the repository ``r``, and ``rows.csv``."""
    folder = tmp_path_factory.mktemp("small")
    train(passages, folder / "a", encoder=str(tiny_bert), preset=TINY)
    compose("ensemble_all", folder / "r", artifacts=folder / "a")
    with (folder / "rows.csv").open("w", encoding="utf-8", newline="") as file:
        rows = [(text, " ".join(text.split()[:5])) for text in passages.texts[:60]]
        targets = passages.targets[:60].tolist()
        csv.writer(file).writerows(
            [("text", "other", "score"), *((*row, target) for row, target in zip(rows, targets, strict=True))]
        )
    return folder


def _run(folder: Path, line: str) -> dict[str, Any]:
    arguments = [str(folder / part) if part in ("r", "a", "rows.csv") else part for part in line.split()]
    result = CliRunner().invoke(
        app, ["tune", *arguments, "--out", str(folder / "out"), "--json"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    assert json.loads((folder / "out" / PLAN).read_text(encoding="utf-8")) == found
    return found


@pytest.mark.usefixtures("_int8_instructions")
def test_every_option_is_obeyed(small: Path) -> None:
    plain = _show(small, "r --seconds 1 --data rows.csv")
    other = _run(small, "r --seconds 1 --data rows.csv --text-column other")
    labelled = _run(small, "r --seconds 1 --data rows.csv --target-column score")
    encoder = _run(small, "r --seconds 1 --data rows.csv --target-column score --output BERT_SCORE")
    assert plain["num_texts"] == labelled["num_texts"] == 45  # a quarter of 60 is for calibration
    int8, int8_other, int8_labelled, int8_encoder = (
        found["candidates"][2] for found in (plain, other, labelled, encoder)
    )
    assert int8["mean"] != int8_other["mean"]
    assert int8["error"] is None
    assert plain["dtype"] != "int8"
    assert "never chosen without labelled texts" in plain["reason"]
    assert isinstance(int8_labelled["error"], float)
    assert int8_encoder["rmse"] != int8_labelled["rmse"]
    assert "seen" not in plain
    assert _run(small, "--artifacts a --seconds 1 --data rows.csv --target-column score")["seen"] in (True, False)


def _show(folder: Path, line: str) -> dict[str, Any]:
    """Return the plan of a command that prints a table, and what to type."""
    arguments = [str(folder / part) if part in ("r", "rows.csv") else part for part in line.split()]
    line_and_out = ["tune", *arguments, "--out", str(folder / "shown")]
    result = CliRunner().invoke(app, line_and_out, env={"COLUMNS": "160"}, catch_exceptions=False)
    assert result.exit_code == 0
    assert "chosen: " in result.stdout
    assert f"--tuned {folder / 'shown' / PLAN}" in result.stdout
    assert (folder / "shown" / "tuned.svg").read_text(encoding="utf-8").lstrip().startswith("<?xml")
    found: dict[str, Any] = json.loads((folder / "shown" / PLAN).read_text(encoding="utf-8"))
    return found


@pytest.mark.usefixtures("_int8_instructions")
def test_more_time_measures_more_texts(small: Path, passages: Corpus, tmp_path: Path) -> None:
    few, more = (tune(small / "r", tmp_path / "tuned", passages.texts, seconds=seconds) for seconds in (0, 5))
    assert few["num_texts"] == 16
    assert more["num_texts"] == len(passages) == 100
    assert few["candidates"][2] == {"dtype": "int8", "why_not": "there are no texts for calibration"}


@pytest.mark.parametrize(
    ("line", "what"),
    [("", "Name a repository"), ("r --artifacts a", "Name a repository"), ("r --text-column x", "without --data"),
     ("--artifacts a --output SCORE", "with --artifacts")],
)  # fmt: skip
def test_options_without_effect_are_refused(line: str, what: str) -> None:
    with pytest.raises(ShoalError, match=what):
        CliRunner().invoke(app, ["tune", *line.split()], catch_exceptions=False, standalone_mode=False)
