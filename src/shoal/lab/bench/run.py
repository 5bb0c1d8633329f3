"""Benchmark runs, from repositories to the record and its files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import count, product
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from shoal.clients.llm.tokens import open_tokenizer
from shoal.errors import InputError, SetupError
from shoal.kit.component.spec import STRING, ModelSpec, TensorSpec
from shoal.lab.bench.advice import Evidence, advise
from shoal.lab.bench.asking import sets_length, takes_ids, takes_prompts
from shoal.lab.bench.generation import Prompts, Tokens, compare_streams, note_places, note_tokens
from shoal.lab.bench.inputs import Texts, read_inputs
from shoal.lab.bench.measure import Outcome, measure, start_rows
from shoal.lab.bench.record import (
    BenchSettings,
    C,
    Cell,
    F,
    Figures,
    Measured,
    TokenCell,
    TokenFigures,
    compare,
    find_ratios,
    rounded,
    start_record,
)
from shoal.lab.bench.tables import write_page
from shoal.lab.bench.target import BenchTarget, check_inputs
from shoal.system.progress import OnProgress

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
NEIGHBOURS = 0.1  # of all cores' time: other programs that use more make the figures unreliable
_INPUT_TOKENS, _OUTPUT_TOKENS, _STREAMS = (32,), (8, 32, 128), (1, 16)


@dataclass(frozen=True)
class Loads:
    """Sizes of the loads to measure, where they are wanted: rows or prompts per request, requests at a time, tokens.

    Without ``batches``, requests have the sizes in ``usual`` that every target takes.
    """

    batches: Sequence[int] = ()
    concurrency: Sequence[int] = ()
    input_tokens: Sequence[int] = ()
    output_tokens: Sequence[int] = ()
    usual: Sequence[int] = BATCHES


@dataclass(frozen=True)
class Source:
    """Source of the rows or prompts: a file, or ``texts``; the columns of a file are named as for `read_inputs`.

    ``tokenizer`` is that of `open_tokenizer`; it counts the tokens where a server does not.
    """

    texts: Texts
    file: Path | None = None
    text_column: str = ""
    columns: Mapping[str, str] | None = None
    tokenizer: str = ""


def bench(
    targets: Sequence[BenchTarget],
    settings: BenchSettings,
    source: Source,
    loads: Loads | None = None,
    *,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Measure targets in turns, in rows or in tokens, as they are; return the record as JSON values.

    Raises:
        InputError: the targets take different inputs, or a size or the rows cannot be used.
        ArtifactError: a repository or the file of rows is missing or damaged.
        ServerError: a server does not start, or fails under every load.
        SetupError: the embedded server cannot run here.
    """
    loads = loads or Loads()
    measure_unit = _bench_rows if find_unit(targets, source) == "rows" else _bench_tokens
    with ExitStack() as held:
        return measure_unit(targets, settings, source, loads, held, on_progress)


def find_unit(targets: Sequence[BenchTarget], source: Source) -> str:
    """Return the unit in which targets are measured: rows, tokens (of texts) or token ids.

    Raises:
        InputError: the targets have different units.
    """

    def find(spec: ModelSpec | None) -> str:
        if takes_ids(spec):
            return "token ids"
        return "tokens" if takes_prompts(spec, has_tokenizer=bool(source.tokenizer)) else "rows"

    units = {target.label: find(target.spec) for target in targets}
    if len({*units.values()}) > 1:
        listed = ", ".join(f"{label} in {unit}" for label, unit in units.items())
        raise InputError(f"The subjects are measured in different units: {listed}.", "Measure them one by one.")
    return next(iter(units.values()))


# --- rows -----------------------------------------------------------------------------------------------------------


