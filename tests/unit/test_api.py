"""The page of public names, which ``make docs`` makes: each with its signature and docstring."""

from __future__ import annotations

import inspect
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shoal
from tests.support.once import ROOT

make_page = runpy.run_path(str(ROOT / "docs" / "api.py"))["make_page"]


def find_members(thing: Any) -> Iterator[str]:
    """Yield the public methods and properties that a class has from shoal."""
    for name in dir(thing) if inspect.isclass(thing) else ():
        has_it = [owner for owner in thing.__mro__ if name in vars(owner)]
        is_ours = any(owner.__module__.startswith("shoal") for owner in has_it) and not name.startswith("_")
        value = inspect.getattr_static(thing, name)
        if is_ours and (callable(value) or isinstance(value, property | staticmethod | classmethod)):
            yield name


def test_the_page_has_each_name_and_method() -> None:
    page = make_page()
    members = [f"{name}.{member}" for name in shoal.__all__ for member in find_members(getattr(shoal, name))]
    assert len(members) > 50
    assert sorted(re.findall(r"^##+ (.+)$", page, re.MULTILINE)) == sorted([*shoal.__all__, *members])
    assert " at 0x" not in page


def test_every_public_name_and_method_says_what_it_does() -> None:
    for name in shoal.__all__:
        thing = getattr(shoal, name)
        assert inspect.getdoc(thing) or not inspect.isfunction(thing), name
        for member in () if inspect.isclass(thing) and issubclass(thing, Exception) else find_members(thing):
            assert inspect.getdoc(getattr(thing, member)), f"{name}.{member}"


def test_a_section_has_signature_text_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def compose(path: Path, *, strict: bool = False) -> None:
        """Compose ``path``.

        Raises:
            InputError: there is no ``path``,
                or it is empty.
        """
        del path, strict

    monkeypatch.setattr(shoal, "compose", compose)
    section = (
        "## compose\n\n    shoal.compose(path: Path, *, strict: bool = False) -> None\n\nCompose `path`.\n\n"
        "Raises:\n\n- `InputError`: there is no `path`, or it is empty.\n"
    )
    assert section in make_page()


def test_it_ships_its_types() -> None:
    assert (Path(shoal.__file__).parent / "py.typed").is_file()
