"""nginx and Caddy, as the page about keys configures them, between clients and a service with keys."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc  # type: ignore[import-untyped]
import numpy as np
import openai
import pytest
from tritonclient import grpc as triton_grpc
from tritonclient import http as triton_http
from tritonclient.utils import InferenceServerException

from shoal.serving.gateway.callers.key_file import KeyFile
from shoal.serving.server.launch import find_ports
from tests.support.once import ROOT
from tests.support.pairs import make_pair
from tests.support.planted import write
from tests.support.service import Service, wait_until

PAGE = (ROOT / "docs" / "keys.md").read_text(encoding="utf-8")
NGINX, CADDY = re.findall(r"^```\n((?:server|gpu-1\.example) \{\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
[RATE] = re.findall(r"^```\n(map .*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
[LIMITED] = re.findall(r"`(limit_req zone=.*?;)`", PAGE)
LIMIT = 64 * 2**20  # bytes of a request, by default
PAUSE = 0.4  # seconds between two words of an answer
MODELS = {  # inputs, outputs, more of the configuration, and code
    "sum": (
        "X:FP32:-1", "Y:FP32:1", "max_batch_size: 1",
        """
class Sum(shoal.Component):
    def run(self, batch):
        return {"Y": batch["X"].sum(axis=1, keepdims=True)}
""",
    ),
    "embed": (
        "TEXT:STRING:1", "EMBEDDING:FP32:5", "max_batch_size: 8",
        """
class Embed(shoal.Component):
    def run(self, batch):
        return {"EMBEDDING": np.ones((len(batch["TEXT"]), 5), np.float32)}
""",
    ),
    "talk": (
        "text_input?:STRING:1 messages?:STRING:1 stream?:BOOL:1", "text_output:STRING:1 finish_reason:STRING:1",
        "max_batch_size: 0 model_transaction_policy { decoupled: true }",
        f"""
class Talk(shoal.StreamingComponent):
    def answers(self, inputs, stream):
        for word, reason in (("A ", ""), ("cat ", ""), ("sat.", "stop")):
            yield {{"text_output": np.array([word], object), "finish_reason": np.array([reason], object)}}
            time.sleep(0 if reason else {PAUSE})
""",
    ),
}  # fmt: skip


def write_models(repository: Path) -> Path:
    """Write a model that adds numbers, one that embeds texts, and one that says three words."""
    for name, (inputs, outputs, more, code) in MODELS.items():
        sides = ([each.split(":") for each in side.split()] for side in (inputs, outputs))
        takes, gives = (
            ", ".join(
                f'{{ name: "{tensor.rstrip("?")}" data_type: TYPE_{kind} dims: [ {size} ]'
                f"{' optional: true' if tensor.endswith('?') else ''} }}"
                for tensor, kind, size in side
            )
            for side in sides
        )
        config = f'backend: "python"\n{more}\ninput [ {takes} ]\noutput [ {gives} ]\n'
        write(repository / name / "config.pbtxt", f"{config}instance_group [ {{ kind: KIND_CPU }} ]\n")
        code = f"import time\n\nimport numpy as np\nimport shoal\n{code}"
        write(repository / name / "1" / "model.py", f"{code}\n\nTritonPythonModel = {name.title()}.for_triton()\n")
    return repository


class Behind(NamedTuple):
    """A service, its audit and a key, and the name, port and certificate of the proxy in front of it."""

    service: Service
    audit: Path
    key: str
    name: str
    port: int
    certificate: Path

    @property
    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.certificate)

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    def openai(self, key: str) -> openai.OpenAI:
        """Return OpenAI's client, which sends nothing twice."""
        web = openai.DefaultHttpxClient(verify=self.context)
        return openai.OpenAI(base_url=f"https://localhost:{self.port}/v1", api_key=key, http_client=web, max_retries=0)

    def grpc(self) -> triton_grpc.InferenceServerClient:
        return triton_grpc.InferenceServerClient(
            f"localhost:{self.port}", ssl=True, root_certificates=str(self.certificate)
        )

    def http(self) -> triton_http.InferenceServerClient:
        options = {"ca_certs": str(self.certificate)}
        return triton_http.InferenceServerClient(f"localhost:{self.port}", ssl=True, ssl_options=options)


