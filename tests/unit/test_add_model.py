"""``shoal add-model``: what is refused names the ways out, and progress is shown."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from shoal.authoring.project.importing.add_model import add_model
from shoal.errors import InputError, SetupError
from tests.support.imports import Column, script
from tests.support.skeletons import run

ROWS = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)


@pytest.mark.usefixtures("may_start_processes")
@pytest.mark.parametrize("is_file", [False, True])
@pytest.mark.parametrize("model", [LogisticRegression(), make_pipeline(StandardScaler(), LogisticRegression())])
def test_an_estimator_that_is_not_a_forest(model: LogisticRegression, is_file: bool, tmp_path: Path) -> None:
    model.fit(ROWS, ROWS[:, 0] > 0)
    source = tmp_path / "model.skops"
    if is_file:
        pytest.importorskip("skops.io").dump(model, source)
    with pytest.raises(InputError, match=f"{type(model).__name__} is not a forest that can be added") as refused:
        add_model(source if is_file else model, "m", project=tmp_path / "project")
    for words in ("skl2onnx.to_onnx(", "shoal serve model.onnx", "shoal new model NAME", "RandomForest"):
        assert words in refused.value.fix


def test_a_model_without_a_name_has_its_files(tmp_path: Path) -> None:
    result = run("add-model", script(Column(), tmp_path / "my column.pt"), "--input", "FP32:5", "--project", tmp_path)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "models" / "my_column" / "config.pbtxt").is_file()


def test_stages_are_shown(tmp_path: Path) -> None:
    source = script(Column(), tmp_path / "column.pt")
    result = run("add-model", source, "column", "--input", "FP32:5", "--project", tmp_path)
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines() == [
        f"{source} is a program, and is run now, as you: add files that you trust.",
        "loading the libraries for a TorchScript model ...", "reading and trying a TorchScript model ...",
        "checking the model folder ...",
    ]  # fmt: skip
    assert result.stdout.startswith("TorchScript, from column.pt: forward(")


def test_a_project_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "models").touch()
    source = script(Column(), tmp_path / "column.pt")
    with pytest.raises(SetupError, match=r"config\.pbtxt cannot be written: Not a directory\. Make .*column a folder"):
        add_model(source, "column", project=tmp_path, inputs=["FP32:5"])
