"""Evaluation metrics: RMSE and correlations with bootstrap intervals, baselines, and the blend's weight.

Every interval is a 95 % percentile bootstrap (Efron & Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13)
over texts. It shows the variation with other texts of the same kind, not the variation with another training run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import InputError, needs
from shoal.kit.blocks import blend

ENCODER, FOREST, BLEND = "encoder", "forest", "blend"
MEAN = "mean of training rows"
MODEL, FORMULA, BASELINE = "model", "formula", "baseline"
NUM_RESAMPLES = 2000
QUANTILES = (0.025, 0.975)
MAX_GENRES, OTHER_GENRES = 15, "(all other genres)"  # so that a table stays a table
_CHUNK = 256  # resamples at a time: 10 MB of counts for 4,724 texts
EVEN = 0.5  # default weight, when the data prefer neither model

FP64 = NDArray[np.float64]
INT64 = NDArray[np.int64]


@dataclass(frozen=True)
class Evaluation:
    """Predictions for texts that no model saw in training, with the texts' targets, folds, lengths and genres.

    With n texts, ``targets`` and each of ``predictions`` are FP64 ``[n]``. ``folds`` INT64 ``[n]`` names the fold whose
    models made the prediction (all 0 for one held-out set). ``num_words`` is INT64 ``[n]``; ``genres`` has one name per
    text, or is empty. ``kinds`` gives each prediction's kind: "model", "formula" or "baseline". The order of
    ``predictions`` is kept; one prediction must be named "blend".

    Raises:
        InputError: there are no texts, an array has another length, a value is not finite, a kind is unknown, or
            "blend" is missing.
    """

    targets: FP64
    folds: INT64
    predictions: Mapping[str, FP64]
    kinds: Mapping[str, str]
    num_words: INT64
    genres: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        num_texts = len(self.targets)
        if not num_texts:
            raise InputError("The evaluation has no texts.", "Give it held-out texts.")
        values = {"targets": self.targets, **self.predictions}
        sized = {**values, "folds": self.folds, "num_words": self.num_words, "genres": self.genres or self.folds}
        for name, column in sized.items():
            if len(column) != num_texts:
                raise InputError(f"{name} has {len(column)} rows; there are {num_texts} targets.", "Give one per text.")
            if name in values:
                _check_finite(name, np.asarray(column))
        if BLEND not in self.predictions:
            raise InputError(f"There is no prediction named {BLEND}.", f"There are: {', '.join(self.predictions)}.")
        for name in self.predictions:
            if self.kinds.get(name) not in (MODEL, FORMULA, BASELINE):
                raise InputError(f"{name} is of kind {self.kinds.get(name)}.", "Name it model, formula or baseline.")

    def named(self, kind: str) -> list[str]:
        """Return the names of the predictions of one kind, in order."""
        return [name for name in self.predictions if self.kinds[name] == kind]


def _check_finite(name: str, values: FP64) -> None:
    if num_odd := np.count_nonzero(~np.isfinite(values)):
        raise InputError(f"{name} holds {num_odd} values that are not finite.", "Leave out their texts.")


@dataclass(frozen=True)
class Intervals:
    """95 % intervals (low, high) of a prediction's RMSE, its Pearson correlation, and its difference to the blend.

    ``pearson`` is None if the correlation is meaningless. ``difference`` is the blend's RMSE minus the prediction's
    RMSE, None for the blend itself.
    """

    rmse: tuple[float, float]
    pearson: tuple[float, float] | None
    difference: tuple[float, float] | None


def rmse(predictions: FP64, targets: FP64) -> float:
    """Return the root of the mean squared error."""
    return float(np.sqrt(np.mean((predictions - targets) ** 2)))


def pearson(predictions: FP64, targets: FP64) -> float | None:
    """Return Pearson's correlation, or None if the predictions or the targets are constant."""
    if is_constant(predictions) or is_constant(targets):
        return None
    x, y = predictions - predictions.mean(), targets - targets.mean()
    return float((x @ y) / np.sqrt((x @ x) * (y @ y)))


def spearman(predictions: FP64, targets: FP64) -> float | None:
    """Return Spearman's rank correlation, with the mean rank for equal values; None if either side is constant."""
    if pearson(predictions, targets) is None:
        return None
    with needs("train"):
        from scipy.stats import spearmanr
    return float(spearmanr(predictions, targets).statistic)


def is_constant(values: FP64) -> bool:
    """Whether ``values`` differ by no more than rounding errors."""
    return float(np.ptp(values)) <= 1e-12 * max(1.0, float(np.abs(values).max()))


def _has_correlation(evaluation: Evaluation, name: str) -> bool:
    """Whether a correlation of prediction ``name`` is meaningful.

    It is not if predictions or targets are constant, or for the baseline, which predicts the mean of each fold's
    training rows. This mean is lower when the fold's held-out targets are high: over all folds it correlates with the
    targets negatively, without any skill.
    """
    values = evaluation.predictions[name]
    by_fold = (values[evaluation.folds == fold] for fold in np.unique(evaluation.folds))
    is_mean = evaluation.kinds[name] == BASELINE and all(map(is_constant, by_fold))
    return not is_mean and pearson(values, evaluation.targets) is not None


