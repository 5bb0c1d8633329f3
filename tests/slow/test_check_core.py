"""Triton refuses what `shoal check` marks as core's, in the words that it gives."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Scale
from tests.support.explicit import Explicit, explicit
from tests.support.planted import Plant
from tests.support.plants import PLANTS

pytestmark = pytest.mark.verify


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Explicit]:
    repository = tmp_path_factory.mktemp("planted") / "repository"
    repository.mkdir()
    with explicit(repository) as server:
        yield server


REFUSED = [plant for plant in PLANTS if plant.core]
KINDS = {words: [plant for plant in REFUSED if plant.core == words] for words in dict.fromkeys(p.core for p in REFUSED)}


@pytest.mark.parametrize("plants", KINDS.values(), ids=lambda plants: plants[0].name)
def test_core_refuses_it_too_in_these_words(
    plants: list[Plant], triton: Explicit, tmp_path: Path, scale: Scale
) -> None:
    """A Triton that has unpacked an environment is in there from then on: it is one of its own."""
    for number, plant in enumerate(plants[: scale(1, full=len(plants))]):
        bad = plant.write(tmp_path / str(number), is_bad=True)
        if plant.has_environment:
            with explicit(bad) as server:
                assert re.search(plant.core, server.load("first"))
        else:
            triton.refill(bad)
            assert re.search(plant.core, triton.load(plant.model))
            triton.unload(plant.model)


def test_core_loads_their_corrected_twins(triton: Explicit, tmp_path: Path, scale: Scale) -> None:
    """But for environments, which hold no Python here: theirs is the base, which is among them."""
    twins = {str(plant.good): plant for plant in REFUSED if not plant.has_environment}
    of_rules = {plant.rule: plant for plant in reversed(twins.values())}
    for number, plant in enumerate((twins if scale.is_full else of_rules).values()):
        good = plant.write(tmp_path / str(number), is_bad=False)
        if not (good / plant.model).is_dir():
            continue  # the mistake is a folder too many
        triton.refill(good)
        assert triton.load(plant.model) == "", plant.name
        triton.unload(plant.model)
