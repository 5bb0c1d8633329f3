"""One server for the whole tier, with every model that its tests ask. One worker owns it; see tests/conftest.py."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.serving.server.launch import Server, serve
from tests.served.chain import compose_chain
from tests.served.imported import IMPORTED, make_project
from tests.support.counts import write_counts
from tests.support.imports import make_repository
from tests.support.ways import write_models


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Leaves of imported models, one of each kind."""
    return make_project(tmp_path_factory.mktemp("imported"))


@pytest.fixture(scope="session")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with one pipeline of all pieces."""
    return compose_chain(tmp_path_factory.mktemp("chain"))


@pytest.fixture(scope="session")
def zoo(repository: Path, project: Path, chain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The readability pipeline; all pieces; imported models; and odd ones."""
    folder = tmp_path_factory.mktemp("zoo") / "repository"
    shutil.copytree(repository, folder)
    for path in chain.iterdir():
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
    imported = make_repository(project, IMPORTED, folder.parent / "imported")
    for path in imported.iterdir():
        shutil.move(path, folder / path.name)
    write_models(folder)
    write_counts(folder)
    return folder


@pytest.fixture(scope="session")
def server(zoo: Path) -> Iterator[Server]:
    with serve(zoo) as running:
        yield running
