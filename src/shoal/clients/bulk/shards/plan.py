"""Plan of a sharded run: the inputs cut into shards, in ``_plan.json``. A shard's output depends on the plan alone.

The file is JSON with one shard per line, so that a worker reads it line by line: its memory does not grow with it.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from shoal import __version__
from shoal.clients.bulk.parquet import open_parquet
from shoal.clients.bulk.rows import RowSource, shorten
from shoal.clients.bulk.shards.folders import Folder, find_inputs, open_input
from shoal.clients.bulk.shards.parts import FilePart, digest_end
from shoal.clients.bulk.tables import TEXT, explained, json_rows, open_csv
from shoal.errors import ArtifactError, InputError

PLAN, SUCCESS, RECORDS = "_plan.json", "_SUCCESS.json", "_shards"
KINDS = (".parquet", ".jsonl", ".txt", ".csv")  # of inputs that can be cut; .tsv is taken as .csv
READERS = 16  # requests to an object store at a time
_OURS = re.compile(rf"{PLAN}|{SUCCESS}|part-\d{{5,}}\.(parquet|jsonl|csv)|{RECORDS}/\d{{5,}}\.(json|failed|begun-\d+)")
_SAMPLE = 2**20  # bytes of the first file, from which the size of a row is estimated


class Shard(msgspec.Struct, frozen=True):
    """Input of one output file."""

    number: int
    parts: tuple[FilePart, ...]


class ShardPlan(msgspec.Struct, frozen=True):
    """Head of a plan. ``job`` has the options that answers depend on; ``inputs`` is a digest of names, sizes and ends.

    ``kind`` and ``output_kind`` are file endings. ``rows`` is None where only reading the inputs would tell.
    """

    shoal: str
    job: dict[str, Any]
    input: str
    shard_rows: int
    kind: str
    output_kind: str
    columns: tuple[str, ...]
    files: int
    bytes: int
    rows: int | None
    shards: int
    inputs: str

    def file(self, number: int) -> str:
        """Return the name of a shard's output."""
        width = max(5, len(str(self.shards - 1)))  # the order of the names is that of the inputs
        return f"part-{number:0{width}}{self.output_kind}"

    def digest(self) -> str:
        """Return the SHA-256 of this plan."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()


def make_plan(
    folder: Folder,
    pattern: str,
    shard_rows: int,
    job: Mapping[str, Any],
    *,
    output_kind: str = "",
    check: Callable[[ShardPlan], object] = lambda plan: None,
    is_fresh: bool = False,
) -> ShardPlan:
    """Cut the inputs into shards of about ``shard_rows`` rows, and write the plan, unless the folder has the same one.

    Parquet is cut between row groups, and JSON Lines and plain text at bytes, by the size of the first rows; CSV files
    are not cut, because a cell may hold line ends. Small files share a shard. Without ``output_kind``, the outputs are
    Parquet or CSV where the inputs are, else JSON Lines. ``check`` may refuse the plan before it is written.

    Raises:
        InputError: there are no inputs, they are of several kinds or within the folder, or the folder has another plan
            or foreign files.
        ArtifactError: an input cannot be read, or the columns of two inputs differ.
    """
    files = find_inputs(pattern)
    kind = _find_kind(files)
    output_kind = output_kind or (kind if kind in (".parquet", ".csv") else ".jsonl")
    if output_kind == ".parquet" != kind:
        raise InputError(
            f"Shards of {kind} files cannot be written as .parquet: their types might differ.", "Leave --format out."
        )
    for name, _ in files:
        if folder.has(name):
            raise InputError(f"The input {name} is in the output folder.", "Name another folder to write.")
    with tempfile.TemporaryFile() as lines:
        cutter = _Cutter(kind, shard_rows)
        for shard in cutter.cut(files):
            lines.write((b",\n" if shard.number else b"") + msgspec.json.encode(shard))
        asked = __version__, dict(job), pattern, shard_rows, kind, output_kind
        num_bytes, rows = sum(size for _, size in files), cutter.num_rows if kind == ".parquet" else None
        totals = len(files), num_bytes, rows, cutter.num_shards
        plan = ShardPlan(*asked, cutter.columns, *totals, cutter.hashed.hexdigest())
        check(plan)
        if is_fresh:
            _remove(folder)
        with tempfile.NamedTemporaryFile() as file:
            file.write(msgspec.json.encode(plan)[:-1] + b',"plan":[\n')
            lines.seek(0)
            shutil.copyfileobj(lines, file)
            file.write(b"\n]}\n")
            file.flush()
            _check_foreign(folder)
            if not folder.put(PLAN, Path(file.name)):
                file.seek(0)
                _check_same(folder, plan, file)
    return plan


def read_plan(folder: Folder) -> ShardPlan:
    """Read the head of a folder's plan.

    Raises:
        InputError: the folder has no plan, or it is damaged.
    """
    try:
        with folder.open(PLAN) as file:
            return msgspec.json.decode(file.readline().rstrip() + b"]}", type=ShardPlan)
    except (OSError, msgspec.MsgspecError):
        raise InputError(
            f"{folder} has no plan of shoal infer.", "Make one: shoal infer --input 'FILES' --output FOLDER/"
        ) from None


def read_shards(folder: Folder) -> Iterator[Shard]:
    """Yield the shards of a folder's plan, one after another.

    Raises:
        ArtifactError: the plan is damaged.
    """
    with folder.open(PLAN) as file:
        yield from _decode_shards(file, f"{PLAN} of {folder}")


def _decode_shards(file: BinaryIO, name: str) -> Iterator[Shard]:
    file.readline()
    for line in file:
        if line.startswith(b"{"):
            try:
                yield msgspec.json.decode(line.rstrip(b",\n"), type=Shard)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                raise ArtifactError(f"{name} is damaged.", "Start over: --fresh") from None


class ShardReader:
    """Reader of single shards of a folder's plan; those in ascending order are found in one pass."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._shards: Iterator[Shard] = iter(())
        self._next = 0

    def find(self, number: int) -> Shard:
        """Return one shard.

        Raises:
            ArtifactError: the plan is damaged.
        """
        if not 0 < self._next <= number:
            self._shards = read_shards(self._folder)
        self._next = number + 1
        return next(shard for shard in self._shards if shard.number == number)


