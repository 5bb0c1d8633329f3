"""Bulk work that is stopped, at whatever moment, and goes on."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal.cli import app
from shoal.clients.bulk.files import Journal, open_journal, partial_path
from shoal.clients.bulk.scoring import WINDOW, Endpoint, local
from shoal.clients.client.failures import UnknownModelError
from shoal.clients.local import Pipeline
from shoal.errors import ArtifactError, InputError, ServerError, SetupError
from tests.support.bulk import Stopped, infer_arguments, read_rows, run, write_texts

KINDS = (".csv", ".jsonl", ".parquet")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_texts(tmp_path_factory.mktemp("in") / "in.csv", 5 * WINDOW + 7)
    with path.open("ab") as file:
        file.write(b"bad,\xff\n")
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_writes_the_same_bytes(kind: str, source: Path, tmp_path: Path, scorer: Pipeline) -> None:
    model = local(scorer)
    whole, out = tmp_path / f"whole{kind}", tmp_path / f"out{kind}"
    summary = run(model, source, whole)
    assert (summary.num_rows, summary.num_failed) == (5 * WINDOW + 8, 1)
    draw = random.Random(kind)
    for cut in (
        0,
        1,
        10_000,
        None,
    ):  # bytes at the end that the machine lost with it; None: more were written than known
        with pytest.raises(Stopped):
            run(model, source, out, stop_after=draw.randint(2, 4) * WINDOW)
        assert not out.exists()
        kept = partial_path(out).read_bytes()
        partial_path(out).write_bytes(kept + b'{"rows": 256, "fai' if cut is None else kept[: len(kept) - cut])
    assert run(model, source, out) == summary
    assert out.read_bytes() == whole.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"out{kind}", f"whole{kind}"]


def test_answered_rows_are_not_sent_again(source: Path, tmp_path: Path, scorer: Pipeline) -> None:
    asked: list[str] = []

    def call(inputs: Any) -> Any:
        asked.extend(inputs["excerpt"])
        return scorer(**inputs)

    model = local(scorer)
    counting = Endpoint(model.spec, call, model.stream, model.max_rows, 1)
    with pytest.raises(Stopped):
        run(counting, source, tmp_path / "out.csv", stop_after=4 * WINDOW)
    asked.clear()
    run(counting, source, tmp_path / "out.csv")
    assert WINDOW < len(asked) < 2 * WINDOW  # the last 264 rows, and again some that were asked with a bad one


def test_a_journal_of_something_else_is_not_gone_on_with(source: Path, tmp_path: Path, scorer: Pipeline) -> None:
    model, out = local(scorer), tmp_path / "out.csv"
    with pytest.raises(Stopped):
        run(model, source, out, stop_after=2 * WINDOW, settings={"batch_size": 32})
    with pytest.raises(InputError, match=r"out\.csv\.partial was begun with another batch size: 32, now 64\. Start"):
        run(model, source, out, settings={"batch_size": 64})
    other = write_texts(tmp_path / "other.csv", 5 * WINDOW)
    text = other.read_text(encoding="utf-8")
    other.write_text(text.replace("\n0,", "\n00,", 1), encoding="utf-8")
    for rows, settings in ((other, {"batch_size": 32}), (write_texts(tmp_path / "few.csv", 9), {"batch_size": 32})):
        with pytest.raises(
            InputError,
            match=rf"The first 512 rows of {rows.name} are not those that out\.csv\.partial has answers for\. Give the",
        ):
            run(model, rows, out, settings=settings)
    run(model, other, out, settings={"batch_size": 64}, is_fresh=True)
    assert len(out.read_bytes().splitlines()) == 5 * WINDOW + 1
    for content in (b"mine\n", b"{}\n", b"[1]\nrest", b"mine"):
        partial_path(out).write_bytes(content)
        with pytest.raises(InputError, match=r"out\.csv\.partial was not written by shoal infer\. Move it away"):
            run(model, source, out, is_fresh=True)
        assert partial_path(out).read_bytes() == content


def test_the_order_of_settings_does_not_matter(source: Path, tmp_path: Path, scorer: Pipeline) -> None:
    model, out = local(scorer), tmp_path / "out.csv"
    with pytest.raises(Stopped):
        run(model, source, out, stop_after=2 * WINDOW, settings={"set": {"A": 1, "B": 2}, "x": 1})
    assert run(model, source, out, settings={"x": 1, "set": {"B": 2, "A": 1}}).num_rows == 5 * WINDOW + 8
    assert len(out.read_bytes().splitlines()) == 5 * WINDOW + 9


def test_another_repository_does_not_go_on(forest: Path, source: Path, tmp_path: Path) -> None:
    other, out = shutil.copytree(forest, tmp_path / "other"), tmp_path / "out.csv"
    manifest = json.loads((other / "manifest.json").read_text(encoding="utf-8"))
    (other / "manifest.json").write_text(json.dumps({**manifest, "identity": "another"}), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "append", _stop)
        assert isinstance(CliRunner().invoke(app, infer_arguments(forest, source, out)).exception, Stopped)
    result = CliRunner().invoke(app, infer_arguments(other, source, out))
    assert isinstance(result.exception, InputError)
    assert f"was begun with another repository: '{manifest['identity'][:12]}" in str(result.exception)


def _stop(*_: object, **__: object) -> None:
    raise Stopped


def test_an_input_that_grew_is_resumed_twice(source: Path, tmp_path: Path, scorer: Pipeline) -> None:
    """If an earlier run ended in the middle of a window, the next run's windows begin there."""
    growing, out, model = tmp_path / "in.csv", tmp_path / "out.csv", local(scorer)
    rows = source.read_bytes().splitlines(keepends=True)
    growing.write_bytes(b"".join(rows[:601]))
    with pytest.raises(Stopped):
        run(model, growing, out, stop_after=600)
    growing.write_bytes(b"".join(rows))
    with pytest.raises(Stopped):
        run(model, growing, out, stop_after=900)
    assert run(model, growing, out).num_rows == len(rows) - 1
    assert len(out.read_bytes().splitlines()) == len(rows)


