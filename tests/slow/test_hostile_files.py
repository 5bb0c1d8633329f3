"""Files of many hostile kinds to every command that reads files: it ends soon, in words, and writes nothing outside."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.conftest import Scale
from tests.support.hostile_commands import CASES, COMPOSE, INFER, MARK, READERS, SECONDS, lay_out, run_command, spoil

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.support.hostile_commands"])
# Commands that write, and the files that they make, all of which fail on a full disk.
WRITERS = {
    "env unpack": READERS["unpacked"][2],
    "add-model": READERS["add .json"][2],
    "add-model, an encoder": READERS["encoder's words"][2],
    "compose": COMPOSE,
    "infer to a file": (*INFER, "--input", "good.csv", "--output", "out.csv"),
    "infer to a folder": (*INFER, "--input", "good.csv", "--output", "other"),
    "fill": ("fill", "t.pbtxt", "size:4,b:c", "--in_place"),
    "keys": ("keys", "new", "b", "--file", "keys.json"),
    "new": ("new", "model", "another", "--project", "project"),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("good")
    lay_out(folder)
    for command in (WRITERS["infer to a file"], (*INFER, "--input", "good.csv", "--output", "out")):
        assert run(folder, command)["code"] == 0
    (folder / "out.csv").unlink()
    yield folder
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # it would end with this process


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "case" / "work"))


def run(folder: Path, command: tuple[str, ...], most_written: int | None = None) -> dict[str, Any]:
    """Run a command in a process with limits; return its exit code, what it said, and its processor time."""
    ours, theirs = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=run_command, args=(folder, command, most_written, theirs))
    process.start()
    theirs.close()
    said = b""
    while part := os.read(ours.fileno(), 2**16):
        said = (said + part)[-(2**16) :]
    ours.close()
    process.join()
    words, _, report = said.decode("utf-8", "replace").partition(MARK)
    assert report, f"{' '.join(command)} ended with {process.exitcode}: {words[-2000:]}"
    return {**json.loads(report), "said": words[-6000:]}


def list_files(folder: Path) -> dict[str, int]:
    """Return the sizes of the files in ``folder``; links are not followed."""
    return {str(path.relative_to(folder)): path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()}


def check(found: dict[str, Any]) -> None:
    assert "Traceback" not in found["said"], found["said"]
    assert "set_int_max_str_digits" not in found["said"], found["said"]
    assert found["seconds"] <= SECONDS, found
    assert found["code"] in (0, 1, 2), found
    assert found["code"] == 0 or found["said"].strip()


def choose(scale: Scale) -> Iterator[tuple[str, str]]:
    cases = Random(0).sample(CASES, len(CASES))
    yield from cases[: scale(12, full=300)]


def test_hostile_files(good: Path, tmp_path: Path, scale: Scale) -> None:
    failed = []
    for number, (reader, kind) in enumerate(choose(scale)):
        case = tmp_path / str(number)
        work = Path(shutil.copytree(good, case / "work"))
        spoil(work, reader, kind)
        try:
            check(run(work, READERS[reader][2]))
            assert [path.name for path in case.iterdir()] == ["work"]
        except AssertionError as error:
            failed.append(f"{reader}, {kind}: {error}"[:3000])
        shutil.rmtree(case)
    assert not failed, f"{len(failed)} failed\n" + "\n\n".join(failed)


@pytest.mark.parametrize("command", WRITERS)
@pytest.mark.parametrize("most", [0, 300])
def test_a_full_disk(command: str, most: int, folder: Path) -> None:
    """The command says so; what it would replace is as it was, and it leaves nothing half written."""
    for reader in ("template", "unpacked", "add .json", "keys"):
        spoil(folder, reader, "as it is")
    before = list_files(folder)
    found = run(folder, WRITERS[command], most)
    check(found)
    if found["code"] == 0:  # it writes no more than that
        assert most
        return
    left = {name: size for name, size in list_files(folder).items() if before.get(name) != size}
    assert not [name for name in left if "__pycache__" not in name and ".partial" not in name], (left, found)
