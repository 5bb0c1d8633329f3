"""The line of ``serve --print``, run in a root with the layout of NVIDIA's image.

The embedded server stands in for NVIDIA's, and shoal's backends in Python for the image's FIL and PyTorch: they are in
the image's own backend directory, where the service must find them.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
from shoal.lab.tiny_llm import make_tiny
from shoal.serving.gateway.callers.key_file import KeyFile
from tests.support.encoders import pipeline
from tests.support.imports import add
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
    for name in ("fil", "pytorch"):
        (server / "backends" / name).mkdir()
        shutil.copyfile(BACKENDS / name / "model.py", server / "backends" / name / "model.py")
        copy_package(server / "backends" / name)
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("image"))


@contextmanager
def serve_as_printed(made: Path, root: Path, place: Path, *given: str) -> Iterator[tuple[Service, str]]:
    """Serve a repository by the line that is printed for it, with keys; yield the service and a key."""
    file = KeyFile(place / "keys" / "keys.json")
    file.path.parent.mkdir()
    key = file.new("all")
    said = CliRunner().invoke(app, ["serve", str(made), "--print", "--keys", str(file.path), *given])
    assert said.exception is None
    words = shlex.split(said.stdout.replace("\\\n", " "))
    (path,) = [word.partition("=")[2] for word in words if word.startswith("SHOAL_TRITONSERVER=")]
    command = shlex.split(words[-1].partition(" && exec ")[2])
    assert command[:3] == ["shoal", "serve", "/models"]
    options = [word.removeprefix("/mnt") for word in command[3:]]  # where the printed command mounts the files
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("SHOAL_TRITONSERVER", f"{root}{path}")
        with Service(made, place / "log", *options) as service:
            (server,) = service.servers()
            assert server.arguments()[0] == f"{root}/{TRITON}/bin/tritonserver"
            yield service, key
            assert service.stop() == 0


def kill_models(service: Service) -> None:
    """Kill the processes of all Python models, and wait until the service is back."""
    for stub in service.stubs():
        os.kill(stub.pid, signal.SIGKILL)
    service.wait(is_ready=False, seconds=10)
    service.wait(is_ready=True, seconds=120)


def ask(service: Service, path: str, key: str, body: dict[str, Any] | None = None) -> Any:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{service.http}/v1/{path}", data, headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def test_the_printed_service(artifacts: Path, root: Path, tmp_path: Path) -> None:
    made = compose("cuml", tmp_path / "made", artifacts=artifacts, plan=Plan(target="26.06"))
    given = ["--alias", "forest=cuml", "--audit", str(tmp_path / "audit.jsonl")]
    with serve_as_printed(made, root, tmp_path, *given) as (service, key):
        (server,) = service.servers()
        assert f"--backend-directory={root}/{TRITON}/backends" in server.arguments()
        (stub,) = service.stubs()
        assert stub.arguments()[0] == f"{root}/{TRITON}/backends/python/{STUB}"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask(service, "models", "")
        assert {"cuml", "forest"} <= {model["id"] for model in ask(service, "models", key)["data"]}
        with Client(service.grpc, api_key=key) as client:
            rows = np.zeros((2, 207), np.float32)
            before = client.infer("cuml", input__0=rows)["output__0"]
            kill_models(service)
            np.testing.assert_array_equal(client.infer("cuml", input__0=rows)["output__0"], before)
    assert (tmp_path / "audit.jsonl").stat().st_size


def test_a_language_model_and_an_encoder(tiny_bert: Path, root: Path, tmp_path: Path) -> None:
    weights = make_tiny(tmp_path / "weights", hidden=32, layers=1)
    project = tmp_path / "project"
    add(project, tiny_bert, "encoder", task="embeddings", pooling="mean", tokenizer="tokens", max_length=16)
    pipeline(project, "encoder", "tokens", "embedded")
    how: dict[str, Any] = {"weights": weights, "projects": [project], "plan": Plan(target="26.06"), "is_together": True}
    made = compose(["llm_bls", "embedded"], tmp_path / "made", **how)
    chat: dict[str, Any] = {
        "model": "gpt-4o",
        "messages": [{"role": "user", "content": "Hello!"}],
        "max_tokens": 8,
        "temperature": 0,
    }
    asked: dict[str, dict[str, Any]] = {
        "chat/completions": chat,
        "embeddings": {"model": "embedded", "input": ["w1 w2", "w3"]},
    }
    with serve_as_printed(made, root, tmp_path, "--alias", "gpt-4o=llm_bls") as (service, key):
        for path, request in asked.items():
            with pytest.raises(urllib.error.HTTPError, match="401"):
                ask(service, path, "", request)
        before = [ask(service, path, key, request) for path, request in asked.items()]
        kill_models(service)
        after = [ask(service, path, key, request) for path, request in asked.items()]
    assert after[0]["choices"] == before[0]["choices"]
    assert before[0]["choices"][0]["message"]["content"]
    assert after[1]["data"] == before[1]["data"]
    assert len(before[1]["data"]) == 2