def test_a_server_that_loses_the_model_during_a_run(source: Path, tmp_path: Path, scorer: Pipeline) -> None:
    """The rows are not at fault."""
    model, out = local(scorer), tmp_path / "out.csv"
    calls = iter(range(20))

    def call(inputs: Any) -> Any:
        if next(calls, None) is None:
            raise UnknownModelError("The server has no model forest.")
        return scorer(**inputs)

    losing = Endpoint(model.spec, call, model.stream, model.max_rows, 1)
    with pytest.raises(ServerError, match="The server has no model forest"):
        run(losing, source, out)
    assert run(model, source, out).num_failed == 1


def test_a_quote_that_is_never_closed_costs_no_answer_before_it(source: Path, tmp_path: Path, scorer: Pipeline) -> None:
    damaged, out, model = tmp_path / "in.csv", tmp_path / "out.csv", local(scorer)
    lines = source.read_bytes().splitlines(keepends=True)
    damaged.write_bytes(b"".join([*lines[: 2 * WINDOW + 1], b'0,"open\n', *lines[2 * WINDOW + 2 :]]))
    with pytest.raises(ArtifactError, match=rf"^in\.csv, row {2 * WINDOW + 2} is not CSV: unexpected end of data"):
        run(model, damaged, out)
    with open_journal(out, {"model": "forest"}, is_fresh=False) as journal:
        assert journal.num_rows == 2 * WINDOW
    damaged.write_bytes(source.read_bytes())
    assert run(model, damaged, out).num_rows == 5 * WINDOW + 8


def test_two_runs_do_not_write_one_output(source: Path, tmp_path: Path, scorer: Pipeline) -> None:
    out = tmp_path / "out.csv"
    with (
        open_journal(out, {}, is_fresh=False),
        pytest.raises(SetupError, match=r"Another process is writing .*out\.csv\.partial\. Wait for it"),
    ):
        run(local(scorer), source, out)


