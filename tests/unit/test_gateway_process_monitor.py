"""Processes that ended, hang or take too much memory, found in a fake /proc with a fake clock."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping

import pytest

from shoal.serving.gateway.control.process_monitor import (
    BATCH_SECONDS,
    HANG_SECONDS,
    MOST_STARVED,
    PERIOD,
    STUCK_SECONDS,
    ProcessFault,
    ProcessMonitor,
)  # fmt: skip
from shoal.system.processes import Thread, find_threads
from tests.support.fake_processes import EXITED, KILLED, MIB, SERVER, FakeProcesses
from tests.support.fake_upstream import FakeServer

A, A2, B, SILENT = 101, 102, 103, 104  # processes of the models a, a, b and silent, which has no heartbeat


class Bench:
    """A monitor of a server with the models ``a`` (two instances), ``b`` and ``silent``, and the ensemble ``both``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, memory_mib: float = 0.0) -> None:
        self.now = 1000.0
        self.processes = FakeProcesses(monkeypatch)
        for pid, model in ((A, "a"), (A2, "a"), (B, "b")):
            self.processes.add(pid, model)
        self.processes.add(SILENT, "silent", beacon=False)
        self.processes.add(105, "other", group=7)  # of another server
        self.processes.add(106, "other", parent=A)
        self.processes.add(107)  # not a stub
        self.waiting: dict[str, float] = {}
        self.answered: float | None = None  # always just now
        self.monitor = ProcessMonitor(
            FakeServer(SERVER),  # type: ignore[arg-type]
            expected={"a": 2, "b": 1},
            members={"both": {"a", "b"}, "part": {"a", "onnx"}},
            hang_seconds={"b": 60.0},
            memory_mib=memory_mib,
            clock=lambda: self.now,
        )

    def look(self, seconds: float = 0.0, **busy: float) -> list[ProcessFault]:
        """Check for some seconds, until a fault; ``busy`` is the processor time per second, as in ``p101=1.0``."""
        end = self.now + seconds
        while True:
            if (found := self.check()) or self.now >= end:
                return found
            self.advance(**busy)

    def check(self) -> list[ProcessFault]:
        """Check once."""
        return self.monitor.check(self.waiting, self.now if self.answered is None else self.answered)

    def advance(self, **busy: float) -> None:
        """Let the time between two checks pass."""
        self.now += PERIOD
        for name, share in busy.items():
            pid = int(name.removeprefix("p"))
            self.processes.set(pid, seconds=self.processes.all[pid].seconds + share * PERIOD)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_idle_processes_are_well(bench: Bench) -> None:
    assert [stub.model for stub in bench.monitor.stubs] == ["a", "a", "b", "silent"]
    bench.processes.children[A] = [107]
    assert bench.look(600) == []
    assert bench.monitor.resident_bytes == 6 * 10 * MIB
    assert all(len(stub.samples) < 400 for stub in bench.monitor.stubs)
    assert bench.monitor.has_processes("a")
    assert not bench.monitor.has_processes("both")


@pytest.mark.parametrize(
    ("state", "exit_code", "what"),
    [("", 0, ""), ("Z", KILLED, ", killed by SIGKILL"), ("X", EXITED, ", with exit code 3")],
)
@pytest.mark.parametrize(("pid", "model", "words"), [(SERVER, "", "Triton ended"), (B, "b", "a process of b ended")])
def test_a_process_that_ended(
    bench: Bench, pid: int, model: str, words: str, state: str, exit_code: int, what: str
) -> None:
    assert bench.look(1) == []
    if state:
        bench.processes.set(pid, state=state, exit_code=exit_code)
    else:
        del bench.processes.all[pid]
    assert bench.look() == [ProcessFault(model, "died" if model else "server", words + what)]


def test_a_process_id_that_another_process_has_now(bench: Bench) -> None:
    bench.processes.set(B, group=7)
    assert [fault.kind for fault in bench.look()] == ["died"]
    bench.monitor.kill("b")
    assert bench.processes.killed == []


