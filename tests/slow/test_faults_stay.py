"""A fault of one model of ``shoal serve`` stays there: the other models answer every request, on a busy machine too."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.conftest import Scale
from tests.support.planted import write
from tests.support.service import Callers, Service, are_gone, make_repository, wait_until

BYSTANDERS = {"first": "other", "other": "chain", "triton": ""}  # a model that does not need the killed process
NUM_BUSY = 6


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    make_repository(folder)
    return folder


@pytest.fixture(scope="module")
def service(home: Path) -> Iterator[Service]:
    with Service(home / "repository", home / "log", "--max-restarts", 1000) as running:
        yield running


def find_victim(service: Service, kind: str) -> int:
    """Process id of Triton, or of a model's process."""
    if kind == "triton":
        return service.servers()[0].pid
    return next(stub.pid for stub in service.stubs() if f"{kind}_0_0" in stub.arguments())


@contextmanager
def failing_start(service: Service, told: Path, *, is_killed: bool) -> Iterator[None]:
    """Let the next server fail to start: a model refuses, or Triton is killed while it loads its models."""
    before = {server.pid for server in service.servers()}
    number = count_failed(service)
    if not is_killed:
        write(told, "refuse")
    yield
    if is_killed:
        assert wait_until(lambda: bool({server.pid for server in service.servers()} - before), 30)
        time.sleep(random.uniform(0, 0.2))  # it loads its models for about half a second
        for server in service.servers():
            if server.pid not in before:
                os.kill(server.pid, signal.SIGKILL)
    assert wait_until(lambda: count_failed(service) > number, 30)
    told.unlink(missing_ok=True)


def count_failed(service: Service) -> int:
    return service.log.read_text(encoding="utf-8").count("The next server did not start")


@pytest.mark.parametrize("kind", BYSTANDERS)
def test_killed_processes(service: Service, home: Path, scale: Scale, record: Callable[..., None], kind: str) -> None:
    num_kills, regions, bystander = scale(3, full=40), len(service.regions()), BYSTANDERS[kind]
    failing = {number * num_kills // scale(1, full=10): number % 2 for number in range(scale(1, full=10))}
    known, seen = ("unavailable", "ended while it had this request"), set[int]()
    with ExitStack() as stack:
        callers = stack.enter_context(Callers(service, 4, "chain" if kind != "other" else "other"))
        others = stack.enter_context(Callers(service, 4, bystander)) if bystander else None
        for number in range(num_kills):
            time.sleep(random.uniform(0.3, 1))
            seen |= {each.pid for each in (*service.servers(), *service.stubs())}
            with ExitStack() as failure:
                if number in failing:
                    failure.enter_context(failing_start(service, home / "second", is_killed=bool(failing[number])))
                os.kill(find_victim(service, kind), signal.SIGKILL)
                service.wait(is_ready=False, seconds=5)
            service.wait(is_ready=True, seconds=60)
    assert count_failed(service) >= len(failing)
    assert callers.num_answers > 10 * num_kills
    assert not [each for each in callers.failures if not any(words in each.lower() for words in known)]
    assert others is None or not others.failures, others.failures[:5]
    assert wait_until(lambda: len(service.servers()) == 1 and len(service.stubs()) == 3, 40)
    assert wait_until(lambda: len(service.regions()) == regions)
    left = {each.pid for each in (*service.servers(), *service.stubs())}
    assert wait_until(lambda: are_gone([*(seen - left)]))
    record(
        f"a fault of one model stays there: {kind} killed",
        kills=num_kills,
        failed_starts=len(failing),
        answers=callers.num_answers,
        refusals=len(callers.failures),
        answers_of_others=others.num_answers if others else 0,
        failures_of_others=len(others.failures) if others else 0,
    )


def test_a_process_that_does_not_run_for_a_second(service: Service, scale: Scale) -> None:
    """Triton gives it up and, if it goes on, ends with boost::interprocess::lock_exception; so it is killed."""
    for _ in range(scale(2, full=10)):
        triton, victim = find_victim(service, "triton"), find_victim(service, "first")
        with Callers(service, 4, "first") as callers, Callers(service, 4, "other") as others:
            callers.wait_up()
            others.wait_up()
            os.kill(victim, signal.SIGSTOP)
            time.sleep(1.25)
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGCONT)
            service.wait(is_ready=True, seconds=30)
        assert not others.failures, others.failures[:5]
        assert wait_until(lambda: are_gone([triton]), 40)  # noqa: B023
    log = service.log.read_text(encoding="utf-8")
    assert "lock_exception" not in log
    assert "Triton ended, killed by SIGABRT" not in log


def test_a_busy_machine(service: Service, scale: Scale, record: Callable[..., None]) -> None:
    """Nothing is taken for a hang where all get little processor time."""
    restarts, seconds, before = service.metric("shoal_restarts_total"), scale(8, full=600), service.servers()
    with ExitStack() as stack:
        for _ in range(NUM_BUSY):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
            stack.callback(busy.wait)
            stack.callback(busy.kill)
        with Callers(service, 2) as callers:
            time.sleep(seconds)
        time.sleep(seconds / 10)  # without requests but for the canaries
    assert not callers.failures, callers.failures[:5]
    assert service.metric("shoal_restarts_total") == restarts
    assert [each.pid for each in service.servers()] == [each.pid for each in before]
    record(
        "a busy machine", busy_processes=NUM_BUSY, seconds=seconds, answers=callers.num_answers, failures=0, restarts=0
    )
