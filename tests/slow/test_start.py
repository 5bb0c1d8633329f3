"""Causes that keep a server from starting are reported before the start, each in one line with its fix."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from shoal.cli.doctor import examine
from shoal.errors import InputError, SetupError, ShoalError
from shoal.serving.server import checks
from shoal.serving.server.launch import Server
from shoal.serving.server.orphans import make_folder
from shoal.serving.server.runtime import find_runtime
from shoal.system.machine import VISIBLE
from tests.support.service import SHOAL, make_repository

SECONDS = 5


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return make_repository(tmp_path)


def manifest(repository: Path, **content: object) -> None:
    (repository / "manifest.json").write_text(json.dumps(content), encoding="utf-8")


def refusal(repository: Path) -> ShoalError:
    begin = time.monotonic()
    with pytest.raises(ShoalError) as error:
        checks.check_start(repository)
    assert time.monotonic() - begin < SECONDS
    assert "\n" not in str(error.value)
    faults = [finding for finding in examine(repository) if finding.level == "fault"]
    said = [re.sub(r"\d+ MiB free", "", finding.found) for finding in faults]
    assert re.sub(r"\d+ MiB free", "", error.value.what) in said  # shoal doctor says the same
    return error.value


def test_no_gpu_for_a_repository_of_one(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "describe_machine", lambda: {"cores": 2})
    monkeypatch.delenv(VISIBLE, raising=False)
    manifest(repository, gpus=[0])
    error = refusal(repository)
    assert error.what == f"{repository} was composed for GPU 0, and this machine has none."
    assert "--placement cpu" in error.fix
    monkeypatch.setattr(checks, "describe_machine", lambda: {"num_gpus": 1})
    checks.check_gpus(repository)


def test_too_little_shared_memory(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = shutil.disk_usage("/dev/shm").free // 2**20
    manifest(repository, launch={"shared_memory": (free + 1000) * 2**20})
    error = refusal(repository)
    assert error.what.startswith("/dev/shm has ")
    assert error.what.endswith(f"the largest requests need {free + 1000} MiB.")
    assert f"--shm-size={free + 1000}m" in error.fix
    monkeypatch.setattr(checks, "SHARED_MEMORY", Path("/nowhere"))
    assert refusal(repository).what == "/nowhere cannot be written."


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_cannot_be_read(repository: Path) -> None:
    path = repository / "first" / "1" / "model.py"
    manifest(repository, files={"first/1/model.py": "0" * 64})
    path.chmod(0)
    error = refusal(repository)
    assert isinstance(error, InputError)
    assert error.what == f"{path} cannot be read by this user."


def test_a_glibc_that_is_too_old(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.31"))
    error = refusal(repository)
    assert isinstance(error, SetupError)
    assert error.what == "The embedded Triton needs glibc 2.35 or newer, and this is glibc 2.31."
    monkeypatch.setenv("SHOAL_TRITONSERVER", "/some/other")
    checks.check_glibc()


def test_a_temporary_folder_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    with pytest.raises(SetupError, match=r"No temporary folder can be created: .*/nowhere"):
        make_folder()


def test_a_changed_file(repository: Path) -> None:
    manifest(repository, files={"first/1/model.py": "0" * 64})
    assert "is not the file that manifest.json lists" in refusal(repository).what


def run(*arguments: object) -> tuple[int, str, float]:
    begin = time.monotonic()
    done = subprocess.run([*SHOAL, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=60)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr, time.monotonic() - begin


def test_a_model_that_does_not_load(repository: Path) -> None:
    """Its own error, and not what follows from it."""
    (repository / "first" / "1" / "model.py").write_text("raise ValueError('no such weights')", encoding="utf-8")
    code, said, seconds = run(
        "serve", repository, "--no-check", "--http-port", 0, "--grpc-port", 0, "--metrics-port", 0
    )
    assert code == 1
    assert "failed to load 'first' version 1" in said
    assert "no such weights" in said
    assert seconds < 4 * SECONDS  # Python and its libraries included


def test_a_port_in_use(repository: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for option in ("--http-port", "--grpc-port", "--metrics-port"):
            others = [x for o in ("--http-port", "--grpc-port", "--metrics-port") if o != option for x in (o, 0)]
            code, said, seconds = run("serve", repository, option, port, *others)
            assert code == 1
            assert f"Port {port} cannot be used: Address already in use." in said
            assert seconds < SECONDS


def test_no_other_program_gets_its_ports(repository: Path) -> None:
    """Triton listens once its models are loaded; seconds after its start."""
    server = Server(repository, find_runtime())
    try:
        for url in (server.http_url, server.grpc_url, server.metrics_url):
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", int(url.rsplit(":")[-1])))
        server.wait_ready()
        assert b"nv_inference" in urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=10).read()
    finally:
        server.stop()
