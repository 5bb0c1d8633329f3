"""Forests of each library, format and task, added to a project: they answer as their library does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import lightgbm
import numpy as np
import pytest
import treelite
import xgboost
from sklearn.ensemble import RandomForestClassifier

import shoal
from shoal.authoring.check.families import check
from shoal.authoring.project.importing.forests import draft_forest
from shoal.authoring.repository.config import read_config
from tests.support.grown import BINARY, CASES, HOLED, NAMES, NUM_FEATURES, ROWS, SERVED, THREE, Array
from tests.support.imports import add, here

pytestmark = pytest.mark.usefixtures("may_start_processes")  # forests are read in a process of their own

TOLERANCE = 1e-5
# Of those beside the served ones: where something is put right that Treelite leaves out, or is laid out otherwise.
SAMPLE = (
    "xgboost_dart", "xgboost_codes", "xgboost_object", "lightgbm_ova", "lightgbm_means", "lightgbm_codes",
    "lightgbm_root", "sklearn_forest", "sklearn_scores", "sklearn_early", "sklearn_exponential", "sklearn_counts",
    "sklearn_codes", "sklearn_odd",
)  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        beside = [name for name in CASES if name not in SERVED]
        metafunc.parametrize("case", beside if metafunc.config.getoption("--verify") else SAMPLE)


@pytest.fixture(scope="module")
def greatest(record: Callable[..., None]) -> Iterator[dict[str, float]]:
    """The greatest difference from the library, by case."""
    found: dict[str, float] = {}
    yield found
    record("imported forests, greatest difference from their library on 1,000 rows", **found)


def difference(found: Array, expected: Array) -> float:
    """Return the largest difference, over both columns of a binary classifier if the library gives only one."""
    if expected.ndim == 1:
        expected = np.stack([1 - expected, expected], axis=1) if found.shape[1] == 2 else expected[:, None]
    assert found.shape == expected.shape
    assert found.dtype == np.float32
    return float(np.abs(found - expected).max())


def ask(project: Path, name: str, rows: Array) -> Array:
    """Return a model's answer in this process."""
    return here(project, name, input__0=rows)["output__0"]


def test_a_leaf_answers_as_its_library_does(case: str, tmp_path: Path, greatest: dict[str, float]) -> None:
    rows = CASES[case].rows
    source, expected = CASES[case].make(tmp_path)
    add(tmp_path, source, case)
    greatest[case] = difference(ask(tmp_path, case, rows), expected)
    assert greatest[case] <= TOLERANCE


# --- on a real server --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def expected() -> dict[str, Array]:
    return {}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, expected: dict[str, Array]) -> Path:
    """Leaves of each format and task, and an ensemble of them: FEATURES -> an output for each, called as it is."""
    folder = tmp_path_factory.mktemp("project")
    widths = {}
    for name, case in SERVED.items():
        source, expected[name] = case.make(tmp_path_factory.mktemp(name))
        config, _ = add(folder, source, name)
        widths[name] = config.spec.outputs[0].dims[0]
    assert sorted(widths.values()) == [1] * 4 + [2] * 4 + [3] * 4
    outputs = [f'output {{ name: "{name}" data_type: TYPE_FP32 dims: [ {w} ] }}' for name, w in widths.items()]
    steps = [
        f'step {{ model_name: "{name}" model_version: -1 input_map {{ key: "input__0" value: "FEATURES" }}'
        f' output_map {{ key: "output__0" value: "{name}" }} }}'
        for name in widths
    ]
    text = [
        'name: "all_of_them"\nplatform: "ensemble"\nmax_batch_size: 512',
        f'input {{ name: "FEATURES" data_type: TYPE_FP32 dims: [ {NUM_FEATURES} ] }}',
        *outputs,
        "ensemble_scheduling {",
        *steps,
        "}\n",
    ]
    (folder / "ensembles/all_of_them/1").mkdir(parents=True)
    (folder / "ensembles/all_of_them/1/.gitkeep").touch()
    (folder / "ensembles/all_of_them/config.pbtxt").write_text("\n".join(text), encoding="utf-8")
    assert check(folder) == []
    return folder


@pytest.fixture(scope="module")
def repository(project: Path) -> Path:
    return shoal.compose("all_of_them", project / "repository", projects=[project])


@pytest.mark.parametrize("name", SERVED)
def test_each_format_and_task_answers_here(
    name: str, project: Path, expected: dict[str, Array], greatest: dict[str, float]
) -> None:
    rows = SERVED[name].rows
    greatest[name] = difference(ask(project, name, rows), expected[name])
    assert greatest[name] <= TOLERANCE


# --- what is derived, and said -----------------------------------------------------------------------------------


def test_derived_facts_are_written_and_printed(project: Path) -> None:
    config = read_config(project / "models" / "skops_three")
    text = (config.folder / "config.pbtxt").read_text(encoding="utf-8")
    said = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ")]
    message = config.message
    assert {key: entry.string_value for key, entry in message.parameters.items()} == {
        "artifacts": "checkpoint.tl",
        "model_type": "treelite_checkpoint",
        "storage_type": "AUTO",
        "output_class": "true",
        "predict_proba": "true",
        "threshold": "0.5",
        "labels": json.dumps(NAMES.tolist()),
        "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
    }
    assert (message.name, message.backend, message.max_batch_size) == ("skops_three", "fil", 512)
    assert said[:4] == [
        "scikit-learn's RandomForestClassifier, 15 trees",
        "input__0 FP32 [6]: its number of features",
        "output__0 FP32 [3]: the probabilities of its 3 classes, as in predict_proba",
        "labels: easy, hard, odd",
    ]
    assert any(line.startswith("compared with the library on 256 rows: ") for line in said)


