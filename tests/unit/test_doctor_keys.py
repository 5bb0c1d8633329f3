"""Findings of ``shoal doctor`` about a file of keys."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest

from shoal.cli.doctor import FAULT, OK, WARNING, _keys, examine
from shoal.serving.gateway.callers.key_file import KeyFile


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    found = KeyFile(tmp_path / "keys.json")
    found.new("team")
    return found


def look(file: KeyFile) -> list[tuple[str, str]]:
    return [(finding.level, f"{finding.found} {finding.fix}") for finding in _keys(file.path)]


def test_a_file_without_faults(file: KeyFile) -> None:
    file.new("long", span=timedelta(days=15))
    assert look(file) == [(OK, f"{file.path} has 2 ")]


def test_keys_that_expire_soon(file: KeyFile) -> None:
    file.new("soon", span=timedelta(days=13))
    (level, text), (last, _) = look(file)
    assert (level, last) == (WARNING, OK)
    assert "the key soon of" in text
    assert text.endswith(f"Make another: shoal keys rotate soon --file {file.path}")
    file.rotate("soon", timedelta(days=1))  # as long again
    assert [level for level, _ in look(file)] == [WARNING, OK]


def test_mode_and_damage(file: KeyFile) -> None:
    file.path.chmod(0o640)
    assert look(file) == [(FAULT, f"Other users can read or write {file.path} (mode 0640). chmod 600 {file.path}")]
    file.path.chmod(0o600)
    file.path.write_text("{")
    ((level, text),) = look(file)
    assert (level, "it is not JSON to its end" in text) == (FAULT, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has files of root")
@pytest.mark.parametrize(("mode", "is_private"), [(0o440, True), (0o640, True), (0o660, False), (0o444, False)])
def test_a_file_of_root_may_be_read_by_a_group(
    mode: int, is_private: bool, file: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.path.chmod(mode)
    monkeypatch.setattr(os, "geteuid", lambda: 10001)
    assert (FAULT not in [level for level, _ in look(file)]) is is_private


def test_the_owner(file: KeyFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: file.path.stat().st_uid + 1)
    assert [level for level, _ in look(file)] == [WARNING, OK]
    assert "belongs to the user" in look(file)[0][1]


def test_the_default_file_is_checked_if_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def found() -> list[str]:
        return [finding.level for finding in examine() if finding.check == "keys"]

    assert found() == []
    KeyFile(tmp_path / "shoal" / "keys.json").new("team")
    assert found() == [OK]
    assert [each.level for each in examine(None, tmp_path / "none") if each.check == "keys"] == [FAULT]
