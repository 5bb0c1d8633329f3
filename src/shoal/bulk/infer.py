"""Score any number of rows: to a file, with resumption after an interruption, or to a stream."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from shoal.bulk.endpoint import Endpoint
from shoal.bulk.journal import Journal, open_journal, partial_path, written
from shoal.bulk.output_formats import ERROR, Csv, JsonLines, Npy, Parquet
from shoal.bulk.scoring import Feed, Scored, score
from shoal.bulk.values import show_example
from shoal.component.spec import STRING, TensorSpec
from shoal.errors import ArtifactError, InputError
from shoal.tables import TEXT, Row, Table, shorten_all

OUTPUT_KINDS = (".csv", ".jsonl", ".parquet", ".npy")


# Progress callback: rows answered, and the fraction of the input that is read, where its size is known.
OnRows = Callable[[int, float | None], None]


@dataclass(frozen=True)
class Summary:
    """Totals of a run."""

    num_rows: int
    num_failed: int


def make_feed(
    model: Endpoint,
    table: Table[Row],
    *,
    text_column: str = "",
    columns: Mapping[str, str] | None = None,
    constants: Mapping[str, Any] | None = None,
) -> Feed:
    """Map the table's rows to the model's inputs.

    ``columns`` maps an input's name to its column, or to several columns joined by commas; ``constants`` maps it to a
    value. Every other input is read from the column of the same name, in any letter case. The text input is read from
    ``text_column``, or by default from the column ``text`` or the one of its own name. This is the model's only text
    input, or the only required one that is neither in ``columns`` nor in ``constants``.

    Raises:
        InputError: the model has no such input, or one is given twice.
        ArtifactError: the table has no such column, or none for a required input.
    """
    columns, constants = dict(columns or {}), dict(constants or {})
    for name in (*columns, *constants):
        model.find_input(name)
    text_input = model.text_input or _only_text({*columns, *constants}, model)
    if text_column and not text_input:
        raise InputError(f"Model {model.name} has no single text input.", "Name each: --column INPUT=COLUMN")
    twice = sorted((columns.keys() & constants.keys()) | ({model.text_input} & {*columns, *constants}))
    if twice and (text_column or twice[0] != model.text_input):
        raise InputError(f"The input {twice[0]} is given twice.", "Give it once: as a value, or by its column.")
    found: dict[str, str | tuple[str, ...]] = {}
    for spec in model.inputs:
        if spec.name in columns:
            found[spec.name] = _split_columns(columns[spec.name], table)
        elif spec.name not in constants:
            wanted = [spec.name]
            if spec.name == text_input:
                wanted = [text_column] if text_column else [TEXT, spec.name]
            column = _find_column(wanted, table)
            if column is not None:
                found[spec.name] = column
            elif not spec.is_optional or wanted == [text_column]:
                raise _no_column(wanted[0], spec, model, table)
    return Feed(found, constants)


def _only_text(given: Container[str], model: Endpoint) -> str:
    """Return the only required text input that is not given; empty if there are several, or none."""
    texts = [s.name for s in model.inputs if s.dtype == STRING and s.dims == (1,) and not s.is_optional]
    left = [name for name in texts if name not in given]
    return left[0] if len(left) == 1 else ""


def _split_columns(wanted: str, table: Table[Row]) -> str | tuple[str, ...]:
    columns = (wanted,) if wanted in table.columns else tuple(wanted.split(","))
    for column in columns:
        if column not in table.columns:
            raise ArtifactError(
                f"{table.source.name} has no column {column!r}; it has {shorten_all(table.columns)}.",
                "Name one that it has: --column INPUT=COLUMN",
            )
    return columns if len(columns) > 1 else columns[0]


def _find_column(wanted: Sequence[str], table: Table[Row]) -> str | None:
    for name in wanted:
        if name in table.columns:
            return name
        alike = [column for column in table.columns if column.lower() == name.lower()]
        if len(alike) == 1:
            return alike[0]
    return None


def _no_column(wanted: str, spec: TensorSpec, model: Endpoint, table: Table[Row]) -> ArtifactError:
    fix = f"Name it: --column {spec.name}=COLUMN, or give one value for all rows: --set {show_example(spec)}"
    if spec.name == model.text_input:
        fix = "Name the column of the texts: --text-column NAME"
    elif spec.dims != (1,):
        fix = f"Name it: --column {spec.name}=COLUMN, or the columns of its elements: --column {spec.name}=A,B,..."
    return ArtifactError(f"{table.source.name} has no column {wanted!r}; it has {shorten_all(table.columns)}.", fix)


def make_format(kind: str, table: Table[Row], model: Endpoint, origin: Path | None = None) -> JsonLines:
    """Make the format of this kind (the ending of a file) for the answers of a model to a table's rows.

    ``origin`` is the file that the table is read from, if it is one.

    Raises:
        InputError: the kind is unknown, or the table has a column where an answer would go.
        SetupError: the library for Parquet is not installed.
    """
    added = {model.columns[spec.name]: spec for spec in model.outputs}
    taken = [name for name in (*added, ERROR) if name in table.columns]
    if taken:
        where = table.source.name
        raise InputError(f"{where} has a column {taken[0]!r}, where an answer would go.", "Rename that column.")
    if ERROR in added:
        raise InputError(f"The model gives an output {ERROR!r}, where errors go.", "Ask it with shoal.Client.")
    if kind == ".csv":
        return Csv(table.columns, added)
    if kind == ".jsonl":
        return JsonLines(table.columns, added)
    if kind == ".parquet":
        return Parquet(table.columns, added, origin if table.source.kind == ".parquet" else None)
    if kind == ".npy":
        return Npy(table.columns, added)
    raise InputError(f"Answers cannot be written as {kind!r}.", f"Known: {', '.join(OUTPUT_KINDS)}.")


def infer_to_stream(
    table: Table[Row], model: Endpoint, feed: Feed, form: JsonLines, stream: BinaryIO, on_rows: OnRows
) -> Summary:
    """Write the answers as they arrive, in order."""
    done = failed = 0
    stream.write(form.header())
    for scored in score(table.rows, model, feed):
        window = list(map(form.admit, scored))
        stream.write(form.encode(window))
        stream.flush()
        done, failed = done + len(window), failed + _count_failed(window)
        on_rows(done, table.fraction_read())
    return Summary(done, failed)


def infer_to_file(
    table: Table[Row],
    model: Endpoint,
    feed: Feed,
    form: JsonLines,
    output: Path,
    *,
    settings: Mapping[str, Any],
    on_rows: OnRows,
    is_fresh: bool = False,
) -> Summary:
    """Write the answers to ``output``, which appears only when it is complete.

    Until then they are kept in ``OUTPUT.partial``. A run that finds it resumes from it, if its ``settings`` are the
    same and the input still begins with the rows that were answered.

    Raises:
        InputError: the settings or rows differ, or the output exists.
        SetupError: the output cannot be written.
    """
    output = output.resolve()  # through a link, the file that it names is written
    if output.is_dir():
        raise InputError(f"{output} is a folder.", "Name a file in it.")
    if output.exists() and not (is_fresh or partial_path(output).exists()):
        raise InputError(f"{output} exists; it will not be replaced.", "Name another file, or replace it: --fresh")
    with open_journal(output, settings, is_fresh=is_fresh) as journal:
        hashed = _skip(journal, table)
        on_rows(journal.num_rows, table.fraction_read())
        for scored in score(table.rows, model, feed):
            for each in scored:
                hashed.update(_as_bytes(each.row))
            window = list(map(form.admit, scored))
            failed, digest = _count_failed(window), hashed.hexdigest()
            journal.append(form.encode(window), num_rows=len(window), num_failed=failed, digest=digest)
            on_rows(journal.num_rows, table.fraction_read())
        _finish(form, journal, output)
        return Summary(journal.num_rows, journal.num_failed)


def _skip(journal: Journal, table: Table[Row]) -> Any:
    """Skip the rows that have been answered, and check that they are the same as before; return their running hash."""
    hashed, skipped = hashlib.sha256(), 0
    for _, row in islice(table.rows, journal.num_rows):
        hashed.update(_as_bytes(row))
        skipped += 1
    if skipped < journal.num_rows or (skipped and hashed.hexdigest() != journal.digest):
        raise InputError(
            f"The first {journal.num_rows:,} rows of {table.source.name} are not those that {journal.path.name} has"
            " answers for.",
            "Give the same input, or start over: --fresh",
        )
    return hashed


def _as_bytes(row: Row) -> bytes:
    return repr(row).encode("utf-8", "surrogatepass")


def _finish(form: JsonLines, journal: Journal, output: Path) -> None:
    aside = output.with_name(f"{output.name}.partial.new")
    with written(output):
        try:
            form.finish(journal.payloads, aside)
            with aside.open("rb") as file:
                os.fsync(file.fileno())
            aside.replace(output)
        finally:
            aside.unlink(missing_ok=True)
        journal.path.unlink()


def _count_failed(window: list[Scored]) -> int:
    return sum(isinstance(scored.answer, str) for scored in window)
