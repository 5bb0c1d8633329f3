"""FIL's settings: what shoal's own backend answers under each, as Triton's would, and which it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import treelite
from sklearn.ensemble import GradientBoostingClassifier, RandomForestRegressor

from shoal.authoring.repository.loading import component_class
from shoal.errors import ArtifactError
from shoal.kit.backends import BACKENDS
from shoal.kit.component.context import Context
from shoal.kit.forests.treelite import FilSettings
from tests.support.forests import CHANCES, declare

ROWS = np.random.default_rng(0).normal(size=(400, 6)).astype(np.float32)
TARGETS = ROWS[:, 0] * ROWS[:, 1] + ROWS[:, 2]
TRUE, FALSE = "true", "false"
BOTH = np.concatenate([1 - CHANCES, CHANCES], axis=1)
THREE = np.array([[0.5, 0.5, 0], [0.125, 0.25, 0.625]], np.float32)
ANSWERS: list[tuple[dict[str, str], Any, int, Any]] = [
    ({"output_class": FALSE}, CHANCES, 1, CHANCES),
    ({}, THREE, 3, THREE),
    ({"output_class": TRUE}, CHANCES, 1, [[0], [0], [1], [1]]),
    ({"output_class": TRUE, "threshold": "0.7"}, CHANCES, 1, [[0], [0], [0], [1]]),
    ({"is_classifier": TRUE, "threshold": "0.2"}, CHANCES, 1, [[1], [1], [1], [1]]),
    ({"is_classifier": FALSE, "output_class": TRUE}, CHANCES, 1, CHANCES),
    ({"output_class": TRUE, "predict_proba": TRUE}, CHANCES, 2, BOTH),
    ({"output_class": FALSE, "predict_proba": TRUE}, CHANCES, 2, BOTH),
    ({"is_classifier": TRUE, "predict_proba": TRUE}, CHANCES, 1, CHANCES),
    ({"output_class": TRUE, "threshold": "0.9"}, THREE, 1, [[0], [2]]),
    ({"output_class": TRUE, "predict_proba": TRUE}, THREE, 3, THREE),
]


@pytest.mark.parametrize(("parameters", "values", "width", "expected"), ANSWERS)
def test_settings_decide_what_is_answered(parameters: dict[str, str], values: Any, width: int, expected: Any) -> None:
    settings = FilSettings.read(declare(width, parameters))
    assert width in settings.widths(values.shape[1], is_classifier=True)
    found = settings.answer(values, width)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)


def write_classifier(folder: Path, num_classes: int) -> Any:
    classes = np.digitize(TARGETS, np.linspace(-1, 1, num_classes - 1))
    forest = GradientBoostingClassifier(n_estimators=5, random_state=0).fit(ROWS, classes)
    treelite.sklearn.import_model(forest).serialize(str(folder / "checkpoint.tl"))
    return forest


@pytest.mark.parametrize("num_classes", [2, 3])
def test_the_backend_gives_classes_and_chances(num_classes: int, tmp_path: Path) -> None:
    forest = write_classifier(tmp_path, num_classes)
    backend = component_class(BACKENDS / "fil" / "model.py")
    for parameters, width, expected in (
        ({"output_class": TRUE, "threshold": "0.5"}, 1, forest.predict(ROWS)[:, None]),
        ({"output_class": TRUE, "predict_proba": TRUE}, num_classes, forest.predict_proba(ROWS)),
    ):
        component = backend(Context(declare(width, parameters), tmp_path))
        (answer,) = component.process([{"input__0": ROWS}])
        np.testing.assert_allclose(answer["output__0"], expected, rtol=0, atol=1e-5)  # type: ignore[index]


REGRESSOR = "takes 6 features and gives 1 score; the config of forest declares input__0 [6], output__0 [1], "
REFUSED: list[tuple[int, int, dict[str, str], str, str]] = [
    (3, 1, {"output_class": TRUE, "predict_proba": TRUE}, "output__0 [1], output_class true, predict_proba true", "3"),
    (3, 3, {"output_class": TRUE}, "takes 6 features and gives classes or several scores; the config of forest", "1"),
    (2, 2, {"output_class": TRUE}, "declares input__0 [6], output__0 [2], output_class true", "1"),
    (2, 3, {"predict_proba": TRUE}, "declares input__0 [6], output__0 [3], predict_proba true", "2 or 1"),
    (2, 1, {"output_class": "True"}, "Parameter output_class of model forest is 'True'; expected false or true.", ""),
    (2, 1, {"output_class": TRUE, "threshold": "half"}, "threshold of model forest is 'half'; expected a number", ""),
    (1, 1, {"output_class": TRUE}, f"{REGRESSOR}output_class true", ""),
    (1, 1, {"is_classifier": TRUE}, f"{REGRESSOR}is_classifier true", ""),
]


@pytest.mark.parametrize(("num_classes", "width", "parameters", "message", "right"), REFUSED)
def test_settings_that_do_not_fit_end_the_start(
    num_classes: int, width: int, parameters: dict[str, str], message: str, right: str, tmp_path: Path
) -> None:
    if num_classes > 1:
        write_classifier(tmp_path, num_classes)
    else:
        forest = RandomForestRegressor(3, random_state=0).fit(ROWS, TARGETS)
        treelite.sklearn.import_model(forest).serialize(str(tmp_path / "checkpoint.tl"))
    with pytest.raises(ArtifactError) as refused:
        component_class(BACKENDS / "fil" / "model.py")(Context(declare(width, parameters), tmp_path))
    assert message in refused.value.what
    assert (f"(of width {right} under these settings)" in refused.value.fix) == bool(right)
