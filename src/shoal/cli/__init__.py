"""The command line: it parses, calls the library, and prints."""

from __future__ import annotations

import sys

import typer

from shoal.cli import environment, project, repository, serving
from shoal.cli.bench import bench
from shoal.cli.check import check
from shoal.cli.graph import describe, graph
from shoal.cli.infer import infer
from shoal.console import ERR, plain
from shoal.errors import ShoalError
from shoal.readability import commands as pipeline

app = typer.Typer(no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(environment.app, name="env")
app.add_typer(project.app, name="new")
for command in (
    pipeline.train,
    pipeline.evaluate,
    project.add_model,
    repository.compose,
    repository.plan,
    check,
    serving.copies,
    serving.serve,
    infer,
    bench,
    graph,
    describe,
    pipeline.quickstart,
    serving.doctor,
):
    app.command()(command)


def main() -> None:
    """Run the command line; an error of shoal's is one line and exit code 1."""
    try:
        app(standalone_mode=True)
    except ShoalError as error:
        ERR.print(f"[red]error:[/] {plain(error.what)}", soft_wrap=True)
        if error.fix:
            ERR.print(f"  {plain(error.fix)}", soft_wrap=True)
        sys.exit(1)
