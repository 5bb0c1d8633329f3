"""Clients that know nothing of shoal ask ``shoal serve`` as they ask a bare Triton."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient import grpc as triton_grpc
from tritonclient import http as triton_http
from tritonclient.grpc import aio as triton_grpc_aio
from tritonclient.http import aio as triton_http_aio
from tritonclient.utils import InferenceServerException

import shoal
from shoal.serving.server.launch import Server
from tests.support.once import ROOT
from tests.support.service import Service, make_repository

# Methods that read, with their arguments; and what is closed, with the words for it.
READING: dict[str, tuple[Any, ...]] = {
    "is_server_live": (), "is_server_ready": (), "is_model_ready": ("chain",), "get_server_metadata": (),
    "get_model_metadata": ("chain",), "get_model_config": ("chain",), "get_model_repository_index": (),
    "get_inference_statistics": ("chain",),
}  # fmt: skip
CLOSED: dict[str, str] = {
    "get_log_settings": "Logging", "get_trace_settings": "Tracing", "get_system_shared_memory_status": "Shared memory",
    "get_cuda_shared_memory_status": "Shared memory",
}  # fmt: skip
MODULES = {"http": triton_http, "grpc": triton_grpc, "http aio": triton_http_aio, "grpc aio": triton_grpc_aio}
PERF_ANALYZER = "tritonclient-2.51.0-py3-none-manylinux1_x86_64.whl"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clients")
    repository = make_repository(folder)
    for name in ("first", "second"):  # members that clients may not ask
        config = repository / name / "config.pbtxt"
        config.write_text(config.read_text().replace('"public"', '"private"'))
    return folder


@pytest.fixture(scope="module")
def service(home: Path) -> Iterator[Service]:
    with Service(home / "repository", home / "log") as running:
        yield running


@pytest.fixture(scope="module")
def bare(home: Path) -> Iterator[Server]:
    with shoal.serve(home / "repository") as server:
        yield server


def ask(kind: str, url: str, method: str, arguments: tuple[Any, ...], **more: Any) -> Any:
    """Return the answer of a method of one of the four clients, as JSON if possible."""

    async def go() -> Any:
        client = MODULES[kind].InferenceServerClient(url)
        try:
            of = getattr(client, method)
            as_json = {"as_json": True} if "as_json" in inspect.signature(of).parameters else {}
            answer = of(*arguments, **as_json, **more)
            return await answer if inspect.isawaitable(answer) else answer
        finally:
            closing = client.close()
            if inspect.isawaitable(closing):
                await closing

    return asyncio.run(go())


@pytest.mark.parametrize("method", READING)
@pytest.mark.parametrize("kind", MODULES)
def test_methods_that_read(service: Service, bare: Server, kind: str, method: str) -> None:
    is_grpc = kind.startswith("grpc")
    more = {}
    if method in ("get_model_config", "get_model_repository_index", "get_inference_statistics"):  # closed on ours
        more["headers"] = {f"{'triton-grpc-protocol-' if is_grpc else ''}admin-key": bare.admin_key}
    wanted = ask(kind, bare.grpc_url if is_grpc else bare.http_url, method, READING[method], **more)
    found = ask(kind, service.grpc if is_grpc else service.http, method, READING[method])
    if method == "get_server_metadata":
        assert set(found.pop("extensions")) < set(wanted.pop("extensions"))
    elif method == "get_model_config":
        (wanted.get("config", wanted)).pop("model_warmup", None)
        for name in ("parameters", "cc_model_filenames", "default_model_filename", "metric_tags", "model_warmup"):
            wanted.get("config", wanted).pop(name, None)
    elif method == "get_model_repository_index":
        models = wanted["models"] if is_grpc else wanted
        models[:] = [entry for entry in models if entry["name"] in ("chain", "other")]
    elif method == "get_inference_statistics":  # figures of another server
        wanted, found = ([entry["name"] for entry in answer["model_stats"]] for answer in (wanted, found))
    assert found == wanted


@pytest.mark.parametrize("method", CLOSED)
@pytest.mark.parametrize("kind", MODULES)
def test_methods_that_are_closed(service: Service, kind: str, method: str) -> None:
    is_grpc = kind.startswith("grpc")
    with pytest.raises(InferenceServerException) as caught:
        ask(kind, service.grpc if is_grpc else service.http, method, ())
    assert f"{CLOSED[method]} is closed" in str(caught.value)
    assert caught.value.status() in ("403", "StatusCode.PERMISSION_DENIED")


@pytest.mark.parametrize("kind", MODULES)
def test_members_are_not_for_clients(service: Service, kind: str) -> None:
    is_grpc = kind.startswith("grpc")
    url = service.grpc if is_grpc else service.http
    assert not ask(kind, url, "is_model_ready", ("first",))
    for method in ("get_model_metadata", "get_model_config", "get_inference_statistics"):
        with pytest.raises(InferenceServerException, match="unknown model: 'nobody'") as caught:
            ask(kind, url, method, ("nobody",))
        assert caught.value.status() in ("404", "StatusCode.NOT_FOUND")
    config = ask(kind, url, "get_model_config", ("first",))  # as a step of what they may ask
    assert "parameters" not in config.get("config", config)


@pytest.mark.parametrize("key", ["guess", None])
def test_no_key_of_a_clients_reaches_triton(service: Service, key: str | None) -> None:
    """Not even the right one, which other users of the machine can read on Triton's command line."""
    if key is None:
        command = Path(f"/proc/{service.servers()[0].pid}/cmdline").read_text()
        key = command.split("admin-key=")[1].split("\0")[0]
    for kind in MODULES:
        is_grpc = kind.startswith("grpc")
        headers = {"admin-key": key, "triton-grpc-protocol-admin-key": key}
        with pytest.raises(InferenceServerException, match="Logging is closed"):
            ask(kind, service.grpc if is_grpc else service.http, "get_log_settings", (), headers=headers)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_pytritons_client(service: Service, protocol: str) -> None:
    from pytriton.client import ModelClient

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own, about time limits over gRPC
        with ModelClient(f"{protocol}://{getattr(service, protocol)}", "chain") as client:
            answer = client.infer_batch(np.full((2, 1), 3, np.float32))
            assert client.model_config.max_batch_size == 4
    assert answer["Z"].tolist() == [[12.0], [12.0]]


