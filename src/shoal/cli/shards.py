"""``shoal shards``: look at a folder of ``shoal infer``, check it, or join its files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.console import ERR, OUT, Json, plain, print_json
from shoal.cli.usage import Command, Group
from shoal.errors import InputError, printable

app = typer.Typer(cls=Group, no_args_is_help=True, help="Look at a folder of `shoal infer`: status, verify, merge.")

Folder = Annotated[str, typer.Argument(help="What `shoal infer --output FOLDER` wrote: a folder, or an s3:// URL.")]


@app.command(cls=Command)
def status(folder: Folder, as_json: Json = False) -> None:
    """Print how far a folder is."""
    from shoal.clients.bulk.shards.folders import open_folder
    from shoal.clients.bulk.shards.report import read_status

    found = read_status(open_folder(folder))
    if as_json:
        print_json(found)
        return
    for name, value in found.items():
        OUT.print(f"{name.replace('_', ' ')}: {plain(str(value))}", soft_wrap=True)


@app.command(cls=Command)
def verify(folder: Folder) -> None:
    """Read a complete folder and its inputs again, and check that each row is there once, in order."""
    from shoal.clients.bulk.shards.folders import open_folder
    from shoal.clients.bulk.shards.report import find_faults

    faults = list(find_faults(open_folder(folder)))
    for fault in faults:
        ERR.print(printable(fault), style="red", soft_wrap=True, markup=False)
    if faults:
        ERR.print("Outputs and records that you remove are made again by the same command; all, with --fresh.")
        raise typer.Exit(1)
    OUT.print("All rows are there once, in order.")


@app.command(cls=Command)
def merge(
    folder: Folder,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="The file to write, with the ending of the shards.")
    ],
) -> None:
    """Join the files of a complete folder to one."""
    from shoal.clients.bulk.shards import report
    from shoal.clients.bulk.shards.folders import is_url, open_folder

    if is_url(output):
        raise InputError("shoal shards merge needs a file of this machine to write.", "For example: --output all.jsonl")
    rows = report.merge(open_folder(folder), Path(output))
    OUT.print(f"{rows:,} rows: {plain(output)}", soft_wrap=True)