def test_a_process_that_ended_before_the_first_check(bench: Bench) -> None:
    bench.monitor.stubs = [stub for stub in bench.monitor.stubs if stub.pid != A2]
    assert bench.look() == [ProcessFault("a", "died", "a process of a ended")]


@pytest.mark.parametrize(("share", "hangs"), [(0.0, True), (0.01, True), (0.5, False)])
def test_busy_without_processor_time(bench: Bench, share: float, hangs: bool) -> None:
    bench.look(3)
    bench.processes.beacons[A] = bench.now
    assert bench.look(HANG_SECONDS - 0.3, p101=share) == []
    assert [fault.what for fault in bench.look(3, p101=share)] == (["a process of a hangs"] if hangs else [])


class Threads:
    """A process's threads: ``main``, which sleeps, a ``worker``, and one that runs every 0.3 s, as a stub's do."""

    def __init__(self, bench: Bench, pid: int) -> None:
        self._bench, self._pid = bench, pid
        self._run, self._waited = Counter[str](), Counter[str]()

    def look(self, seconds: float, *, state: str = "S", run: float = 0.0, wait: float = 0.0) -> list[ProcessFault]:
        """Check for some seconds. ``run`` and ``wait`` are what the threads have of each second."""
        for _ in range(round(seconds / PERIOD)):
            self._run["worker"] += round(run * PERIOD * 1e9)
            self._waited["beat"] += round(wait * PERIOD * 1e9)
            states = {"main": "S", "worker": state, "beat": "S"}
            found = [Thread(states[name], 1 + self._run[name], self._waited[name]) for name in states]
            self._bench.processes.threads[self._pid] = dict(enumerate(found))
            self._bench.advance(**{f"p{self._pid}": run})
            if faults := self._bench.check():
                return faults
        return []


def test_a_process_that_gets_no_processor_time_does_not_hang(bench: Bench) -> None:
    """As on a machine with thirty busy processes: its main thread sleeps and waits for a worker, which waits to run."""
    threads = Threads(bench, A)
    bench.look(5)
    bench.processes.beacons[A] = bench.now
    assert threads.look(3 * BATCH_SECONDS, state="R") == []
    assert all(len(stub.samples) < 400 for stub in bench.monitor.stubs)
    assert threads.look(2, state="R", run=1.0) == []
    assert threads.look(60, wait=1.0) == []
    assert [fault.what for fault in threads.look(2)] == ["a process of a hangs"], "it does nothing, and could"


@pytest.mark.parametrize(("wait", "seconds"), [(0.0, HANG_SECONDS), (0.5, 2 * HANG_SECONDS), (0.9, 10 * HANG_SECONDS)])
def test_a_hang_on_a_busy_machine_is_found_later(bench: Bench, wait: float, seconds: float) -> None:
    bench.look(30)
    start = bench.processes.beacons[A] = bench.now
    assert Threads(bench, A).look(100, wait=wait)
    assert bench.now - start == pytest.approx(seconds, rel=0.15, abs=2 * PERIOD)


def test_a_batch_that_never_gets_processor_time_ends_at_last(bench: Bench) -> None:
    start = bench.processes.beacons[A] = bench.now
    found = Threads(bench, A).look(20 * BATCH_SECONDS, state="R")
    assert [fault.what for fault in found] == [f"a process of a has been at one batch for {bench.now - start:.0f} s"]
    assert bench.now - start == pytest.approx(MOST_STARVED * BATCH_SECONDS, rel=0.01)


def test_a_thread_that_waits_for_a_device_is_no_excuse(bench: Bench) -> None:
    threads = Threads(bench, A)
    bench.look(5)
    bench.processes.beacons[A] = bench.now
    assert [fault.what for fault in threads.look(10, state="D")] == ["a process of a hangs"]


