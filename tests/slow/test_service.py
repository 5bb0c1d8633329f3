"""``shoal serve``: its end, its limits, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

import shoal
from shoal.cli import app
from shoal.clients.client.failures import UnknownModelError
from shoal.errors import ShoalError
from shoal.serving.server.orphans import clean_up
from tests.conftest import Scale
from tests.support.planted import write
from tests.support.service import SHOAL, Callers, Service, are_gone, make_repository, wait_until
from tests.support.streams import FILES

GRACE = 20.0


@pytest.fixture
def home(tmp_path: Path) -> Path:
    make_repository(tmp_path)
    return tmp_path


def serve(home: Path, *arguments: object) -> Service:
    return Service(home / "repository", home / "log", *arguments)


LENGTHS = """
import numpy as np

from shoal import Component


class Lengths(Component):
    def run(self, batch):
        return {"LENGTH": np.array([[len(text)] for (text,) in batch["TEXT"]], np.int32)}


TritonPythonModel = Lengths.for_triton()
"""


def test_models_that_were_composed_by_name_may_be_asked(home: Path) -> None:
    for config in (home / "repository").glob("*/config.pbtxt"):
        config.write_text(config.read_text(encoding="utf-8").replace('"public"', '"private"'), encoding="utf-8")
    write(home / "repository" / "manifest.json", '{"ensembles": ["chain", "other"]}')
    with serve(home) as service, shoal.Client(service.grpc) as client:
        assert service.process.stdout is not None
        said = [service.process.stdout.readline().split("(")[0].strip() for _ in range(4)]
        assert said[::2] == ["chain", "other"]
        assert client.infer("other", X=[[3.0]])["Y"].item() == 6
        with pytest.raises(UnknownModelError, match="Open it: shoal serve REPOSITORY --expose first"):
            client.infer("first", X=[[3.0]])


def test_the_road_is_short(tmp_path: Path) -> None:
    """One text costs two requests as the service counts them, a file three before its first rows: somebody's own
    ensemble, in a repository that was written by hand.
    """
    tensors = """
        max_batch_size: 8
        input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
        output [ { name: "LENGTH" data_type: TYPE_INT32 dims: [ 1 ] } ]
    """
    step = """ensemble_scheduling { step [ { model_name: "lengths" model_version: -1
        input_map { key: "TEXT" value: "TEXT" } output_map { key: "LENGTH" value: "LENGTH" } } ] }"""
    cpu = "instance_group [ { kind: KIND_CPU } ]"
    write(tmp_path / "repository" / "lengths" / "config.pbtxt", f'backend: "python" {tensors} {cpu}')
    write(tmp_path / "repository" / "lengths" / "1" / "model.py", LENGTHS)
    write(tmp_path / "repository" / "mine" / "config.pbtxt", f'platform: "ensemble" {tensors} {step}')
    write(tmp_path / "repository" / "mine" / "1" / ".gitkeep", "")
    file = tmp_path / "texts.txt"
    file.write_text("a\nbb\nccc\n", encoding="utf-8")
    with serve(tmp_path) as service:
        for protocol in ("grpc", "http"):
            for arguments, most in ((["A text."], 2), (["--input", file], 3)):
                before = service.metric("shoal_requests_total")
                options = ["--url", getattr(service, protocol), "--protocol", protocol, "--format", "csv"]
                command = [*SHOAL, "infer", *map(str, arguments), *options]
                printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                assert printed.split()[1:] == (["A", "text.,7,"] if most == 2 else ["a,1,", "bb,2,", "ccc,3,"])
                assert service.metric("shoal_requests_total") - before == most
    local = subprocess.run(
        [*SHOAL, "infer", "A text.", "--local", "--repository", str(tmp_path / "repository"), "--format", "csv"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "A text.,7" in local.stdout


def test_drain(home: Path, scale: Scale, record: Callable[..., None]) -> None:
    """Accepted requests are answered, over both protocols; later ones are refused at once."""
    num = scale(50, full=1000)
    with serve(home, "--grace", GRACE, "--max-wait", 1000) as service:
        clients = [
            shoal.Client(service.grpc, retries=0, timeout=120),
            shoal.Client(service.http, protocol="http", retries=0, timeout=120),
        ]
        for client in clients:  # so that they know the models: to ask what they are like is a request too
            client.infer("chain", X=[[0.0]])
            client.infer("second", X=[[0.0]])
        before = service.metric("shoal_requests_total")
        (home / "second").write_text("1", encoding="utf-8")  # so slow that few are answered before all are let in

        def ask(index: int) -> float:
            model, output = ("chain", "Z") if index % 4 < 2 else ("second", "Y")
            return float(clients[index % 2].infer(model, X=[[float(index)]])[output][0, 0])

        with ThreadPoolExecutor(num) as pool:
            answers = [pool.submit(ask, index) for index in range(num)]
            # Those answered first: one that is answered in between is then missing, not counted twice.
            assert wait_until(
                lambda: service.metric("shoal_requests_total") - before + service.metric("shoal_in_flight") >= num, 60
            )
            assert service.metric("shoal_in_flight") > num * 0.8
            (home / "second").write_text("0.02" if scale.is_full else "0.2", encoding="utf-8")
            service.process.terminate()
            start = time.monotonic()
            assert wait_until(lambda: not service.is_ready())
            for client in clients:
                with pytest.raises(shoal.ServerError, match="stopping"):
                    client.infer("other", X=[[1.0]])
            assert [answer.result() for answer in answers] == [
                index * (4.0 if index % 4 < 2 else 2.0) for index in range(num)
            ]
        assert service.process.wait(GRACE + 5) == 0
        seconds = time.monotonic() - start
        for client in clients:
            client.close()
    assert seconds < GRACE + 5
    record("drain", requests=num, lost=0, seconds=round(seconds, 1))


def test_grace_is_over(home: Path) -> None:
    with serve(home, "--grace", 1) as service, ThreadPoolExecutor(1) as pool:
        (home / "other").write_text("spin", encoding="utf-8")
        with shoal.Client(service.grpc, retries=0) as client:
            answer = pool.submit(client.infer, "other", X=[[1.0]])
            assert wait_until(lambda: service.metric("shoal_in_flight") == 1)
            start = time.monotonic()
            assert service.stop() == 0
            assert time.monotonic() - start < 1 + 5
            assert isinstance(answer.exception(), shoal.ServerError)
    assert any("not answered within 1 s" in entry["message"] for entry in service.entries())


def test_a_stream_that_the_end_of_the_service_ends(tmp_path: Path) -> None:
    """The model's process is not at fault, and nothing says so."""
    for path, text in FILES.items():
        write(tmp_path / "repository" / path, text)
    with serve(tmp_path, "--grace", 1, "--expose", "counts") as service:
        body = json.dumps({"COUNT": 1000, "DELAY": 0.1}).encode()
        url = f"http://{service.http}/v2/models/counts/generate_stream"
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=30) as stream:
            events = [stream.readline() for _ in range(4)]
            service.process.terminate()
            events += stream.readlines()
        assert service.process.wait(30) == 0
    last = json.loads(b"".join(events).decode().strip().split("\n\n")[-1].removeprefix("data: "))
    assert last == {"error": "The server is stopping, and ended this request to counts. Try again in 5 s."}
    assert not [entry for entry in service.entries() if "ended while it had" in entry["message"]]


