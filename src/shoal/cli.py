"""The command line: it parses, calls the library, and prints."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from shoal.errors import InputError, ServerError, ShoalError, needs

app = typer.Typer(no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, help=__doc__)
_out, _err = Console(highlight=False), Console(stderr=True, highlight=False)
MIN_TEXT_WIDTH = 20  # of a text in a table, on however narrow a terminal

Data = Annotated[Path | None, typer.Option(help="The CLEAR corpus (.xlsx); else SHOAL_DATA_DIR's, else shoal's own.")]
Encoder = Annotated[str, typer.Option(help="A BERT-family encoder: a folder, or a Hugging Face name.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SMALL_ENCODER = "sentence-transformers/all-MiniLM-L6-v2"


def main() -> None:
    """Run the command line; an error of shoal's is one line and exit code 1."""
    try:
        app(standalone_mode=True)
    except ShoalError as error:
        _err.print(f"[red]error:[/] {_plain(error.what)}", soft_wrap=True)
        if error.fix:
            _err.print(f"  {_plain(error.fix)}", soft_wrap=True)
        sys.exit(1)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


@contextmanager
def _progress() -> Iterator[Any]:
    """A bar per stage on a terminal, a line per stage elsewhere."""
    if not _err.is_terminal:
        yield lambda stage, done, total: _err.print(f"{stage} ...", soft_wrap=True) if done == 0 else None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_err) as progress:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage)
            current = progress.tasks[tasks[stage]]
            # The end of a stage says 1 of 1; a bar that has counted steps stays at its own total.
            if (done, total) == (1, 1) and (current.total or 0) > 1 and current.finished:
                return
            progress.update(tasks[stage], completed=done, total=total)

        yield show


@app.command()
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
    with _progress() as show:
        report = train_pipeline(corpus, out, encoder=encoder, preset=PRESETS[preset], seed=seed, on_progress=show)
    if as_json:
        _print_json(report)
        return
    _print_rmse(report["held_out_rmse"], report["is_demonstration"])
    _out.print(f"artifacts: {out.resolve()}", soft_wrap=True)


@app.command()
def compose(
    ensemble: Annotated[str, typer.Argument(help="The ensemble's name, such as ensemble_all.")],
    repository: Annotated[Path, typer.Argument(help="The model repository to write.")],
    artifacts: Annotated[Path, typer.Option(help="The folder that `shoal train` wrote.")] = Path("build/artifacts"),
    placement: Annotated[str, typer.Option(help="Where the models run: cpu.")] = "cpu",
    target: Annotated[
        str, typer.Option(help="embedded, or a release of NVIDIA's container such as 26.06.")
    ] = "embedded",
    dtype: Annotated[str, typer.Option(help="The encoder's: fp32 or bf16.")] = "fp32",
    leaves: Annotated[list[Path] | None, typer.Option(help="Folders with leaf folders of your own.")] = None,
) -> None:
    """Write a model repository: leaf folders, artifacts, placement."""
    from shoal.repository.compose import compose as compose_repository
    from shoal.repository.placement import Plan

    plan = Plan(placement=placement, target=target, dtype=dtype)
    path = compose_repository(ensemble, repository, artifacts=artifacts, plan=plan, leaves=leaves or ())
    _out.print(f"repository: {path}", soft_wrap=True)
    serve_it = f"shoal serve {path}"
    _out.print(f"next: {serve_it if target == 'embedded' else f'{serve_it} --print'}", soft_wrap=True)


