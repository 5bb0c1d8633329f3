"""``shoal quickstart``: from nothing to a served pipeline that answers."""

from __future__ import annotations

from contextlib import closing
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.console import OUT, Data, Encoder, plain, refuse_ignored, show_progress
from shoal.kit.encoders.packaged import SMALL_ENCODER
from shoal.readability import commands as readability


def quickstart(
    context: typer.Context,
    out: Annotated[Path | None, typer.Option(help="The folder for what is made. Default: build, or build/llm.")] = None,
    data: Data = None,
    encoder: Encoder = SMALL_ENCODER,
    is_llm: Annotated[
        bool, typer.Option("--llm", help="A tiny language model, made on the spot, that streams a chat.")
    ] = False,
) -> None:
    """Train models, compose a repository, serve it with a real Triton, score passages (with --llm: chat), and stop."""
    if not is_llm:
        readability.quickstart(out or Path("build"), data, encoder)
        return
    from shoal.lab.llm_quickstart import run

    refuse_ignored(context, "--data --encoder", "with --llm, whose model is made on the spot")
    out = out or Path("build/llm")
    with show_progress() as show:
        answers = run(out, on_progress=show)
        first = next(answers)
    with closing(answers):
        for question, pieces in groupby(chain([first], answers), key=itemgetter(0)):
            OUT.print(f"[bold]{plain(question)}[/]", soft_wrap=True)
            for _, piece in pieces:
                typer.echo(piece.text, nl=False)
            typer.echo()
    OUT.print(f"weights: {(out / 'weights').resolve()}", soft_wrap=True)
    OUT.print(f"repository: {(out / 'repository').resolve()}", soft_wrap=True)
    OUT.print(f"next: shoal serve {out / 'repository'}", soft_wrap=True)
    OUT.print('then: shoal generate --chat --stream "What do cats do?"', soft_wrap=True)
