"""Triton refuses what `shoal check` marks as core's, in the words that it gives."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.explicit import Explicit, explicit
from tests.support.planted import Plant
from tests.support.plants import PLANTS


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Explicit]:
    repository = tmp_path_factory.mktemp("planted") / "repository"
    repository.mkdir()
    with explicit(repository) as server:
        yield server


REFUSED = [plant for plant in PLANTS if plant.core]


@pytest.mark.parametrize(
    "plant", [plant for plant in REFUSED if not plant.has_environment], ids=lambda plant: plant.name
)
def test_core_refuses_it_too_in_these_words(plant: Plant, triton: Explicit, tmp_path: Path) -> None:
    triton.refill(plant.write(tmp_path / "bad", is_bad=True))
    assert re.search(plant.core, triton.load(plant.model))
    triton.unload(plant.model)


@pytest.mark.parametrize("plant", [plant for plant in REFUSED if plant.has_environment], ids=lambda plant: plant.name)
def test_core_refuses_an_environment_too(plant: Plant, tmp_path: Path) -> None:
    with explicit(plant.write(tmp_path / "bad", is_bad=True)) as server:
        assert re.search(plant.core, server.load("first"))


def test_core_loads_their_corrected_twins(triton: Explicit, tmp_path: Path) -> None:
    """But for environments, which hold no Python here: theirs is the base, which is among them."""
    loaded = set()
    for number, plant in enumerate(plant for plant in REFUSED if not plant.has_environment):
        twin = plant.write(tmp_path / str(number), is_bad=False)
        files = tuple((str(p.relative_to(twin)), p.read_bytes()) for p in sorted(twin.rglob("*")) if p.is_file())
        if files not in loaded:
            loaded.add(files)
            triton.refill(twin)
            assert triton.load(plant.model) == "", plant.name
            triton.unload(plant.model)
