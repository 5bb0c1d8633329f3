"""The command line: it parses, calls the library, and prints."""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated

import typer

import shoal
from shoal.cli.console import ERR, plain
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


_PANELS = {  # commands by their names, each the function or the app that it is made of
    "Serve and ask: start a server, and send requests to it.": {
        "serve": "shoal.cli.serving:serve",
        "infer": "shoal.cli.infer:infer",
        "generate": "shoal.cli.llm:generate",
        "chat": "shoal.cli.chat:chat",
        "tokens": "shoal.cli.llm:tokens",
        "status": "shoal.cli.status:status",
        "copies": "shoal.cli.status:copies",
        "shards": "shoal.cli.shards:app",
    },
    "Author: make, check and draw repositories, without a server.": {
        "compose": "shoal.cli.repository:compose",
        "plan": "shoal.cli.repository:plan",
        "fill": "shoal.cli.repository:fill",
        "check": "shoal.cli.check:check",
        "graph": "shoal.cli.graph:graph",
        "describe": "shoal.cli.graph:describe",
    },
    "Models: take in those that you have, and write new ones.": {
        "add-model": "shoal.cli.project:add_model",
        "new": "shoal.cli.project:app",
    },
    "Measure: find out what is fast and exact on this machine.": {
        "bench": "shoal.cli.bench:bench",
        "tune": "shoal.cli.tune:tune",
    },
    "Keys and environments: what a service needs around it.": {
        "doctor": "shoal.cli.doctor:doctor",
        "keys": "shoal.cli.keys:app",
        "env": "shoal.cli.environment:app",
    },
}
Root.own = [Waiting(name, place, panel) for panel, places in _PANELS.items() for name, place in places.items()]


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
