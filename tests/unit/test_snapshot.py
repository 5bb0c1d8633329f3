"""The copy of a repository that a service runs on: what is in it, where it is, and who finds the service."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from shoal.errors import ArtifactError, SetupError
from shoal.serving.server import orphans, snapshot
from shoal.serving.server.orphans import clean_up
from shoal.serving.server.snapshot import SMALL, find_services, take_snapshot
from shoal.system import files
from tests.support.commands import Shoal
from tests.support.planted import write

LARGE = b"w" * (SMALL + 1)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Path]:
    """The folders in which a copy may be: for temporary files, for the user's cache, and the repository's own."""
    found = tmp_path / "tmp", tmp_path / "cache", tmp_path / "home"
    for place in found:
        place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(found[0]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(found[1]))
    monkeypatch.setattr(snapshot, "watch", lambda _: MagicMock())
    return found


@pytest.fixture
def repository(places: tuple[Path, Path, Path]) -> Path:
    home = places[2]
    repository = home / "repository"
    write(repository / "m/config.pbtxt", f'parameters: "{repository}/m/env.tar.gz {repository}-2/env.tar.gz"')
    write(repository / "m/1/model.py", "answer = 1")
    (repository / "m/env.tar.gz").write_bytes(LARGE)
    (repository / "m/triton_python_backend_stub").touch(0o755)
    write(home / "data/words", "outside")
    return repository


def refuse_links(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    link = os.link

    def refuse(source: Path, target: Path) -> None:
        if any(target.is_relative_to(folder) for folder in folders):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        link(source, target)

    monkeypatch.setattr("os.link", refuse)


def test_what_happens_to_the_folder_does_not_reach_the_copy(repository: Path, places: tuple[Path, ...]) -> None:
    with take_snapshot(repository) as taken:
        model = taken.folder / "m"
        assert taken.folder.is_relative_to(places[0])
        assert not taken.shared
        assert model.joinpath("env.tar.gz").samefile(repository / "m/env.tar.gz")
        (repository / "m/1/model.py").write_text("answer = 2", encoding="utf-8")  # in place
        shutil.rmtree(repository)
        write(repository / "m/1/model.py", "rubbish")
        assert model.joinpath("1/model.py").read_text(encoding="utf-8") == "answer = 1"
        assert model.joinpath("env.tar.gz").read_bytes() == LARGE
        assert os.access(model / "triton_python_backend_stub", os.X_OK)
        said = f'parameters: "{model}/env.tar.gz {repository}-2/env.tar.gz"'
        assert model.joinpath("config.pbtxt").read_text(encoding="utf-8") == said
    assert not any(places[0].iterdir())
    assert repository.exists()


def test_links_lead_where_they_did(repository: Path) -> None:
    home, version = repository.parent, repository / "m" / "1"
    (version / "env").symlink_to("../env.tar.gz")
    (version / "model").symlink_to(repository / "m/1/model.py")
    (version / "words").symlink_to("../../../data/words")
    (version / "nothing").symlink_to("../nothing")
    (version / "loop").symlink_to("loop")
    (repository / "linked").symlink_to(home / "data", target_is_directory=True)
    os.mkfifo(version / "pipe")
    with take_snapshot(repository) as taken:
        copy = taken.folder / "m" / "1"
        assert (copy / "env").resolve() == taken.folder / "m" / "env.tar.gz"
        assert (copy / "model").resolve() == copy / "model.py"
        assert (copy / "words").resolve() == home / "data" / "words"
        assert (copy / "../../../data/words").read_text(encoding="utf-8") == "outside"  # as a model may name it
        assert (taken.folder / "linked/words").read_text(encoding="utf-8") == "outside"
        assert (copy / "nothing").is_symlink()
        assert (copy / "loop").is_symlink()
        assert not (copy / "pipe").exists()
    assert (home / "data/words").exists()


@pytest.mark.parametrize("num_refusing", [1, 2, 3])
def test_a_place_that_can_be_linked_to(
    repository: Path, places: tuple[Path, ...], num_refusing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_links(monkeypatch, *places[:num_refusing])
    with take_snapshot(repository) as taken:
        assert taken.folder.is_relative_to(places[num_refusing % 3])  # copies are among the temporary files
        archive = taken.folder / "m/env.tar.gz"
        assert archive.samefile(repository / "m/env.tar.gz") == (num_refusing < 3)
        assert archive.read_bytes() == LARGE
    assert sorted(path.name for place in places for path in place.iterdir()) == ["data", "repository"]


def test_large_files_without_room(repository: Path, places: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_links(monkeypatch, *places)
    monkeypatch.setattr("shutil.disk_usage", lambda _: MagicMock(free=4 * len(LARGE)))
    with take_snapshot(repository) as taken:
        assert taken.shared == [repository / "m/env.tar.gz"]
        assert (taken.folder / "m/env.tar.gz").resolve() == repository / "m/env.tar.gz"
        assert not (taken.folder / "m/1/model.py").is_symlink()


def test_a_copy_elsewhere_of_a_killed_service(
    repository: Path, places: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_links(monkeypatch, places[0])
    taking = take_snapshot(repository)
    taken = taking.__enter__()
    own, elsewhere = taken.own, taken.folder.parents[1]
    assert elsewhere.parent == places[1]
    mine = write_lease(own, elsewhere.with_name(".mine"))
    assert clean_up() == [], "the service runs"
    monkeypatch.setattr(orphans.Lease, "end", lambda lease: lease._file.close())  # as if it was killed
    taking.__exit__(None, None, None)
    assert elsewhere.exists()
    assert clean_up() == [own]
    assert not elsewhere.exists()
    assert mine.exists()
    assert (repository / "m/env.tar.gz").read_bytes() == LARGE


def write_lease(own: Path, other: Path) -> Path:
    """Name another folder in a lease, which must not be removed."""
    other.mkdir()
    with (own / "lease").open("a", encoding="utf-8") as file:
        file.write(f"{other}\n")
    return other


def test_errors_name_the_repository(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArtifactError) as raised, take_snapshot(repository) as taken:
        raise ArtifactError(f"{taken.folder}/m/config.pbtxt is damaged.", f"See {taken.folder}.")
    assert raised.value.what == f"{repository}/m/config.pbtxt is damaged."
    assert raised.value.fix == f"See {repository}."

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (repository / "m/1/link").symlink_to("model.py")
    monkeypatch.setattr(Path, "symlink_to", fail)
    with pytest.raises(SetupError, match=r"repository cannot be copied: .*No space left.* Name another place: TMPDIR"):
        take_snapshot(repository).__enter__()


def test_a_file_that_cannot_be_read_stays_where_it_is(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = files.copy_file

    def refuse(source: Path, target: Path) -> None:
        if source.name == "model.py":
            target.touch()
            raise PermissionError(errno.EACCES, "Permission denied")
        copy(source, target)

    monkeypatch.setattr(snapshot, "copy_file", refuse)
    with take_snapshot(repository) as taken:
        assert taken.shared == [repository / "m/1/model.py"]
        assert (taken.folder / "m/1/model.py").resolve() == repository / "m/1/model.py"


def test_compose_says_who_serves_the_folder(repository: Path, shoal: Shoal) -> None:
    path = repository.with_name("composed")
    assert "note: process" not in shoal("compose", "softmax", path)
    with take_snapshot(repository), take_snapshot(path) as taken:
        taken.announce("http://127.0.0.1:8000")
        before = (taken.folder / "softmax/config.pbtxt").read_bytes()
        assert find_services(path) == [(os.getpid(), "http://127.0.0.1:8000")]
        assert find_services(repository) == []
        said = shoal("compose", "softmax", path, "--instances", "softmax=2")
        note = (
            f"note: process {os.getpid()} serves {path} at http://127.0.0.1:8000, and goes on with what it was started"
        )
        assert note in said
        assert (path / "softmax/config.pbtxt").read_bytes() != before
        assert (taken.folder / "softmax/config.pbtxt").read_bytes() == before
    assert find_services(path) == []