def _bench_rows(
    targets: Sequence[BenchTarget],
    settings: BenchSettings,
    source: Source,
    loads: Loads,
    held: ExitStack,
    on_progress: OnProgress,
) -> dict[str, Any]:
    for option, value in (
        ("--input-tokens", loads.input_tokens),
        ("--output-tokens", loads.output_tokens),
        ("--tokenizer", source.tokenizer),
    ):
        if value:
            raise InputError(
                f"{option} is for models that make tokens, and {targets[0].name} answers in rows.", "Leave it out."
            )
    check_inputs(targets)
    cells = find_cells(targets, loads)
    spec = next(target.spec for target in targets if target.spec)
    inputs = read_inputs(spec, source.file or source.texts, source.text_column, source.columns)
    subjects = start_rows(targets, inputs, settings, held, on_progress)
    outcome = measure(subjects, cells, settings, on_progress)
    measured = outcome.measured
    record = _start(targets, settings, outcome)
    evidence = {}
    for subject in subjects:
        found = {entry.cell: entry.median for entry in measured if entry.label == subject.label}
        if found:
            evidence[subject.label] = Evidence(found, subject.steps, record["machine"]["cores"])
    notes = [f"{inputs.source}: {inputs.note}"] if inputs.note else []
    return {
        **record,
        "inputs": {
            "source": inputs.source,
            "num_rows": inputs.num_rows,
            "mean_bytes_a_row": rounded(inputs.text_bytes),
        },
        "comparison": compare(measured),
        "notes": [*notes, *_notes(measured), *_note_steps(targets, measured), *record["notes"]],
        "advice": {label: [asdict(advice) for advice in advise(case)] for label, case in evidence.items()},
    }


def find_cells(targets: Sequence[BenchTarget], loads: Loads | None = None) -> list[Cell]:
    """Choose the loads to measure in rows; the first is one caller with one row.

    The numbers of callers are those wanted, or else 1 and 16 with single rows, and 2 with larger requests.

    Raises:
        InputError: a wanted size exceeds the limit of a target.
    """
    loads = loads or Loads()
    limit, smallest = min(
        ((max(1, target.spec.max_batch_size), target) for target in targets if target.spec), key=lambda pair: pair[0]
    )
    if beyond := [batch for batch in loads.batches if batch > limit]:
        raise InputError(
            f"{smallest.name} in {smallest.repository or smallest.url} takes 1 to {limit} rows per request, not"
            f" {beyond[0]}.",
            f"Give sizes it takes: --batches 1,{limit}" if limit > 1 else "Leave --batches out.",
        )
    cells = {Cell(1, 1)}
    for batch in loads.batches or loads.usual:
        if batch <= limit:
            cells |= {Cell(batch, number) for number in loads.concurrency or ((1, 16) if batch == 1 else (2,))}
    return sorted(cells)


def _start(
    targets: Sequence[BenchTarget], settings: BenchSettings, outcome: Outcome[C, F], *libraries: str
) -> dict[str, Any]:
    """Return what the records of rows and of tokens have."""
    measured = outcome.measured
    return {
        **start_record(settings, measured, *libraries),
        "repositories": [target.describe() for target in targets],
        "ratios": find_ratios(measured),
        "notes": [*note_places(targets), *outcome.notes],
        "is_interrupted": outcome.is_interrupted,
    }


def _notes(measured: Iterable[Measured[Cell, Figures]]) -> Iterable[str]:
    """Yield a warning if other programs used much CPU time during the measurements."""
    shares = [share for entry in measured if (share := entry.median.other_cpu or 0) > NEIGHBOURS]
    if shares:
        yield (
            f"Other programs took up to {max(shares):.0%} of the cores' time, in {len(shares)} of the loads more than"
            f" {NEIGHBOURS:.0%}: figures are lower than on a quiet machine."
        )


def _note_steps(targets: Iterable[BenchTarget], measured: Iterable[Measured[Cell, Figures]]) -> Iterable[str]:
    """Yield which running servers did not let this client read Triton's statistics."""
    silent = {entry.label for entry in measured if not entry.median.steps}
    for target in targets:
        if target.label in silent and target.url and not target.is_client:
            yield f"{target.label}: the server does not let this client read its statistics, so no steps are shown."


