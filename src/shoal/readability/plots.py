"""Plots of the report, each an image as a ``data:`` URI; the same numbers give the same bytes."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.kit.blocks import blend
from shoal.lab.bench.plots import make_figure, save
from shoal.readability.evaluation import (
    BASELINE,
    BLEND,
    ENCODER,
    FOREST,
    FORMULA,
    FP64,
    MODEL,
    Evaluation,
    genre_groups,
    length_groups,
    pearson,
    rmse,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Blue, orange and grey of Okabe & Ito, "Color Universal Design" (2008): apart for every kind of colour vision.
COLOURS = {MODEL: "#0072B2", FORMULA: "#E69F00", BASELINE: "#767676"}
INK, FAINT = "#333333", "#B0B0B0"
MARKERS = {MODEL: "o", FORMULA: "s", BASELINE: "D"}  # for print without colour
WIDTH = 9.0  # inches
MAX_IMPORTANCES = 20
MAX_POINTS = 400  # fewer texts are drawn one by one, more as a density
_DOTS_PER_INCH = 144


def _svg(figure: Figure) -> str:
    buffer = io.BytesIO()
    save(figure, buffer)
    return _data_uri("image/svg+xml", buffer)


def _png(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None}, pil_kwargs={"optimize": True})
    return _data_uri("image/png", buffer)


def _data_uri(kind: str, buffer: io.BytesIO) -> str:
    return f"data:{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def _label(text: object, width: int = 34) -> str:
    words = " ".join(str(text).split()) or "(none)"
    return words if len(words) <= width else words[: width - 1].rstrip() + "…"


def plot_predictions(evaluation: Evaluation) -> str:
    """Plot predicted against actual values of every model, side by side: points for few texts, else a density."""
    names = evaluation.named(MODEL)
    drawn = [evaluation.targets, *(evaluation.predictions[name] for name in names)]
    low, high = min(x.min() for x in drawn), max(x.max() for x in drawn)
    margin = 0.05 * (high - low) or 1.0
    limits = (float(low - margin), float(high + margin))
    figure, axes = make_figure(WIDTH, 3.8, len(names), sharex=True, sharey=True)
    densities = []
    for axis, name in zip(axes, names, strict=True):
        values = evaluation.predictions[name]
        axis.plot(limits, limits, color=INK, linewidth=0.8, linestyle="--", zorder=3)
        if len(values) <= MAX_POINTS:
            axis.scatter(evaluation.targets, values, s=12, color=COLOURS[MODEL], alpha=0.6, linewidth=0)
        else:
            densities.append(_density(axis, evaluation.targets, values, limits))
        r = pearson(values, evaluation.targets)
        figures = f"RMSE {rmse(values, evaluation.targets):.3f}" + (f", r {r:.3f}" if r is not None else "")
        axis.set(title=f"{_label(name)}\n{figures}", xlabel="actual", xlim=limits, ylim=limits, aspect="equal")
    axes[0].set_ylabel("predicted")
    if densities:
        most = max(float(density.get_array().max()) for density in densities)
        for density in densities:
            density.set_clim(1, max(most, 2))
        ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if tick <= max(most, 2)]
        bar = figure.colorbar(densities[0], ax=axes, label="texts", fraction=0.02, pad=0.01, ticks=ticks)
        bar.ax.set_yticklabels(map(str, ticks))
        bar.ax.minorticks_off()
    return _png(figure)


def _density(axis: Axes, targets: FP64, values: FP64, limits: tuple[float, float]) -> Any:
    return axis.hexbin(
        targets, values, gridsize=36, extent=(*limits, *limits), mincnt=1, norm="log", cmap="viridis_r", linewidths=0.1
    )


def plot_residuals(evaluation: Evaluation) -> str:
    """Plot the blend's residuals by fifth of the texts' length and, if genres are known, by genre."""
    residuals = evaluation.targets - evaluation.predictions[BLEND]
    groupings = {"by length": length_groups(evaluation), "by genre": genre_groups(evaluation)}
    groupings = {title: groups for title, groups in groupings.items() if groups}
    height = 1.2 + 0.3 * max(map(len, groupings.values()))
    figure, axes = make_figure(WIDTH, height, len(groupings), sharex=True)
    for axis, (title, groups) in zip(axes, groupings.items(), strict=True):
        axis.boxplot(
            [residuals[rows] for rows in groups.values()],
            orientation="horizontal",
            whis=(5, 95),
            showfliers=False,
            widths=0.6,
            patch_artist=True,
            boxprops={"facecolor": "#CFE3F1", "edgecolor": COLOURS[MODEL]},
            medianprops={"color": INK, "linewidth": 1.5},
            whiskerprops={"color": COLOURS[MODEL]},
            capprops={"color": COLOURS[MODEL]},
        )
        names = [f"{_label(name, 28)} ({len(rows):,})" for name, rows in groups.items()]
        axis.set_yticks(range(1, len(names) + 1), names)
        axis.invert_yaxis()  # first on top
        axis.axvline(0, color=FAINT, linewidth=0.8, zorder=0)
        axis.set(title=title, xlabel="actual − predicted")
    return _svg(figure)


def plot_errors(predictions: Sequence[Mapping[str, Any]]) -> str:
    """Plot the RMSE of every prediction with its interval, best on top; ``predictions`` comes from ``summarise``."""
    rows = sorted(predictions, key=lambda row: row["rmse"])
    figure, (axis,) = make_figure(WIDTH, 1.2 + 0.27 * len(rows))
    for kind, colour in COLOURS.items():
        chosen = [(place, row) for place, row in enumerate(rows) if row["kind"] == kind]
        if not chosen:
            continue
        places = [place for place, _ in chosen]
        low, high = zip(*(row["rmse_interval"] for _, row in chosen), strict=True)
        axis.hlines(places, low, high, color=colour, linewidth=2.5, alpha=0.6)
        rmses = [row["rmse"] for _, row in chosen]
        axis.plot(rmses, places, MARKERS[kind], color=colour, markersize=6, label=kind)
    for place, row in enumerate(rows):
        axis.annotate(
            f"{row['rmse']:.3f}",
            (row["rmse_interval"][1], place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=INK,
        )
    axis.set_yticks(range(len(rows)), [_label(row["name"]) for row in rows])
    axis.set_xlim(0, 1.12 * max(row["rmse_interval"][1] for row in rows) or 1)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlabel("RMSE, with its 95 % interval (left is better)")
    axis.grid(axis="x", color="#E6E6E6", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.legend(loc="lower left")  # the worst are below, on the right
    return _svg(figure)


def plot_importances(importances: Mapping[str, float]) -> str:
    """Plot the twenty features with the greatest permutation importance."""
    top = sorted(importances.items(), key=lambda item: -item[1])[:MAX_IMPORTANCES]
    figure, (axis,) = make_figure(WIDTH, 0.9 + 0.22 * len(top))
    axis.barh(range(len(top)), [value for _, value in top], color=COLOURS[MODEL], height=0.7)
    axis.set_yticks(range(len(top)), [_label(name, 48) for name, _ in top])
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(len(top) - 0.3, -0.7)
    axis.set_xlabel("increase of the forest's RMSE when the feature is shuffled")
    return _svg(figure)


def plot_weights(evaluation: Evaluation, bert_weight: float) -> str:
    """Plot the RMSE of ``w * encoder + (1 - w) * forest`` for w from 0 to 1, and mark the chosen ``bert_weight``."""
    encoder, forest = (evaluation.predictions[name] for name in (ENCODER, FOREST))

    def error(weight: float) -> float:
        return rmse(blend(weight, encoder, forest), evaluation.targets)

    weights = np.linspace(0, 1, 101).tolist()
    figure, (axis,) = make_figure(WIDTH, 2.8)
    axis.plot(weights, [error(weight) for weight in weights], color=COLOURS[MODEL])
    axis.plot([bert_weight], [error(bert_weight)], "o", color=INK, markersize=7)
    axis.annotate(
        f"w = {bert_weight:.2f}: RMSE {error(bert_weight):.3f}",
        (bert_weight, error(bert_weight)),
        xytext=(0, 12),
        textcoords="offset points",
        ha="left" if bert_weight < 0.15 else "right" if bert_weight > 0.85 else "center",
    )
    axis.set(xlabel="w, the encoder's weight (0: forest alone, 1: encoder alone)", ylabel="RMSE", xlim=(-0.02, 1.02))
    axis.margins(y=0.15)
    return _svg(figure)


def plot_histories(histories: Sequence[Sequence[Mapping[str, Any]]], chosen: Sequence[Mapping[str, Any]] = ()) -> str:
    """Plot the encoder's RMSE during training, one line per fold: on the training rows, and on the fold's inner split.

    The inner split is held out of the training rows. Its RMSE is that of the head that the fold chose; a dot marks the
    step that was kept.
    """
    figure, (train, inner) = make_figure(WIDTH, 3.0, 2, sharex=True, sharey=True)
    for index, history in enumerate(histories):
        if not history:
            continue
        choice = chosen[index] if index < len(chosen) else {}
        head = choice.get("head") or min(history[-1]["inner_rmse"], key=history[-1]["inner_rmse"].__getitem__)
        epochs = [point["epoch"] for point in history]
        errors = [point["inner_rmse"][head] for point in history]
        train.plot(epochs, [point["train_rmse"] for point in history], color=COLOURS[MODEL], linewidth=0.9, alpha=0.8)
        inner.plot(epochs, errors, color=COLOURS[MODEL], linewidth=0.9, alpha=0.8)
        kept = [(e, r) for e, r, p in zip(epochs, errors, history, strict=True) if p["step"] == choice.get("best_step")]
        for epoch, error in kept:
            inner.plot([epoch], [error], "o", color=COLOURS[FORMULA], markersize=5, zorder=3)
    train.set(title="training rows", xlabel="epoch", ylabel="RMSE")
    inner.set(title="inner split (dots: the step that was kept)", xlabel="epoch")
    for axis in (train, inner):
        axis.grid(axis="y", color="#E6E6E6", linewidth=0.6)
    return _svg(figure)