@pytest.fixture(scope="module")
def perf_analyzer(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The program in the last wheel that has it and runs on Debian 12, with two libraries of PyTriton's."""
    import pytriton

    wheel = ROOT / ".venv" / "wheels" / PERF_ANALYZER
    if not wheel.is_file():
        pytest.skip(f"{PERF_ANALYZER} is not in .venv/wheels: make test-slow fetches it")
    folder = tmp_path_factory.mktemp("perf_analyzer")
    with zipfile.ZipFile(wheel) as archive:
        program = Path(archive.extract("tritonclient-2.51.0.data/data/bin/perf_analyzer", folder))
    program.chmod(0o755)
    for name in ("libb64", "libcudart"):
        library = next((Path(pytriton.__file__).parents[1] / "nvidia_pytriton.libs").glob(f"{name}-*"))
        (folder / {"libb64": "libb64.so.0d", "libcudart": "libcudart.so.12"}[name]).symlink_to(library)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [program, *arguments], capture_output=True, text=True, check=False, timeout=120,
            env={"LD_LIBRARY_PATH": str(folder)},
        )  # fmt: skip

    return run


@pytest.mark.parametrize(
    ("protocol", "more"),
    [("http", ()), ("http", ("--async",)), ("grpc", ("--async",)), ("grpc", ("--async", "--streaming"))],
)
def test_perf_analyzer(
    service: Service,
    perf_analyzer: Callable[..., subprocess.CompletedProcess[str]],
    protocol: str,
    more: tuple[str, ...],
) -> None:
    done = perf_analyzer(
        "-m", "chain", "-i", protocol, "-u", getattr(service, protocol), "--request-count", "50", *more
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "throughput:" in done.stdout