@contextmanager
def run(home: Path, port: int, *command: str | Path, **environment: str) -> Iterator[None]:
    """Run a proxy in the folder ``home`` until the block ends."""
    with (home / "proxy.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=home, env={**os.environ, **environment}, stdout=log, stderr=log)
    try:
        assert wait_until(lambda: is_open(port), 20), (home / "proxy.log").read_text(encoding="utf-8")
        yield
    finally:
        process.terminate()
        process.wait(20)


def is_open(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.connect()
    except OSError:
        return False
    connection.close()
    return True


@contextmanager
def run_nginx(home: Path, block: str, port: int) -> Iterator[Path]:
    """Run nginx with a block of ``http``; yield the certificate of its server."""
    certificate, _ = make_pair(home, "server")
    folders = "".join(f"{kind}_temp_path temp;\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    main = f"daemon off;\npid nginx.pid;\nevents {{ }}\nhttp {{\naccess_log off;\n{folders}{block}}}\n"
    write(home / "nginx.conf", main)
    with run(home, port, "nginx", "-p", home, "-c", "nginx.conf", "-e", "stderr"):
        yield certificate


@contextmanager
def run_caddy(home: Path, block: str, port: int) -> Iterator[Path]:
    """Run Caddy with a site; yield the certificate of its authority, which no system is made to trust."""
    write(
        home / "Caddyfile", f"{{\n    admin off\n    skip_install_trust\n    auto_https disable_redirects\n}}\n{block}"
    )
    places = dict.fromkeys(("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"), str(home))
    certificate = home / "caddy" / "pki" / "authorities" / "local" / "root.crt"
    with run(home, port, "caddy", "run", "--config", "Caddyfile", "--adapter", "caddyfile", **places):
        assert wait_until(certificate.is_file, 20)
        yield certificate


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, Path, str]]:
    """Run a service as the page starts it; yield it with its audit and a key."""
    home = tmp_path_factory.mktemp("behind")
    keys = KeyFile(home / "keys.json")
    key = keys.new("team")
    options = ["--trusted-proxy", "127.0.0.1", "--keys", keys.path, "--audit", home / "audit"]
    with Service(write_models(home / "repository"), home / "log", *options) as running:
        yield running, home / "audit", key


@pytest.fixture(scope="module", params=["nginx", "caddy"])
def behind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    name: str = request.param
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed here: apt-get install {name}")
    service: tuple[Service, Path, str] = request.getfixturevalue("service")
    home, port, running = tmp_path_factory.mktemp(name), find_ports(0, 0, 0)[0], service[0]
    block = NGINX if name == "nginx" else CADDY
    block = block.replace("127.0.0.1:8000", running.http).replace("127.0.0.1:8001", running.grpc)
    block = block.replace("443", str(port)).replace("gpu-1.example {", f"localhost:{port} {{")
    with (run_nginx if name == "nginx" else run_caddy)(home, block, port) as certificate:
        yield Behind(*service, name, port, certificate)


def test_a_chat_comes_piece_by_piece(behind: Behind) -> None:
    """Each word when the model has said it: a proxy that buffers would send all of them at the end."""
    asked: Any = {"model": "talk", "messages": [{"role": "user", "content": "What did the cat do?"}], "stream": True}
    words, times = [], []
    with behind.openai(behind.key) as client:
        for chunk in client.chat.completions.create(**asked):
            if chunk.choices[0].delta.content:
                words.append(chunk.choices[0].delta.content)
                times.append(time.monotonic())
    assert words == ["A ", "cat ", "sat."]
    assert times[-1] - times[0] > PAUSE


def test_openais_client(behind: Behind) -> None:
    with behind.openai(behind.key) as client:
        found = client.embeddings.create(model="embed", input=["A cat", "x"], encoding_format="float")
        assert [len(each.embedding) for each in found.data] == [5, 5]
    with behind.openai("sk-nothing") as client, pytest.raises(openai.AuthenticationError) as unknown:
        client.embeddings.create(model="embed", input="x")
    assert (unknown.value.status_code, unknown.value.code) == (401, "invalid_api_key")


def infer(client: Any, library: Any, size: int, headers: dict[str, str] | None) -> float:
    """Return the sum of ``size`` ones."""
    given = library.InferInput("X", [1, size], "FP32")
    given.set_data_from_numpy(np.ones((1, size), np.float32))
    return float(client.infer("sum", [given], headers=headers).as_numpy("Y").item())


@pytest.mark.parametrize("library", [triton_grpc, triton_http], ids=["grpc", "http"])
def test_tritons_clients(library: Any, behind: Behind) -> None:
    """Without a key, and with requests of the size that the service takes."""
    with behind.grpc() if library is triton_grpc else behind.http() as client:
        assert client.is_server_ready()
        assert client.get_model_metadata("sum", headers=behind.headers)
        most = LIMIT // 4 - 256
        assert infer(client, library, most, behind.headers) == pytest.approx(most)
        with pytest.raises(InferenceServerException, match="A valid key is needed"):
            infer(client, library, 1, None)


def test_health_over_grpc(behind: Behind) -> None:
    """As probes of Kubernetes ask it, without a key."""
    trusted = grpc.ssl_channel_credentials(behind.certificate.read_bytes())
    with grpc.secure_channel(f"localhost:{behind.port}", trusted) as channel:
        assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=20) == b"\x08\x01"  # it serves