def test_a_batch_is_judged_by_the_time_that_it_could_use(bench: Bench) -> None:
    start = bench.processes.beacons[A] = bench.now
    assert [fault.kind for fault in Threads(bench, A).look(5000, state="R", run=0.25, wait=0.75)] == ["hangs"]
    assert bench.now - start == pytest.approx(4 * BATCH_SECONDS, rel=0.01)


@pytest.mark.parametrize("pid", [SERVER, SILENT])
def test_a_canary_that_waits_for_a_processor(bench: Bench, pid: int) -> None:
    threads = Threads(bench, pid)
    bench.look(5)
    bench.waiting = {"silent": bench.now}
    assert threads.look(60, state="R") == []
    assert [fault.what for fault in threads.look(3)] == ["a process of silent hangs"]


def test_a_triton_that_gets_no_processor_time_does_not_hang(bench: Bench) -> None:
    threads = Threads(bench, SERVER)
    bench.look(20)
    bench.waiting, bench.answered = {"a": bench.now, "part": bench.now}, bench.now
    assert threads.look(60, state="R") == []
    assert bench.monitor.may_be_late("part", 60.0), "its canary may be late"
    assert not bench.monitor.may_be_late("both", 60.0)
    assert bench.monitor.may_be_late("a", 60.0)
    assert [fault.what for fault in threads.look(STUCK_SECONDS + 1)] == ["Triton hangs with a request to a"]


def test_a_model_is_not_excused_by_another_one_that_gets_no_processor_time(bench: Bench) -> None:
    threads = Threads(bench, A)
    bench.look(5)
    bench.waiting = {"onnx": bench.now}
    assert threads.look(60, state="R") == []
    assert not bench.monitor.may_be_late("onnx", 60.0)


def test_threads_are_read_only_while_something_takes_long(bench: Bench) -> None:
    for _ in range(100):
        bench.processes.beacons[A] = bench.now  # another batch
        bench.advance()
        assert bench.check() == []
    assert bench.processes.num_read == 0


def test_the_threads_of_this_process() -> None:
    before = find_threads(os.getpid())[os.getpid()]
    assert (before.state, before.run_ns > 0) == ("R", True)
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    after = find_threads(os.getpid())[os.getpid()]
    assert after.run_ns - before.run_ns > 5e7
    assert after.find_wait(before, 1.0) == (after.waited_ns - before.waited_ns) / 1e9
    assert after.find_wait(after, 1.0) == after.find_wait(None, 1.0) == 1.0, "it is to run, and has not run since"
    assert Thread("S", 5, 7).find_wait(None, 1.0) == Thread("R", 0, 0).find_wait(None, 1.0) == 0.0
    assert find_threads(2**22 + 1) == {}


@pytest.mark.parametrize("state", ["R", "D"])
def test_a_process_that_waits_for_a_processor_or_a_disk_does_not_hang(bench: Bench, state: str) -> None:
    bench.processes.beacons[A] = bench.now
    bench.processes.set(A, state=state)
    assert bench.look(30) == []


def test_a_model_may_wait_longer(bench: Bench) -> None:
    bench.processes.beacons[B] = bench.now
    assert bench.look(59) == []
    assert [fault.model for fault in bench.look(2)] == ["b"]


def test_a_batch_that_never_ends(bench: Bench) -> None:
    start = bench.processes.beacons[A] = bench.now
    assert [fault.what for fault in bench.look(400, p101=1.0)] == ["a process of a has been at one batch for 300 s"]
    assert bench.now - start == pytest.approx(BATCH_SECONDS, abs=2 * PERIOD)


def test_a_short_batch_after_long_idleness(bench: Bench) -> None:
    bench.look(30)
    bench.processes.beacons[A] = bench.now - 1.0
    assert bench.look() == []


