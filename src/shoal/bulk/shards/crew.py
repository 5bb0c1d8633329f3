"""Worker processes of a sharded run, and the choice of their shards. A run needs no leader and no lock.

Each run marks a shard when it begins it. With several runs over one plan (``--worker I/N``), each begins with its own
shards, goes on with those of others that are not begun, and ends with its own that another one began and has not
finished. So each shard is done even if other runs die; one that is done twice has the same bytes.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import msgspec

from shoal.bulk.shards.folders import Folder
from shoal.bulk.shards.plan import RECORDS, SUCCESS, Plan, ShardReader, read_plan
from shoal.bulk.shards.work import Job, Success, read_records, score_shard
from shoal.errors import ArtifactError, InputError, ServerError, SetupError, ShoalError

TRIES = 3
HUNG_SECONDS = 1800.0  # without an answered window of 256 rows
_LOOK_SECONDS = 0.5
_ERRORS = {kind.__name__: kind for kind in (ArtifactError, InputError, ServerError, SetupError, ShoalError)}
_STATE = re.compile(rf"{RECORDS}/(\d+)\.(json|failed|begun-(\d+))")

OnRows = Callable[[int], None]  # rows that this run has answered


class State(NamedTuple):
    """Shards that have a record; by shard, the runs that began it; shards that failed in a run."""

    done: set[int]
    begun: dict[int, set[int]]
    failed: set[int]


def read_state(folder: Folder) -> State:
    """Read which shards are done, begun and failed, from the names of the files in the folder of the records."""
    state = State(set(), {}, set())
    for entry in folder.entries(RECORDS):
        found = _STATE.fullmatch(entry.name)
        if found is None:
            continue  # not of a run: `--verify` names it
        number, kind = int(found[1]), found[2]
        if kind == "json":
            state.done.add(number)
        elif kind == "failed":
            state.failed.add(number)
        else:
            state.begun.setdefault(number, set()).add(int(found[3]))
    return state


class Outcome(NamedTuple):
    """End of a run: rows and errors of its shards, why shards failed, and the number that others have to finish."""

    rows: int
    errors: int
    failed: dict[int, str]
    missing: int


class Crew:
    """Workers of one run: ``processes`` of them, for the shards ``index`` of ``count``.

    With ``has_own_cores``, the machine's cores are divided among the processes; without, all use all of them.
    """

    def __init__(
        self, folder: Folder, job: Job, *, processes: int, index: int = 0, count: int = 1, has_own_cores: bool = True,
        hung_seconds: float = HUNG_SECONDS,
    ) -> None:  # fmt: skip
        self._folder, self._plan, self._job = folder, read_plan(folder), job
        self._index, self._count, self._hung = index, count, hung_seconds
        self._tries: Counter[int] = Counter()
        self._failed: dict[int, str] = {}
        self._rows = self._errors = 0
        available = sorted(os.sched_getaffinity(0))
        shares = [available[at::processes] if has_own_cores else [] for at in range(processes)]
        self._workers = [_Worker(folder, job, share or available) for share in shares]

    def run(self, on_rows: OnRows) -> Outcome:
        """Score all shards that this run can do.

        Raises:
            ServerError: the server went away, three times in one shard.
            SetupError: the folder cannot be written; or the workers die while they load the model.
        """
        for number in read_state(self._folder).failed:  # an earlier run's: tried again
            if number % self._count == self._index:
                self._folder.remove(f"{RECORDS}/{number:05}.failed")
        try:
            while True:
                self._assign()
                busy = [worker for worker in self._workers if worker.shard is not None]
                if not busy:
                    break
                wait([worker.pipe for worker in busy], _LOOK_SECONDS)
                for worker in busy:
                    self._hear(worker)
                on_rows(self._rows + sum(worker.rows for worker in self._workers))
        finally:
            for worker in self._workers:
                worker.end()
        missing = self._plan.shards - len(read_state(self._folder).done)
        if not missing:
            finish(self._folder, self._plan)
        return Outcome(self._rows, self._errors, self._failed, missing - len(self._failed))

    def _assign(self) -> None:
        idle = [worker for worker in self._workers if worker.shard is None]
        choices = self._choose() if idle else iter(())
        for worker, number in zip(idle, choices, strict=False):
            self._folder.put(f"{RECORDS}/{number:05}.begun-{self._index}", b"")
            worker.begin(number)

    def _choose(self) -> Iterator[int]:
        """Yield the shards to begin, in this order; those that failed once come last."""
        state, working = read_state(self._folder), {worker.shard for worker in self._workers}
        left = [
            number
            for number in range(self._plan.shards)
            if not (number in state.done or number in working or number in self._failed)
        ]
        turns: dict[int, list[int]] = {}
        for number in left:
            is_own, is_begun = number % self._count == self._index, bool(state.begun.get(number, set()) - {self._index})
            if is_own or not (is_begun or number in state.failed or self._tries[number]):
                turns.setdefault((2 if is_begun or self._tries[number] else 0) if is_own else 1, []).append(number)
        for turn in sorted(turns):
            yield from sorted(turns[turn], key=lambda number: self._tries[number])

    def _hear(self, worker: _Worker) -> None:
        """Read a worker's messages, or notice that it died or hangs."""
        number = worker.shard
        assert number is not None
        message = worker.receive(self._hung)
        if message is None:
            return
        kind, *content = message
        if kind == "done":
            rows, errors = content
            self._rows, self._errors = self._rows + rows, self._errors + errors
        elif kind == "died":
            self._fail(number, SetupError(content[0]), may_end=not worker.is_ready)
            worker.restart()
        else:
            error = _ERRORS[content[0]](*content[1:])
            if not worker.is_ready:  # the model does not load, or refuses the test request
                raise error
            self._fail(number, error, may_end=not isinstance(error, ArtifactError))
        worker.shard, worker.rows = None, 0

    def _fail(self, number: int, error: ShoalError, *, may_end: bool) -> None:
        """Count a failure of a shard. The third one ends the run if other shards would fail in the same way."""
        self._tries[number] += 1
        if self._tries[number] < TRIES:
            return
        if may_end:
            raise error
        self._failed[number] = str(error)
        content = msgspec.json.encode({"error": str(error), "tries": self._tries[number]})
        self._folder.put(f"{RECORDS}/{number:05}.failed", content)


