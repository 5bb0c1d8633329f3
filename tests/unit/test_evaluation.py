from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InputError
from shoal.readability.evaluation import (
    FP64,
    INT64,
    MAX_GENRES,
    OTHER_GENRES,
    Evaluation,
    blend_weight,
    bootstrap,
    by_group,
    cross_fitted_blend,
    genre_groups,
    length_groups,
    linear_baselines,
    pearson,
    resample_counts,
    rmse,
    spearman,
    summarise,
)

KINDS = {"encoder": "model", "forest": "model", "blend": "model", "one formula": "formula", "mean": "baseline"}


def invented(num_texts: int = 60, num_folds: int = 3, seed: int = 0) -> Evaluation:
    random = np.random.default_rng(seed)
    targets, folds = random.normal(size=num_texts), np.arange(num_texts) % num_folds
    encoder = 0.8 * targets + random.normal(0, 0.4, num_texts)
    forest = 0.5 * targets + random.normal(0, 0.5, num_texts)
    mean = np.zeros(num_texts)
    for fold in range(num_folds):
        mean[folds == fold] = targets[folds != fold].mean() if num_folds > 1 else 0.1
    predictions = {
        "encoder": encoder,
        "forest": forest,
        "blend": cross_fitted_blend(encoder, forest, targets, folds),
        "one formula": 0.2 * targets + random.normal(0, 0.2, num_texts),
        "mean": mean,
    }
    genres = tuple("story" if i % 3 else "news" for i in range(num_texts))
    return Evaluation(targets, folds, predictions, KINDS, random.integers(50, 250, num_texts), genres)


def test_exact_figures() -> None:
    targets, predictions = np.array([0.0, 1.0, 2.0, 3.0]), np.array([1.0, 1.0, 2.0, 1.0])
    assert rmse(predictions, targets) == pytest.approx(math.sqrt(5 / 4))
    assert pearson(np.array([1.0, 2.0, 3.0, 5.0]), targets) == pytest.approx(6.5 / math.sqrt(5 * 8.75))
    assert spearman(np.array([1.0, 2.0, 30.0, 500.0]), targets) == pytest.approx(1)
    assert spearman(np.array([1.0, 1.0, 0.0, 0.0]), targets) == pytest.approx(-2 / math.sqrt(5))
    assert pearson(-targets, targets) == pytest.approx(-1)


def test_a_constant_has_no_correlation() -> None:
    targets = np.arange(3.0)
    for constant in (np.full(3, 0.1), np.array([0.1, 0.1 + 1e-16, 0.1])):
        assert pearson(constant, targets) is None
        assert spearman(constant, targets) is None
        assert pearson(targets, constant) is None


def test_an_evaluation_that_cannot_be() -> None:
    good = invented(6)
    with pytest.raises(InputError, match="no texts"):
        invented(0, 1)
    with pytest.raises(InputError, match="folds has 5 rows; there are 6 targets"):
        replace(good, folds=good.folds[:5])
    with pytest.raises(InputError, match="genres has 1 rows"):
        replace(good, genres=("news",))
    with pytest.raises(InputError, match="blend holds 6 values that are not finite"):
        replace(good, predictions={**good.predictions, "blend": np.full(6, np.nan)})
    with pytest.raises(InputError, match=r"There is no prediction named blend\. There are: encoder\."):
        replace(good, predictions={"encoder": good.targets})
    with pytest.raises(InputError, match="mean is of kind guess"):
        replace(good, kinds={**KINDS, "mean": "guess"})


def test_resamples_are_drawn_with_replacement() -> None:
    chunks = list(resample_counts(50, 300, seed=1))
    assert [chunk.shape for chunk in chunks] == [(256, 50), (44, 50)]
    counts = np.vstack(chunks)
    assert (counts.sum(axis=1) == 50).all()
    assert counts.mean(axis=0) == pytest.approx(np.ones(50), abs=0.3)
    assert (counts == np.vstack(list(resample_counts(50, 300, seed=1)))).all()


def test_intervals_are_those_of_a_plain_loop() -> None:
    evaluation = invented(40)
    drawn = [np.repeat(np.arange(40), row.astype(int)) for chunk in resample_counts(40, 300, seed=5) for row in chunk]
    errors = {
        name: [rmse(values[rows], evaluation.targets[rows]) for rows in drawn]
        for name, values in evaluation.predictions.items()
    }
    for name, found in bootstrap(evaluation, num_resamples=300, seed=5).items():
        values = evaluation.predictions[name]
        assert found.rmse == pytest.approx(np.quantile(errors[name], (0.025, 0.975)), rel=1e-12)
        if name == "mean":
            assert found.pearson is None
        else:
            correlations = [np.corrcoef(values[rows], evaluation.targets[rows])[0, 1] for rows in drawn]
            assert found.pearson == pytest.approx(np.quantile(correlations, (0.025, 0.975)), rel=1e-9)
        if name == "blend":
            assert found.difference is None
        else:
            differences = np.subtract(errors["blend"], errors[name])
            assert found.difference == pytest.approx(np.quantile(differences, (0.025, 0.975)), abs=1e-12)


