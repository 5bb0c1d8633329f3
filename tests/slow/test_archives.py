"""Archives of a stranger, many of them; tests/unit/test_hostile_archives.py has a sample."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings

from tests.support.hostile_archives import ARCHIVES, check_unpacking


def test_archives_of_a_stranger() -> None:
    outcomes = Counter[str]()

    @settings(max_examples=2000)
    @given(ARCHIVES)
    def check(items: list[bytes]) -> None:
        with TemporaryDirectory() as folder:
            outcomes[check_unpacking(Path(folder), items)] += 1

    check()
    assert outcomes.total() >= 2000
    assert min(outcomes[""], outcomes["ArtifactError"]) > 60, outcomes
