"""Unit tests start no server, no training and, unless they say so, no Python: such a test belongs to another tier."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_SLOW = ("python", "shoal", "triton")
_forbidden: list[str] = []  # the running test, while it may start none of these


@pytest.fixture
def may_start_processes() -> None:
    """A test that asks for this may start a Python process that is over in a moment."""


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen" and _forbidden:
        command = arguments[1] if isinstance(arguments[1], list | tuple) else [arguments[1]]
        program = Path(os.fsdecode(arguments[0] or command[0])).name
        if program.startswith(_SLOW):
            raise RuntimeError(
                f"{_forbidden[0]} starts {program}. Ask for the fixture may_start_processes if it is over in a moment;"
                " else move the test to tests/slow."
            )


sys.addaudithook(_refuse)


@pytest.fixture(autouse=True)
def _no_server_no_training(request: pytest.FixtureRequest) -> Iterator[None]:
    test = request.node.nodeid

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"{test} starts a server or a training: move it to tests/served or tests/slow.")

    with pytest.MonkeyPatch.context() as patch:  # of its own: a test's patches are undone before its folder is removed
        patch.setattr("shoal.serving.server.launch.Server._launch", refuse)
        patch.setattr("shoal.readability.fit.Training.run", refuse)
        if "may_start_processes" not in request.fixturenames:
            _forbidden.append(test)
        yield
        _forbidden.clear()