def test_second_signal(home: Path) -> None:
    with serve(home) as service, ThreadPoolExecutor(1) as pool:
        (home / "other").write_text("spin", encoding="utf-8")
        with shoal.Client(service.grpc, retries=0) as client:
            answer = pool.submit(client.infer, "other", X=[[1.0]])
            assert wait_until(lambda: service.metric("shoal_in_flight") == 1)
            service.process.terminate()
            assert wait_until(lambda: not service.is_ready())
            service.process.send_signal(signal.SIGINT)
            assert service.process.wait(5) == 1
            assert isinstance(answer.exception(), shoal.ServerError)


def test_memory_limit(home: Path) -> None:
    with serve(home, "--model-memory-mib", 700) as service:
        (home / "first").write_text("leak", encoding="utf-8")
        start = time.monotonic()
        with Callers(service, 4, "other") as others, Callers(service, 1) as callers:
            assert service.wait(is_ready=False, seconds=10) < 10
            (home / "first").unlink()
            service.wait(is_ready=True, seconds=15)
        assert not others.failures
        assert callers.num_answers
        told = next(entry for entry in service.entries() if entry.get("kind") == "memory")
        assert "more than 700" in told["message"]
        assert time.monotonic() - start < 30


def test_too_many_restarts_are_followed_by_pauses(home: Path) -> None:
    with serve(home, "--max-restarts", 1) as service:
        for _ in range(2):
            os.kill(service.servers()[0].pid, signal.SIGKILL)
            service.wait(is_ready=False, seconds=10)
            page = service.get("/health/ready")[1]
            service.wait(is_ready=True, seconds=30)
        assert "started again after a pause" in page
        assert any("replaced 2 times within ten minutes" in entry["message"] for entry in service.entries())