def resample_counts(num_texts: int, num_resamples: int, seed: int) -> Iterator[FP64]:
    """Yield how often each resample contains each text, FP64 ``[up to 256, num_texts]``; rows sum to ``num_texts``."""
    random = np.random.default_rng(seed)
    for start in range(0, num_resamples, _CHUNK):
        size = min(_CHUNK, num_resamples - start)
        draws = random.integers(num_texts, size=(size, num_texts)) + num_texts * np.arange(size)[:, None]
        yield np.bincount(draws.ravel(), minlength=size * num_texts).reshape(size, num_texts).astype(np.float64)


def bootstrap(evaluation: Evaluation, *, num_resamples: int = NUM_RESAMPLES, seed: int = 0) -> dict[str, Intervals]:
    """Compute 95 % intervals of every prediction, all on the same resamples, so that differences are paired."""
    # RMSE and Pearson are functions of sums over texts (e², x, x², xy, y, y²), so one matrix product with the counts
    # of each resample gives them for all predictions, without drawing the texts themselves.
    names, num_texts, width = list(evaluation.predictions), len(evaluation.targets), len(evaluation.predictions)
    stacked = np.column_stack([evaluation.predictions[name] for name in names])
    errors = (stacked - evaluation.targets[:, None]) ** 2
    targets = (evaluation.targets - evaluation.targets.mean())[:, None]
    centred = stacked - stacked.mean(axis=0)  # else rounding of the squares would exceed the variance
    columns = np.hstack([errors, centred, centred**2, centred * targets, targets, targets**2])
    sums = np.vstack([counts @ columns for counts in resample_counts(num_texts, num_resamples, seed)])
    mse, x, xx, xy, y, yy = np.split(sums / num_texts, [width, 2 * width, 3 * width, 4 * width, 4 * width + 1], axis=1)
    rmses = np.sqrt(mse)
    with np.errstate(divide="ignore", invalid="ignore"):  # a resample may repeat a single text
        pearsons = (xy - x * y) / np.sqrt((xx - x**2) * (yy - y**2))
    of_blend = rmses[:, names.index(BLEND)]
    return {
        name: Intervals(
            rmse=_interval(rmses[:, i]),
            pearson=_interval(pearsons[:, i]) if _has_correlation(evaluation, name) else None,
            difference=_interval(of_blend - rmses[:, i]) if name != BLEND else None,
        )
        for i, name in enumerate(names)
    }


def _interval(values: FP64) -> tuple[float, float]:
    low, high = np.quantile(values[np.isfinite(values)], QUANTILES)
    return float(low), float(high)


def _rounded(value: Any) -> Any:
    """Round every number in ``value`` to four decimals; tuples become lists, as in JSON."""
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    return round(value, 4) if isinstance(value, float) else value


def summarise(evaluation: Evaluation, *, num_resamples: int = NUM_RESAMPLES, seed: int = 0) -> list[dict[str, Any]]:
    """Return one record per prediction, in order, as JSON values rounded to four decimals.

    Keys: ``name``, ``kind``, ``rmse``, ``rmse_interval``, ``pearson``, ``pearson_interval``, ``spearman``,
    ``rmse_by_fold`` (folds ascending), and ``difference`` with ``difference_interval``. The difference is the blend's
    RMSE minus this prediction's RMSE; it is negative if the blend is better. Undefined values are None.
    """
    intervals = bootstrap(evaluation, num_resamples=num_resamples, seed=seed)
    targets, folds = evaluation.targets, [evaluation.folds == fold for fold in np.unique(evaluation.folds)]
    of_blend = rmse(evaluation.predictions[BLEND], targets)

    def describe(name: str, values: FP64) -> dict[str, Any]:
        correlates = _has_correlation(evaluation, name)
        record = {
            "name": name,
            "kind": evaluation.kinds[name],
            "rmse": rmse(values, targets),
            "rmse_interval": intervals[name].rmse,
            "pearson": pearson(values, targets) if correlates else None,
            "pearson_interval": intervals[name].pearson,
            "spearman": spearman(values, targets) if correlates else None,
            "rmse_by_fold": [rmse(values[fold], targets[fold]) for fold in folds],
            "difference": of_blend - rmse(values, targets) if name != BLEND else None,
            "difference_interval": intervals[name].difference,
        }
        return {key: _rounded(value) for key, value in record.items()}

    return [describe(name, values) for name, values in evaluation.predictions.items()]


