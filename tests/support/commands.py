"""Commands of shoal in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal import cli
from shoal.errors import ShoalError
from shoal.readability import train as training
from tests.support.artifacts import TINY

Shoal = Callable[..., str]


@pytest.fixture
def shoal() -> Shoal:
    """Run a command in this process, with a text as its standard input; what it printed on standard output."""

    def run(*arguments: object, typed: str = "") -> str:
        result = CliRunner().invoke(cli.app, [str(a) for a in arguments], input=typed)
        if isinstance(result.exception, ShoalError):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result.stdout

    return run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which commands are typed."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def trained_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the preset `quick` train for a moment, on shoal's own passages."""
    monkeypatch.setitem(training.PRESETS, "quick", TINY)
    monkeypatch.delenv("SHOAL_DATA_DIR", raising=False)
