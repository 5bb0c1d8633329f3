"""What a start removes, and what it must not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shoal.server import orphans
from shoal.server.orphans import Lease, clean_up


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(orphans, "SHARED_MEMORY", tmp_path / "shm")
    return tmp_path


def plant(place: Path, content: object) -> Path:
    folder = place / "shoal-x"
    folder.mkdir(mode=0o700)
    (folder / "lease").write_text(json.dumps(content), encoding="utf-8")
    return folder


SOUND = {"shared_memory": "shoal_1_0123abcd_", "environments": [], "session": 0}


def test_what_nobody_holds_is_removed(places: Path) -> None:
    region, other = places / "shm" / "shoal_1_0123abcd_region", places / "shm" / "shoal_1_ffffffff_region"
    for path in (region, other):
        path.touch()
    folder = plant(places, SOUND)
    assert clean_up() == [folder]
    assert not folder.exists()
    assert not region.exists()
    assert other.exists()


def test_what_somebody_holds_stays(places: Path) -> None:
    folder = places / "shoal-y"
    folder.mkdir(mode=0o700)
    lease = Lease(folder, "shoal_1_0123abcd_")
    assert clean_up() == []
    lease.end()
    assert not folder.exists()


@pytest.mark.parametrize(
    "content",
    [
        {**SOUND, "environments": ["/home"]},
        {**SOUND, "environments": ["/tmp/python_env_abcdef/../../home"]},
        {**SOUND, "shared_memory": ""},
        {**SOUND, "shared_memory": "../../home/"},
        {**SOUND, "session": "1"},
        {"session": 0},
        [],
        None,
    ],
)
def test_a_lease_that_names_something_else_is_none(places: Path, content: object) -> None:
    folder = plant(places, content)
    assert clean_up() == []
    assert folder.exists()


def test_a_lease_that_others_can_write_is_none(places: Path) -> None:
    folder = plant(places, SOUND)
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
    folder = plant(places, SOUND)
    os.chown(folder / "lease", 12345, 12345)
    assert clean_up() == []