def test_a_server_that_goes_away_keeps_what_it_answered(source: Path, tmp_path: Path, scorer: Pipeline) -> None:
    model, out = local(scorer), tmp_path / "out.csv"
    calls = iter(range(20))

    def call(inputs: Any) -> Any:
        if next(calls, None) is None:
            raise ServerError("Gone.")
        return scorer(**inputs)

    with pytest.raises(ServerError, match="Gone"):
        run(Endpoint(model.spec, call, model.stream, model.max_rows, 1), source, out)
    with open_journal(out, {"model": "forest"}, is_fresh=False) as journal:
        assert journal.num_rows == 2 * WINDOW
    assert run(model, source, out).num_rows == 5 * WINDOW + 8


@pytest.fixture
def small_disk(mount_disk: Callable[[str], Path]) -> Path:
    return mount_disk("2m")


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk(kind: str, source: Path, tmp_path: Path, scorer: Pipeline, small_disk: Path) -> None:
    out = small_disk / f"out{kind}"
    room = 40_000 if kind == ".csv" else 90_000  # for a part of the answers
    (small_disk / "filler").write_bytes(bytes(os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize - room))
    with pytest.raises(
        SetupError, match=r"out\.\w+(\.partial)? cannot be written: No space left on device\. Make room"
    ):
        run(local(scorer), source, out)
    assert not out.exists()
    (small_disk / "filler").unlink()
    run(local(scorer), source, out)
    run(local(scorer), source, tmp_path / f"whole{kind}")
    assert out.read_bytes() == (tmp_path / f"whole{kind}").read_bytes()


def test_a_disk_that_takes_a_part(source: Path, tmp_path: Path, scorer: Pipeline) -> None:
    """By the limit of a file's size, which takes no root; what was written of the last answers is cut off."""
    out, before = tmp_path / "out.csv", resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (25_000, before[1]))
    try:
        with pytest.raises(SetupError, match=r"out\.csv\.partial cannot be written: File too large\. Make room there"):
            run(local(scorer), source, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert run(local(scorer), source, out).num_rows == 5 * WINDOW + 8
    run(local(scorer), source, tmp_path / "whole.csv")
    assert out.read_bytes() == (tmp_path / "whole.csv").read_bytes()


def test_an_output_that_no_answer_has_is_no_column(tmp_path: Path, scorer: Pipeline) -> None:
    """Also in a resumed run; where later answers have it, CSV refuses those rows."""
    source = write_texts(tmp_path / "in.csv", 3 * WINDOW)
    model = local(scorer)
    (score,) = model.spec.outputs
    asked = set[str]()  # texts whose answers have the output

    def call(inputs: Any) -> Any:
        answer = scorer(**inputs)
        return {**answer, **({"EXTRA": answer[score.name]} if asked & {*inputs["excerpt"]} else {})}

    spec = replace(model.spec, outputs=(score, replace(score, name="EXTRA")))
    fed = replace(model, spec=spec, call=call, max_rows=1, num_callers=1)
    run(model, source, tmp_path / "plain.csv")
    with pytest.raises(Stopped):
        run(fed, source, tmp_path / "out.csv", stop_after=WINDOW)
    run(fed, source, tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_bytes() == (tmp_path / "plain.csv").read_bytes()
    rows = read_rows(tmp_path / "plain.csv")
    asked.add(rows[-2]["text"])
    number = sum(row["text"] in asked for row in rows)
    assert run(fed, source, tmp_path / "late.csv").num_failed == number
    late = [row for row in read_rows(tmp_path / "late.csv") if row["text"] in asked]
    assert all("which the answers to the first rows lack; CSV cannot hold it" in row["error"] for row in late)
    asked |= {row["text"] for row in rows}
    assert run(fed, source, tmp_path / "all.csv").num_failed == 0
    assert all(row["extra"] == row["score"] for row in read_rows(tmp_path / "all.csv"))
