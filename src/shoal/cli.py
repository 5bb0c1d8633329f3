"""The command line: it parses, calls the library, and prints."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.console import ERR, OUT, plain, print_copies, print_json, print_rmse, print_table, show_progress
from shoal.errors import InputError, ServerError, ShoalError, needs

app = typer.Typer(no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, help=__doc__)

Data = Annotated[Path | None, typer.Option(help="The CLEAR corpus (.xlsx); else SHOAL_DATA_DIR's, else shoal's own.")]
Encoder = Annotated[str, typer.Option(help="A BERT-family encoder: a folder, or a Hugging Face name.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Placement = Annotated[str, typer.Option(help="Where the models run: cpu, hybrid (with a client), or gpu.")]
Target = Annotated[str, typer.Option(help="embedded, or a release of NVIDIA's container such as 26.06.")]
Gpu = Annotated[str, typer.Option(help="Pin the models to these: 0,1 (or none, for hybrid on the host).")]
Concurrency = Annotated[int, typer.Option(help="Requests in flight that memory is sized for.")]
SMALL_ENCODER = "sentence-transformers/all-MiniLM-L6-v2"


def main() -> None:
    """Run the command line; an error of shoal's is one line and exit code 1."""
    try:
        app(standalone_mode=True)
    except ShoalError as error:
        ERR.print(f"[red]error:[/] {plain(error.what)}", soft_wrap=True)
        if error.fix:
            ERR.print(f"  {plain(error.fix)}", soft_wrap=True)
        sys.exit(1)


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
    with show_progress() as show:
        report = train_pipeline(corpus, out, encoder=encoder, preset=PRESETS[preset], seed=seed, on_progress=show)
    if as_json:
        print_json(report)
        return
    print_rmse(report["held_out_rmse"], report["is_demonstration"])
    OUT.print(f"artifacts: {out.resolve()}", soft_wrap=True)


@app.command()
def compose(
    ensemble: Annotated[str, typer.Argument(help="The ensemble's name, such as ensemble_all.")],
    repository: Annotated[Path, typer.Argument(help="The model repository to write.")],
    artifacts: Annotated[Path, typer.Option(help="The folder that `shoal train` wrote.")] = Path("build/artifacts"),
    placement: Placement = "cpu",
    target: Target = "embedded",
    dtype: Annotated[str, typer.Option(help="The encoder's: fp32, bf16 or fp16.")] = "fp32",
    gpu: Gpu = "",
    concurrency: Concurrency = 16,
    leaves: Annotated[list[Path] | None, typer.Option(help="Folders with leaf folders of your own.")] = None,
) -> None:
    """Write a model repository: leaf folders, artifacts, placement."""
    from shoal.repository.compose import compose as compose_repository
    from shoal.repository.placement import Plan

    plan = Plan(placement, target, dtype, _parse_gpus(gpu), concurrency)
    path = compose_repository(ensemble, repository, artifacts=artifacts, plan=plan, leaves=leaves or ())
    OUT.print(f"repository: {path}", soft_wrap=True)
    serve_it = f"shoal serve {path}"
    OUT.print(f"next: {serve_it if target == 'embedded' else f'{serve_it} --print'}", soft_wrap=True)


@app.command()
def plan(
    ensemble: Annotated[str, typer.Argument(help="The ensemble's name, such as ensemble_all.")],
    placement: Placement = "cpu",
    target: Target = "embedded",
    gpu: Gpu = "",
    concurrency: Concurrency = 16,
    rows: Annotated[int, typer.Option(help="Of the largest request; 0 is max_batch_size.", min=0)] = 0,
    width: Annotated[int, typer.Option(help="Of a dimension that is -1, such as tokens.", min=1)] = 256,
    text_bytes: Annotated[int, typer.Option(help="Of the largest text.", min=1)] = 65_536,
    leaves: Annotated[list[Path] | None, typer.Option(help="Folders with leaf folders of your own.")] = None,
    as_json: Json = False,
) -> None:
    """Show where the models run, and the memory it takes: pools, shared memory, launch flags."""
    from shoal.repository.graph import Graph
    from shoal.repository.leaves import collect, find_leaves
    from shoal.repository.placement import Plan
    from shoal.repository.sizes import Largest, find_sizes

    chosen = Plan(placement, target, gpus=_parse_gpus(gpu), concurrency=concurrency)
    models = collect(ensemble, find_leaves(leaves or ()))
    drawn = Graph.build(models[-1], {model.name: model for model in models})
    sizes = find_sizes(drawn, chosen, Largest(rows or drawn.config.spec.max_batch_size, width, text_bytes))
    places = {model.name: list(chosen.gpus_of(model)) for model in models if not model.is_ensemble}
    if as_json:
        print_json({"gpus": places, **sizes.as_dict()})
        return
    for name, gpus in places.items():
        where = f"GPU {', '.join(map(str, gpus))}" if gpus else "host"
        is_here = placement == "hybrid" and drawn.members[name].backend == "python"
        OUT.print(f"{name}: {'client' if is_here else where}", soft_wrap=True)
    for line in sizes.explain():
        OUT.print(line, soft_wrap=True)
    if sizes.flags():
        OUT.print(f"flags: {' '.join(sizes.flags())}", soft_wrap=True)