@app.command()
def serve(
    repository: Annotated[Path, typer.Argument(help="A model repository.")],
    http_port: Annotated[int, typer.Option(help="0 is any free one.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="0 is any free one.")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="0 is any free one.")] = 8002,
    log: Annotated[Path | None, typer.Option(help="Keep Triton's log in this file.")] = None,
    is_printed: Annotated[
        bool, typer.Option("--print", help="Print the command for NVIDIA's container instead.")
    ] = False,
) -> None:
    """Serve a repository with the embedded Triton until Ctrl-C; for development, on loopback."""
    from shoal.serving.runtime import container_command
    from shoal.serving.server import KEEP_LOG
    from shoal.serving.server import serve as start

    if is_printed:
        _out.print(container_command(repository), soft_wrap=True)
        return
    _err.print("Embedded Triton 24.10: for development and tests, on loopback. In production: --print", soft_wrap=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop in order, as on Ctrl-C
    ports = {"http_port": http_port, "grpc_port": grpc_port, "metrics_port": metrics_port}
    with start(repository, **ports, log=log and log.resolve()) as server:
        try:
            _out.print(f"ready: http {server.http_url}  grpc {server.grpc_url}  metrics {server.metrics_url}")
            _err.print(f"log: {server.log}  (Ctrl-C stops)", soft_wrap=True)
            code = server.wait()
        except KeyboardInterrupt:
            _err.print("stopping ...")
        else:
            raise ServerError(f"Triton ended with exit code {code}: {server.cause()}", KEEP_LOG)


@app.command()
def infer(
    texts: Annotated[list[str], typer.Argument(help="Texts to score.")],
    url: Annotated[str, typer.Option(help="The server's gRPC address.")] = "127.0.0.1:8001",
    model: Annotated[str, typer.Option(help="The ensemble; else the one of shoal's that the server has.")] = "",
    values: Annotated[
        list[str] | None, typer.Option("--set", help="Another input, the same for each text: BERT_WEIGHT=0.7.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Score texts on a running server."""
    from shoal.component.tensors import STRING
    from shoal.serving.client import Client

    with Client(url) as client:
        model = model or _find_ensemble(client)
        text_input = next((spec.name for spec in client.inputs(model) if spec.dtype == STRING), "")
        if not text_input:
            raise InputError(f"Model {model} takes no text.", "Name an ensemble that does: --model NAME")
        others = {name: [value] * len(texts) for name, value in map(_parse_setting, values or ())}
        outputs = client.infer(model, **{text_input: texts, **others})
    columns = {name: array[:, 0].tolist() for name, array in outputs.items() if array.shape[1:] == (1,)}
    if len(columns) < len(outputs):
        raise InputError(f"Model {model} gives more than one number a text.", "Use shoal.Client.")
    if as_json:
        _print_json([{"text": text, **dict(zip(columns, row, strict=True))} for text, row in _rows(texts, columns)])
        return
    _print_table(list(columns), _rows(texts, columns))


def _rows(texts: Sequence[str], columns: dict[str, list[float]]) -> Iterator[tuple[str, tuple[float, ...]]]:
    yield from zip(texts, zip(*columns.values(), strict=True), strict=True)


def _find_ensemble(client: Any) -> str:
    from shoal.repository.leaves import find_leaves

    known = [name for name, config in find_leaves().items() if config.is_ensemble]
    ready = [name for name in known if client.is_ready(name)]
    if len(ready) == 1:
        return ready[0]
    raise InputError(
        f"The server at {client.url} has {'several' if ready else 'none'} of shoal's ensembles.",
        "Name one: --model NAME",
    )


def _parse_setting(setting: str) -> tuple[str, float]:
    name, _, value = setting.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise InputError(f"--set {setting!r} is no NAME=NUMBER.", "For example: --set BERT_WEIGHT=0.7") from None


@app.command()
def graph(
    folder: Annotated[Path, typer.Argument(help="An ensemble in a repository, such as build/repository/ensemble_all.")],
) -> None:
    """Draw an ensemble as Mermaid text."""
    from shoal.repository.graph import Graph

    typer.echo(Graph.load(folder).mermaid(), nl=False)


@app.command()
def quickstart(
    out: Annotated[Path, typer.Option(help="The folder for artifacts and repository.")] = Path("build"),
    data: Data = None,
    encoder: Encoder = SMALL_ENCODER,
) -> None:
    """Train, compose, serve with a real Triton, score passages, stop."""
    with needs("train"):
        from shoal.quickstart import run

    with _progress() as show:
        result = run(out, data=data, encoder=encoder, on_progress=show)
    rows = ((score.text, (score.bert, score.forest, score.blend)) for score in result.scores)
    _print_table(["BERT score", "forest score", "blended score"], rows, title="Higher is easier to read")
    _print_rmse(result.rmse, result.is_demonstration)
    for name in ("artifacts", "repository", "report"):
        _out.print(f"{name}: {getattr(result, name).resolve()}", soft_wrap=True)
    _out.print(f"next: shoal serve {result.repository}", soft_wrap=True)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Check whether this machine can serve; exit code 1 if it cannot."""
    from shoal.doctor import FAULT, OK, examine

    findings = examine()
    if as_json:
        _print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            colour = {"ok": "green", "warning": "yellow"}.get(finding.level, "red")
            _out.print(f"[{colour}]{finding.level:8}[/] {finding.check}: {_plain(finding.found)}", soft_wrap=True)
            if finding.level != OK:
                _out.print(f"         {_plain(finding.fix)}", soft_wrap=True)
    if any(finding.level == FAULT for finding in findings):
        raise typer.Exit(1)


def _print_rmse(rmse: dict[str, float], is_demonstration: bool) -> None:
    _out.print(
        "held-out RMSE: " + ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in rmse.items()),
        soft_wrap=True,
    )
    if is_demonstration:
        _out.print(
            "Trained on shoal's own hundred passages: these scores are a demonstration, not a measurement.",
            soft_wrap=True,
        )


def _print_table(names: Sequence[str], rows: Iterable[tuple[str, Sequence[float]]], title: str = "") -> None:
    """A line a text, cut to what the scores leave of the width."""
    table = Table("text", *(Column(name, justify="right") for name in names), title=title or None)
    room = max(MIN_TEXT_WIDTH, _out.width - sum(len(name) + 3 for name in names) - 4)
    for text, values in rows:
        line = Text(" ".join(text.split()))
        line.truncate(room, overflow="ellipsis")
        table.add_row(line, *(f"{value:.3f}" for value in values))
    _out.print(table)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False))
