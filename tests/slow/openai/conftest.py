"""One service for the tests of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.apis import make_repository
from tests.support.service import Service


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The language models with tiny weights, and four models of numbers."""
    return make_repository(tmp_path_factory.mktemp("openai"))


@pytest.fixture(scope="package")
def service(repository: Path) -> Iterator[Service]:
    """A service of these models, of which one has two names."""
    with Service(repository, repository.parent / "log", "--alias", "gpt-4o=llm_bls") as running:
        yield running
