"""Work on one shard: score its rows, and put the output and its record into the folder."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from shoal.authoring.repository.find_graph import find_graph
from shoal.clients.bulk.files import as_bytes, count_failed
from shoal.clients.bulk.inputs import Feed, make_feed, read_constants
from shoal.clients.bulk.output_formats import make_format
from shoal.clients.bulk.parquet import ParquetOrigin
from shoal.clients.bulk.rows import Row, RowSource
from shoal.clients.bulk.scoring import ERROR, Ask, Endpoint, open_model, rehearse, score
from shoal.clients.bulk.shards.folders import Folder
from shoal.clients.bulk.shards.parts import open_groups, open_parts
from shoal.clients.bulk.shards.plan import READERS, RECORDS, Shard, ShardPlan, ShardReader, read_plan
from shoal.clients.bulk.tables import Table, scan_table
from shoal.clients.client.calls import find_text_input
from shoal.clients.client.client import Client
from shoal.errors import ArtifactError, InputError, ServerError, SetupError, ShoalError
from shoal.kit.component.files import sha256
from shoal.kit.component.spec import Array, ModelSpec


@dataclass(frozen=True)
class ScoringJob:
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
    def open(self, plan: ShardPlan) -> Iterator[tuple[Endpoint, Feed]]:
        """Open the model, and send it a test request where it takes one text."""
        limits = {"max_rows": self.max_rows, "num_callers": self.num_callers}
        with open_model(self.model, self.where, self.repository, self.connect, **limits) as endpoint:
            feed = self.feed(endpoint.spec, plan)
            if list(feed.columns) == [find_text_input(endpoint.spec)]:
                rehearse(endpoint, feed.constants, must_answer=not self.columns)
            yield endpoint, feed

    def feed(self, model: ModelSpec, plan: ShardPlan) -> Feed:
        """Map the columns of the plan's inputs to the model's inputs, and check that the outputs can be written."""
        table: Table[Row] = Table(RowSource(plan.input, plan.kind), plan.columns, iter(()), lambda: None)
        constants = read_constants(self.constants, model)
        make_format(plan.output_kind, table, model, ParquetOrigin(()))
        return make_feed(model, table, text_column=self.text_column, columns=self.columns, constants=constants)

    def describe(self) -> ModelSpec:
        """Return the declaration of the model, which is not loaded."""
        if self.where == "server":
            with self.connect() as client:
                return client.describe(self.model or client.default_model())
        return find_graph(self.repository, self.model).config.spec


class ShardRecord(msgspec.Struct, frozen=True):
    """Totals and SHA-256 of a shard's output. ``input`` and ``plan`` are those of the rows read, and of the plan."""

    plan: str
    file: str
    rows: int
    errors: int
    sha256: str
    input: str


class Success(msgspec.Struct, frozen=True):
    """Content of ``_SUCCESS.json``: the totals, and the records of all shards in order."""

    rows: int
    errors: int
    shards: list[ShardRecord]


def read_records(folder: Folder, plan: ShardPlan, numbers: Iterable[int]) -> list[ShardRecord]:
    """Read records, several at a time, in this order.

    Raises:
        ArtifactError: a record is damaged, or of another plan.
    """
    read = partial(_read_record, folder, plan.digest())
    with ThreadPoolExecutor(READERS, thread_name_prefix="shoal-records") as pool:
        return list(pool.map(read, numbers))


