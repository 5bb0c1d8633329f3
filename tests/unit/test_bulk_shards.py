"""Sharded runs: each row once and in order, whatever happens to workers, inputs and folders."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal.cli import app
from shoal.clients.bulk.shards.folders import open_folder
from shoal.clients.bulk.shards.parts import FilePart, digest_end, open_parts
from shoal.clients.bulk.shards.plan import PLAN, SUCCESS, ShardPlan, make_plan, read_shards
from shoal.clients.bulk.shards.report import find_faults, read_status
from shoal.clients.bulk.shards.scheduler import Scheduler
from shoal.clients.bulk.shards.shard_task import ScoringJob
from shoal.clients.bulk.shards.workers import make_processes
from shoal.clients.client.client import Client
from shoal.errors import ArtifactError, InputError, ShoalError
from tests.conftest import Scale
from tests.support.projects import write_model
from tests.support.shards import command, read_files, run, write_inputs

pytestmark = pytest.mark.usefixtures("may_start_processes")


def merged_ids(out: Path, tmp_path: Path, kind: str) -> list[int]:
    from tests.support.bulk import read_rows

    path = tmp_path / f"merged{kind}"
    path.unlink(missing_ok=True)
    result = CliRunner().invoke(app, ["shards", "merge", str(out), "--output", str(path)])
    assert result.exit_code == 0, result
    rows = read_rows(path)
    assert all(float(row["score"]) < 100 for row in rows)
    return [int(row["id"] if "id" in row else row["text"].split()[0]) for row in rows]


@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".txt", ".parquet"])
def test_each_row_is_there_once_in_order(kind: str, forest: Path, tmp_path: Path) -> None:
    pattern = write_inputs(tmp_path / "in", kind, [230, 0, 3, 410])
    if kind == ".csv":
        (tmp_path / "in" / "1.csv").write_bytes(b"")
    done = run(forest, pattern, tmp_path / "one")
    assert done.returncode == 0, done.stderr
    assert merged_ids(tmp_path / "one", tmp_path, ".jsonl" if kind == ".txt" else kind) == list(range(643))
    assert list(find_faults(open_folder(str(tmp_path / "one")))) == []
    status = read_status(open_folder(str(tmp_path / "one")))
    assert (status["rows"], status["is_complete"]) == (643, True)
    assert status["done"] == status["shards"] >= 2
    # A run of several workers, and one of which another command does the rest.
    assert run(forest, pattern, tmp_path / "two", "--workers", "2").returncode == 0
    assert read_files(tmp_path / "two") == read_files(tmp_path / "one")


def test_two_runs_of_every_shard_write_the_same_bytes(forest: Path, tmp_path: Path) -> None:
    pattern = write_inputs(tmp_path / "in", ".parquet", [400, 400])
    assert run(forest, pattern, tmp_path / "whole").returncode == 0
    runs = [subprocess.Popen(command(forest, pattern, tmp_path / "out")) for _ in range(2)]
    assert [each.wait(120) for each in runs] == [0, 0]
    assert run(forest, pattern, tmp_path / "out").returncode == 0
    assert read_files(tmp_path / "out") == read_files(tmp_path / "whole")


def test_outputs_that_were_removed_are_made_again(forest: Path, tmp_path: Path) -> None:
    pattern, out = write_inputs(tmp_path / "in", ".jsonl", [300]), tmp_path / "out"
    assert run(forest, pattern, out).returncode == 0
    kept = read_files(out)
    for names in (["part-00001.jsonl"], ["_shards/00001.json"], ["part-00000.jsonl", "_shards/00000.json"]):
        for name in names:
            (out / name).unlink()
        assert run(forest, pattern, out).returncode == 0
        assert read_files(out) == kept
    (out / "part-00001.jsonl").write_bytes(kept["part-00001.jsonl"][:5_000])
    (out / "_shards" / "00001.json").unlink()
    done = run(forest, pattern, out)
    assert (done.returncode, "Remove it, and run the same command again." in done.stderr) == (1, True), done.stderr


def test_the_records_of_another_plan_are_refused(forest: Path, tmp_path: Path) -> None:
    """A worker of an earlier plan was still at work."""
    pattern, out = write_inputs(tmp_path / "in", ".jsonl", [300]), tmp_path / "out"
    assert run(forest, pattern, out).returncode == 0
    record, part = out / "_shards" / "00001.json", out / "part-00001.jsonl"
    old = record.read_bytes()
    with (tmp_path / "in" / "0.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"text": "more"}\n')
    assert run(forest, pattern, out, "--fresh").returncode == 0
    for path in (record, out / SUCCESS):
        path.unlink()
    record.write_bytes(old)
    done = run(forest, pattern, out)
    assert (done.returncode, "00001.json" in done.stderr, "of another plan" in done.stderr) == (1, True, True)
    (out / PLAN).unlink()
    for more in ([], ["--fresh"]):
        done = run(forest, pattern, out, *more)
        assert (done.returncode, f"and no {PLAN}." in done.stderr) == (1, True), done.stderr
    assert part.exists()


@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".parquet"])
def test_an_input_that_changes_while_it_is_read(kind: str, tmp_path: Path) -> None:
    write_inputs(tmp_path / "in", kind, [30_000])
    path = tmp_path / "in" / f"0{kind}"
    plan = make_plan(open_folder(str(tmp_path / "out")), str(path), 10**6, {})
    for change in (
        lambda: os.truncate(path, path.stat().st_size - 9),
        lambda: os.truncate(path, path.stat().st_size // 2),
        lambda: path.write_bytes(path.read_bytes() + b"more"),
    ):
        content = path.read_bytes()
        rows = open_parts(next(read_shards(open_folder(str(tmp_path / "out")))).parts, kind, plan.columns).rows
        next(rows)
        change()
        said = rf"0{re.escape(kind)}( changed since| is damaged| cannot be read|, row \d+ is not CSV)"
        with pytest.raises(ArtifactError, match=said):
            list(rows)
        path.write_bytes(content)


def test_a_slow_model_with_processes_of_its_own(tmp_path: Path) -> None:
    """Each answered request shows that the worker lives; and a component may start processes."""
    write_model(tmp_path / "slow", "slow", [("TEXT", "STRING", [1])], [("score", "FP32", [1])], rows=32)
    path = tmp_path / "slow" / "slow" / "1" / "model.py"
    slowly = """        import multiprocessing, time
        own = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(0.1,))
        own.start()
        own.join()
        time.sleep(1.5)
        rows, outputs ="""
    path.write_text(path.read_text(encoding="utf-8").replace("        rows, outputs =", slowly), encoding="utf-8")
    pattern = write_inputs(tmp_path / "in", ".jsonl", [128])
    folder, job = (
        open_folder(str(tmp_path / "out")),
        ScoringJob("", "local", tmp_path / "slow", Client, None, 1, "", {}, {}),
    )
    make_plan(folder, pattern, 1000, {})
    assert Scheduler(folder, make_processes(folder, job, 1), hung=5).run(lambda rows: None) == (128, 0, {}, 0)


@pytest.fixture
def fragile(tmp_path: Path) -> Path:
    """A model that dies of the text KILL, and hangs at the text HANG for the first time."""
    write_model(tmp_path / "fragile", "fragile", [("TEXT", "STRING", [1])], [("score", "FP32", [1])], rows=32)
    path = tmp_path / "fragile" / "fragile" / "1" / "model.py"
    harm = f"""        flag = {str(tmp_path / "flag")!r}
        if b"KILL" in batch["TEXT"]:
            os.kill(os.getpid(), 9)
        if b"HANG" in batch["TEXT"] and not os.path.exists(flag):
            open(flag, "w").close()
            import time
            time.sleep(100)