# --- tokens ---------------------------------------------------------------------------------------------------------


def _bench_tokens(
    targets: Sequence[BenchTarget],
    settings: BenchSettings,
    source: Source,
    loads: Loads,
    held: ExitStack,
    on_progress: OnProgress,
) -> dict[str, Any]:
    if remote := next((target for target in targets if target.is_client), None):
        raise InputError(f"{remote.name} makes tokens: it cannot be measured in the client.", "Leave --placement out.")
    tokenizer = open_tokenizer(source.tokenizer) if source.tokenizer else None
    subjects = []
    for number, target in enumerate(targets):
        on_progress("opening", number, len(targets))
        subjects.append(
            Tokens(target, (lambda text: len(tokenizer.encode(text).ids)) if tokenizer else None, settings, held)
        )
    on_progress("opening", len(targets), len(targets))
    cells = _find_token_cells(targets, subjects, source, loads)
    encode = (lambda text: tokenizer.encode(text).ids) if tokenizer else None
    on_progress("fitting prompts", 0, 1)
    prompts = Prompts({}, _read_prompts(source) if source.file else (), encode)
    subjects[0].prompts = prompts
    words = {} if prompts.texts else subjects[0].fit(sorted({cell.input_tokens for cell in cells}))
    on_progress("fitting prompts", 1, 1)
    for subject in subjects:
        subject.prompts = replace(prompts, words=words)
    return make_token_record(targets, settings, measure(subjects, cells, settings, on_progress))


def make_token_record(
    targets: Sequence[BenchTarget], settings: BenchSettings, outcome: Outcome[TokenCell, TokenFigures]
) -> dict[str, Any]:
    """Build the record of a measurement in tokens, as JSON values."""
    record = _start(targets, settings, outcome, "transformers")
    return {
        "unit": "tokens",
        **record,
        "comparison": [*compare_streams(outcome.measured)],
        "notes": [*note_tokens(outcome.measured), *record["notes"]],
        "advice": {},
    }


def _find_token_cells(
    targets: Sequence[BenchTarget], subjects: Sequence[Tokens], source: Source, loads: Loads
) -> list[TokenCell]:
    is_ids, is_free = takes_ids(targets[0].spec), any(not sets_length(target.spec) for target in targets)
    if is_free and loads.output_tokens:
        raise InputError(f"{targets[0].name} alone decides how long its answers are.", "Leave --output-tokens out.")
    if source.file and loads.input_tokens:
        raise InputError("--input-tokens has no effect with --inputs, whose prompts are as long as they are.")
    if source.file and is_ids and not source.tokenizer:
        raise InputError(f"{targets[0].name} takes token ids, not texts.", "Name a tokenizer: --tokenizer FOLDER")
    most = min(subjects, key=lambda subject: subject.most_rows)
    if beyond := [batch for batch in loads.batches if batch > most.most_rows]:
        limit = f"1 to {most.most_rows} prompts" if most.most_rows > 1 else "one prompt"
        raise InputError(
            f"{most.label} takes {limit} per request, not {beyond[0]}.",
            "Send several requests at a time: --concurrency 8",
        )
    lengths = (
        (0,) if source.file else loads.input_tokens or _INPUT_TOKENS,
        (0,) if is_free else loads.output_tokens or _OUTPUT_TOKENS,
    )
    sizes = (loads.batches or (1,), loads.concurrency or _STREAMS)
    return [TokenCell(*numbers) for numbers in product(*lengths, *sizes)]


def _read_prompts(source: Source) -> list[str]:
    assert source.file
    spec = ModelSpec("the model", (TensorSpec("prompt", STRING, (1,)),), (), 1)
    rows = read_inputs(spec, source.file, source.text_column, source.columns).arrays["prompt"]
    return [text.decode(errors="replace") for text in rows.ravel().tolist()]


# --- files ----------------------------------------------------------------------------------------------------------


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
