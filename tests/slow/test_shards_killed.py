"""A million rows in shards: workers and whole runs killed, here and on a Ray cluster; and a plan of 10^8 rows."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from shoal.clients.bulk.shards.folders import open_folder
from shoal.clients.bulk.shards.plan import SUCCESS
from shoal.clients.bulk.shards.report import find_faults
from tests.conftest import Scale
from tests.support.bulk import WORDS
from tests.support.shards import children, read_files, wait_until

ROOT = Path(__file__).parents[2]
CODE = "from shoal.cli import main; main()"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, scale: Scale) -> Path:
    folder, draw = tmp_path_factory.mktemp("in"), random.Random(0)
    num_rows = scale(5_000, 250_000)
    for at in range(4):
        with (folder / f"{at}.jsonl").open("w", encoding="utf-8") as file:
            for number in range(at * num_rows, (at + 1) * num_rows):
                text = " ".join(draw.choices(WORDS, k=draw.randint(1, 9)))
                file.write(json.dumps({"id": number, "text": text}) + "\n")
    return folder


@pytest.fixture(scope="module")
def shard_rows(scale: Scale) -> int:
    return scale(500, 10_000)


@pytest.fixture(scope="module")
def command(forest: Path, source: Path, shard_rows: int) -> Callable[..., list[str]]:
    def make(out: Path, *more: str, python: str = sys.executable) -> list[str]:
        options = ["--local", "--repository", str(forest), "--input", f"{source}/*.jsonl", "--output", str(out)]
        return [python, "-c", CODE, "infer", *options, "--shard-rows", str(shard_rows), *more]

    return make


@pytest.fixture(scope="module")
def whole(command: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The unbroken run of one worker, and its seconds."""
    out = tmp_path_factory.mktemp("whole") / "out"
    start = time.monotonic()
    subprocess.run(command(out), check=True, stderr=subprocess.DEVNULL)
    return out, time.monotonic() - start


def check(out: Path, whole: Path, source: Path) -> int:
    """All files are those of the unbroken run, with each row once, in order. Return the number of rows."""
    assert read_files(out) == read_files(whole)
    assert list(find_faults(open_folder(str(out)))) == []
    given, found = (
        [json.loads(line)["id"] for path in sorted(files) for line in path.read_bytes().splitlines()]
        for files in (source.iterdir(), out.glob("part-*"))
    )
    assert found == given == list(range(len(given)))
    return len(given)


