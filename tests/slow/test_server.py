"""Start and stop of the real server."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from shoal.authoring.repository.manifest import MANIFEST
from shoal.clients.client.calls import NO_LIMIT
from shoal.clients.client.client import Client
from shoal.clients.local import load
from shoal.errors import ArtifactError, InputError, ServerError, SetupError
from shoal.serving.server.checks import check_repository
from shoal.serving.server.launch import find_cause, serve
from tests.support.service import make_repository
from tests.support.ways import WAYS, connect, url_of


def regions() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob(f"shoal_{os.getpid()}_*")}


def test_a_server_outlives_the_thread_that_started_it_and_leaves_nothing(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # and no proxy stands between us and loopback
    before = regions()
    with ThreadPoolExecutor(1) as brief:
        running = brief.submit(serve, repository).result()
    time.sleep(0.5)
    with running, Client(running.grpc_url) as client:
        assert client.is_ready("ensemble_all")
        folder, url = running.log.parent, running.http_url
        children = subprocess.run(
            ["pgrep", "-f", str(folder)], capture_output=True, text=True, check=True
        ).stdout.split()
        assert len(children) >= 5  # the server and four stubs
        assert len(regions()) > len(before)
    assert regions() == before
    assert not folder.exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(url.split(":")[1]))) != 0


def test_the_server_ends_with_its_parent(repository: Path, tmp_path: Path) -> None:
    code = (
        f"import shoal, time\ns = shoal.serve({str(repository)!r})\nprint(s._process.pid, flush=True)\ntime.sleep(99)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists()


def test_a_stub_that_hangs_does_not_outlive_its_server(repository: Path) -> None:
    """Triton crashes, or gives up on it and ends; whoever started Triton ends what is left."""
    running = serve(repository)
    tasks = Path(f"/proc/{running._process.pid}/task").glob("*/children")
    stubs = [int(pid) for task in tasks for pid in task.read_text().split()]
    assert len(stubs) == 4
    os.kill(stubs[0], signal.SIGSTOP)
    running._process.kill()
    running.wait()
    running.stop()
    deadline = time.monotonic() + 5  # the kernel takes its time to end what was killed
    while any(map(_is_alive, stubs)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def without_manifest(repository: Path, copy: Path) -> Path:
    shutil.copytree(repository, copy)
    (copy / MANIFEST).unlink()
    return copy


def test_files_are_checked_against_the_manifest_before_anything_runs(repository: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(repository, copy)
    with (copy / "preprocess" / "1" / "model.py").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    message = r"preprocess/1/model\.py in .* is not the file that manifest\.json lists\. Compose again"
    with pytest.raises(ArtifactError, match=message):
        serve(copy)
    with pytest.raises(ArtifactError, match=message):
        load(copy / "ensemble_all")
    (copy / "preprocess" / "1" / "model.py").unlink()
    with pytest.raises(ArtifactError, match=r"model\.py in .* is missing, and manifest\.json lists it"):
        serve(copy)


def test_a_model_that_does_not_load_is_named_with_its_own_error(repository: Path, tmp_path: Path) -> None:
    broken = without_manifest(repository, tmp_path / "broken")
    (broken / "preprocess" / "1" / "vocab.txt").write_text("[PAD]\n", encoding="utf-8")
    with pytest.raises(ServerError, match=r"failed to load 'preprocess' .* vocab\.txt is not the one preprocess\.json"):
        serve(broken)


def test_a_forest_of_another_bundle_is_refused_at_load(repository: Path, tmp_path: Path) -> None:
    broken = without_manifest(repository, tmp_path / "broken")
    path = broken / "preprocess" / "1" / "preprocess.json"
    path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    with pytest.raises(ServerError, match=r"failed to load 'cuml' .* checkpoint\.tl was made with another preprocess"):
        serve(broken)


def test_an_ensemble_that_does_not_fit_is_named(repository: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(repository, broken)
    config = broken / "cuml" / "config.pbtxt"
    config.write_text(config.read_text(encoding="utf-8").replace("207", "206"), encoding="utf-8")
    with pytest.raises(ServerError, match="206"):
        serve(broken)


def test_faults_are_found_before_the_start(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="Triton does not support the path"):
        serve(tmp_path / "with blank")
    with pytest.raises(InputError, match="is not a model repository"):
        serve(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(
            SetupError, match=r"Port \d+ cannot be used: Address already in use\. Stop what listens there"
        ):
            serve(repository, http_port=taken.getsockname()[1])
    with pytest.raises(InputError, match=r"The log .*triton\.log cannot be written: No such file or directory"):
        serve(repository, log=tmp_path / "nowhere" / "triton.log")
    with pytest.raises(SetupError, match=r"--grpc-port 70000 is no port\. Give 1 to 65535"):
        serve(repository, grpc_port=70000)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.pbtxt").touch()
    (tmp_path / ".git").mkdir()
    with pytest.raises(InputError, match=r"holds folders that are not models: \.git"):
        check_repository(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "white space"))
    (tmp_path / "white space").mkdir()
    with pytest.raises(InputError, match="does not support"):
        serve(repository)
    assert not list((tmp_path / "white space").iterdir())


def test_a_server_that_is_not_ready_in_time_is_stopped(repository: Path) -> None:
    before = regions()
    with pytest.raises(ServerError, match=r"Triton was not ready after 0\.1 s"):
        serve(repository, timeout=0.1)
    assert regions() == before


def test_a_server_with_other_restrictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it keeps configurations to itself, or lists its models, its answers are the same."""
    repository = make_repository(tmp_path)
    x = np.arange(10, dtype=np.float32)[:, None]
    for restricted in ("shared-memory", "model-config,model-repository"):
        monkeypatch.setattr("shoal.serving.server.launch.RESTRICTED", restricted)
        with serve(repository) as server:
            for way in WAYS:
                with connect(way, url_of(server, way)) as client:
                    assert np.array_equal(client.infer("other", X=x[:4])["Y"], 2 * x[:4])
                    spec = client.describe("other")
                    assert [tensor.is_optional for tensor in spec.inputs] == ["config" in restricted]
                    if "config" not in restricted:
                        assert client.default_model() == "chain"
                        assert spec.max_batch_size == 4
                        assert np.array_equal(client.infer("other", X=x)["Y"], 2 * x)
                        continue
                    assert spec.max_batch_size == NO_LIMIT
                    with pytest.raises(InputError, match="batch-size must be <= 4 for 'other'"):
                        client.infer("other", X=x)


def test_a_server_that_does_not_end_is_killed(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = regions()
    running = serve(repository)
    monkeypatch.setattr("shoal.serving.server.launch.EXIT_SECONDS", -9.9)
    os.kill(running._process.pid, signal.SIGSTOP)
    running.stop()
    assert running.wait() == -signal.SIGKILL
    assert regions() == before


def test_causes_in_logs() -> None:
    assert find_cause("") == "it said nothing."
    assert find_cause("a\nlast words\n") == "last words"
    assert find_cause("E1 x.cc] \"Poll failed for model directory 'e': reason\"") == (
        "Poll failed for model directory 'e': reason"
    )
