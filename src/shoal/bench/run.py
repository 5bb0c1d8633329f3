"""Benchmark runs, from repositories to the record and its files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from shoal.bench.figures import Cell
from shoal.bench.inputs import Texts, read_inputs
from shoal.bench.markdown import write_page
from shoal.bench.measure import Settings, measure
from shoal.bench.record import make_record
from shoal.bench.target import Target, find_targets
from shoal.errors import InputError, SetupError
from shoal.progress import OnProgress

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Wanted:
    """Loads to measure; without ``batches``, those of ``usual`` that the pipeline takes.

    Without ``callers``, their number depends on the batch size.
    """

    settings: Settings = field(default_factory=Settings)
    batches: tuple[int, ...] = ()
    usual: tuple[int, ...] = BATCHES
    callers: tuple[int, ...] = ()


def bench(
    places: Sequence[Path],
    wanted: Wanted,
    *,
    rows: Path | Texts,
    model: str = "",
    text_column: str = "text",
    on_progress: OnProgress = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Measure the pipeline of each repository, interleaved, each on its own server; return the record.

    ``rows`` is a file, or a function that returns the name and the texts of a corpus.

    Raises:
        InputError: repositories do not belong together, or a size or the rows cannot be used.
        ArtifactError: a repository or the file of rows is missing or damaged.
        ServerError: a server does not start, or fails under load.
        SetupError: the embedded server cannot run here.
    """
    targets = find_targets(places, model)
    cells = find_cells(targets, wanted)
    inputs = read_inputs(targets[0].graph.config.spec, rows, text_column)
    measured = measure(targets, cells, inputs, wanted.settings, on_progress)
    return make_record(targets, inputs, wanted.settings, measured)


def find_cells(targets: Sequence[Target], wanted: Wanted) -> list[Cell]:
    """Choose the loads to measure, all within the limits of every target; the first is one caller with one row.

    Raises:
        InputError: a batch size given exceeds the limit of a target.
    """
    smallest = min(targets, key=lambda target: target.graph.config.spec.max_batch_size)
    limit = max(1, smallest.graph.config.spec.max_batch_size)
    beyond = [batch for batch in wanted.batches if batch > limit]
    if beyond:
        raise InputError(
            f"{smallest.name} in {smallest.repository} takes 1 to {limit} rows per request, not {beyond[0]}.",
            f"Give sizes it takes: --batches 1,{limit}" if limit > 1 else "Leave --batches out.",
        )
    cells = {Cell(1, 1)}
    for batch in wanted.batches or wanted.usual:
        if batch <= limit:
            cells |= {Cell(batch, callers) for callers in wanted.callers or ((1, 16) if batch == 1 else (2,))}
    return sorted(cells)


def make_folder(folder: Path) -> None:
    """Create a folder and check that it is writable.

    Raises:
        SetupError: it cannot be created, or is not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _unwritable(folder, error) from None


def _unwritable(folder: Path, error: OSError) -> SetupError:
    return SetupError(f"{folder} cannot be written: {error.strerror or error}.", "Name another folder: --out DIR")


def _free_stem(folder: Path, date: str) -> Path:
    """Return ``bench-DATE``, with a number appended if needed to keep earlier runs of the same day."""
    stems = (folder / f"bench-{date}{f'-{number}' if number > 1 else ''}" for number in count(1))
    return next(stem for stem in stems if not any(stem.with_suffix(end).exists() for end in (".json", ".md")))


def write(record: dict[str, Any], folder: Path) -> tuple[list[Path], str]:
    """Write ``bench-DATE.json``, ``bench-DATE.md`` and, if matplotlib is installed, two pictures.

    A second run of the same day is ``bench-DATE-2``, and so on. Returns the files, and why there are no pictures.

    Raises:
        SetupError: the folder cannot be written.
    """
    from shoal.bench.plots import draw

    make_folder(folder)
    stem, missing = _free_stem(folder, record["date"]), ""
    pictures: list[Path] = []
    try:
        data = stem.with_suffix(".json")
        data.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        try:
            pictures = [] if record.get("unit") == "tokens" else draw(record, stem)
        except SetupError as error:
            missing = f"There are no pictures: {error}"
        page = stem.with_suffix(".md")
        page.write_text(write_page(record, pictures), encoding="utf-8")
    except OSError as error:
        raise _unwritable(folder, error) from None
    return [data, page, *pictures], missing
