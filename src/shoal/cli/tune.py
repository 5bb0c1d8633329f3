"""``shoal tune``: choose the precision of encoders on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from shoal.cli.applications import read_texts, sample_texts, tune_artifacts
from shoal.cli.console import OUT, Json, plain, print_json, refuse_ignored, show_progress
from shoal.errors import InputError


def tune(
    context: typer.Context,
    repository: Annotated[
        Path | None, typer.Argument(help="A repository that `shoal compose` wrote. Or give --artifacts.")
    ] = None,
    artifacts: Annotated[Path | None, typer.Option(help="What `shoal train` wrote, instead of a repository.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Texts: a .csv, .jsonl, .parquet or .xlsx. Default: shoal's corpus.")
    ] = None,
    text_column: Annotated[str | None, typer.Option(help="The column of texts.")] = None,
    target_column: Annotated[
        str | None, typer.Option(help="The column of the right scores; without it, INT8 is never chosen.")
    ] = None,
    output: Annotated[str, typer.Option(help="The output to compare. Default: the first of TYPE_FP32.")] = "",
    out: Annotated[Path, typer.Option(help="The folder for the plan and the quantised encoders.")] = Path(
        "build/tuned"
    ),
    seconds: Annotated[float, typer.Option(min=1, help="About how long to measure, after quantising.")] = 120.0,
    as_json: Json = False,
) -> None:
    """Measure FP32, BF16 and INT8 on this machine, and choose; `shoal compose --tuned` takes the choice."""
    if (repository is None) == (artifacts is None):
        raise InputError("Name a repository, or artifacts, and not both.", "For example: shoal tune build/repository")
    if data is None:
        refuse_ignored(context, "--text-column --target-column", "without --data")
    if artifacts is not None:
        refuse_ignored(context, "--output", "with --artifacts")
    named = {"text_column": text_column, "target_column": target_column}
    with show_progress() as show:
        if artifacts is not None:
            texts = read_texts(data, **named, on_progress=show)
            plan = tune_artifacts(artifacts, texts, out, seconds=seconds, on_progress=show)
        else:
            options: dict[str, Any] = {"output": output, "seconds": seconds, "on_progress": show}
            plan = _tune_repository(repository or Path(), data, out, named, **options)
    if as_json:
        print_json(plan)
        return
    columns = ["precision", "1 row, ms", "1 row/s", "16 rows/s", "64 rows/s", "MiB", "mean |diff.|", "RMSE", "Spearman"]
    table = Table(
        *(Column(name, justify="right" if name != "precision" else "left") for name in columns), box=SIMPLE_HEAD
    )
    for each in plan["candidates"]:
        if "why_not" not in each:
            rates = [f"{rate:.1f}" for rate in each["rows_per_s"].values()]
            rest = [f"{each[name]:.4f}" if name in each else "" for name in ("mean", "rmse", "spearman")]
            table.add_row(each["dtype"], f"{each['p50_ms']:.1f}", *rates, str(each["peak_mib"]), *rest)
    OUT.print(table)
    for each in plan["candidates"]:
        if "why_not" in each:
            OUT.print(f"{each['dtype']} was not measured: {plain(each['why_not'])}.", soft_wrap=True)
    if plan.get("seen"):
        OUT.print("The models were trained on these texts; errors on new texts are larger.", soft_wrap=True)
    OUT.print(f"chosen: {plan['dtype']} ({plain(plan['reason'])})", soft_wrap=True)
    OUT.print(f"next: shoal compose ... --tuned {out / 'tuned.json'}", soft_wrap=True)


def _tune_repository(
    repository: Path, data: Path | None, out: Path, columns: dict[str, str | None], **options: Any
) -> dict[str, Any]:
    """Tune a repository on texts of which a quarter, at most 128, are for calibration."""
    import numpy as np

    from shoal.authoring.repository.find_graph import find_graph
    from shoal.kit.encoders.quantize import NUM_CALIBRATED
    from shoal.lab.bench.inputs import read_inputs
    from shoal.lab.tune import tune as tune_repository

    targets: Any = None
    if columns["target_column"] is not None:
        corpus = read_texts(data, **columns, on_progress=options["on_progress"])
        texts, targets = list(corpus.texts), corpus.targets
    elif data is not None:
        found = read_inputs(find_graph(repository).config.spec, data, columns["text_column"] or "")
        texts = [text.decode() for text in next(iter(found.arrays.values())).ravel()]
    else:
        texts = list(sample_texts()[1])
    texts = list(dict.fromkeys(texts)) if targets is None else texts
    order = np.random.default_rng(0).permutation(len(texts))
    first = {texts[row] for row in order[: min(NUM_CALIBRATED, len(texts) // 4)]}
    rest = [row for row in order if texts[row] not in first]
    measured, known = [texts[row] for row in rest], None if targets is None else targets[rest].tolist()
    return tune_repository(repository, out, measured, targets=known, calibration=sorted(first), **options)
