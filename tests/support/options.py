"""Options of the command line: all that there are, and what two values of one give."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import typer
from torch import Tensor, nn
from typer.testing import CliRunner

from shoal.authoring.repository.manifest import MANIFEST
from shoal.cli import app
from shoal.errors import ShoalError
from tests.support.imports import load_script

PRINTED = "printed"
_REFUSED = "refused: "
_NOT_OURS = ("--install-completion", "--show-completion", "--help")  # typer's own


class Net(nn.Module):
    """A model whose trunk may be converted to another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Embedding(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.trunk(x.to(torch.int64)).to(torch.float32).sum(1)
        return found


class Both(NamedTuple):
    """Two command lines that differ in one option: ``base`` and ``one``, ``base`` and ``two``.

    ``base`` may begin with ``FILE | ``, a file of the world for standard input.
    ``see`` is a pattern of the files whose contents must differ, or ``PRINTED``; by default everything counts.
    """

    base: str
    one: str
    two: str
    see: str = ""


class Elsewhere(NamedTuple):
    """A test of another file that compares two values of the option: ``slow/test_x.py::test_y``."""

    test: str


Table = Mapping[str, Any]  # ``Both``, ``Elsewhere``, or what a module has of its own


def find_options(command: Any = None, path: str = "") -> Iterator[str]:
    """Yield every option of a command and of those below it, as ``env build --target``."""
    command = command or typer.main.get_command(app)
    for parameter in command.params:
        names = [name for name in parameter.opts if name.startswith("--") and name not in _NOT_OURS]
        yield from (f"{path} {name}".lstrip() for name in names[:1])
    for name in command.list_commands(None) if hasattr(command, "commands") else ():
        yield from find_options(command.get_command(None, name), f"{path} {name}".lstrip())


class Shoal:
    """Runs command lines, each in a new folder with links to what ``world`` holds, and says what they gave."""

    def __init__(self, world: Path, folder: Path, **values: str) -> None:
        self.world, self.folder, self.seen = world, folder, dict[str, dict[str, str]]()
        self.values = values  # for ``{name}`` in lines

    def __call__(self, line: str) -> dict[str, str]:
        """Return what is ``PRINTED``, with the exit code, and the digest of each file that was written.

        A line that was given before is not run again.
        """
        line = line.strip()
        if line not in self.seen:
            self.seen[line] = self.run(line)
        return self.seen[line]

    def run(self, line: str) -> dict[str, str]:
        """Run a line, whether it was given before or not."""
        here = self.folder / str(len([*self.folder.iterdir()]))
        here.mkdir()
        for path in self.world.iterdir():
            (here / path.name).symlink_to(path)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(here)
            for name, value in self.values.items():
                line = line.replace(f"{{{name}}}", value)
            typed, _, command = line.rpartition(" | ")
            given = Path(typed).read_bytes() if typed else None
            done = CliRunner().invoke(app, shlex.split(command), env={"COLUMNS": "200"}, input=given)
        if isinstance(done.exception, ShoalError):
            return {PRINTED: f"{_REFUSED}{done.exception}"}
        if not isinstance(done.exception, SystemExit | None):
            raise done.exception
        assert done.exit_code in (0, 1), done.output  # 2: the line is not one that the command takes
        printed = done.output
        for place, name in ((here, "HERE"), (self.world, "HERE")):
            printed = printed.replace(str(place), name)
        return {PRINTED: f"{done.exit_code} {re.sub(r'[0-9.]+ (m?s|[MG]iB free)', 'NOW', printed)}", **_digests(here)}


def _digests(folder: Path) -> dict[str, str]:
    found = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for path in (Path(parent) / name for name in names):
            if not path.is_symlink():
                content = path.read_bytes().replace(bytes(folder), b"HERE")
                if path.name == MANIFEST:  # the rest records options, whether they have an effect or not
                    content = repr(json.loads(content)["launch"]).encode()
                if path.suffix == ".pt":
                    content = _read_script(path)
                found[str(path.relative_to(folder))] = hashlib.sha256(content).hexdigest()
    return found


def _read_script(path: Path) -> bytes:
    """Return the graph and the weights of a TorchScript file, without the numbers of the process that wrote it."""
    module = load_script(path)
    graph = re.sub(r"#.*|__torch__[\w.]*|%[\w.]+", "", str(module.inlined_graph))
    return graph.encode() + b"".join(weight.numpy().tobytes() for weight in module.state_dict().values())


def look(seen: Mapping[str, str], see: str) -> dict[str, str]:
    """Return the part of what was seen that must differ."""
    return {name: value for name, value in seen.items() if fnmatch(name, see or "*")}


def rows(table: Table) -> list[Any]:
    """Return the entries of a table that are run, as parameters of ``check_both``."""
    return [pytest.param(entry, id=name) for name, entry in table.items() if isinstance(entry, Both)]


def check_both(run: Callable[[str], dict[str, str]], entry: Both) -> None:
    """Check that two values of an option give two results, one of which at most is a refusal."""
    both = [run(f"{entry.base} {value}") for value in (entry.one, entry.two)]
    refusals = [seen[PRINTED] for seen in both if seen[PRINTED].startswith(_REFUSED)]
    assert len(refusals) < 2, refusals
    one, two = (seen if refusals else look(seen, entry.see) for seen in both)
    assert one != two


def check_steady(shoal: Shoal, table: Table) -> None:
    """Check that a line gives the same result twice, so that results of two values differ because of the values.

    One line is run for each command and first argument.
    """
    entries = [entry for entry in table.values() if isinstance(entry, Both)]
    lines = {tuple(entry.base.split()[:2]): f"{entry.base} {entry.one}" for entry in entries}
    for line in lines.values():
        assert shoal.run(line) == shoal(line), line


TEXT = """
import numpy as np
from shoal import Component


class Text(Component):
    def run(self, batch):
        return {"OUT": np.array([[text.WAY()] for (text,) in batch["TEXT"]], np.object_)}


TritonPythonModel = Text.for_triton()
"""