"""
    code = path.read_text(encoding="utf-8")
    path.write_text(code.replace("        rows, outputs =", f"{harm}        rows, outputs ="), encoding="utf-8")
    return tmp_path / "fragile"


def test_a_shard_that_kills_its_worker_is_named(fragile: Path, tmp_path: Path) -> None:
    pattern = write_inputs(tmp_path / "in", ".jsonl", [100, 100, 100])
    with (tmp_path / "in" / "1.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"text": "KILL"}\n')
    done = run(fragile, pattern, tmp_path / "out", "--workers", "2")
    assert done.returncode == 1
    said = re.findall(r"part (\d+): The worker died \(signal 9, SIGKILL\) after 0 rows of part (\d+)", done.stderr)
    assert len(said) == 1, done.stderr
    status = read_status(open_folder(str(tmp_path / "out")))
    assert (status["failed"], status["done"]) == ([int(said[0][0])], status["shards"] - 1)


def test_a_worker_that_hangs_is_replaced(fragile: Path, tmp_path: Path) -> None:
    pattern = write_inputs(tmp_path / "in", ".jsonl", [100])
    with (tmp_path / "in" / "0.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"text": "HANG"}\n')
    folder, job = open_folder(str(tmp_path / "out")), ScoringJob("", "local", fragile, Client, None, None, "", {}, {})
    plan = make_plan(folder, pattern, 1000, {})
    assert Scheduler(folder, make_processes(folder, job, 1), hung=5).run(lambda rows: None) == (101, 0, {}, 0)
    assert ((tmp_path / "flag").exists(), plan.shards) == (True, 1)


def test_bad_rows_and_damaged_files(forest: Path, tmp_path: Path) -> None:
    from pyarrow import parquet

    pattern = write_inputs(tmp_path / "in", ".parquet", [200, 200, 200])
    path = tmp_path / "in" / "1.parquet"
    content = bytearray(path.read_bytes())
    at = parquet.read_metadata(path).row_group(0).column(1).data_page_offset
    content[at : at + 30] = b"\xff" * 30
    path.write_bytes(content)
    done = run(forest, pattern, tmp_path / "out")
    assert done.returncode == 1
    assert "1.parquet is damaged at row 1 or after" in done.stderr
    assert "1 parts failed; the same command tries them again." in done.stderr
    status = read_status(open_folder(str(tmp_path / "out")))
    assert (status["done"], status["failed"]) == (status["shards"] - 1, [2])
    assert status["errors"][2]["tries"] == 3
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "a.jsonl").write_bytes(
        b'{"text": "A cat."}\n{"text": "\xff"}\n[1]\n' + b'{"text": "' + b"x" * 2**24 + b'"}\n'
    )
    done = run(forest, str(bad / "*.jsonl"), tmp_path / "out2")
    assert (done.returncode, "3 of 4 rows have an error." in done.stderr) == (1, True), done.stderr
    again = run(forest, str(bad / "*.jsonl"), tmp_path / "out2")
    assert (again.returncode, "3 of 4 rows have an error." in again.stderr) == (1, True)
    written = (tmp_path / "out2" / "part-00000.jsonl").read_text(encoding="utf-8")
    errors = [json.loads(line).get("error", "") for line in written.splitlines()]
    assert [errors[0], "16,777,216 characters" in errors[3]] == ["", True]


def test_a_full_disk(forest: Path, tmp_path: Path, mount_disk: Callable[[str], Path]) -> None:
    """No file is half written; with room, the same command does the rest."""
    pattern = write_inputs(tmp_path / "in", ".jsonl", [1_000])
    assert run(forest, pattern, tmp_path / "whole").returncode == 0
    disk = mount_disk("400k")
    (disk / "filler").write_bytes(b"x" * 300_000)
    done = run(forest, pattern, disk / "out", "--workers", "2")
    assert done.returncode == 1
    assert re.search(r"disk/out/\S+ cannot be written: No space left on device", done.stderr), done.stderr
    found = read_files(disk / "out")
    assert SUCCESS not in found
    assert [name for name in found if name.startswith("part-")]
    whole = read_files(tmp_path / "whole")
    assert [name for name, content in found.items() if ".begun" not in name and content != whole[name]] == []
    (disk / "filler").unlink()
    assert run(forest, pattern, disk / "out").returncode == 0
    assert read_files(disk / "out") == whole


def test_plans_that_are_refused(forest: Path, tmp_path: Path) -> None:
    pattern, out = write_inputs(tmp_path / "in", ".jsonl", [150, 150]), tmp_path / "out"

    def refusal(*more: str, given: str = pattern, output: Path = out) -> str:
        found = CliRunner().invoke(app, command(forest, given, output, *more)[3:])
        assert isinstance(found.exception, ShoalError), found.output
        return str(found.exception)

    assert "No file has the name" in refusal(given=str(tmp_path / "none" / "*.jsonl"))
    assert "is in the output folder" in refusal(output=tmp_path / "in")
    assert "has no column 'nothing'" in refusal("--text-column", "nothing")
    assert not out.exists()  # a mistake leaves nothing behind
    assert "is not I/N" in refusal("--worker", "2/2")
    assert "--fresh and --worker exclude" in refusal("--worker", "0/2", "--fresh")
    (tmp_path / "in" / "c.csv").write_text("text\na\n")
    assert "several kinds" in refusal(given=str(tmp_path / "in" / "*"))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.md").write_text("mine")
    assert "has another file: notes.md" in refusal(output=tmp_path / "foreign")
    (tmp_path / "spark").mkdir()
    (tmp_path / "spark" / "part-00000-8b1f.c000.snappy.parquet").write_text("theirs")
    assert "has another file: part-00000-8b1f" in refusal("--fresh", output=tmp_path / "spark")
    assert run(forest, pattern, out).returncode == 0
    assert "was begun with another shard rows: 100, now 50." in refusal("--shard-rows", "50")
    path = tmp_path / "in" / "1.jsonl"
    path.write_text(path.read_text(encoding="utf-8") + '{"text": "more"}\n', encoding="utf-8")
    assert f"The inputs changed since {out} was begun: {path}" in refusal()
    assert run(forest, pattern, out, "--fresh").returncode == 0
    assert read_status(open_folder(str(out)))["rows"] == 301


@pytest.mark.parametrize("kind", [".csv", ".parquet"])
def test_inputs_with_other_columns(kind: str, tmp_path: Path) -> None:
    pattern = write_inputs(tmp_path / "in", kind, [5, 5])
    if kind == ".csv":
        (tmp_path / "in" / "1.csv").write_text("id,body\n1,a\n")
    else:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"id": [1.5], "text": ["a"]}), tmp_path / "in" / "1.parquet")
    with pytest.raises(
        ArtifactError, match=r"0.(csv|parquet) has '(text|id: int64)' where .*1.(csv|parquet) has '(body|id: double)"
    ):
        make_plan(open_folder(str(tmp_path / "out")), pattern, 100, {})
    assert not (tmp_path / "out").exists()


def test_any_two_cuts_divide_a_file_into_its_lines(tmp_path: Path, scale: Scale) -> None:
    """At every byte, with all kinds of line ends, blank lines and characters of one to four bytes."""
    draw = random.Random(0)
    lines: list[bytes] = []
    while len(b"".join(lines)) < scale(1_000, full=2_000):
        text = "".join(draw.choices("aé€😀\u2028\r \x0b", k=draw.randint(0, 9)))
        lines.append((text + draw.choice(["\n", "\r\n", "\n\n"])).encode())
    for content in (b"".join(lines), b"".join(lines)[:-1], b"\xef\xbb\xbf" + b"".join(lines), b"no end", b"\n" * 9):
        path = tmp_path / "in.txt"
        path.write_bytes(content)
        with path.open("rb") as file:
            part = partial(FilePart, str(path), len(content), digest_end(file, len(content), ".txt"))

        def read(*cuts: tuple[int, int], part: Callable[..., FilePart] = part) -> list[Any]:
            table = open_parts([part(*cut) for cut in cuts], ".txt", ("text",))
            return [row["text"] for _, row in table.rows if isinstance(row, dict)]

        whole = read((0, len(content)))
        expected = content.removeprefix(b"\xef\xbb\xbf").decode().split("\n")
        assert whole == [line.rstrip("\r") for line in (expected[:-1] if content.endswith(b"\n") else expected)]
        for cut in range(len(content) + 1):
            assert read((0, cut), (cut, len(content))) == whole, cut
        cuts = sorted(draw.sample(range(len(content)), min(5, len(content))))
        assert read(*zip([0, *cuts], [*cuts, len(content)], strict=True)) == whole


def test_any_cut_divides_json_lines(tmp_path: Path, scale: Scale) -> None:
    """At each byte: every line once, in order; a line that is not JSON is an error of its own."""
    draw, path = random.Random(1), tmp_path / "in.jsonl"
    content = b""
    while len(content) < scale(2_000, full=5_000):
        text = json.dumps({"text": "".join(draw.choices("aé€😀\u2028\r", k=draw.randint(0, 60)))}, ensure_ascii=False)
        content += draw.choice([text, text, "  " + text, "[1", ""]).encode() + draw.choice([b"\n", b"\r\n", b"\n\n"])
    path.write_bytes(content[:-1])
    size = len(content) - 1
    with path.open("rb") as file:
        part = partial(FilePart, str(path), size, digest_end(file, size, ".jsonl"))

    def read(*cuts: tuple[int, int]) -> list[str]:
        rows = open_parts([part(*cut) for cut in cuts], ".jsonl", ("text",)).rows
        return ["error" if isinstance(row, ArtifactError) else row["text"] for _, row in rows]

    lines = [line.strip() for line in content[:-1].decode().split("\n") if line.strip()]
    whole = ["error" if line == "[1" else json.loads(line)["text"] for line in lines]
    for cut in range(size + 1):
        assert read((0, cut), (cut, size)) == whole, cut


def test_faults_are_found(forest: Path, tmp_path: Path) -> None:
    pattern, out = write_inputs(tmp_path / "in", ".jsonl", [300]), tmp_path / "out"
    assert run(forest, pattern, out).returncode == 0
    kept, inputs = tmp_path / "kept", (tmp_path / "in" / "0.jsonl").read_bytes()
    shutil.copytree(out, kept)
    lines = (out / "part-00001.jsonl").read_bytes().splitlines(keepends=True)
    draw = random.Random(0)

    def bit(content: bytes) -> bytes:
        at = draw.randrange(len(content))
        return content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :]

    faults: list[Callable[[], object]] = [
        lambda: (out / "part-00001.jsonl").unlink(),
        lambda: (out / "part-00009.jsonl").write_bytes(b""),
        lambda: (out / "other.txt").write_bytes(b""),
        lambda: (out / "_shards" / "mine.txt").write_bytes(b""),
        lambda: (out / "_shards" / "00001.json").write_bytes(b"{"),
        lambda: (out / SUCCESS).write_bytes(b'{"rows": 300}'),
        lambda: (out / PLAN).write_bytes((out / PLAN).read_bytes().replace(b'"size"', b'"sise"')),
        lambda: (out / SUCCESS).write_bytes((out / SUCCESS).read_bytes().replace(b'"rows":300', b'"rows":299', 1)),
        lambda: (tmp_path / "in" / "0.jsonl").write_bytes(inputs.replace(b"cat", b"dog", 1)),
        lambda: (out / "part-00000.jsonl").write_bytes((out / "part-00001.jsonl").read_bytes()),
    ]
    for _ in range(12):
        at, to = draw.sample(range(len(lines)), 2)
        swapped = [*lines]
        swapped[at], swapped[to] = swapped[to], swapped[at]
        changed = [lines[:at] + lines[at + 1 :], lines[:at] + lines[at : at + 1] + lines[at:], swapped]
        faults += [partial((out / "part-00001.jsonl").write_bytes, b"".join(new)) for new in changed]
        faults.append(lambda: (out / "part-00000.jsonl").write_bytes(bit((out / "part-00000.jsonl").read_bytes())))
    assert len(faults) >= 50
    for fault in faults:
        fault()
        found = CliRunner().invoke(app, ["shards", "verify", str(out)])
        assert (found.exit_code, isinstance(found.exception, SystemExit | ShoalError)) == (1, True), found.exception
        shutil.rmtree(out)
        shutil.copytree(kept, out)
        (tmp_path / "in" / "0.jsonl").write_bytes(inputs)
    result = CliRunner().invoke(app, ["shards", "verify", str(out)])
    assert (result.exit_code, "All rows are there once, in order." in result.output) == (0, True)


def test_the_commands_that_look_at_a_folder(forest: Path, tmp_path: Path) -> None:
    pattern = write_inputs(tmp_path / "in", ".jsonl", [300])
    assert run(forest, pattern, tmp_path / "out", "--worker", "0/2").returncode == 0
    assert run(forest, pattern, tmp_path / "half", "--worker", "1/2").returncode == 0
    status = json.loads(CliRunner().invoke(app, ["shards", "status", str(tmp_path / "out"), "--json"]).stdout)
    assert (status["rows"], status["is_complete"]) == (300, True)  # the shards of a run that has not begun, too
    shown = CliRunner().invoke(app, ["shards", "status", str(tmp_path / "out")]).stdout
    assert "is complete: True" in shown
    for wrong, said in {
        f"merge {tmp_path / 'out'} --output s3://bucket/a": "needs a file of this machine",
        f"merge {tmp_path / 'out'} --output {tmp_path / 'a.csv'}": "The shards are .jsonl files",
        f"status {tmp_path / 'in'}": "has no plan of shoal infer",
    }.items():
        assert said in str(CliRunner().invoke(app, ["shards", *wrong.split()]).exception)


def test_a_first_file_of_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_text("\n\n")
    (tmp_path / "1.jsonl").write_text('{"id": 1, "text": "a"}\n')
    assert make_plan(open_folder(str(tmp_path / "out")), str(tmp_path / "*.jsonl"), 10, {}).columns == ("id", "text")


def test_tabs_are_taken_like_commas(tmp_path: Path) -> None:
    (tmp_path / "0.csv").write_text("id,text\n1,a\n")
    (tmp_path / "1.tsv").write_text("id\ttext\n2\tb, c\n")
    plan = make_plan(open_folder(str(tmp_path / "out")), str(tmp_path / "*.?sv"), 10, {})
    assert (plan.kind, plan.columns, plan.output_kind) == (".csv", ("id", "text"), ".csv")
    (shard,) = read_shards(open_folder(str(tmp_path / "out")))
    rows = [row for _, row in open_parts(shard.parts, plan.kind, plan.columns).rows]
    assert rows == [{"id": "1", "text": "a"}, {"id": "2", "text": "b, c"}]


def test_many_empty_files_and_no_rows(tmp_path: Path) -> None:
    for number in range(2_000):
        (tmp_path / f"{number}.txt").touch()
    plan = make_plan(open_folder(str(tmp_path / "out")), str(tmp_path / "*.txt"), 100, {})
    assert (plan.files, plan.shards, plan.bytes) == (2_000, 0, 0)
    assert list(read_shards(open_folder(str(tmp_path / "out")))) == []
    assert isinstance(plan, ShardPlan)
    with pytest.raises(InputError, match="not complete"):
        list(find_faults(open_folder(str(tmp_path / "out"))))
