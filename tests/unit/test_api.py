"""The page of public names is up to date: a change of a public name changes the page."""

from __future__ import annotations

import inspect
import runpy
from importlib import import_module
from pathlib import Path

import pytest

import shoal
from tests.support.once import ROOT

PAGE = ROOT / "docs" / "api.md"
_PROGRAM = runpy.run_path(str(ROOT / "docs" / "api.py"))
make_page, FACES = _PROGRAM["make_page"], _PROGRAM["FACES"]


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == make_page(), "type: python docs/api.py > docs/api.md"


def test_every_public_name_and_method_says_what_it_does() -> None:
    for package, name in [(face, name) for face in map(import_module, FACES) for name in face.__all__]:
        thing = getattr(package, name)
        assert inspect.getdoc(thing) or not inspect.isfunction(thing), name
        if not inspect.isclass(thing) or issubclass(thing, Exception):
            continue
        for member, value in vars(thing).items():
            if not member.startswith("_") and (callable(value) or isinstance(value, property | staticmethod)):
                assert inspect.getdoc(getattr(thing, member)), f"{name}.{member}"


def test_a_changed_signature_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def compose(path: Path, *, strict: bool = False) -> None:
        """Another one."""
        del path, strict

    before = make_page()
    monkeypatch.setattr(shoal, "compose", compose)
    assert make_page() != before


def test_it_ships_its_types() -> None:
    assert (Path(shoal.__file__).parent / "py.typed").is_file()
