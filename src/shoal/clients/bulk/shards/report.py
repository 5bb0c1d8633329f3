"""State of a sharded run, a check of its outputs, and their concatenation."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from shoal.clients.bulk.files import as_bytes, written
from shoal.clients.bulk.shards.folders import Folder
from shoal.clients.bulk.shards.parts import open_parts
from shoal.clients.bulk.shards.plan import PLAN, RECORDS, SUCCESS, read_plan, read_shards
from shoal.clients.bulk.shards.scheduler import read_state
from shoal.clients.bulk.shards.shard_task import ShardRecord, Success, read_records, record_name
from shoal.clients.bulk.tables import scan_table
from shoal.errors import ArtifactError, InputError
from shoal.kit.component.files import sha256

_RATE_SECONDS = 600.0  # before the last record: the records from which the speed is computed


def read_status(folder: Folder) -> dict[str, Any]:
    """Return the numbers of shards in each state, the rows that are done, their speed, and when the run will end.

    The speed is that of the last ten minutes, by the times of the records. ``errors`` are why shards failed.
    """
    plan, state = read_plan(folder), read_state(folder)
    times = {entry.name: entry.modified for entry in folder.entries(RECORDS)}
    numbers = sorted(state.done, key=lambda n: times[record_name(n)])
    records = [*zip((times[record_name(n)] for n in numbers), read_records(folder, plan, numbers), strict=True)]
    done = sum(record.rows for _, record in records)
    late = [(at, record.rows) for at, record in records if at >= records[-1][0] - _RATE_SECONDS]
    seconds = late[-1][0] - late[0][0] if late else 0.0
    rate = sum(rows for _, rows in late[1:]) / seconds if seconds else None
    left = plan.shards - len(records)
    total = plan.rows if plan.rows is not None else round(done / len(records) * plan.shards) if records else None
    end = late[-1][0] + (total - done) / rate if rate and total is not None and left else None
    return {
        "shards": plan.shards,
        "done": len(records),
        "under_way": len(state.begun.keys() - state.done - state.failed),
        "failed": sorted(state.failed - state.done),
        "rows": done,
        "rows_total": total,
        "rows_with_error": sum(record.errors for _, record in records),
        "rows_per_second": None if rate is None else round(rate, 1),
        "expected_end": None if end is None else datetime.fromtimestamp(end, UTC).isoformat(timespec="seconds"),
        "is_complete": folder.read(SUCCESS) is not None,
        "errors": {n: json.loads(folder.read(f"{RECORDS}/{n:05}.failed") or b"{}") for n in sorted(state.failed)},
    }


def find_faults(folder: Folder) -> Iterator[str]:
    """Yield what is wrong in a finished run's folder: inputs and outputs are read again, all of them.

    The outputs must be those of the records, byte for byte, with their numbers of rows, and the inputs must have the
    rows that were scored, in their order.
    """
    plan = read_plan(folder)
    success = _read_success(folder)
    records = success.shards
    for name in ("rows", "errors"):
        if getattr(success, name) != sum(getattr(record, name) for record in records):
            yield f"{SUCCESS} has {getattr(success, name)} {name}, and its shards do not add up to that"
    if len(records) != plan.shards:
        yield f"{SUCCESS} has {len(records)} shards, the plan {plan.shards}"
    shards = 0
    for number, (shard, record) in enumerate(zip(read_shards(folder), records, strict=False)):
        shards += 1
        if shard.number != number or record.file != plan.file(number):
            yield f"{SUCCESS} or {PLAN} has shard {number} in another place"
        if folder.read(record_name(number)) != msgspec.json.encode(record):
            yield f"{record_name(number)} is not what {SUCCESS} says"
        yield from _check_output(folder, record)
        table, hashed, rows = open_parts(shard.parts, plan.kind, plan.columns), hashlib.sha256(), 0
        try:
            for _, row in table.rows:
                hashed.update(as_bytes(row))
                rows += 1
        except ArtifactError as error:
            yield f"the input of {record.file}: {error}"
            continue
        if (rows, hashed.hexdigest()) != (record.rows, record.input):
            yield f"the input of {record.file} does not have the rows that were scored"
    if shards != plan.shards:
        yield f"{PLAN} has {shards} shards, and says {plan.shards}"
    expected = {PLAN, SUCCESS, *(plan.file(n) for n in range(plan.shards)), *map(record_name, range(plan.shards))}
    for entry in folder.entries():
        if entry.name not in expected:
            yield f"{entry.name} is not a file of this run"


def _check_output(folder: Folder, record: ShardRecord) -> Iterator[str]:
    try:
        with folder.local(record.file) as path:
            if sha256(path) != record.sha256:
                yield f"{record.file} has other bytes than were written"
            elif path.suffix != ".jsonl" or path.stat().st_size:
                with scan_table(path) as table:
                    rows = sum(1 for _ in table.rows)
                if rows != record.rows:
                    yield f"{record.file} has {rows} rows, not {record.rows}"
    except OSError:
        yield f"{record.file} is missing"


def _read_success(folder: Folder) -> Success:
    content = folder.read(SUCCESS)
    if content is None:
        raise InputError(f"The run in {folder} is not complete.", f"See: shoal shards status {folder}")
    try:
        return msgspec.json.decode(content, type=Success)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise ArtifactError(f"{SUCCESS} is damaged.", "Remove it, and run the same command again.") from None


def merge(folder: Folder, output: Path) -> int:
    """Write the outputs of a finished run to one file, which appears whole, and return its number of rows.

    Raises:
        ArtifactError: an output is missing or damaged.
        InputError: the run is not complete, the file exists, or its ending is not that of the outputs.
        SetupError: the file cannot be written.
    """
    plan, success = read_plan(folder), _read_success(folder)
    if output.suffix.lower() != plan.output_kind:
        raise InputError(f"The shards are {plan.output_kind} files, not {output.suffix}.", "Give that ending.")
    if output.exists():
        raise InputError(f"{output} exists; it will not be replaced.", "Name another file.")
    if [record.file for record in success.shards] != [plan.file(number) for number in range(plan.shards)]:
        raise ArtifactError(f"{SUCCESS} of {folder} is not that of its plan.", f"See: shoal shards verify {folder}")
    aside = output.with_name(f"{output.name}.merging")
    paths = _open_outputs(folder, success.shards)
    with written(output):
        try:
            if plan.output_kind == ".parquet":
                _merge_parquet(paths, aside)
            else:
                _merge_text(paths, aside, has_header=plan.output_kind == ".csv")
            aside.replace(output)
        finally:
            aside.unlink(missing_ok=True)
    return success.rows


def _open_outputs(folder: Folder, records: Sequence[ShardRecord]) -> Iterator[Path]:
    for record in records:
        try:
            with folder.local(record.file) as path:
                if sha256(path) == record.sha256:
                    yield path
                    continue
                said = "has other bytes than were written"
        except FileNotFoundError:
            said = "is missing"
        raise ArtifactError(f"{record.file} of {folder} {said}.", f"See: shoal shards verify {folder}")


def _merge_text(paths: Iterable[Path], output: Path, *, has_header: bool) -> None:
    with output.open("wb") as file:
        for number, path in enumerate(paths):
            with path.open("rb") as part:
                if has_header and number:
                    _skip_header(part)
                shutil.copyfileobj(part, file)


def _skip_header(part: Any) -> None:
    """Read a CSV file's header, whose names may hold line ends."""
    line = part.readline()
    quotes = line.count(b'"')
    while line and quotes % 2:
        line = part.readline()
        quotes += line.count(b'"')


def _merge_parquet(paths: Iterable[Path], output: Path) -> None:
    from pyarrow import parquet

    with ExitStack() as held:
        writer: Any = None
        for path in paths:
            with parquet.ParquetFile(path) as file:
                writer = writer or held.enter_context(parquet.ParquetWriter(output, file.schema_arrow))
                for batch in file.iter_batches():
                    writer.write_batch(batch)