def _find_kind(files: Sequence[tuple[str, int]]) -> str:
    kinds: dict[str, str] = {}
    for name, _ in files:
        suffix = Path(name).suffix.lower()
        kinds.setdefault(".csv" if suffix == ".tsv" else suffix, name)
    if len(kinds) > 1:
        first, second = [*kinds.values()][:2]
        raise InputError(f"The inputs are of several kinds: {first} and {second}.", "Give a narrower pattern.")
    (kind,) = kinds
    if kind not in KINDS:
        raise InputError(
            f"{files[0][0]} is not one of {', '.join(KINDS)}, .tsv.", "Only these are divided into shards."
        )
    return kind


class _End(NamedTuple):
    """End of a file, as planning reads it. ``counts`` are the rows of its row groups; empty files have none."""

    name: str
    size: int
    digest: str = ""
    columns: tuple[str, ...] = ()
    schema: Any = None
    counts: tuple[int, ...] = ()


def _read_end(kind: str, name: str, size: int) -> _End:
    if not size and kind != ".parquet":
        return _End(name, size)
    with ExitStack() as stack, explained(name):
        file = stack.enter_context(open_input(name))
        digest = digest_end(file, size, kind)
        file.seek(0)
        if kind == ".parquet":
            table = open_parquet(file, name, stack)
            schema, metadata = table.schema_arrow, table.metadata
            counts = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
            return _End(name, size, digest, tuple(schema.names), schema.remove_metadata(), counts)
        columns = open_csv(file, RowSource(name, kind), stack).columns if kind == ".csv" else ()
        return _End(name, size, digest, tuple(map(str, columns)))


def _read_all(kind: str, files: Iterable[tuple[str, int]]) -> Iterator[_End]:
    """Yield the ends of files in this order, with several requests to an object store at a time."""
    waiting: deque[Future[_End]] = deque()
    with ThreadPoolExecutor(READERS, thread_name_prefix="shoal-plan") as pool:
        for name, size in files:
            waiting.append(pool.submit(_read_end, kind, name, size))
            if len(waiting) > 2 * READERS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class _Cutter:
    """Cuts inputs into shards, of which it reads the ends. Its attributes are complete after ``cut``."""

    def __init__(self, kind: str, shard_rows: int) -> None:
        self._kind, self._most = kind, shard_rows
        self._first: _End | None = None  # of a file with rows
        self.columns: tuple[str, ...] = (TEXT,) if kind == ".txt" else ()
        self.hashed = hashlib.sha256()
        self.num_rows = self.num_shards = 0

    def cut(self, files: Iterable[tuple[str, int]]) -> Iterator[Shard]:
        parts: list[FilePart] = []
        weight = 0
        for part, more in (piece for file in _read_all(self._kind, files) for piece in self._cut_file(file)):
            if parts and weight + more > self._most:
                yield self._shard(parts, weight)
                parts, weight = [], 0
            if parts and parts[-1].file == part.file:  # the next row group, or the next bytes
                parts[-1] = msgspec.structs.replace(parts[-1], end=part.end)
            else:
                parts.append(part)
            weight += more
        if parts:
            yield self._shard(parts, weight)

    def _shard(self, parts: Sequence[FilePart], weight: int) -> Shard:
        self.num_shards, self.num_rows = self.num_shards + 1, self.num_rows + weight
        return Shard(self.num_shards - 1, tuple(parts))

    def _cut_file(self, file: _End) -> Iterator[tuple[FilePart, int]]:
        """Yield the parts of a file that are not cut further, each with its weight: rows of Parquet, else bytes."""
        name, size = file.name, file.size
        self.hashed.update(f"{name}\n{size}\n{file.digest}\n".encode())
        if self._kind == ".parquet":
            pieces = [(group, group + 1, count) for group, count in enumerate(file.counts)] or [(0, 0, 0)]
        elif not size:
            return
        else:
            if not self._first:
                self._most *= _estimate_row(name)
            starts = [0] if self._kind == ".csv" else range(0, size, self._most)
            pieces = [(at, end, end - at) for at, end in pairwise([*starts, size])]
        if self._kind == ".jsonl" and not self.columns:
            self.columns = _read_keys(name)
        self._check(file)
        for begin, end, weight in pieces:
            yield FilePart(name, size, file.digest, begin, end), weight

    def _check(self, file: _End) -> None:
        if not self._first:
            self._first, self.columns = file, file.columns or self.columns
            return
        if file.columns == self._first.columns and (file.schema is None or file.schema.equals(self._first.schema)):
            return
        for there, here in zip(_show(self._first), _show(file), strict=False):
            if here != there:
                raise _differ(self._first.name, there, file.name, here)
        there, here = (f"{len(each.columns)} columns" for each in (self._first, file))
        raise _differ(self._first.name, there, file.name, here)


