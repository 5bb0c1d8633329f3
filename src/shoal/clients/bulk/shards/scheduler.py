"""Workers of a sharded run, and the choice of their shards. A run needs no leader and no lock.

Each run marks a shard when it begins it. With several runs over one plan (``--worker I/N``), each begins with its own
shards, goes on with those of others that are not begun, and ends with its own that another one began and has not
finished. So each shard is done even if other runs die; one that is done twice has the same bytes.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

import msgspec

from shoal.clients.bulk.shards.folders import Folder
from shoal.clients.bulk.shards.plan import RECORDS, SUCCESS, ShardPlan, read_plan
from shoal.clients.bulk.shards.shard_task import ERRORS, Success, put_exactly, read_records
from shoal.clients.bulk.shards.workers import Worker
from shoal.errors import ArtifactError, SetupError, ShoalError

TRIES = 3
HUNG_SECONDS = 1800.0  # without an answered request
_LOOK_SECONDS = 0.5
_OUTPUT = re.compile(r"part-(\d+)\.")
_STATE = re.compile(rf"{RECORDS}/(\d+)\.(json|failed|begun-(\d+))")

OnRows = Callable[[int], None]  # rows that this run has answered


class State(NamedTuple):
    """Shards that have an output and a record; by shard, the runs that began it; shards that failed in a run."""

    done: set[int]
    begun: dict[int, set[int]]
    failed: set[int]


def read_state(folder: Folder) -> State:
    """Read which shards are done, begun and failed, from the names of the files in the folder of the records."""
    state, outputs = State(set(), {}, set()), set[int]()
    for entry in folder.entries():
        if output := _OUTPUT.match(entry.name):
            outputs.add(int(output[1]))
        found = _STATE.fullmatch(entry.name)
        if found is None:
            continue  # not of a run: `shoal shards verify` names it
        number, kind = int(found[1]), found[2]
        if kind == "json":
            state.done.add(number)
        elif kind == "failed":
            state.failed.add(number)
        else:
            state.begun.setdefault(number, set()).add(int(found[3]))
    state.done.intersection_update(outputs)  # a user may have removed an output
    return state


class Outcome(NamedTuple):
    """End of a run: rows and errors (of all shards if all are done, else of this run's), why shards failed, and the
    number of shards that others have to finish.
    """

    rows: int
    errors: int
    failed: dict[int, str]
    missing: int


class Scheduler:
    """Workers of one run, for the shards ``index``, ``index + count``, ... and those that others have not begun."""

    def __init__(
        self, folder: Folder, workers: Sequence[Worker], index: int = 0, count: int = 1, hung: float = HUNG_SECONDS
    ) -> None:
        self._folder, self._plan, self._workers = folder, read_plan(folder), workers
        self._index, self._count, self._hung = index, count, hung
        self._tries: Counter[int] = Counter()
        self._failed: dict[int, str] = {}
        self._rows = self._errors = 0

    def run(self, on_rows: OnRows) -> Outcome:
        """Score all shards that this run can do.

        Raises:
            ServerError: the server went away, three times in one shard.
            SetupError: the folder cannot be written; or the workers die while they load the model.
        """
        state = read_state(self._folder)
        if len(state.done) < self._plan.shards:  # it may be that of outputs that were removed
            self._folder.remove(SUCCESS)
        for number in state.failed:  # an earlier run's: tried again
            if number % self._count == self._index:
                self._folder.remove(f"{RECORDS}/{number:05}.failed")
        try:
            while busy := self._assign():
                busy[0].wait(busy, _LOOK_SECONDS)
                for worker in busy:
                    self._hear(worker)
                on_rows(self._rows + sum(worker.rows for worker in self._workers))
        finally:
            for worker in self._workers:
                worker.end()
        missing = self._plan.shards - len(read_state(self._folder).done)
        if not missing:
            success = finish(self._folder, self._plan)
            return Outcome(success.rows, success.errors, {}, 0)
        return Outcome(self._rows, self._errors, self._failed, missing - len(self._failed))

    def _assign(self) -> Sequence[Worker]:
        """Let idle workers begin shards, and return the busy workers; none when nothing is left to do.

        The shard of a worker that has not loaded its model, and may never (Ray waits for a machine), is given to an
        idle worker that has: one of them comes first, and both write the same bytes.
        """
        idle = [worker for worker in self._workers if worker.shard is None]
        loading = {worker.shard for worker in self._workers if not worker.is_ready}
        choices = deque(self._choose(loading) if idle else ())
        for worker in idle:
            number = next((n for n in choices if worker.is_ready or n not in loading), None)
            if number is not None:
                choices.remove(number)
                self._folder.put(f"{RECORDS}/{number:05}.begun-{self._index}", b"")
                worker.begin(number)
        busy = [worker for worker in self._workers if worker.shard is not None]
        is_done = not choices and any(worker.is_ready and worker.shard is None for worker in idle)
        return [] if is_done and not any(worker.is_ready for worker in busy) else busy

    def _choose(self, loading: Container[int | None]) -> list[int]:
        """Return the shards to begin, in this order: late are those that failed once, last those of loading workers."""
        state = read_state(self._folder)
        working = {worker.shard for worker in self._workers if worker.is_ready}
        turns: dict[int, list[int]] = {}
        for number in range(self._plan.shards):
            if number in state.done or number in working or number in self._failed:
                continue
            is_own, is_begun = number % self._count == self._index, bool(state.begun.get(number, set()) - {self._index})
            if is_own or not (is_begun or number in state.failed or self._tries[number]):
                late = is_begun or self._tries[number]
                turn = 3 if number in loading else 1 if not is_own else 2 if late else 0
                turns.setdefault(turn, []).append(number)
        return [n for turn in sorted(turns) for n in sorted(turns[turn], key=lambda number: self._tries[number])]

    def _hear(self, worker: Worker) -> None:
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
            error = ERRORS[content[0]](*content[1:])
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


def finish(folder: Folder, plan: ShardPlan) -> Success:
    """Write ``_SUCCESS.json`` from the records of all shards, and remove what only a run needs; return the totals."""
    records = read_records(folder, plan, range(plan.shards))
    rows, errors = (sum(getattr(record, name) for record in records) for name in ("rows", "errors"))
    success = Success(rows, errors, records)
    put_exactly(folder, SUCCESS, msgspec.json.encode(success))
    for entry in [*folder.entries(RECORDS)]:
        if not entry.name.endswith(".json"):
            folder.remove(entry.name)
    folder.sweep()
    return success
