"""Forests by ONNX Runtime: every row ends in the leaves that Treelite's own engine finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import treelite
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.ensemble import (
    ExtraTreesClassifier,
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)

from shoal.forests import treelite as forests

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(400, 6)).astype(np.float32).round(2)  # few values: many rows lie on a threshold's edge
TARGETS = ROWS[:, 0] * ROWS[:, 1] + ROWS[:, 2]


def by_both(model: Any, rows: NDArray[Any], tmp_path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """ONNX Runtime's scores of a model written and read again, and GTIL's."""
    path = tmp_path / "checkpoint.tl"
    model.serialize(str(path))
    read = treelite.Model.deserialize(str(path))
    assert forests._onnx(read) is not None  # or GTIL would be compared with itself
    return forests.load_forest(path)(rows), forests._gtil(read)(rows)


@pytest.mark.parametrize(
    "forest",
    [
        RandomForestRegressor(20, max_depth=8, random_state=0),
        GradientBoostingRegressor(n_estimators=20, random_state=0),
        HistGradientBoostingRegressor(max_iter=20, random_state=0),
    ],
    ids=lambda forest: type(forest).__name__,
)
def test_both_engines_agree(forest: Any, tmp_path: Path) -> None:
    model = treelite.sklearn.import_model(forest.fit(ROWS, TARGETS))
    found, expected = by_both(model, ROWS, tmp_path)
    assert found.shape == (400, 1)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)
    np.testing.assert_allclose(found[:, 0], forest.predict(ROWS), rtol=0, atol=1e-5)
    assert forests.load_forest(tmp_path / "checkpoint.tl")(ROWS[:0]).shape == (0, 1)


@pytest.mark.parametrize("num_classes", [2, 3])
@pytest.mark.parametrize(
    "forest",
    [
        RandomForestClassifier(20, max_depth=8, random_state=0),
        ExtraTreesClassifier(20, max_depth=1, random_state=0),
        GradientBoostingClassifier(n_estimators=20, random_state=0),
        HistGradientBoostingClassifier(max_iter=20, random_state=0),
    ],
    ids=lambda forest: type(forest).__name__,
)
def test_both_engines_agree_on_classes(forest: Any, num_classes: int, tmp_path: Path) -> None:
    classes = np.digitize(TARGETS, np.linspace(-1, 1, num_classes - 1))
    model = treelite.sklearn.import_model(forest.fit(ROWS, classes))
    found, expected = by_both(model, ROWS, tmp_path)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)
    said = forest.predict_proba(ROWS)
    np.testing.assert_allclose(found, said[:, -found.shape[1] :], rtol=0, atol=1e-5)
    assert forests.load_forest(tmp_path / "checkpoint.tl")(ROWS[:0]).shape == (0, found.shape[1])


def test_missing_values_go_where_the_forest_sends_them(tmp_path: Path) -> None:
    rows = ROWS.copy()
    rows[RNG.random(rows.shape) < 0.2] = np.nan
    model = treelite.sklearn.import_model(HistGradientBoostingRegressor(max_iter=20).fit(rows, TARGETS))
    found, expected = by_both(model, rows, tmp_path)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


@settings(max_examples=300, deadline=None)
@given(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(width=32, allow_nan=False),
    st.sampled_from([2, 3, 4, 5]),
)
def test_a_rounded_threshold_parts_numbers_as_before(threshold: float, x: float, code: int) -> None:
    (rounded,) = forests.round_thresholds(np.array([threshold]), np.array([code], np.int8))
    compare: Any = {2: np.less, 3: np.less_equal, 4: np.greater, 5: np.greater_equal}[code]
    with np.errstate(over="ignore"):
        near = [np.float32(threshold), *(np.nextafter(np.float32(threshold), np.float32(s)) for s in (-np.inf, np.inf))]
    for value in (np.float32(x), *near):
        assert compare(value, rounded) == compare(np.float64(value), threshold)


def build(num_trees: int) -> Any:
    """Treelite's builder of a regressor of two features, in single precision."""
    maker = treelite.model_builder
    return maker.ModelBuilder(
        threshold_type="float32", leaf_output_type="float32",
        metadata=maker.Metadata(
            num_feature=2, task_type="kRegressor", average_tree_output=False, num_target=1, num_class=[1],
            leaf_vector_shape=(1, 1),
        ),
        tree_annotation=maker.TreeAnnotation(
            num_tree=num_trees, target_id=[0] * num_trees, class_id=[0] * num_trees
        ),
        postprocessor=maker.PostProcessorFunc(name="identity"), base_scores=[0.5],
    )  # fmt: skip