def test_labels_may_be_given_where_a_file_has_none(tmp_path: Path) -> None:
    source, _ = SERVED["xgboost_three"].make(tmp_path)
    draft = draft_forest(source, "triage", labels=["easy", "hard", "odd"], max_batch_size=8)
    assert draft.message.parameters["labels"].string_value == '["easy", "hard", "odd"]'
    assert draft.message.max_batch_size == 8
    assert draft.message.output[0].label_filename == "labels.txt"
    assert draft.files["labels.txt"] == b"easy\nhard\nodd\n"
    plain = draft_forest(source, "triage")
    assert "labels" not in plain.message.parameters
    assert (plain.message.output[0].label_filename, [*plain.files]) == ("", ["1/checkpoint.tl"])
    broken = draft_forest(source, "triage", labels=["easy", "very\nhard", "odd"])  # a line of the file is a label
    assert (broken.message.output[0].label_filename, [*broken.files]) == ("", ["1/checkpoint.tl"])
    assert "the file does not name the classes: give labels, or use their numbers" in plain.said


def test_xgboosts_estimators_boosters_and_files_stop_at_their_best_round(tmp_path: Path) -> None:
    model = xgboost.XGBClassifier(n_estimators=60, learning_rate=1.0, early_stopping_rounds=2, n_jobs=1)
    model.fit(HOLED[:500], THREE[:500], eval_set=[(HOLED[500:], THREE[500:])], verbose=False)
    best = model.best_iteration
    assert best + 1 < model.get_booster().num_boosted_rounds()
    rounds = model.get_booster().num_boosted_rounds()
    model.save_model(tmp_path / "model.json")
    model.save_model(tmp_path / "model.ubj")
    sources = {
        "object": model, "booster": model.get_booster(), "json": tmp_path / "model.json", "ubj": tmp_path / "model.ubj"
    }  # fmt: skip
    for kind, source in sources.items():
        _, said = add(tmp_path / kind, source, "leaf")
        assert difference(ask(tmp_path / kind, "leaf", HOLED), model.predict_proba(HOLED)) <= TOLERANCE
        assert any(line.startswith(f"{best + 1} of its {rounds} rounds are used, up to best_iter") for line in said)
        assert ("labels: 0, 1, 2" in said) == (kind == "object")


def test_a_booster_of_xgboosts_own_training_stops_at_its_best_round(tmp_path: Path) -> None:
    train, test = xgboost.DMatrix(HOLED[:500], BINARY[:500]), xgboost.DMatrix(HOLED[500:], BINARY[500:])
    settings = {"objective": "binary:logistic", "learning_rate": 1.0, "nthread": 1}
    watched = [(test, "test")]
    booster = xgboost.train(settings, train, 60, evals=watched, early_stopping_rounds=2, verbose_eval=False)
    assert booster.best_iteration + 1 < booster.num_boosted_rounds()
    add(tmp_path, booster, "leaf")
    best = booster.predict(xgboost.DMatrix(HOLED), iteration_range=(0, booster.best_iteration + 1))
    assert difference(ask(tmp_path, "leaf", HOLED), best) <= TOLERANCE


def test_xgboosts_softmax_gives_chances(tmp_path: Path) -> None:
    """XGBoost's own predict gives classes instead."""
    data = xgboost.DMatrix(ROWS, THREE)
    given = {"num_class": 3, "nthread": 1}
    labels = xgboost.train({"objective": "multi:softmax", **given}, data, 10)
    chances = xgboost.train({"objective": "multi:softprob", **given}, data, 10)
    add(tmp_path, labels, "leaf")
    found = ask(tmp_path, "leaf", ROWS)
    assert difference(found, chances.predict(data)) <= TOLERANCE
    np.testing.assert_array_equal(found.argmax(axis=1), labels.predict(data))


@pytest.mark.filterwarnings("ignore:The argument 'eval_set' is deprecated")
def test_lightgbms_estimators_bring_names_and_stop_at_their_best_round(tmp_path: Path) -> None:
    model = lightgbm.LGBMClassifier(n_estimators=60, learning_rate=1.0, verbosity=-1, n_jobs=1)
    stop = lightgbm.early_stopping(2, verbose=False)
    model.fit(HOLED[:500], NAMES[BINARY[:500]], eval_set=[(HOLED[500:], NAMES[BINARY[500:]])], callbacks=[stop])
    assert model.best_iteration_ < 60
    _, said = add(tmp_path, model, "leaf")
    assert difference(ask(tmp_path, "leaf", HOLED), np.asarray(model.predict_proba(HOLED))) <= TOLERANCE
    assert "labels: easy, hard" in said


def test_a_feature_may_be_called_as_a_field(tmp_path: Path) -> None:
    """Treelite reads on behind LightGBM's trees, where features are counted by name."""
    names = ["threshold", "leaf_value", "num_leaves", "left_child", "split_feature", "num_cat"]
    data = lightgbm.Dataset(ROWS, BINARY, feature_name=names, params={"verbosity": -1})
    booster = lightgbm.train({"objective": "binary", "verbosity": -1}, data, 5)
    booster.save_model(tmp_path / "model.txt")
    add(tmp_path, tmp_path / "model.txt", "leaf")
    assert difference(ask(tmp_path, "leaf", ROWS), np.asarray(booster.predict(ROWS))) <= TOLERANCE


def test_treelite_checkpoints_are_copied_unchanged(tmp_path: Path) -> None:
    estimator = RandomForestClassifier(5, random_state=0).fit(ROWS, BINARY)
    _, said = add(tmp_path, treelite.sklearn.import_model(estimator), "leaf")
    assert difference(ask(tmp_path, "leaf", ROWS), estimator.predict_proba(ROWS)) <= TOLERANCE
    assert said[0] == "Treelite, task multiclass, postprocessor identity_multiclass, 5 trees"
