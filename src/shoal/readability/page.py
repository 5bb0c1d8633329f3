"""``report.html``: the report as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import needs
from shoal.kit.encoders.encoder import HEADS
from shoal.lab.bench.plots import drawing
from shoal.readability import plots
from shoal.readability.evaluation import BASELINE, BLEND, FORMULA, MODEL, NUM_RESAMPLES, Evaluation
from shoal.readability.work import flatten

TEMPLATE = "report.html.j2"
_ASSETS = Path(__file__).parent / "assets"


def write_page(path: Path, report: Mapping[str, Any], evaluation: Evaluation) -> None:
    """Write the page of ``report``; ``evaluation`` has the predictions behind the report's figures.

    The same report gives the same bytes. The page contains no script and no text of the corpus.

    Raises:
        SetupError: jinja2 or matplotlib is not installed.
    """
    with needs("train"):
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    environment = Environment(
        loader=FileSystemLoader(_ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"fixed": fixed, "span": span, "seconds": seconds}
    template = environment.get_template(TEMPLATE)
    page = template.render(
        report=report,
        sentences=summarise_in_words(report["evaluation"]["predictions"]),
        targets=evaluation.targets,
        models=evaluation.named(MODEL),
        pictures=_draw(report, evaluation),
        settings=_settings_used(report),
        heads=HEADS,
        num_resamples=NUM_RESAMPLES,
    )
    path.write_text(page, encoding="utf-8")


def _settings_used(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings by name. If less was used than a setting asked for, say both: ``80 (at most 200)``."""
    done = {
        "num_rows": report["num_trained_on"],
        "num_held_out": report["evaluation"]["num_texts"],
        "encoder.max_steps": report["encoder"]["num_steps"],
    }
    asked = dict(flatten(report["preset"]))
    used = {name: done.get(name, value) for name, value in asked.items()}
    return {
        name: value if asked[name] in (None, value) else f"{value} (at most {asked[name]})"
        for name, value in used.items()
    }


def _draw(report: Mapping[str, Any], evaluation: Evaluation) -> dict[str, str]:
    """Draw the page's pictures, each a data URI by name; pictures without data are left out."""
    with drawing("train"):
        pictures = {
            "errors": plots.plot_errors(report["evaluation"]["predictions"]),
            "predictions": plots.plot_predictions(evaluation),
            "residuals": plots.plot_residuals(evaluation),
            "weights": plots.plot_weights(evaluation, report["bert_weight"]),
        }
        if histories := report["encoder"]["histories"]:
            pictures["histories"] = plots.plot_histories(histories, report["encoder"]["chosen"])
        if importances := report.get("importances"):
            pictures["importances"] = plots.plot_importances(importances)
    return pictures


def summarise_in_words(predictions: Sequence[Mapping[str, Any]]) -> list[str]:
    """Put the results of ``summarise`` into two sentences: the blend's RMSE, and a comparison with the better model."""
    rows = {row["name"]: row for row in predictions}
    blend = rows[BLEND]
    parts = [f"The blend's RMSE is {fixed(blend['rmse'], 2)} (95 % interval {span(blend['rmse_interval'], 2)})"]
    formulas = [row for row in predictions if row["kind"] == FORMULA]
    if formulas:
        best = min(formulas, key=lambda row: row["rmse"])
        parts.append(f"the best that published formulas reach is {fixed(best['rmse'], 2)}, with {best['name']}")
    parts += [f"the {row['name']} gives {fixed(row['rmse'], 2)}" for row in predictions if row["kind"] == BASELINE]
    sentences = ["; ".join(parts) + "."]
    others = [row for row in predictions if row["kind"] == MODEL and row["name"] != BLEND]
    if others:
        sentences.append(_compare(min(others, key=lambda row: row["rmse"])))
    return sentences


def _compare(other: Mapping[str, Any]) -> str:
    """Compare the blend with ``other``, one of the models in it, in a sentence."""
    low, high = other["difference_interval"]
    name = f"the {other['name']} alone"
    by = f"(difference {fixed(other['difference'])}, interval {span((low, high))})"
    if low == high == 0:
        return f"The blend is {name}: the other model adds nothing to it on these texts."
    if low <= 0 <= high:
        return f"These texts do not show whether the blend is better or worse than {name} {by}."
    return f"The blend is {'better' if high < 0 else 'worse'} than {name} {by}."


def fixed(value: float | None, decimals: int = 3) -> str:
    """Format ``value`` with this many decimals and a true minus sign; a dash for None."""
    if value is None:
        return "–"
    return f"{round(value, decimals) + 0.0:.{decimals}f}".replace("-", "−")  # + 0.0 removes the sign of -0.0


def span(pair: Sequence[float] | None, decimals: int = 3) -> str:
    """Format an interval; a dash for None."""
    return "–" if pair is None else f"{fixed(pair[0], decimals)} to {fixed(pair[1], decimals)}"


def seconds(value: float) -> str:
    """Format seconds as ``42 s``, ``3 min 20 s`` or ``2 h 5 min``."""
    if value < 60:
        return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
