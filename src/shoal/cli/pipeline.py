"""The first pipeline, from training to scores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import SMALL_ENCODER, Data, Encoder, Json
from shoal.console import OUT, print_json, print_rmse, print_table, show_progress
from shoal.errors import InputError, needs


def train(
    out: Annotated[Path, typer.Option(help="The artifact folder to write.")] = Path("build/artifacts"),
    preset: Annotated[str, typer.Option(help="How much to train: quick.")] = "quick",
    data: Data = None,
    encoder: Encoder = SMALL_ENCODER,
    seed: Annotated[int, typer.Option(help="The same seed gives the same split and order.")] = 0,
    as_json: Json = False,
) -> None:
    """Train encoder and forest, and write the artifact folder."""
    with needs("train"):
        from shoal.training.corpus import find_corpus
        from shoal.training.train import PRESETS
        from shoal.training.train import train as train_pipeline

    if preset not in PRESETS:
        raise InputError(f"There is no preset {preset!r}.", f"Known: {', '.join(PRESETS)}.")
    corpus = find_corpus(data)
    with show_progress() as show:
        report = train_pipeline(corpus, out, encoder=encoder, preset=PRESETS[preset], seed=seed, on_progress=show)
    if as_json:
        print_json(report)
        return
    print_rmse(report["held_out_rmse"], report["is_demonstration"])
    OUT.print(f"artifacts: {out.resolve()}", soft_wrap=True)


def quickstart(
    out: Annotated[Path, typer.Option(help="The folder for artifacts and repository.")] = Path("build"),
    data: Data = None,
    encoder: Encoder = SMALL_ENCODER,
) -> None:
    """Train, compose, serve with a real Triton, score passages, stop."""
    with needs("train"):
        from shoal.quickstart import run

    with show_progress() as show:
        result = run(out, data=data, encoder=encoder, on_progress=show)
    rows = ((score.text, (score.bert, score.forest, score.blend)) for score in result.scores)
    print_table(["BERT score", "forest score", "blended score"], rows, title="Higher is easier to read")
    print_rmse(result.rmse, result.is_demonstration)
    for name in ("artifacts", "repository", "report"):
        OUT.print(f"{name}: {getattr(result, name).resolve()}", soft_wrap=True)
    OUT.print(f"next: shoal serve {result.repository}", soft_wrap=True)
