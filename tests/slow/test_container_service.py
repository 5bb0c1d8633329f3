"""The line of ``serve --print``, run in a root with the layout of NVIDIA's image.

The embedded server stands in for NVIDIA's, and shoal's backend in Python for the image's FIL: it is in the image's own
backend directory, where the service must find it.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from shoal.authoring.composition.compose import compose
from shoal.authoring.environment.embedded import STUB, find_installed
from shoal.authoring.repository.plan import Plan
from shoal.authoring.vendoring import copy_package
from shoal.cli import app
from shoal.clients.client.client import Client
from shoal.kit.backends import BACKENDS
from shoal.serving.gateway.callers.key_file import KeyFile
from tests.support.service import Service

TRITON = "opt/tritonserver"


def make_root(folder: Path) -> Path:
    """Make a root with the folders of NVIDIA's image below ``/opt/tritonserver``: the stub beside the backend."""
    wheel = find_installed()
    assert wheel is not None
    server = folder / TRITON
    for name in ("bin", "backends", "caches"):
        shutil.copytree(wheel / name, server / name, ignore=shutil.ignore_patterns("__pycache__"))
    (server / "lib").symlink_to(wheel.parents[1] / "nvidia_pytriton.libs")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copy2(wheel / "python_backend_stubs" / version / STUB, server / "backends" / "python")
    (server / "backends" / "fil").mkdir()
    shutil.copyfile(BACKENDS / "fil" / "model.py", server / "backends" / "fil" / "model.py")
    copy_package(server / "backends" / "fil")
    return folder


def list_models(service: Service, key: str) -> list[str]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"http://{service.http}/v1/models", headers=headers)
    with urllib.request.urlopen(request, timeout=30) as reply:
        return [model["id"] for model in json.load(reply)["data"]]


def test_the_printed_service(artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_root(tmp_path / "root")
    made = compose("cuml", tmp_path / "made", artifacts=artifacts, plan=Plan(target="26.06"))
    file = KeyFile(tmp_path / "keys" / "keys.json")
    file.path.parent.mkdir()
    key = file.new("all")
    given = ["--keys", str(file.path), "--alias", "forest=cuml", "--audit", str(tmp_path / "audit.jsonl")]
    said = CliRunner().invoke(app, ["serve", str(made), "--print", *given])
    assert said.exception is None
    words = shlex.split(said.stdout.replace("\\\n", " "))
    (path,) = [word.partition("=")[2] for word in words if word.startswith("SHOAL_TRITONSERVER=")]
    monkeypatch.setenv("SHOAL_TRITONSERVER", f"{root}{path}")
    command = shlex.split(words[-1].partition(" && exec ")[2])
    assert command[:3] == ["shoal", "serve", "/models"]
    options = [word.removeprefix("/mnt") for word in command[3:]]  # where the printed command mounts the files
    with Service(made, tmp_path / "log", *options) as service:
        (server,) = service.servers()
        assert server.arguments()[0] == f"{root}/{TRITON}/bin/tritonserver"
        assert f"--backend-directory={root}/{TRITON}/backends" in server.arguments()
        (stub,) = service.stubs()
        assert stub.arguments()[0] == f"{root}/{TRITON}/backends/python/{STUB}"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            list_models(service, "")
        assert {"cuml", "forest"} <= {*list_models(service, key)}
        with Client(service.grpc, api_key=key) as client:
            rows = np.zeros((2, 207), np.float32)
            before = client.infer("cuml", input__0=rows)["output__0"]
            os.kill(stub.pid, signal.SIGKILL)
            service.wait(is_ready=False, seconds=10)
            service.wait(is_ready=True, seconds=30)
            np.testing.assert_array_equal(client.infer("cuml", input__0=rows)["output__0"], before)
        assert service.stop() == 0
    assert (tmp_path / "audit.jsonl").stat().st_size
