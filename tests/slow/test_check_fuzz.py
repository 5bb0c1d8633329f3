"""Whatever stands in a repository: findings, or a typed error; never a crash, and never slow."""

from __future__ import annotations

import multiprocessing
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from shoal.authoring.check.families import check
from shoal.authoring.check.findings import Finding
from shoal.errors import ShoalError
from tests.conftest import Scale
from tests.support.mutants import SMALL, mutate
from tests.support.planted import write

A_TIME = 50  # mutants of one seed: a draw of hypothesis costs as much as a check
MAX_SECONDS = 2.0


def test_half_a_million_mutants_give_findings_and_nothing_else(scale: Scale, record: Callable[..., None]) -> None:
    number, processes = scale(5_000, 500_000), scale(1, os.cpu_count() or 1)
    if processes == 1:
        done = [run(0, number)]
    else:
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
            done = list(pool.map(run, range(processes), [number // processes] * processes))
    kinds = sum((kinds for kinds, _ in done), Counter[str]())
    slowest = max(seconds for _, seconds in done)
    assert len(kinds) > 30, kinds  # they get past the first rule
    assert not scale.is_full or slowest < MAX_SECONDS  # elsewhere the machine may be busy
    record("check_mutants", number=number, slowest_seconds=round(slowest, 3), findings=dict(kinds.most_common()))


def run(number: int, num_mutants: int) -> tuple[Counter[str], float]:
    """Check mutants; the rules that they broke, and the seconds of the slowest."""
    kinds, slowest = Counter[str](), [0.0]

    @seed(number)
    @settings(
        max_examples=num_mutants // A_TIME, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(start=st.integers(0, 2**63))
    def search(start: int) -> None:
        chance = random.Random(start)
        for _ in range(A_TIME):
            changed = mutate(repository, chance)
            target = chance.choice([None, "embedded", "26.06"])
            begun = time.perf_counter()
            try:
                findings = check(repository, target=target)
            except ShoalError:
                kinds["refused"] += 1
            else:
                assert all(isinstance(finding, Finding) and finding.what and finding.fix for finding in findings)
                kinds.update(finding.rule.id for finding in findings)
                kinds["clean"] += not findings
                assert all(finding.place.line >= 0 for finding in findings)  # looked up only now
            slowest[0] = max(slowest[0], time.perf_counter() - begun)
            write(changed, SMALL[str(changed.relative_to(repository))])

    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a file for each mutant
    with tempfile.TemporaryDirectory(prefix="shoal-", dir=in_memory) as name:
        repository = Path(name)
        for file, content in SMALL.items():
            write(repository / file, content)
        assert check(repository) == []
        search()
    return kinds, slowest[0]