def _parse_gpus(text: str) -> tuple[int, ...] | None:
    """``0,1`` as indices, ``none`` as none of them, nothing as the plan's own choice."""
    if not text:
        return None
    try:
        return () if text == "none" else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--gpu {text!r} is no list of GPUs.", "For example: --gpu 0,1, or --gpu none") from None


@app.command()
def copies(
    folder: Annotated[Path, typer.Argument(help="An ensemble in the served repository: build/repository/ensemble_all")],
    url: Annotated[str, typer.Option(help="The server's metrics address.")] = "127.0.0.1:8002",
    as_json: Json = False,
) -> None:
    """Show what a running server's components copied between host and device, by edge; exit code 1 beyond the budget.

    The budget holds for placement gpu: the request up, the answer down, control scalars of at most 1 KiB a batch.
    """
    from shoal.repository.compose import read_manifest
    from shoal.repository.graph import Graph
    from shoal.serving.copies import read_metrics

    read, drawn = read_metrics(url), Graph.load(folder)
    beyond = read.beyond(drawn) if read_manifest(folder.parent).get("placement") == "gpu" else []
    if as_json:
        rows = [{"model": c.model, **c.edge._asdict(), **asdict(c.traffic)} for c in read]
        print_json({"copies": rows, "events": read.events, "beyond_budget": beyond})
    else:
        print_copies(read)
    if beyond:
        raise ShoalError(f"Copied beyond the budget: {'; '.join(beyond)}.")


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
        OUT.print(container_command(repository), soft_wrap=True)
        return
    ERR.print("Embedded Triton 24.10: for development and tests, on loopback. In production: --print", soft_wrap=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop in order, as on Ctrl-C
    ports = {"http_port": http_port, "grpc_port": grpc_port, "metrics_port": metrics_port}
    with start(repository, **ports, log=log and log.resolve()) as server:
        try:
            OUT.print(f"ready: http {server.http_url}  grpc {server.grpc_url}  metrics {server.metrics_url}")
            ERR.print(f"log: {server.log}  (Ctrl-C stops)", soft_wrap=True)
            code = server.wait()
        except KeyboardInterrupt:
            ERR.print("stopping ...")
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
    from shoal.component.spec import STRING
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
        print_json([{"text": text, **dict(zip(columns, row, strict=True))} for text, row in _rows(texts, columns)])
        return
    print_table(list(columns), _rows(texts, columns))


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

    with show_progress() as show:
        result = run(out, data=data, encoder=encoder, on_progress=show)
    rows = ((score.text, (score.bert, score.forest, score.blend)) for score in result.scores)
    print_table(["BERT score", "forest score", "blended score"], rows, title="Higher is easier to read")
    print_rmse(result.rmse, result.is_demonstration)
    for name in ("artifacts", "repository", "report"):
        OUT.print(f"{name}: {getattr(result, name).resolve()}", soft_wrap=True)
    OUT.print(f"next: shoal serve {result.repository}", soft_wrap=True)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Check whether this machine can serve; exit code 1 if it cannot."""
    from shoal.doctor import FAULT, OK, examine

    findings = examine()
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            colour = {"ok": "green", "warning": "yellow"}.get(finding.level, "red")
            OUT.print(f"[{colour}]{finding.level:8}[/] {finding.check}: {plain(finding.found)}", soft_wrap=True)
            if finding.level != OK:
                OUT.print(f"         {plain(finding.fix)}", soft_wrap=True)
    if any(finding.level == FAULT for finding in findings):
        raise typer.Exit(1)