def find_workers(run: subprocess.Popen[bytes]) -> list[int]:
    """The worker processes of a command; besides them, it has one that Python starts."""
    found = children(run.pid) if run.poll() is None else []
    return [pid for pid in found if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.parametrize("options", [["--workers 2"], [f"--worker {n}/4" for n in range(4)]], ids=["workers", "worker"])
def test_killed_at_random_moments(
    options: list[str],
    command: Callable[..., list[str]],
    whole: tuple[Path, float],
    source: Path,
    tmp_path: Path,
    scale: Scale,
    record: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kill a random command, or a worker of one; a command that was killed is repeated. No half of a file stays."""
    (scratch := tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    out, draw, num_kills = tmp_path / "out", random.Random(len(options)), scale(3, 20)
    running: dict[str, subprocess.Popen[bytes]] = {}
    killed = {"run": 0, "worker": 0}
    start = time.monotonic()
    try:
        while not (out / SUCCESS).exists():
            for option in options:
                if option not in running or running[option].poll() is not None:
                    running[option] = subprocess.Popen(command(out, *option.split()), stderr=subprocess.DEVNULL)
            if sum(killed.values()) == num_kills:
                break
            with suppress(subprocess.TimeoutExpired):
                running[draw.choice(options)].wait(draw.uniform(0.3, whole[1] / num_kills / 2 + 0.5))
            victim = running[draw.choice(options)]
            if draw.random() < 0.5:
                victim.kill()
                victim.wait()
                killed["run"] += 1
            elif workers := find_workers(victim):
                os.kill(draw.choice(workers), signal.SIGKILL)
                killed["worker"] += 1
            for path in out.glob("part-*"):
                assert path.read_bytes() == (whole[0] / path.name).read_bytes()
        for each in running.values():
            assert each.wait(600) in (0, -signal.SIGKILL)
    finally:
        for each in running.values():
            each.kill()
            each.wait()
    subprocess.run(command(out), check=True, stderr=subprocess.DEVNULL)  # no run is left to be waited for
    num_rows = check(out, whole[0], source)
    wait_until(lambda: not any(path.is_file() for path in scratch.rglob("*")))
    assert sum(killed.values()) == num_kills or not scale.is_full
    record(
        f"a million rows in shards, killed twenty times, {options[0].split()[0]}",
        rows=num_rows, killed=killed, seconds=round(time.monotonic() - start, 1), unbroken_seconds=round(whole[1], 1),
    )  # fmt: skip


# --- Ray ------------------------------------------------------------------------------------------------------------


class Cluster:
    """Ray cluster of this machine: a head without CPUs, and two nodes of one CPU."""

    def __init__(self, python: str) -> None:
        self.python = python
        self.folder = Path(tempfile.mkdtemp(prefix="shoal-ray-", dir="/tmp"))  # paths of sockets are short
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.environ = {
            **os.environ,
            "HOME": str(self.folder),
            "RAY_AUTH_MODE": "disabled",
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        port = self.address.partition(":")[2]
        options = [f"--port={port}", "--num-cpus=0", "--include-dashboard=false", f"--temp-dir={self.folder}"]
        self.nodes = [self._start("--head", "--disable-usage-stats", *options)]
        for _ in range(2):
            self.add()

    def _start(self, *options: str) -> subprocess.Popen[bytes]:
        ray = Path(self.python).with_name("ray")
        path = self.folder / f"start-{time.monotonic_ns()}.log"
        with path.open("wb") as log:
            node = subprocess.Popen([ray, "start", "--block", *options], env=self.environ, stdout=log, stderr=log)
        wait_until(lambda: b"Ray runtime started" in path.read_bytes())
        return node

    def add(self) -> None:
        """Start a node."""
        self.nodes.append(self._start(f"--address={self.address}", "--num-cpus=1"))

    def kill_raylet(self, node: subprocess.Popen[bytes]) -> None:
        """Kill a node's raylet; ``ray start`` ends with it."""
        for pid in children(node.pid):
            if b"raylet/raylet" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        node.wait(60)
        self.nodes.remove(node)

    def actors(self) -> list[int]:
        """The processes of this cluster's actors."""
        found = []
        for each in Path("/proc").iterdir():
            with suppress(OSError):
                if (each / "cmdline").read_bytes().startswith(b"ray::_Actor") and self._is_here(each):
                    found.append(int(each.name))
        return found

    def _is_here(self, process: Path) -> bool:
        return str(self.folder).encode() in (process / "environ").read_bytes()

    def end(self) -> None:
        for node in reversed(self.nodes):
            node.terminate()
            node.wait(60)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def ray_python(tmp_path_factory: pytest.TempPathFactory, scale: Scale) -> str:
    """The Python of an environment with Ray, over that of the tests."""
    if not scale.is_full:
        pytest.skip("installs Ray: in `make verify`")
    folder = tmp_path_factory.mktemp("ray")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    (packages,) = folder.glob("lib/*/site-packages")
    ours = next(path for path in sys.path if path.endswith("site-packages"))
    (packages / "tests.pth").write_text(f"import site; site.addsitedir({ours!r})\n", encoding="utf-8")
    pip = [str(folder / "bin/pip"), "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), "ray"]
    subprocess.run(pip, check=True)
    return str(folder / "bin/python")


@pytest.fixture(scope="module")
def cluster(ray_python: str) -> Iterator[Cluster]:
    made = Cluster(ray_python)
    yield made
    made.end()


def test_addresses_of_no_cluster(ray_python: str, command: Callable[..., list[str]], tmp_path: Path) -> None:
    environ = {**os.environ, "HOME": str(tmp_path), "RAY_AUTH_MODE": "disabled"}
    for address in ("127.0.0.1:1", "127.0.0.1:99999", "nowhere.invalid:6379", "nowhere", "ray://127.0.0.1:1"):
        arguments = command(tmp_path / "out", "--ray", address, python=ray_python)
        done = subprocess.run(arguments, env=environ, capture_output=True, text=True, timeout=60)
        assert (done.returncode, f"No Ray cluster answers at {address}" in done.stderr) == (1, True), done.stderr
        assert "Traceback" not in done.stderr


def test_killed_on_ray(
    cluster: Cluster,
    command: Callable[..., list[str]],
    whole: tuple[Path, float],
    source: Path,
    tmp_path: Path,
    record: Callable[..., None],
) -> None:
    """A worker, a raylet or the driver is killed, in turns."""
    out, draw, killed = tmp_path / "out", random.Random(0), {"worker": 0, "raylet": 0, "driver": 0}
    start = time.monotonic()
    driver: subprocess.Popen[bytes] | None = None
    log = (cluster.folder / "driver.log").open("ab")
    try:
        while driver is None or driver.poll() != 0:
            if driver is None or driver.poll() is not None:
                assert driver is None or driver.returncode == -signal.SIGKILL, driver.returncode
                options = ["--workers", "2", "--ray", cluster.address]
                driver = subprocess.Popen(
                    command(out, *options, python=cluster.python), env=cluster.environ, stdout=log, stderr=log
                )
            if sum(killed.values()) == 12:
                driver.wait(600)
                continue
            deadline = time.monotonic() + 60
            while not cluster.actors() and driver.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
            with suppress(subprocess.TimeoutExpired):
                driver.wait(draw.uniform(0.5, whole[1] / 12))
                continue
            kind = [*killed][sum(killed.values()) % 3]
            if kind == "driver":
                driver.kill()
                driver.wait()
            elif kind == "raylet":
                cluster.kill_raylet(draw.choice(cluster.nodes[1:]))
                cluster.add()
            elif actors := cluster.actors():
                os.kill(draw.choice(actors), signal.SIGKILL)
            killed[kind] += 1
    finally:
        if driver is not None:
            driver.kill()
            driver.wait()
        log.close()
    num_rows = check(out, whole[0], source)
    assert min(killed.values()) >= 2
    record(
        "a million rows in shards on Ray, killed",
        rows=num_rows, killed=killed, seconds=round(time.monotonic() - start, 1), unbroken_seconds=round(whole[1], 1),
    )  # fmt: skip


# --- a large plan -----------------------------------------------------------------------------------------------------


def test_a_plan_of_many_rows(tmp_path: Path, scale: Scale, record: Callable[..., None]) -> None:
    """10^8 rows of few distinct texts in 1,000 Parquet files: time and memory of a plan, and of its status."""
    import pyarrow
    from pyarrow import parquet

    files, rows = scale(20, 1_000), 100_000
    (tmp_path / "in").mkdir()
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([n % 8 for n in range(rows)], "int8"), [*WORDS[:8]])
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "in" / "0.parquet", row_group_size=25_000)
    for number in range(1, files):
        shutil.copyfile(tmp_path / "in" / "0.parquet", tmp_path / "in" / f"{number}.parquet")
    code = f"""
import json, time
from pathlib import Path
from shoal.clients.bulk.shards.folders import open_folder
from shoal.clients.bulk.shards.plan import ShardReader, make_plan
from shoal.clients.bulk.shards.report import read_status
from shoal.clients.bulk.shards.shard_task import ShardRecord, record_name
import msgspec
start = time.monotonic()
folder = open_folder({str(tmp_path / "out")!r})
plan = make_plan(folder, {str(tmp_path / "in" / "*.parquet")!r}, 25_000, {{}})
seconds = time.monotonic() - start
most = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024
for number in range(plan.shards - 1):
    record = ShardRecord(plan.digest(), plan.file(number), 25_000, 0, "0" * 64, "0" * 64)
    folder.put(record.file, b"")
    folder.put(record_name(number), msgspec.json.encode(record))
start = time.monotonic()
status = read_status(folder)
print(json.dumps([plan.rows, plan.shards, seconds, most, status["rows"], time.monotonic() - start]))
"""
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    total, shards, seconds, most, done, status_seconds = json.loads(found.stdout)
    assert (total, shards, done) == (files * rows, files * 4, (files * 4 - 1) * 25_000)
    assert seconds < 60
    assert most < 300
    code = f"""
from pathlib import Path
from shoal.clients.bulk.shards.folders import open_folder
from shoal.clients.bulk.shards.plan import ShardReader
reader = ShardReader(open_folder({str(tmp_path / "out")!r}))
for number in (0, {shards - 1}):
    assert reader.find(number).number == number
    print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
"""
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    first, last = map(int, found.stdout.split())
    assert last - first < 1024  # KiB: a worker's memory does not grow with the plan
    assert status_seconds < 2
    record(
        "a plan of 10^8 rows in shards",
        rows=total, shards=shards, seconds=round(seconds, 2), most_mib=round(most, 1),
        status_seconds=round(status_seconds, 2),
    )  # fmt: skip
