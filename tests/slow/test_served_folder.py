"""A repository that is composed again, moved, deleted and filled with rubbish while ``shoal serve`` runs on it."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import shoal
from shoal.authoring.environment.building import Built
from tests.conftest import Record, verified
from tests.support.planted import write
from tests.support.service import SHOAL, Callers, Service, make_repository

HEALTHY = 30.0  # seconds for a new server
OWN_COPY = "import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))\n"  # of shoal, by compose


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Models of a user's own, which make_repository writes."""
    repository = make_repository(tmp_path / "made")
    for name in ("first", "second", "other"):
        code = repository / name / "1" / "model.py"
        code.write_text(OWN_COPY + code.read_text(encoding="utf-8"), encoding="utf-8")
        shutil.move(repository / name, tmp_path / "project" / "models" / name)
    shutil.move(repository / "chain", tmp_path / "project" / "ensembles" / "chain")
    return tmp_path / "project"


def compose(project: Path, repository: Path, *options: object) -> str:
    """What the command prints."""
    command = [*SHOAL, "compose", "chain", "other", repository, "--project", project, *options]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True).stdout


def kill_a_model(service: Service) -> None:
    """And wait for the next server."""
    os.kill(random.choice(service.stubs()).pid, signal.SIGKILL)
    service.wait(is_ready=False, seconds=5)
    service.wait(is_ready=True, seconds=HEALTHY)


@pytest.mark.parametrize("seconds", [12, *verified(60)])
def test_the_service_goes_on(project: Path, tmp_path: Path, seconds: int, record: Record) -> None:
    repository, away = tmp_path / "repository", tmp_path / "away"

    def compose_another() -> None:
        code = project / "models" / "first" / "1" / "model.py"
        code.write_text(code.read_text(encoding="utf-8").replace("else 2", "else 3"), encoding="utf-8")
        note = f"note: process {service.process.pid} serves {repository} at http://{service.http}, and goes on with "
        assert note in compose(project, repository)

    def write_in_place() -> None:
        for path in [*repository.rglob("*.py"), *repository.rglob("*.pbtxt"), *repository.rglob("*.json")]:
            path.write_text("rubbish", encoding="utf-8")

    def fill_with_rubbish() -> None:
        write(repository / "first", "not a folder")
        write(repository / "other" / "config.pbtxt", 'name: "rubbish"')
        write(repository / "1" / "model.py", "rubbish")

    deeds: list[Callable[[], object]] = [
        compose_another,
        write_in_place,
        lambda: repository.rename(away),
        lambda: shutil.rmtree(away),
        fill_with_rubbish,
    ]
    compose(project, repository)
    kills = 0
    with Service(repository, tmp_path / "log") as service:
        with Callers(service, 12) as callers:
            callers.wait_up()
            end = time.monotonic() + seconds
            for deed in deeds:
                deed()
                time.sleep(0.5)
                if seconds > 12 or deed is fill_with_rubbish:
                    kill_a_model(service)
                    kills += 1
            time.sleep(max(end - time.monotonic(), 0))
        assert not callers.unexpected()
        assert callers.num_answers > 100
        assert service.metric("shoal_restarts_total") == kills
        with shoal.Client(service.grpc) as client:
            assert client.infer("chain", X=[[1.0]])["Z"].item() == 4
        assert not [entry for entry in service.entries() if "did not start" in entry["message"]]
        assert service.stop() == 0
    assert not [*Path(tempfile.gettempdir()).glob(f"shoal-{service.process.pid}-*")]
    assert repository.joinpath("1/model.py").exists()
    record(
        "a folder that is composed, moved, deleted and filled while it is served",
        kills=kills,
        answers=callers.num_answers,
        failures=len(callers.failures),
    )


def test_messages_name_the_folder_of_the_user(project: Path, tmp_path: Path) -> None:
    write(project / "models/first/1/model.py", "raise RuntimeError('of mine')")
    repository = tmp_path / "repository"
    shutil.copytree(project / "models", repository)
    command = [*SHOAL, "serve", str(repository), "--no-check", "--http-port", "0", "--grpc-port", "0"]
    done = subprocess.run([*command, "--metrics-port", "0"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "of mine" in done.stderr
    assert f"{repository}/first/1/model.py" in done.stderr
    assert tempfile.gettempdir() + "/shoal-" not in done.stderr


@pytest.mark.verify
def test_the_archive_of_an_environment(project: Path, tmp_path: Path, packed: Built) -> None:
    repository = tmp_path / "repository"
    compose(project, repository, "--env", packed.environment)
    with Service(repository, tmp_path / "log") as service, shoal.Client(service.grpc) as client:
        shutil.rmtree(repository)
        kill_a_model(service)
        assert client.infer("chain", X=[[1.0]])["Z"].item() == 4
