"""Benchmark runs, from repositories to the record and its files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from shoal.authoring.repository.manifest import launch_flags
from shoal.errors import InputError, SetupError
from shoal.lab.bench.advice import Evidence, advise
from shoal.lab.bench.inputs import Inputs, Texts, read_inputs
from shoal.lab.bench.measure import measure
from shoal.lab.bench.record import BenchSettings, Cell, Figures, Measured, compare, rounded, start_record
from shoal.lab.bench.tables import write_page
from shoal.lab.bench.target import BenchTarget, find_targets
from shoal.system.progress import OnProgress

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
NEIGHBOURS = 0.1  # of all cores' time: other programs that use more make the figures unreliable


def bench(
    places: Sequence[Path],
    settings: BenchSettings,
    *,
    rows: Path | Texts,
    model: str = "",
    text_column: str = "",
    columns: Mapping[str, str] | None = None,
    batches: Sequence[int] = (),
    callers: Sequence[int] = (),
    usual: Sequence[int] = BATCHES,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Measure the pipeline of each repository, interleaved, each on its own server; return the record as JSON values.

    ``rows`` is a file, or a function that returns the name and the texts of a corpus; ``text_column`` and ``columns``
    are those of `read_inputs`. ``batches``, ``callers`` and
    ``usual`` choose the loads, as in `find_cells`.

    Raises:
        InputError: the pipelines take different inputs, a repository is named twice, or a size or the rows cannot be
            used.
        ArtifactError: a repository or the file of rows is missing or damaged.
        ServerError: a server does not start, or fails under load.
        SetupError: the embedded server cannot run here.
    """
    targets = find_targets(places, model)
    cells = find_cells(targets, batches, callers, usual)
    inputs = read_inputs(targets[0].graph.config.spec, rows, text_column, columns)
    measured = measure(targets, cells, inputs, settings, on_progress)
    return _make_record(targets, inputs, settings, measured)


def find_cells(
    targets: Sequence[BenchTarget],
    batches: Sequence[int] = (),
    callers: Sequence[int] = (),
    usual: Sequence[int] = BATCHES,
) -> list[Cell]:
    """Choose the loads to measure; the first is one caller with one row.

    The request sizes are ``batches``, or else those sizes in ``usual`` that every target takes. The numbers of callers
    are ``callers``, or else 1 and 16 with single rows, and 2 with larger requests.

    Raises:
        InputError: a size in ``batches`` exceeds the limit of a target.
    """
    smallest = min(targets, key=lambda target: target.graph.config.spec.max_batch_size)
    limit = max(1, smallest.graph.config.spec.max_batch_size)
    beyond = [batch for batch in batches if batch > limit]
    if beyond:
        raise InputError(
            f"{smallest.name} in {smallest.repository} takes 1 to {limit} rows per request, not {beyond[0]}.",
            f"Give sizes it takes: --batches 1,{limit}" if limit > 1 else "Leave --batches out.",
        )
    cells = {Cell(1, 1)}
    for batch in batches or usual:
        if batch <= limit:
            cells |= {Cell(batch, number) for number in callers or ((1, 16) if batch == 1 else (2,))}
    return sorted(cells)


def _make_record(
    targets: Sequence[BenchTarget], inputs: Inputs, settings: BenchSettings, measured: Sequence[Measured[Cell, Figures]]
) -> dict[str, Any]:
    """Build the benchmark's record: figures, machine, versions, settings and advice, as JSON values."""
    record = start_record(settings, measured)
    evidence = {
        target.label: Evidence(
            {entry.cell: entry.median for entry in measured if entry.label == target.label},
            target.steps(),
            record["machine"]["cores"],
        )
        for target in targets
    }
    return {
        **record,
        "inputs": {
            "source": inputs.source,
            "num_rows": inputs.num_rows,
            "mean_bytes_a_row": rounded(inputs.text_bytes),
        },
        "repositories": [{**t.describe(), "launch_flags": launch_flags(t.repository)} for t in targets],
        "comparison": compare(measured),
        "notes": [*([f"{inputs.source}: {inputs.note}"] if inputs.note else []), *_notes(measured)],
        "advice": {label: [asdict(advice) for advice in advise(case)] for label, case in evidence.items()},
    }


def _notes(measured: Iterable[Measured[Cell, Figures]]) -> Iterable[str]:
    """Yield a warning if other programs used much CPU time during the measurements."""
    disturbed = [(entry, entry.median.other_cpu) for entry in measured if entry.median.other_cpu > NEIGHBOURS]
    if disturbed:
        most = max(share for _, share in disturbed)
        yield (
            f"Other programs took up to {most:.0%} of the cores' time, in {len(disturbed)} of the loads more than"
            f" {NEIGHBOURS:.0%}: figures are lower than on a quiet machine."
        )


def make_folder(folder: Path) -> None:
    """Create a folder and check that it is writable.

    Raises:
        SetupError: the folder cannot be created, or is not writable.
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
    """Return the path ``bench-DATE`` without a suffix; append a number if an earlier run has written such files."""
    stems = (folder / f"bench-{date}{f'-{number}' if number > 1 else ''}" for number in count(1))
    return next(stem for stem in stems if not any(stem.with_suffix(end).exists() for end in (".json", ".md")))


def write(record: dict[str, Any], folder: Path) -> tuple[list[Path], str]:
    """Write ``bench-DATE.json``, ``bench-DATE.md`` and, if matplotlib is installed, two pictures.

    The files of a second run on the same day are named ``bench-DATE-2``, and so on. Return the paths of the files, and
    the reason if matplotlib is missing, else an empty string.

    Raises:
        SetupError: the folder cannot be written.
    """
    from shoal.lab.bench.plots import draw

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
