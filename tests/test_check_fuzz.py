"""Whatever stands in a repository: findings, or a typed error; never a crash, and never slow."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from shoal.errors import ShoalError
from shoal.repository.check import Finding, check
from tests.conftest import Scale
from tests.mutants import SMALL, mutate
from tests.planted import write

A_TIME = 25  # mutants of one seed: a draw of hypothesis costs as much as a check
MAX_SECONDS = 2.0


def test_half_a_million_mutants_give_findings_and_nothing_else(
    tmp_path: Path, scale: Scale, record: Callable[..., None]
) -> None:
    repository = tmp_path / "repository"
    for name, content in SMALL.items():
        write(repository / name, content)
    assert check(repository) == []
    slowest, kinds = [0.0], Counter[str]()
    number = scale(10_000, 500_000)

    @settings(
        max_examples=number // A_TIME, deadline=None, derandomize=not scale.is_full, database=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(seed=st.integers(0, 2**63))
    def run(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(A_TIME):
            changed = mutate(repository, chance)
            target = chance.choice([None, "embedded", "26.06"])
            start = time.perf_counter()
            try:
                findings = check(repository, target=target)
            except ShoalError:
                kinds["refused"] += 1
            else:
                assert all(isinstance(finding, Finding) and finding.what and finding.fix for finding in findings)
                kinds.update(finding.rule.id for finding in findings)
                kinds["clean"] += not findings
            slowest[0] = max(slowest[0], time.perf_counter() - start)
            write(changed, SMALL[str(changed.relative_to(repository))])

    run()
    assert len(kinds) > 30, kinds  # they get past the first rule
    assert not scale.is_full or slowest[0] < MAX_SECONDS  # elsewhere the machine may be busy
    record("check_mutants", number=number, slowest_seconds=round(slowest[0], 3), findings=dict(kinds.most_common()))