def _read_record(folder: Folder, plan: str, number: int) -> ShardRecord:
    name = record_name(number)
    try:
        record = msgspec.json.decode(folder.read(name) or b"", type=ShardRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise ArtifactError(f"{name} of {folder} is damaged.", "Remove it, and run the same command again.") from None
    if record.plan != plan:
        raise ArtifactError(
            f"{name} of {folder} is of another plan.", "Is a worker of that one at work? Start over: --fresh"
        )
    return record


def put_exactly(folder: Folder, name: str, content: bytes) -> None:
    """Write a small file; one of other content, of a run whose outputs were removed, is replaced."""
    if not folder.put(name, content) and folder.read(name) != content:
        folder.remove(name)
        folder.put(name, content)


def record_name(number: int) -> str:
    """Return the name of a shard's record, with which it is done."""
    return f"{RECORDS}/{number:05}.json"


# ("ready",), ("rows", number, place of the last), ("alive",), ("done", rows, errors), ("error", class, what, fix)
Message = tuple[Any, ...]
_ALIVE_SECONDS = 1.0
ERRORS = {kind.__name__: kind for kind in (ArtifactError, InputError, ServerError, SetupError, ShoalError)}


class Scorer:
    """Model of a run in a worker process; it is opened for the first shard."""

    def __init__(self, folder: Folder, job: ScoringJob) -> None:
        self._folder, self._job = folder, job
        self._held = ExitStack()
        self._answers = 0
        self._opened: tuple[ShardPlan, ShardReader, Endpoint, Feed] | None = None

    def score(self, number: int) -> Iterator[Message]:
        """Score a shard, and yield what the parent is to know: the last message is ``done`` or ``error``.

        An error is sent as the name of its nearest class in ``ERRORS`` and its words, since errors cannot be pickled.
        """
        try:
            if self._opened is None:
                plan = read_plan(self._folder)
                endpoint, feed = self._held.enter_context(self._job.open(plan))
                self._opened = plan, ShardReader(self._folder), replace(endpoint, call=self._counted(endpoint)), feed
                yield ("ready",)
            plan, shards, endpoint, feed = self._opened
            yield from self._with_life(_score_shard(self._folder, plan, shards.find(number), endpoint, feed))
        except OSError as error:  # of the folder for temporary files
            what = f"{error.filename or tempfile.gettempdir()} cannot be written: {error.strerror or error}."
            yield "error", "SetupError", what, "Make room there, or name another folder in TMPDIR."
        except ShoalError as error:
            kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in ERRORS)
            yield "error", kind, error.what, error.fix

    def close(self) -> None:
        """Close the model."""
        self._held.close()

    def _counted(self, endpoint: Endpoint) -> Ask:
        def call(inputs: Mapping[str, Any]) -> Mapping[str, Array]:
            answers = endpoint.call(inputs)
            self._answers += 1
            return answers

        return call

    def _with_life(self, messages: Iterator[Message]) -> Iterator[Message]:
        """Yield messages, and while the next one is far, each second in which a request was answered."""
        with ThreadPoolExecutor(1, thread_name_prefix="shoal-shard") as pool:
            while True:
                coming, answers = pool.submit(next, messages, None), self._answers
                while not wait([coming], _ALIVE_SECONDS).done:
                    if self._answers > answers:
                        answers = self._answers
                        yield ("alive",)
                message = coming.result()
                if message is None:
                    return
                yield message


def _score_shard(folder: Folder, plan: ShardPlan, shard: Shard, endpoint: Endpoint, feed: Feed) -> Iterator[Message]:
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
        record = ShardRecord(plan.digest(), plan.file(shard.number), done, failed, sha256(output), hashed.hexdigest())
        if read_plan(folder) != plan:
            raise SetupError(f"The plan of {folder} was replaced while this run was at work.", "Run the command again.")
        if not folder.put(record.file, output):
            record = _read_back(folder, record)
    put_exactly(folder, record_name(shard.number), msgspec.json.encode(record))
    yield "done", record.rows, record.errors


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file


def _read_back(folder: Folder, record: ShardRecord) -> ShardRecord:
    """Return the record of an output that is there already. A server's answers may differ in their last bits."""
    with folder.local(record.file) as path:
        digest = sha256(path)
        if digest == record.sha256:
            return record
        with scan_table(path) as table:
            rows = [isinstance(row, dict) and bool(row.get(ERROR)) for _, row in table.rows]
    if len(rows) != record.rows:
        raise ArtifactError(
            f"{record.file} of {folder} has {len(rows)} rows, not {record.rows}.",
            "Remove it, and run the same command again.",
        )
    return msgspec.structs.replace(record, sha256=digest, errors=sum(rows))