def test_files_left_by_a_killed_service(home: Path) -> None:
    """Its Triton ends with it; the next start removes the files that are left, and no others."""
    other = home / "other_home"
    make_repository(other)
    with serve(home) as service, Service(other / "repository", other / "log") as neighbour:
        pids = [service.servers()[0].pid, *(stub.pid for stub in service.stubs())]
        folders = [*Path(tempfile.gettempdir()).glob(f"shoal-{service.process.pid}-*")]
        assert len(folders) == 2  # the service's, with the copy of the repository, and the server's
        for pid in (service.process.pid, *pids):
            os.kill(pid, signal.SIGKILL)
        service.process.wait()
        assert wait_until(lambda: are_gone(pids))
        clean_up()
        # Another server that starts now may have begun to clean up before us.
        assert wait_until(lambda: not service.regions() and not any(each.exists() for each in folders))
        assert neighbour.regions()
        assert neighbour.is_ready()


def test_logs_are_json_lines_and_the_file_has_tritons_among_them(home: Path) -> None:
    with serve(home, "--log", home / "kept.log") as service:
        assert service.stop() == 0
    kept = [json.loads(line) for line in (home / "kept.log").read_text().splitlines()]
    assert {entry["source"] for entry in kept} == {"triton", "shoal"}
    assert all({"time", "level", "message"} <= entry.keys() for entry in (*kept, *service.entries()))
    loaded = next(entry for entry in kept if "successfully loaded 'other'" in entry["message"])
    assert loaded["place"].startswith("model_lifecycle.cc")
    assert not [entry for entry in service.entries() if "successfully loaded" in entry["message"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grace", "0"], "--grace 0 is out of range"),
        (["--max-restarts", "-1"], "--max-restarts -1 is out of range"),
        (["--log", "/nowhere/log"], "The log /nowhere/log cannot be written"),
        (["--host", "192.0.2.1", "--open"], "cannot be used"),
        (["--host", "0.0.0.0"], "Give --keys FILE"),
        (["--expose", "nobody"], "--expose nobody names no model"),
        (["--alias", "gpt-4o"], "--alias 'gpt-4o' is not NAME=MODEL with a new name."),
        (["--alias", "a b=chain"], "--alias 'a b=chain' is not NAME=MODEL with a new name."),
        (["--alias", "=chain"], "--alias '=chain' is not NAME=MODEL with a new name."),
        (["--trusted-proxy", "me"], "--trusted-proxy 'me' is not an IP address"),
        (["--client-share", "2"], "--client-share 2 is out of range"),
    ],
)
def test_options_that_cannot_be(home: Path, arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["serve", str(home / "repository"), *arguments])
    assert isinstance(done.exception, ShoalError | SystemExit), done.exception
    assert done.exit_code in (1, 2)
    assert message in f"{done.output}{done.exception}"
