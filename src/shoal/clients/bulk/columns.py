"""Columns of a table for an input: by name, in the file's order, or the advice where they are not clear."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.clients.bulk.rows import advise_header, is_number, shorten_all, show_example
from shoal.clients.bulk.tables import Table, Unnamed
from shoal.clients.client.calls import find_text_input
from shoal.errors import ArtifactError
from shoal.kit.component.spec import STRING, ModelSpec, TensorSpec

Columns = str | tuple[str, ...]  # the column of an input, or those of the elements of its vector


def split_columns(wanted: str, table: Table[Any]) -> Columns:
    """Return the columns that ``--column INPUT=A,B`` names.

    Raises:
        ArtifactError: the table lacks one of them.
    """
    columns = (wanted,) if wanted in table.columns else tuple(wanted.split(","))
    for column in columns:
        if column not in table.columns:
            raise ArtifactError(
                f"{table.source.name} has no column {column!r}; it has {shorten_all(table.columns)}.",
                advise_header(table.columns, "Name one that it has: --column INPUT=COLUMN"),
            )
    return columns if len(columns) > 1 else columns[0]


def find_column(wanted: Sequence[str], table: Table[Any]) -> str | None:
    """Return the first of these columns that the table has, in any letter case."""
    for name in wanted:
        if name in table.columns:
            return name
        alike = [column for column in table.columns if column.lower() == name.lower()]
        if len(alike) == 1:
            return alike[0]
    return None


def take_in_order(spec: TensorSpec, table: Table[Any], first: Mapping[str, Any] | None) -> Columns | None:
    """Return all columns, in the file's order, if they can only be the elements of ``spec``: as many, and of numbers.

    ``first`` is the table's first row; without it, nothing is taken.
    """
    names = table.columns
    if first is None or table.source.kind == ".txt" or spec.dtype == STRING or spec.dims != (len(names),):
        return None
    if advise_header(names, "") or _list_numbers(table, first) != list(names):
        return None
    return names if len(names) > 1 else names[0]


def show_option(spec: TensorSpec, columns: Sequence[str]) -> str:
    """Return the option that names the columns of an input."""
    return f"--column {shlex.quote(spec.name + '=' + ','.join(columns))}"


def _list_numbers(table: Table[Any], first: Mapping[str, Any] | None) -> list[str]:
    """Return the columns that have a name which ``--column`` can hold, and a number or nothing in the first row."""
    named = [name for name in table.columns if not isinstance(name, Unnamed) and "," not in name]
    return [name for name in named if first is None or _may_be_number(first.get(name))]


def _may_be_number(cell: object) -> bool:
    return is_number(cell) if isinstance(cell, str) and cell else cell in (None, "") or isinstance(cell, int | float)


def no_column(
    wanted: str,
    spec: TensorSpec,
    model: ModelSpec,
    table: Table[Any],
    first: Mapping[str, Any] | None,
    *,
    has_constants: bool = True,
) -> ArtifactError:
    """Build the error for an input without a column, with as much of the option that names it as is known."""
    numbers = _list_numbers(table, first)
    others = [name for name in table.columns if name not in numbers]
    column = others[0] if len(others) == 1 and first is not None else "COLUMN"
    what = f"{table.source.name} has no column {wanted!r}; it has {shorten_all(table.columns)}."
    if spec.name == find_text_input(model):
        fix = f"Name the column of the texts: --text-column {shlex.quote(column.replace('COLUMN', 'NAME'))}"
    elif table.source.kind == ".txt":
        fix = "Its lines are read as texts. If they are JSON or CSV: --input-format jsonl or csv, or a file named so"
    elif spec.dtype == STRING or len(spec.dims) != 1:
        fix = f"Name it: {show_option(spec, ['COLUMN'])}"
        fix += f", or give one value for all rows: --set {show_example(spec)}" if has_constants else ""
    else:
        kind = "columns" if first is None else "columns of numbers"
        size = spec.dims[0]
        what += f" {spec.name} has {size} places, and the table {len(numbers)} {kind}." if size > 0 else ""
        fix = _advise_places(spec, numbers, column)
    return ArtifactError(what, advise_header(table.columns, fix))


def _advise_places(spec: TensorSpec, numbers: Sequence[str], column: str) -> str:
    """Return the advice for an input of numbers, whose candidates are the columns ``numbers``."""
    size, lists = spec.dims[0], f"a column of lists: {show_option(spec, [column])}"
    if not numbers:
        return f"Name {lists}"
    if size in (-1, len(numbers)):
        return f"Name its columns in their order: {show_option(spec, numbers)}"
    if len(numbers) > size:
        return f"Name {size} of them in their order; leave {len(numbers) - size} out of: {show_option(spec, numbers)}"
    return f"Add {size - len(numbers)} more to: {show_option(spec, numbers)}; or name {lists}"