def test_intervals_cover_the_truth() -> None:
    """The RMSE of Gaussian errors is 1; about 95 of 100 intervals hold it."""
    covered, zeros = 0, np.zeros(200)
    for seed in range(100):
        targets = np.random.default_rng(seed + 1000).normal(size=200)  # resampled by other draws
        evaluation = Evaluation(targets, zeros.astype(int), {"blend": zeros}, {"blend": "model"}, zeros.astype(int))
        low, high = bootstrap(evaluation, num_resamples=300, seed=seed)["blend"].rmse
        covered += low <= 1 <= high
    assert 89 <= covered <= 99


def test_a_target_far_from_zero_does_not_drown_the_correlation() -> None:
    evaluation = invented()
    moved = replace(
        evaluation,
        targets=evaluation.targets + 1e6,
        predictions={name: values + 1e6 for name, values in evaluation.predictions.items()},
    )
    near, far = (bootstrap(each, num_resamples=50)["encoder"] for each in (evaluation, moved))
    assert near.pearson is not None
    assert far.pearson == pytest.approx(near.pearson, abs=1e-6)


def test_the_summary_holds_every_prediction() -> None:
    evaluation = invented()
    rows = summarise(evaluation, num_resamples=200)
    assert [row["name"] for row in rows] == list(evaluation.predictions)
    assert rows == summarise(evaluation, num_resamples=200) == json.loads(json.dumps(rows))
    for row in rows:
        values = evaluation.predictions[row["name"]]
        assert row["kind"] == KINDS[row["name"]]
        assert row["rmse"] == round(rmse(values, evaluation.targets), 4)
        assert row["rmse_interval"][0] < row["rmse"] < row["rmse_interval"][1]
        assert len(row["rmse_by_fold"]) == 3
        assert math.sqrt(np.mean(np.square(row["rmse_by_fold"]))) == pytest.approx(row["rmse"], abs=2e-4)
        if row["kind"] != "baseline":
            assert row["pearson_interval"][0] < row["pearson"] < row["pearson_interval"][1]
            assert 0 < row["spearman"] < 1
    blend, mean = rows[2], rows[4]
    assert blend["difference"] is blend["difference_interval"] is None
    assert mean["difference"] == pytest.approx(blend["rmse"] - mean["rmse"], abs=1.1e-4)
    assert mean["difference_interval"][1] < 0


def test_means_of_folds_have_no_correlation() -> None:
    """They would have one, of about -0.2 here, that comes from what the folds hold and not from any knowledge."""
    evaluation = invented()
    assert (pearson(evaluation.predictions["mean"], evaluation.targets) or 0) < -0.05
    mean = summarise(evaluation, num_resamples=10)[4]
    assert mean["pearson"] is mean["pearson_interval"] is mean["spearman"] is None


@pytest.mark.parametrize("num_texts", [1, 2, 3])
def test_hardly_any_texts(num_texts: int) -> None:
    rows = summarise(invented(num_texts, 1), num_resamples=100)
    assert all(row["rmse_interval"][0] <= row["rmse"] <= row["rmse_interval"][1] for row in rows)
    json.dumps(rows, allow_nan=False)


def test_groups() -> None:
    num_words = np.array([10, 10, 10, 20, 30, 40, 50, 60, 70, 80])
    evaluation = replace(invented(10), num_words=num_words)
    assert {name: rows.tolist() for name, rows in length_groups(evaluation).items()} == {
        "10 words": [0, 1, 2],
        "20 words": [3],
        "30–40 words": [4, 5],
        "50–60 words": [6, 7],
        "70–80 words": [8, 9],
    }
    groups = by_group(evaluation)
    assert [(row["group"], row["num_texts"]) for row in groups["genre"]] == [("story", 6), ("news", 4)]
    news = np.array([0, 3, 6, 9])
    residuals = (evaluation.targets - evaluation.predictions["forest"])[news]
    assert list(groups["genre"][1]["models"]) == ["encoder", "forest", "blend"]
    assert groups["genre"][1]["models"]["forest"] == {
        "rmse": round(float(np.sqrt(np.mean(residuals**2))), 4),
        "mean_residual": round(float(residuals.mean()), 4),
    }
    assert json.loads(json.dumps(groups)) == groups
    assert by_group(replace(evaluation, genres=()))["genre"] == []
    assert list(length_groups(replace(evaluation, num_words=np.full(10, 7)))) == ["7 words"]


def test_many_genres_are_shown_as_few() -> None:
    genres = tuple(f"genre {i}" for i in range(30)) * 2
    groups = genre_groups(replace(invented(60), genres=genres))
    assert len(groups) == MAX_GENRES + 1
    assert list(groups)[-1] == OTHER_GENRES
    assert sorted(np.concatenate(list(groups.values()))) == list(range(60))


