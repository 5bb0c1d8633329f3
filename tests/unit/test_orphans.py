"""Files that a start removes, and files that it must keep."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from shoal.serving.server import orphans
from shoal.serving.server.orphans import Lease, clean_up, make_folder


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(orphans, "SHARED_MEMORY", tmp_path / "shm")
    return tmp_path


def plant(place: Path, content: str = "", name: str = "shoal-1-0123abcd") -> Path:
    folder = place / name
    folder.mkdir(mode=0o700)
    (folder / "lease").write_text(content, encoding="utf-8")
    return folder


def test_files_without_a_lease_holder_are_removed(places: Path) -> None:
    region, other = places / "shm" / "shoal_1_0123abcd_region", places / "shm" / "shoal_1_ffffffff_region"
    for path in (region, other):
        path.touch()
    folder = plant(places)
    assert clean_up() == [folder]
    assert not folder.exists()
    assert not region.exists()
    assert other.exists()


def test_files_with_a_lease_holder_are_kept(places: Path) -> None:
    folder = make_folder()
    assert folder.parent == places
    lease = Lease(folder)
    assert clean_up() == []
    lease.end()
    assert not folder.exists()


def test_unpacked_environments_are_removed(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "ENVIRONMENT", re.compile(rf"{places}/python_env_\w{{6}}"))
    environment, other = places / "python_env_abcdef", places / "python_env_abcdef_of_mine"
    for path in (environment, other):
        path.mkdir()
    content = f"{environment}\n{other}\n{environment}/../python_env_abcdef_of_mine\n"
    folder = plant(places, content)
    assert clean_up() == [folder]
    assert not environment.exists()
    assert other.exists()


@pytest.mark.usefixtures("may_start_processes")
def test_processes_of_a_killed_starter_are_ended(places: Path) -> None:
    """Those in the server's group; another process that holds the lease, as the starter's forks do, is left alone."""
    folder, other = make_folder(), make_folder()
    (orphan,), (stub, fork) = hold(folder), hold(other, 2)
    try:
        assert clean_up() == [], "this process has started them"
        for place in (folder, other):
            place.rename(places / f"shoal-1-{place.name[-8:]}")
        assert [path.name[-8:] for path in clean_up()] == [folder.name[-8:]]
        assert orphan.wait(10) == -signal.SIGKILL
        assert stub.wait(10) == -signal.SIGKILL
        assert fork.poll() is None
        assert other.with_name(f"shoal-1-{other.name[-8:]}").is_dir(), "which the fork holds"
    finally:
        for process in (orphan, stub, fork):
            process.kill()
            process.wait()


@pytest.mark.usefixtures("may_start_processes")
def test_a_group_that_is_not_the_servers_is_left_alone(places: Path) -> None:
    folder = make_folder()
    (process,) = hold(folder, group=1)
    try:
        folder.rename(places / f"shoal-1-{folder.name[-8:]}")
        assert clean_up() == []
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def hold(folder: Path, number: int = 1, group: int = 0) -> list[subprocess.Popen[bytes]]:
    """Processes, each in a group of its own, that hold the folder's lease; the first or ``group`` is the server."""
    lease = Lease(folder)
    processes = [subprocess.Popen(["sleep", "600"], process_group=0, pass_fds=[lease.file]) for _ in range(number)]
    lease.begin(group or processes[0].pid)
    lease._file.close()
    return processes


@pytest.mark.parametrize("name", ["shoal-x", "shoal-1-", "shoal-1-0123abcd-mine", "shoal-one-0123abcd"])
def test_a_folder_of_another_name_is_left_alone(places: Path, name: str) -> None:
    folder = plant(places, name=name)
    assert clean_up() == []
    assert folder.exists()


def test_a_lease_that_others_can_write_does_not_count(places: Path) -> None:
    folder = plant(places)
    (folder / "lease").chmod(0o666)
    assert clean_up() == []
    (folder / "lease").chmod(0o644)
    folder.chmod(0o777)
    assert clean_up() == []
    folder.chmod(0o700)
    (folder / "lease").rename(folder / "elsewhere")
    (folder / "lease").symlink_to(folder / "elsewhere")
    assert clean_up() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="files can be another's only where this user may give them away")
def test_another_users_lease_is_left_alone(places: Path) -> None:
    folder = plant(places)
    os.chown(folder / "lease", 12345, 12345)
    assert clean_up() == []
