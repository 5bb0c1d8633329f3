"""``shoal graph`` and ``shoal describe``: show an ensemble as a picture, and as tables."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from shoal.cli.console import OUT, Json, print_blocks, print_json
from shoal.errors import InputError, SetupError

_USUAL = 18  # longest name or type, in characters, that is not wrapped: four such columns fit into 80 characters
_WRAPPED = "moves"
_SUFFIXES = {".mmd": "mermaid", ".mermaid": "mermaid", ".svg": "svg", ".png": "png"}

Folder = Annotated[Path, typer.Argument(help="An ensemble, such as build/repository/NAME, or a repository with one.")]
Model = Annotated[str, typer.Option(help="The ensemble, if the repository has several.")]


def graph(
    folder: Folder,
    form: Annotated[
        Literal["mermaid", "svg", "png"] | None,
        typer.Option("--format", help="Default: by the ending of --out, or mermaid."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "--output", "-o", help="Write this file: .svg, .png, .mmd.")
    ] = None,
    model: Model = "",
) -> None:
    """Draw an ensemble: its steps and their devices, and its tensors with dtype and shape.

    Tensors that go from a device to the host and back are red. Arrows of tensors that come many times per request are
    double. A dashed arrow leads to a model that another model's code calls.
    """
    from shoal.authoring.draw import picture
    from shoal.authoring.draw.mermaid import draw
    from shoal.authoring.repository.find_graph import find_graph
    from shoal.authoring.repository.model_folders import find_repository

    chosen = _choose_format(form, out)
    if chosen == "png" and out is None and sys.stdout.isatty():
        raise InputError("A PNG cannot be printed on a terminal.", "Name a file: --out ensemble.png")
    drawn = find_graph(find_repository(folder) or folder, model)
    if chosen == "png":
        content = picture.png(drawn)
    else:
        content = (draw(drawn) if chosen == "mermaid" else picture.svg(drawn)).encode()
    if out is None:
        typer.echo(content, nl=False)
        return
    try:
        out.write_bytes(content)
    except OSError as error:
        raise SetupError(f"{out} cannot be written: {error.strerror or error}.", "Name another file.") from error
    OUT.print(f"picture: {out}", soft_wrap=True, markup=False)


def _choose_format(form: str | None, out: Path | None) -> str:
    chosen = form or (_SUFFIXES.get(out.suffix.lower(), "") if out else "mermaid")
    if not chosen:
        raise InputError(f"The format of {out} cannot be derived from its name.", "End it in .svg, .png or .mmd.")
    return chosen


def describe(folder: Folder, model: Model = "", as_json: Json = False) -> None:
    """Print an ensemble as tables: its steps, what each reads and writes, and the path of each tensor.

    Of a repository with several ensembles, their signatures are printed.
    """
    from shoal.authoring.draw.boxes import legible
    from shoal.authoring.repository.describe import describe as describe_graph
    from shoal.authoring.repository.find_graph import find_graph, list_pipelines
    from shoal.authoring.repository.model_folders import find_repository

    folder = find_repository(folder) or folder
    if not model and len(several := list_pipelines(folder)) > 1:
        if as_json:
            print_json({"pipelines": [{"name": each.name, "signature": each.spec.signature} for each in several]})
            return
        for each in several:
            OUT.print(legible(each.spec.signature), soft_wrap=True, markup=False)
        OUT.print(f"More of one: shoal describe {legible(str(folder))} --model NAME", soft_wrap=True, markup=False)
        return
    found = describe_graph(find_graph(folder, model))
    if as_json:
        print_json(found)
        return
    number = len(found["steps"])
    rows = f"up to {found['max_batch_size']} rows per request" if found["max_batch_size"] else "no batch dimension"
    steps = f"{number} step{'' if number == 1 else 's'}"
    OUT.print(f"{legible(found['name'])}: {steps}, {rows}", soft_wrap=True, markup=False)
    OUT.print(f"in OpenAI's API: {legible(found['api'])}", soft_wrap=True, markup=False)
    _print_steps(found["steps"])
    _print_members(found["steps"])
    _print_tensors(found["tensors"])


def _print_steps(steps: Sequence[Mapping[str, Any]]) -> None:
    """Print the table of steps; steps of one level run in parallel."""
    from shoal.authoring.draw.boxes import legible

    names = ("level", "step", "backend", "device", "instances", "rows", "batching")
    _print_table(
        names,
        (
            (
                *(step["level"], step["name"], step["backend"], step["device"]),
                *("-" if step["instances"] is None else step["instances"], step["max_batch_size"], step["batching"]),
            )
            for step in steps
        ),
    )
    for model, content in {step["model"]: step["content"] for step in steps if step["content"]}.items():
        OUT.print(f"{model} holds {legible(content)}", soft_wrap=True, markup=False)
    for model, step in {step["model"]: step for step in steps if step["calls"]}.items():
        own = f"; in its own process: {legible(', '.join(step['hosts']))}" if step["hosts"] else ""
        OUT.print(f"{model} calls {legible(', '.join(step['calls']))}{own}", soft_wrap=True, markup=False)


def _print_members(steps: Iterable[Mapping[str, Any]]) -> None:
    rows = []
    for step in steps:
        name = step["name"]
        for kind, arrow in (("inputs", "<-"), ("outputs", "->")):
            for tensor in step[kind]:
                outside = f"{arrow} {tensor['tensor']}" if tensor["tensor"] else "not mapped"
                rows.append((name, tensor["name"], _type(tensor), outside))
                name = ""
    _print_table(("step", "its tensor", "type", "the ensemble's"), rows)


def _print_tensors(tensors: Sequence[Mapping[str, Any]]) -> None:
    from shoal.authoring.repository.graph import ROUND_TRIP

    rows = [
        (
            *(f"{tensor['name']} *" if tensor["is_repeated"] else tensor["name"], _type(tensor)),
            *(tensor["from"], tensor["to"]),
            Text(tensor["crossing"], style="red" if tensor["crossing"] == ROUND_TRIP else ""),
        )
        for tensor in tensors
    ]
    if any(row[-1] for row in rows):
        _print_table(("tensor", "type", "from", "to", _WRAPPED), rows)
    else:  # nothing moves between devices
        _print_table(("tensor", "type", "from", "to"), [row[:-1] for row in rows])
    if any(tensor["is_repeated"] for tensor in tensors):
        OUT.print("* many times per request", soft_wrap=True)


def _print_table(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table in which only long names, and the column ``moves`` of the tensors, are wrapped."""
    from shoal.authoring.draw.boxes import legible

    cells = [[cell if isinstance(cell, Text) else Text(legible(str(cell))) for cell in row] for row in rows]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    needed = 0
    for number, name in enumerate(names):
        longest = max((row[number].cell_len for row in cells), default=0)
        is_whole = name != _WRAPPED and longest <= _USUAL
        needed += max(len(name), longest if is_whole else len(name)) + 2
        table.add_column(name, overflow="fold", no_wrap=is_whole)
    for row in cells:
        table.add_row(*row)
    OUT.print()
    if needed > OUT.width:
        print_blocks(names, cells)
    else:
        OUT.print(table)


def _type(tensor: Mapping[str, Any]) -> str:
    return f"{tensor['dtype']} [{','.join(map(str, tensor['dims']))}]"
