"""Work on one shard: score its rows, and put the output and its record into the folder."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from shoal.bulk.files import as_bytes, count_failed
from shoal.bulk.inputs import Feed, make_feed, read_constants
from shoal.bulk.output_formats import make_format
from shoal.bulk.scoring import ERROR, Endpoint, open_model, rehearse, score
from shoal.bulk.shards.folders import Folder
from shoal.bulk.shards.parts import open_groups, open_parts
from shoal.bulk.shards.plan import READERS, RECORDS, Plan, Shard, ShardReader, read_plan
from shoal.client.calls import find_text_input
from shoal.client.client import Client
from shoal.component.artifact_files import sha256
from shoal.component.spec import ModelSpec
from shoal.errors import ArtifactError, InputError, ServerError, SetupError, ShoalError
from shoal.parquet import ParquetOrigin
from shoal.repository.model_folders import find_graph
from shoal.rows import Row, Source
from shoal.tables import Table, scan_table


@dataclass(frozen=True)
class Job:
    """Model and options of a run, as a worker process receives them."""

    model: str
    where: str
    repository: Path
    connect: Callable[[], Client]
    max_rows: int | None
    num_callers: int | None
    text_column: str
    columns: Mapping[str, str]
    constants: Mapping[str, str]

    @contextmanager
    def open(self, plan: Plan) -> Iterator[tuple[Endpoint, Feed]]:
        """Open the model, and send it a test request where it takes one text."""
        limits = {"max_rows": self.max_rows, "num_callers": self.num_callers}
        with open_model(self.model, self.where, self.repository, self.connect, **limits) as endpoint:
            feed = self.feed(endpoint.spec, plan)
            if list(feed.columns) == [find_text_input(endpoint.spec)]:
                rehearse(endpoint, feed.constants, must_answer=not self.columns)
            yield endpoint, feed

    def feed(self, model: ModelSpec, plan: Plan) -> Feed:
        """Map the columns of the plan's inputs to the model's inputs, and check that the outputs can be written."""
        table: Table[Row] = Table(Source(plan.input, plan.kind), plan.columns, iter(()), lambda: None)
        constants = read_constants(self.constants, model)
        make_format(plan.output_kind, table, model, ParquetOrigin(()))
        return make_feed(model, table, text_column=self.text_column, columns=self.columns, constants=constants)

    def describe(self) -> ModelSpec:
        """Return the declaration of the model, which is not loaded."""
        if self.where == "server":
            with self.connect() as client:
                return client.describe(self.model or client.default_model())
        return find_graph(self.repository, self.model).config.spec


class Record(msgspec.Struct, frozen=True):
    """Totals and SHA-256 of a shard's output; ``input`` is the SHA-256 of the rows that were read."""

    file: str
    rows: int
    errors: int
    sha256: str
    input: str


class Success(msgspec.Struct, frozen=True):
    """Content of ``_SUCCESS.json``: the totals, and the records of all shards in order."""

    rows: int
    errors: int
    shards: list[Record]


def read_records(folder: Folder, numbers: Iterable[int]) -> list[Record]:
    """Read records, several at a time, in this order.

    Raises:
        ArtifactError: a record is damaged.
    """
    with ThreadPoolExecutor(READERS, thread_name_prefix="shoal-records") as pool:
        return list(pool.map(partial(_read_record, folder), numbers))


def _read_record(folder: Folder, number: int) -> Record:
    name = record_name(number)
    try:
        return msgspec.json.decode(folder.read(name) or b"", type=Record)
    except msgspec.MsgspecError:
        raise ArtifactError(f"{name} is damaged.", "Remove it, and run the same command again.") from None


def record_name(number: int) -> str:
    """Return the name of a shard's record, with which it is done."""
    return f"{RECORDS}/{number:05}.json"


Message = tuple[Any, ...]  # ("ready",), ("rows", number, place of the last), ("done", rows, errors), ("error", ...)
ERRORS = {kind.__name__: kind for kind in (ArtifactError, InputError, ServerError, SetupError, ShoalError)}


class Scorer:
    """Model of a run in a worker process; it is opened for the first shard."""

    def __init__(self, folder: Folder, job: Job) -> None:
        self._folder, self._job = folder, job
        self._held = ExitStack()
        self._opened: tuple[Plan, ShardReader, Endpoint, Feed] | None = None

    def score(self, number: int) -> Iterator[Message]:
        """Score a shard, and yield what the parent is to know: the last message is ``done`` or ``error``.

        An error is sent as the name of its nearest class in ``ERRORS`` and its words, since errors cannot be pickled.
        """
        try:
            if self._opened is None:
                plan = read_plan(self._folder)
                endpoint, feed = self._held.enter_context(self._job.open(plan))
                self._opened = plan, ShardReader(self._folder), endpoint, feed
                yield ("ready",)
            plan, shards, endpoint, feed = self._opened
            record = yield from _score_shard(self._folder, plan, shards.find(number), endpoint, feed)
            yield "done", record.rows, record.errors
        except ShoalError as error:
            kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in ERRORS)
            yield "error", kind, error.what, error.fix


def _score_shard(
    folder: Folder, plan: Plan, shard: Shard, endpoint: Endpoint, feed: Feed
) -> Generator[Message, None, Record]:
    """Score a shard, write its output if it is not there, and its record. Yield messages of the rows answered.

    Raises:
        ArtifactError: the input has changed, or is damaged.
        ServerError: the server went away.
        SetupError: the folder cannot be written.
    """
    table = open_parts(shard.parts, plan.kind, plan.columns)
    origin = ParquetOrigin([partial(open_groups, part) for part in shard.parts])
    form = make_format(plan.output_kind, table, endpoint.spec, origin, has_all_columns=True)
    done = failed = 0
    hashed = hashlib.sha256()
    with tempfile.TemporaryDirectory(prefix="shoal-shard-") as aside:
        answers, output = Path(aside, "answers"), Path(aside, "output")
        with answers.open("wb") as file:
            for window in score(table.rows, endpoint, feed):
                for each in window:
                    hashed.update(as_bytes(each.row))
                admitted = list(map(form.admit, window))
                file.write(form.encode(admitted))
                done, failed = done + len(window), failed + count_failed(admitted)
                yield "rows", done, table.where(window[-1].number)
        form.finish(lambda: _lines(answers), output)
        record = Record(plan.file(shard.number), done, failed, sha256(output), hashed.hexdigest())
        if not folder.put(record.file, output):
            record = _read_back(folder, record)
    folder.put(record_name(shard.number), msgspec.json.encode(record))
    return record


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file


def _read_back(folder: Folder, record: Record) -> Record:
    """Return the record of an output that is there already. A server's answers may differ in their last bits."""
    with folder.local(record.file) as path:
        digest = sha256(path)
        if digest == record.sha256:
            return record
        with scan_table(path) as table:
            errors = sum(isinstance(row, dict) and bool(row.get(ERROR)) for _, row in table.rows)
    return msgspec.structs.replace(record, sha256=digest, errors=errors)