@pytest.mark.parametrize("pid", [A, SILENT])
@pytest.mark.parametrize("state", ["T", "t"])
def test_a_stopped_process(bench: Bench, pid: int, state: str) -> None:
    bench.look(10)
    bench.processes.set(pid, state=state)
    assert bench.look(HANG_SECONDS - 0.3) == []
    assert [fault.kind for fault in bench.look(1)] == ["hangs"]


@pytest.mark.parametrize(
    ("is_late", "is_used", "hangs"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_without_a_heartbeat_a_late_canary_counts(bench: Bench, is_late: bool, is_used: bool, hangs: bool) -> None:
    bench.processes.add(108, "silent", beacon=False)  # a second instance, which may have the request
    bench.monitor.stubs.append(type(bench.monitor.stubs[0])(108, "silent"))
    bench.look(10)
    bench.waiting = {"silent": bench.now} if is_late else {}
    start = bench.now
    found = bench.look(10, **({"p108": 1.0} if is_used else {}))
    assert [fault.what for fault in found[:1]] == (["a process of silent hangs"] if hangs else [])
    assert not hangs or bench.now - start == pytest.approx(HANG_SECONDS, abs=2 * PERIOD)


@pytest.mark.parametrize("memory_mib", [0.0, 25.0, 35.0])
def test_memory_of_a_process_and_its_children(monkeypatch: pytest.MonkeyPatch, memory_mib: float) -> None:
    bench = Bench(monkeypatch, memory_mib)
    bench.processes.children[A] = [107]
    bench.processes.set(A, resident_bytes=20 * MIB)
    what = "a process of a takes 30 MiB, more than 25"
    assert bench.look() == ([ProcessFault("a", "memory", what)] if memory_mib == 25 else [])


def test_a_stopped_triton(bench: Bench) -> None:
    bench.processes.set(SERVER, state="T")
    start = bench.now
    assert bench.look(HANG_SECONDS - 0.3) == []
    assert bench.look(1) == [ProcessFault("", "server", "Triton hangs")]
    assert bench.now - start == pytest.approx(HANG_SECONDS, abs=2 * PERIOD)


@pytest.mark.parametrize(
    ("waiting", "busy", "answered", "hangs"),
    [
        ("a", 0, 0.0, True),
        ("both", 0, 0.0, True),
        ("both", B, 0.0, False),  # the request is at a step
        ("a", B, 0.0, True),  # another model is busy
        ("a", A, 0.0, False),
        ("part", 0, 0.0, False),  # a step runs without a process
        ("silent", 0, 0.0, False),
        ("onnx", 0, 0.0, False),
        ("a", 0, 3.0, False),  # other requests are answered meanwhile
    ],
)  # fmt: skip
def test_a_request_that_reaches_no_process(bench: Bench, waiting: str, busy: int, answered: float, hangs: bool) -> None:
    bench.look(20)
    bench.processes.set(SILENT, state="R")
    start = bench.now
    bench.waiting, bench.answered = {waiting: start - 100}, start + answered  # long before: since the last ``forget``
    bench.monitor.forget()
    share: Mapping[str, float] = {}
    if busy:
        bench.processes.beacons[busy], share = start, {f"p{busy}": 1.0}
    assert bench.look(STUCK_SECONDS - 0.3, **share) == []
    found = bench.look(1, **share)
    assert [fault.what for fault in found] == ([f"Triton hangs with a request to {waiting}"] if hangs else [])


def test_time_without_checks_proves_nothing(bench: Bench) -> None:
    bench.look(5)
    bench.processes.beacons[A] = bench.now
    bench.processes.set(SERVER, state="T")
    bench.now += 400
    bench.monitor.forget()
    assert bench.look(1.0) == []
    bench.processes.set(SERVER, state="S")
    assert [fault.model for fault in bench.look(2)] == ["a"]


def test_killing_a_model(bench: Bench) -> None:
    bench.processes.children[A] = [107]
    bench.look()
    bench.processes.set(A2, state="Z", exit_code=KILLED)
    bench.monitor.kill("a")
    assert bench.processes.killed == [A, 107, A2]