def test_larger_requests(behind: Behind) -> None:
    """The service's own answers pass, by nginx also before the body was sent."""
    with behind.grpc() as client, pytest.raises(InferenceServerException) as large:
        infer(client, triton_grpc, LIMIT // 4 + 1, behind.headers)
    assert large.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
    if behind.name == "caddy":
        return
    web = http.client.HTTPSConnection("localhost", behind.port, timeout=20, context=behind.context)
    web.putrequest("POST", "/v2/models/sum/infer")
    for name, value in {**behind.headers, "Content-Length": str(LIMIT + 1)}.items():
        web.putheader(name, value)
    web.endheaders()
    answer = web.getresponse()
    assert (answer.status, json.load(answer)["error"][:28]) == (413, "The request is larger than 6")
    web.close()


def test_the_proxy_names_the_client(behind: Behind) -> None:
    """Not the address that the client says: by it, requests and wrong keys are counted."""
    forged = {**behind.headers, "x-forwarded-for": "10.9.8.7"}
    with behind.grpc() as client:
        client.get_model_metadata("sum", headers={**forged, "x-request-id": f"{behind.port}-grpc"})
    with behind.http() as client:
        client.get_model_metadata("sum", headers={**forged, "x-request-id": f"{behind.port}-http"})

    def addresses() -> dict[str, str]:
        lines = map(json.loads, behind.audit.read_text(encoding="utf-8").splitlines())
        own = (line for line in lines if line["request_id"].startswith(f"{behind.port}-"))
        return {line["request_id"].partition("-")[2]: line["address"] for line in own}

    assert wait_until(lambda: len(addresses()) == 2, 10)
    assert {*addresses().values()} <= {"127.0.0.1", "::1"}


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed here: apt-get install nginx")
@pytest.mark.parametrize("header", ["Authorization", "X-Api-Key"])
def test_requests_per_second(header: str, service: tuple[Service, Path, str], tmp_path: Path) -> None:
    running, _, key = service
    port = find_ports(0, 0, 0)[0]
    block = NGINX.replace("127.0.0.1:8000", running.http).replace("443", str(port))
    block = RATE + block.replace(" / { ", f" / {{ {LIMITED} ")
    with run_nginx(tmp_path, block, port) as certificate:
        context = ssl.create_default_context(cafile=certificate)
        web = http.client.HTTPSConnection("localhost", port, timeout=20, context=context)
        statuses, begin = list[int](), time.monotonic()
        while len(statuses) < 20:
            web.request("GET", "/v1/models", headers={header: f"Bearer {key}" if header == "Authorization" else key})
            answer = web.getresponse()
            answer.read()
            statuses.append(answer.status)
        most = 6 + 5 * (time.monotonic() - begin)
        web.close()
    assert {*statuses} == {200, 429}
    assert statuses[:5] == [200] * 5
    assert statuses.count(200) <= most