def add_leaf(builder: Any, node: int, value: float) -> None:
    builder.start_node(node)
    builder.leaf(value)
    builder.end_node()


COMPARISONS = ("<", "<=", ">", ">=")


def test_every_comparison_and_every_way_of_missing_values(tmp_path: Path) -> None:
    """Each tree has two bits of the score, which tells its leaf; the last tree is a single one."""
    builder = build(num_trees=9)
    for power, (way, other) in enumerate([(a, b) for a in (False, True) for b in (False, True)] * 2):
        builder.start_tree()
        for node in range(3):
            builder.start_node(node)
            builder.numerical_test(
                feature_id=min(node, 1),
                threshold=(-1.0, 0.25, 1.5)[node],
                default_left=(way, other, not other)[node],
                opname=COMPARISONS[(node + power) % 4],
                left_child_key=2 * node + 1,
                right_child_key=2 * node + 2,
            )
            builder.end_node()
        for leaf in range(4):
            add_leaf(builder, 3 + leaf, 4.0**power * leaf)
        builder.end_tree()
    builder.start_tree()
    add_leaf(builder, 0, -0.25)
    builder.end_tree()
    model = builder.commit()
    values = np.array([-2, -1, 0, 0.25, 1, 1.5, 2, np.nan, np.inf, -np.inf], np.float32)
    edges = np.concatenate([values, *(np.nextafter(values, np.float32(s)) for s in (-np.inf, np.inf))])
    rows = np.stack(np.meshgrid(edges, edges), axis=-1).reshape(-1, 2)
    found, expected = by_both(model, rows, tmp_path)
    np.testing.assert_array_equal(found, expected)
    for power in range(8):
        assert set((found // 4**power % 4).ravel().tolist()) == {0, 1, 2, 3}


def test_what_onnx_lacks_is_left_to_treelite(tmp_path: Path) -> None:
    builder = build(num_trees=1)
    builder.start_tree()
    builder.start_node(0)
    builder.categorical_test(
        0,
        default_left=False,
        category_list=[1, 3],
        category_list_right_child=False,
        left_child_key=1,
        right_child_key=2,
    )
    builder.end_node()
    for node, value in ((1, -1.5), (2, 1.5)):
        add_leaf(builder, node, value)
    builder.end_tree()
    model = builder.commit()
    assert forests.describe(model) is None
    path = tmp_path / "checkpoint.tl"
    model.serialize(str(path))
    assert forests.load_forest(path)(np.array([[3, 0], [2, 0]], np.float32)).ravel().tolist() == [-1.0, 2.0]


def test_without_onnx_runtime_treelite_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = treelite.sklearn.import_model(RandomForestRegressor(3, random_state=0).fit(ROWS, TARGETS))
    found, _ = by_both(model, ROWS, tmp_path)
    monkeypatch.setattr(forests, "find_spec", lambda name: None)
    np.testing.assert_allclose(forests.load_forest(tmp_path / "checkpoint.tl")(ROWS), found, rtol=0, atol=2e-6)


def test_what_onnx_runtime_cannot_take_is_left_to_treelite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import onnxruntime

    model = treelite.sklearn.import_model(RandomForestRegressor(3, random_state=0).fit(ROWS, TARGETS))
    found, _ = by_both(model, ROWS, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(onnxruntime, "InferenceSession", lambda *_, **__: 1 / 0)
        np.testing.assert_allclose(forests.load_forest(tmp_path / "checkpoint.tl")(ROWS), found, rtol=0, atol=2e-6)
    assert "ONNX Runtime cannot take it: ZeroDivisionError: division by zero" in caplog.text
    monkeypatch.setattr(forests, "MOST_NODES", 10)
    np.testing.assert_allclose(forests.load_forest(tmp_path / "checkpoint.tl")(ROWS), found, rtol=0, atol=2e-6)
    assert "ONNX Runtime gets at most 10" in caplog.text
