"""The command line: it parses, calls the library, and prints."""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated, Any

import typer

import shoal
from shoal.cli import environment, keys, project, repository, serving, shards
from shoal.cli.bench import bench
from shoal.cli.check import check
from shoal.cli.console import ERR, plain
from shoal.cli.graph import describe, graph
from shoal.cli.infer import infer
from shoal.cli.llm import generate, tokens
from shoal.cli.tune import tune
from shoal.cli.usage import Root, Waiting
from shoal.errors import ShoalError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of a disk, of a quota, and of a limit of the process

app = typer.Typer(
    cls=Root,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"shoal {shoal.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Build, check, serve and query pipelines of models for NVIDIA Triton Inference Server."""
    del version


_PANELS: dict[str, tuple[Any, ...]] = {
    "Serve and ask: start a server, and send requests to it.": (
        serving.serve,
        infer,
        generate,
        tokens,
        serving.status,
        serving.copies,
        ("shards", shards.app),
    ),
    "Author: make, check and draw repositories, without a server.": (
        repository.compose,
        repository.plan,
        repository.fill,
        check,
        graph,
        describe,
    ),
    "Models: take in those that you have, and write new ones.": (project.add_model, ("new", project.app)),
    "Measure: find out what is fast and exact on this machine.": (bench, tune),
    "Keys and environments: what a service needs around it.": (
        serving.doctor,
        ("keys", keys.app),
        ("env", environment.app),
    ),
}
Root.own = [
    Waiting(each[0], each[1], panel)
    if isinstance(each, tuple)
    else Waiting(each.__name__.replace("_", "-"), each, panel)
    for panel, commands in _PANELS.items()
    for each in commands
]


def main() -> None:
    """Run the command line; print a ``ShoalError`` as its message and its fix, with exit code 1."""
    # Before torch is imported: OpenMP's threads that wait actively slow down everything else on busy cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app(standalone_mode=True)
    except ShoalError as error:
        ERR.print(f"[red]error:[/] {plain(error.what)}", soft_wrap=True)
        if error.fix:
            ERR.print(f"  {plain(error.fix)}", soft_wrap=True)
        sys.exit(1)
    except OSError as error:
        if error.errno not in _FULL and "usable temporary directory" not in str(error.strerror):
            raise
        place = error.filename or "The folder for temporary files"
        ERR.print(f"[red]error:[/] {plain(str(place))} cannot be written: {error.strerror}.", soft_wrap=True)
        ERR.print("  Make room there, or name another folder for temporary files in TMPDIR.")
        sys.exit(1)