def _show(file: _End) -> Iterable[str]:
    return file.columns if file.schema is None else [f"{field.name}: {field.type}" for field in file.schema]


def _differ(first: str, there: str, name: str, here: str) -> ArtifactError:
    return ArtifactError(
        f"The inputs have different columns: {first} has {shorten(there)} where {name} has {shorten(here)}.",
        "Give files with the same columns.",
    )


def _estimate_row(name: str) -> int:
    """Return the bytes of a row, by a file's first ones; 1 or more."""
    with open_input(name) as file, explained(name):
        sample = file.read(_SAMPLE)
    return max(1, len(sample) // max(1, sample.count(b"\n")))


def _read_keys(name: str) -> tuple[str, ...]:
    """Return the keys of the first line of a JSON Lines file; of none if there is no line."""
    with ExitStack() as stack, explained(name):
        for _, row in json_rows(stack.enter_context(open_input(name)), RowSource(name, ".jsonl"), stack):
            if isinstance(row, ArtifactError):
                raise row
            return tuple(row)
    return ()


# --- a folder that has a plan -----------------------------------------------------------------------------------------


def _check_foreign(folder: Folder) -> None:
    """Refuse a folder with other files than those of a sharded run, whose plan is written first and removed last."""
    name = ""
    for entry in folder.entries():
        name = entry.name
        if not _OURS.fullmatch(name):
            raise InputError(f"{folder} has another file: {name}.", "Name an empty or a new folder.")
    if name and folder.read(PLAN) is None:
        raise InputError(f"{folder} has {name}, and no {PLAN}.", "Name an empty or a new folder.")


def _remove(folder: Folder) -> None:
    """Remove an earlier run; the plan last, so that a folder that is half removed is still one of shoal's."""
    _check_foreign(folder)
    for name in {entry.name for entry in folder.entries()} - {PLAN}:
        folder.remove(name)
    folder.remove(PLAN)


def _check_same(folder: Folder, plan: ShardPlan, lines: Any) -> None:
    """Refuse a plan that differs from the one in the folder, naming what differs."""
    there, again = read_plan(folder), "Give the same, or start over: --fresh"
    begun, wanted = ({**msgspec.to_builtins(each), **each.job} for each in (there, plan))
    for name in ("shoal", "input", *{**there.job, **plan.job}, "shard_rows", "output_kind"):
        if begun.get(name) != wanted.get(name):
            raise InputError(
                f"{folder} was begun with another {name.replace('_', ' ')}: {shorten(begun.get(name))},"
                f" now {shorten(wanted.get(name))}.",
                again,
            )
    if there.inputs != plan.inputs:
        pairs = zip(_list_inputs(read_shards(folder)), _list_inputs(_decode_shards(lines, PLAN)), strict=False)
        first = next((new[0] for old, new in pairs if old != new), "a file was added or removed")
        raise InputError(f"The inputs changed since {folder} was begun: {first}.", again)
    if there != plan:
        raise InputError(f"{folder} was begun with another plan.", again)


def _list_inputs(shards: Iterator[Shard]) -> Iterator[tuple[str, int, str]]:
    """Yield name, size and digest of the inputs of a plan."""
    last = ""
    for shard in shards:
        for part in shard.parts:
            if part.file != last:
                yield part.file, part.size, part.digest
            last = part.file
