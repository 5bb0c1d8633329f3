"""Execution environments of Python models: build, inspect, fit, unpack."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shoal.cli.console import OUT, Json, Target, plain, print_json, refuse_ignored, show_progress
from shoal.cli.usage import Command, Group

if TYPE_CHECKING:
    from shoal.authoring.environment.building import Built

app = typer.Typer(cls=Group, no_args_is_help=True, help=__doc__)

Source = Annotated[
    Path | None,
    typer.Argument(
        help="environment.yml, requirements.txt, or the folder of a conda environment. Default: shoal's own."
    ),
]
Place = Annotated[Path, typer.Argument(help="A packed environment, its folder, or what `env build` wrote.")]
Stub = Annotated[Path | None, typer.Option(help="A Python backend stub. Default: the stub built with the environment.")]
NUM_LARGEST = 10


@app.command(cls=Command)
def build(
    context: typer.Context,
    source: Source = None,
    out: Annotated[Path, typer.Option(help="The folder to write.")] = Path("build/env"),
    target: Target = "embedded",
    python: Annotated[
        str,
        typer.Option(metavar="VERSION", help="Python's version, such as 3.12. Default: the source's, or the target's."),
    ] = "",
    model: Annotated[
        str, typer.Option("--for", metavar="MODEL", help="A model that needs an environment of its own: llm-vllm.")
    ] = "",
    is_for_gpu: Annotated[
        bool, typer.Option("--gpu", help="For components on a GPU: with RAPIDS 26.10 for CUDA 13.")
    ] = False,
    engine: Annotated[
        Literal["rattler", "conda", "mamba", "micromamba", "venv"], typer.Option(help="The tool that builds it.")
    ] = "rattler",
    stub: Annotated[
        str,
        typer.Option(
            metavar="auto|wheel|compile|none|PATH", help="How to get the stub, or the path of a finished stub."
        ),
    ] = "auto",
    stub_builder: Annotated[Path | None, typer.Option(help="Your program that compiles a stub.")] = None,
    channel: Annotated[
        list[str] | None, typer.Option(metavar="CHANNEL", help="A conda channel, in place of the source's.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Build an environment, pack it, make a Python backend stub for it, and check that the server can use both."""
    from shoal.authoring.environment.building import build, find_file, find_overrides
    from shoal.authoring.environment.spec import BuildRequest

    if source and source.is_dir():
        refuse_ignored(context, "--engine --channel", f"with {source}, an environment that exists")
    if engine == "venv":
        refuse_ignored(context, "--channel", "with --engine venv, which has no conda")
    if stub not in ("auto", "compile"):
        refuse_ignored(context, "--stub-builder", f"with --stub {stub}, which compiles none")
    if model or (source and not stub_builder):
        refuse_ignored(context, "--gpu", f"with {'--for' if model else 'a source and no --stub-builder'}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leave nothing half made, as on Ctrl-C
    request = BuildRequest(
        source or find_file(target, engine, is_for_gpu=is_for_gpu, model=model),
        out,
        target=target,
        python=python,
        engine=engine,
        stub=stub,
        is_for_gpu=is_for_gpu,
        builder=stub_builder,
        channels=tuple(channel or ()),
        overrides=find_overrides(target, model),
    )
    with show_progress() as show:
        built = build(request, show)
    _print_built(built, target, f"{model}={out}" if model else str(out), as_json=as_json)


def _print_built(built: Built, target: str, place: str, *, as_json: bool) -> None:
    record = built.record
    if as_json:
        print_json({**record, "is_new": built.is_new})
        return
    OUT.print(f"environment: {built.environment}{'' if built.is_new else '  (unchanged)'}", soft_wrap=True)
    no_stub = f"none needed, {target} has its own for Python {record['python']}"
    OUT.print(f"stub: {built.stub or no_stub}", soft_wrap=True)
    OUT.print(f"Python {record['python']}, NumPy {record['numpy']}, needs glibc {record['glibc']}: fits {target}")
    OUT.print(f"next: shoal compose ENSEMBLE build/repository --target {target} --env {place}", soft_wrap=True)


@app.command(cls=Command)
def inspect(place: Place, as_json: Json = False) -> None:
    """Show what an environment holds, without unpacking or running it."""
    from shoal.authoring.environment.building import locate
    from shoal.authoring.environment.inspection import inspect as read

    environment = read(locate(place)[0])
    if as_json:
        print_json(environment.as_dict())
        return
    for name, value in environment.summary().items():
        OUT.print(f"{name}: {plain(value)}", soft_wrap=True)
    largest = sorted(environment.packages, key=lambda package: -package.num_bytes)[:NUM_LARGEST]
    for package in largest:
        OUT.print(f"  {package.num_bytes / 2**20:8.1f} MiB  {plain(f'{package.name} {package.version}')}")
    for sentence in environment.remarks():
        OUT.print(f"[yellow]note[/] {plain(sentence)}", soft_wrap=True)


@app.command(cls=Command)
def fit(place: Place, stub: Stub = None, target: Target = "embedded", as_json: Json = False) -> None:
    """Check whether a server can use an environment and a Python backend stub; if not, print why, with exit code 1."""
    from shoal.authoring.environment.building import locate
    from shoal.authoring.environment.fit import find_misfits
    from shoal.authoring.environment.inspection import inspect as read
    from shoal.authoring.environment.stub import read_stub
    from shoal.authoring.environment.targets import find_target

    where, own_stub = locate(place)
    chosen = stub or own_stub
    environment = read(where)
    misfits = find_misfits(environment, read_stub(chosen) if chosen else None, find_target(target))
    if as_json:
        print_json([{"what": misfit.what, "fix": misfit.fix} for misfit in misfits])
    for misfit in [] if as_json else misfits:
        OUT.print(f"[red]does not fit[/] {plain(misfit.what)}", soft_wrap=True)
        OUT.print(f"  {plain(misfit.fix)}", soft_wrap=True)
    if misfits:
        raise typer.Exit(1)
    if not as_json:
        OUT.print(f"fits {target}: Python {environment.python}, NumPy {plain(environment.numpy)}", soft_wrap=True)


@app.command(cls=Command)
def unpack(
    archive: Annotated[Path, typer.Argument(help="custom_env.tar.gz, or what `env build` wrote.")],
    folder: Annotated[Path, typer.Argument(help="The folder to make.")],
) -> None:
    """Safely unpack an environment into a folder; Triton loads a folder faster than an archive."""
    from shoal.authoring.environment.archive import unpack as write
    from shoal.authoring.environment.building import locate

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leave nothing half unpacked
    with show_progress() as show:
        path = write(locate(archive)[0], folder, on_progress=show)
    OUT.print(f"environment: {path}", soft_wrap=True)
