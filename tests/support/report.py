"""Report at the end of a run: seconds per tier, starts of Triton, the slowest tests, and what tests left behind.

Every process that a test starts inherits pytest's variable PYTEST_CURRENT_TEST, so a process that outlives the run
names the test that started it. /dev/shm has no owners: each test's report names what appeared there while it ran, and
where two workers did so at once, both tests are named.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

RUN = "SHOAL_TEST_RUN"  # an environment variable that all processes of this run have
SERVER, REGION = "tritonserver", "shared memory"
SHARED_MEMORY = Path("/dev/shm")
OURS = re.compile(r"shoal|triton|pytrtion|psm_")  # names that shoal, Triton, PyTriton and Python give
LEFT_BEHIND = 6  # exit code; pytest's own end at 5
PAUSE, GRACE = 0.2, 10.0  # seconds between two looks, and until terminated processes have ended


class Report:
    """A plugin of the process that started the run; its workers have none."""

    def __init__(self) -> None:
        os.environ[RUN] = self._run = f"{os.getpid()}-{time.time_ns()}"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._starts: dict[tuple[str, str], str] = {}  # process and its start -> test
        self._known = set(_regions())
        self._appeared: defaultdict[str, list[str]] = defaultdict(list)  # region -> tests
        self._left: list[str] = []
        self._is_over = threading.Event()
        self._watch = threading.Thread(target=self._look_again_and_again, daemon=True)

    def pytest_sessionstart(self) -> None:
        self._watch.start()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        for kind, name in report.user_properties:
            if kind == REGION:
                self._appeared[str(name)].append(report.nodeid)

    @pytest.hookimpl(trylast=True)  # when the workers are gone
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        deadline = time.monotonic() + GRACE
        while (left := [*self._processes(), *self._new_regions()]) and time.monotonic() < deadline:
            time.sleep(PAUSE)
        self._is_over.set()
        self._left = left
        if left and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            session.exitstatus = LEFT_BEHIND

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        tiers: defaultdict[str, float] = defaultdict(float)
        counts: Counter[str] = Counter()
        for nodeid, seconds in self._seconds.items():
            tier = nodeid.partition("tests/")[2].partition("/")[0]
            tiers[tier] += seconds
            counts[tier] += 1
        terminalreporter.section("where the time went")
        for tier, seconds in sorted(tiers.items()):
            starts = sum(f"tests/{tier}/" in test for test in self._starts.values())
            terminalreporter.line(f"{tier:8}{counts[tier]:6} tests{seconds:8.0f} s of work{starts:5} starts of Triton")
        for nodeid, seconds in sorted(self._seconds.items(), key=lambda entry: -entry[1])[:10]:
            terminalreporter.line(f"{seconds:7.1f} s  {nodeid}")
        for line in self._left:
            terminalreporter.line(f"LEFT BEHIND: {line}", red=True)

    def _look_again_and_again(self) -> None:
        while not self._is_over.wait(PAUSE):
            for pid in _pids():
                with suppress(OSError):  # it has ended, or is another user's
                    if (Path("/proc") / pid / "comm").read_text().strip() == SERVER:
                        self._note_start(pid)

    def _note_start(self, pid: str) -> None:
        variables = _environment(pid)
        fields = (Path("/proc") / pid / "stat").read_text().rpartition(")")[2].split()
        parent, start = fields[1], fields[19]
        is_fork = (Path("/proc") / parent / "comm").read_text().strip() == SERVER  # of the server, before it is a stub
        is_ldd = "LD_TRACE_LOADED_OBJECTS" in variables  # which starts a program to list its libraries
        if variables.get(RUN) == self._run and not is_fork and not is_ldd:
            self._starts[pid, start] = variables.get("PYTEST_CURRENT_TEST", "")

    def _processes(self) -> Iterator[str]:
        """Processes of tests that still run."""
        for pid in _pids():
            with suppress(OSError):  # it has ended, or is another user's
                variables = _environment(pid)
                test = variables.get("PYTEST_CURRENT_TEST")
                command = (Path("/proc") / pid / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if variables.get(RUN) == self._run and test and command and "resource_tracker" not in command:
                    yield f"process {pid}, {command[:100].strip()}, started by {test}"

    def _new_regions(self) -> Iterator[str]:
        for name in sorted(_regions() - self._known):
            if (pid := re.match(r"shoal_(\d+)_", name)) and pid[1] != str(os.getpid()) and pid[1] in _pids():
                continue  # its server was started by a process of another run; those of this one are gone
            yield f"{SHARED_MEMORY / name}, made by {' or '.join(self._appeared[name]) or 'a fixture'}"


class Regions:
    """A plugin of every worker: notes in a test's report which shared memory appeared while it ran."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self) -> None:
        self._before = _regions()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "call":
            report.user_properties.extend((REGION, name) for name in sorted(_regions() - self._before))
        return report


def _pids() -> list[str]:
    return [path.name for path in Path("/proc").iterdir() if path.name.isdigit()]


def _environment(pid: str) -> dict[str, str]:
    content = (Path("/proc") / pid / "environ").read_bytes().decode(errors="replace")
    return dict(entry.split("=", 1) for entry in content.split("\0") if "=" in entry)


def _regions() -> set[str]:
    paths = SHARED_MEMORY.iterdir() if SHARED_MEMORY.is_dir() else ()
    return {path.name for path in paths if OURS.match(path.name)}