def length_groups(evaluation: Evaluation) -> dict[str, INT64]:
    """Return the row numbers of each fifth of the texts by length, the shortest first, named like ``90–120 words``.

    Texts with the same number of words share a group, so there can be fewer than five groups.
    """
    edges = np.quantile(evaluation.num_words, (0.2, 0.4, 0.6, 0.8))
    fifths = np.searchsorted(edges, evaluation.num_words)  # texts of one length share a group
    groups = {}
    for fifth in np.unique(fifths):
        rows = np.flatnonzero(fifths == fifth)
        low, high = int(evaluation.num_words[rows].min()), int(evaluation.num_words[rows].max())
        groups[f"{low} words" if low == high else f"{low}–{high} words"] = rows
    return groups


def genre_groups(evaluation: Evaluation) -> dict[str, INT64]:
    """Return the row numbers of each genre, the genre with the most texts first; empty if the texts have no genres.

    All genres after the fifteenth form one group.
    """
    if not evaluation.genres:
        return {}
    genres = np.asarray(evaluation.genres)
    names, counts = np.unique(genres, return_counts=True)
    order = sorted(range(len(names)), key=lambda i: (-counts[i], names[i]))
    groups = {str(names[i]): np.flatnonzero(genres == names[i]) for i in order[:MAX_GENRES]}
    if order[MAX_GENRES:]:
        groups[OTHER_GENRES] = np.flatnonzero(np.isin(genres, names[order[MAX_GENRES:]]))
    return groups


def by_group(evaluation: Evaluation) -> dict[str, list[dict[str, Any]]]:
    """Compute RMSE and mean residual of every model by ``genre`` and by ``length``, to four decimals, ready for JSON.

    Each record has ``group``, ``num_texts`` and ``models``, which maps a model's name to ``rmse`` and
    ``mean_residual``. A residual is target minus prediction; it is positive if the text is easier than predicted.
    """

    def describe(group: str, rows: INT64) -> dict[str, Any]:
        targets, figures = evaluation.targets[rows], {}
        for name in evaluation.named(MODEL):
            values = evaluation.predictions[name][rows]
            mean_residual = float(np.mean(targets - values))
            figures[name] = {"rmse": _rounded(rmse(values, targets)), "mean_residual": _rounded(mean_residual)}
        return {"group": group, "num_texts": len(rows), "models": figures}

    groups = {"genre": genre_groups(evaluation), "length": length_groups(evaluation)}
    return {kind: [describe(name, rows) for name, rows in found.items()] for kind, found in groups.items()}


def linear_baselines(
    columns: Mapping[str, FP64], targets: FP64, folds: Sequence[tuple[INT64, INT64]]
) -> dict[str, FP64]:
    """Predict out-of-fold by linear regression on each column alone and, if there are several, on all columns together.

    Each of ``columns`` and ``targets`` is FP64 ``[n]``; ``folds`` are pairs of row numbers ``(train, test)``.
    Everything is fitted on the training rows; rows that are in no test fold are NaN.

    Raises:
        InputError: a column contains a value that is not finite.
    """
    for name, column in columns.items():
        _check_finite(name, column)
    chosen = {name: np.asarray(column, np.float64)[:, None] for name, column in columns.items()}
    if len(columns) > 1:
        chosen[f"all {len(columns)} formulas (linear)"] = np.hstack(list(chosen.values()))
    predictions = {name: np.full(len(targets), np.nan) for name in chosen}
    for train, test in folds:
        for name, inputs in chosen.items():
            mean, std = inputs[train].mean(axis=0), inputs[train].std(axis=0)
            # Standardised, since formulas differ a hundredfold in scale and many are nearly collinear.
            scaled = (inputs - mean) / np.where(std == 0, 1.0, std)
            weights = np.linalg.lstsq(scaled[train], targets[train] - targets[train].mean(), rcond=None)[0]
            predictions[name][test] = targets[train].mean() + scaled[test] @ weights
    return predictions


def blend_weight(encoder: FP64, forest: FP64, targets: FP64) -> float:
    """Return the weight w that minimises the RMSE of ``w * encoder + (1 - w) * forest``, in 0 to 1, to two decimals.

    With e, f and t for encoder, forest and targets, d(RMSE)/dw = 0 at w = sum((t - f)(e - f)) / sum((e - f)^2). The
    weight is 0.5 if both predictions are the same.
    """
    apart = encoder - forest
    if not apart.any():
        return EVEN
    weight = float((targets - forest) @ apart / (apart @ apart))
    return round(min(max(weight, 0.0), 1.0), 2)


def cross_fitted_blend(encoder: FP64, forest: FP64, targets: FP64, folds: INT64) -> FP64:
    """Blend each row, FP64 ``[n]``, with the weight that is best on the rows of all *other* folds.

    A weight fitted to a row's own target would make the blend look better than it is. With a single fold
    the weight is 0.5.
    """
    combined: FP64 = blend(EVEN, encoder, forest)
    for fold in np.unique(folds):
        own = folds == fold
        if not own.all():
            weight = blend_weight(encoder[~own], forest[~own], targets[~own])
            combined[own] = blend(weight, encoder[own], forest[own])
    return combined