def folds_of(num_texts: int, num_folds: int) -> list[tuple[INT64, INT64]]:
    fold = np.arange(num_texts) % num_folds
    return [(np.flatnonzero(fold != k), np.flatnonzero(fold == k)) for k in range(num_folds)]


def formulas(num_texts: int = 50) -> tuple[dict[str, FP64], FP64]:
    random = np.random.default_rng(3)
    targets = random.normal(size=num_texts)
    columns = {
        "large": 100 * targets + random.normal(0, 80, num_texts) + 5000,
        "small": -0.01 * targets + random.normal(0, 0.01, num_texts),
        "constant": np.full(num_texts, 7.0),
    }
    return {**columns, "the same": columns["large"] * 2 - 3}, targets


def test_lines_are_scikit_learns() -> None:
    from sklearn.linear_model import LinearRegression

    columns, targets = formulas()
    found = linear_baselines(columns, targets, folds_of(50, 4))
    assert list(found) == [*columns, "all 4 formulas (linear)"]
    inputs = {name: column[:, None] for name, column in columns.items()}
    inputs["all 4 formulas (linear)"] = np.column_stack(list(columns.values()))
    for name, values in inputs.items():
        for train, test in folds_of(50, 4):
            expected = LinearRegression().fit(values[train], targets[train]).predict(values[test])
            np.testing.assert_allclose(found[name][test], expected, rtol=1e-9, atol=1e-9)


def test_lines_do_not_see_what_they_predict() -> None:
    columns, targets = formulas()
    folds = folds_of(50, 5)
    before = linear_baselines(columns, targets, folds)
    changed = targets.copy()
    changed[folds[2][1]] += 100
    after = linear_baselines(columns, changed, folds)
    for name in before:
        assert (after[name][folds[2][1]] == before[name][folds[2][1]]).all()
        assert (after[name][folds[0][1]] != before[name][folds[0][1]]).all()


def test_lines_for_some_rows_and_some_columns() -> None:
    columns, targets = formulas()
    train, test = folds_of(50, 5)[0]
    found = linear_baselines({"large": columns["large"]}, targets, [(train, test)])
    assert list(found) == ["large"]
    assert np.isnan(found["large"][train]).all()
    assert np.isfinite(found["large"][test]).all()
    assert linear_baselines({}, targets, [(train, test)]) == {}
    with pytest.raises(InputError, match="odd holds 1 values that are not finite"):
        linear_baselines({"odd": np.where(np.arange(50) == 3, np.inf, 1.0)}, targets, [(train, test)])


def test_exact_weights() -> None:
    encoder, forest = np.array([1.0, 2.0, 3.0]), np.array([0.0, 0.0, 1.0])
    assert blend_weight(encoder, forest, 0.3 * encoder + 0.7 * forest) == 0.3
    assert blend_weight(encoder, forest, encoder + 5.0) == 1.0
    assert blend_weight(encoder, forest, forest - 5.0) == 0.0
    assert blend_weight(encoder, encoder, forest) == 0.5
    assert blend_weight(encoder, encoder - 1.0, encoder - 0.25) == 0.75


@given(st.integers(0, 10_000))
def test_no_weight_is_better(seed: int) -> None:
    encoder, forest, targets = np.random.default_rng(seed).normal(size=(3, 12))
    weight = blend_weight(encoder, forest, targets)
    errors = [rmse(w * encoder + (1 - w) * forest, targets) for w in np.linspace(0, 1, 101)]
    assert 0 <= weight <= 1
    assert weight == pytest.approx(np.argmin(errors) / 100, abs=0.0101)


def test_a_folds_weight_comes_from_the_others() -> None:
    evaluation = invented(90)
    encoder, forest, folds = evaluation.predictions["encoder"], evaluation.predictions["forest"], evaluation.folds
    before = cross_fitted_blend(encoder, forest, evaluation.targets, folds)
    changed = np.where(folds == 1, -10 * evaluation.targets, evaluation.targets)
    after = cross_fitted_blend(encoder, forest, changed, folds)
    assert (after[folds == 1] == before[folds == 1]).all()
    assert (after[folds == 0] != before[folds == 0]).all()
    others = folds != 2
    weight = blend_weight(encoder[others], forest[others], evaluation.targets[others])
    expected = weight * encoder + (1 - weight) * forest
    np.testing.assert_allclose(before[~others], expected[~others], rtol=1e-12)


def test_one_fold_has_no_others() -> None:
    evaluation = invented(12, 1)
    encoder, forest = evaluation.predictions["encoder"], evaluation.predictions["forest"]
    np.testing.assert_allclose(evaluation.predictions["blend"], (encoder + forest) / 2, rtol=1e-12)