def finish(folder: Folder, plan: Plan) -> None:
    """Write ``_SUCCESS.json`` from the records of all shards, and remove what only a run needs."""
    records = read_records(folder, range(plan.shards))
    rows, errors = (sum(getattr(record, name) for record in records) for name in ("rows", "errors"))
    folder.put(SUCCESS, msgspec.json.encode(Success(rows, errors, records)))
    for entry in [*folder.entries(RECORDS)]:
        if not entry.name.endswith(".json"):
            folder.remove(entry.name)
    folder.sweep()


# --- processes ------------------------------------------------------------------------------------------------------


class _Worker:
    """Process that scores one shard at a time; started when it gets its first one."""

    def __init__(self, folder: Folder, job: Job, cores: list[int]) -> None:
        self._folder, self._job, self._cores = folder, job, cores
        self._process: BaseProcess | None = None
        self.pipe: Connection
        self.shard: int | None = None
        self.rows = 0
        self.is_ready = False
        self._place = ""
        self._heard = 0.0

    def begin(self, number: int) -> None:
        """Let the process score a shard."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, theirs = context.Pipe()
            self._process = context.Process(
                target=_work, args=(theirs, self._folder, self._job, self._cores), name="shoal-worker", daemon=True
            )
            self._process.start()
            theirs.close()
            self.is_ready = False
        self.shard, self.rows, self._place, self._heard = number, 0, "", time.monotonic()
        with suppress(OSError):  # it died: `receive` says so
            self.pipe.send(number)

    def receive(self, hung_seconds: float) -> Any:
        """Return the message that ends the shard, ``("died", why)`` if the process is gone, else None."""
        assert self._process is not None
        try:
            while self.pipe.poll():
                message = self.pipe.recv()
                self._heard = time.monotonic()
                if message[0] == "ready":
                    self.is_ready = True
                elif message[0] == "rows":
                    self.rows, self._place = message[1:]
                else:
                    return message
        except (EOFError, OSError):
            self._process.join(10)
            code = self._process.exitcode or 0
            how = f"signal {-code}, {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return "died", f"The worker died ({how}){self._tell()}."
        if time.monotonic() - self._heard > hung_seconds:
            return "died", f"The worker answered no rows for {hung_seconds:.0f} seconds{self._tell()}."
        return None

    def _tell(self) -> str:
        if not self.is_ready:
            return " while it loaded the model"
        return f" after {self.rows:,} rows of part {self.shard}, the last being {self._place or 'none'}"

    def restart(self) -> None:
        """End the process; the next shard gets a new one."""
        self.end()
        self._process = None

    def end(self) -> None:
        """End the process, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self.pipe.close()


def _work(pipe: Connection, folder: Folder, job: Job, cores: list[int]) -> None:
    """Run a worker process: score the shards whose numbers come through ``pipe``, until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.sched_setaffinity(0, cores)  # before a library counts them
    try:
        plan, shards = read_plan(folder), ShardReader(folder)
        with job.open(plan) as (endpoint, feed):
            pipe.send(("ready",))
            while True:
                number = pipe.recv()
                with _told(pipe):
                    shard = shards.find(number)
                    record = score_shard(
                        folder, plan, shard, endpoint, feed, lambda rows, place: pipe.send(("rows", rows, place))
                    )
                    pipe.send(("done", record.rows, record.errors))
    except EOFError:
        return
    except ShoalError as error:  # the model does not load
        pipe.recv()
        _send(pipe, error)


@contextmanager
def _told(pipe: Connection) -> Iterator[None]:
    try:
        yield
    except ShoalError as error:
        _send(pipe, error)


def _send(pipe: Connection, error: ShoalError) -> None:
    """Send an error as its words, with the nearest class that the parent knows: errors cannot be pickled."""
    kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _ERRORS)
    pipe.send(("error", kind, error.what, error.fix))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
