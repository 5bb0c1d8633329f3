"""Board and alerts of ``deploy``, in a real Prometheus that reads two services: each alert fires in its scenario."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

import pytest

from shoal.authoring.composition.compose import compose
from shoal.clients.client.client import Client
from shoal.clients.keys import make_key
from shoal.clients.llm.client import Llm
from shoal.errors import ShoalError
from shoal.serving.gateway.callers.key_file import KeyFile
from shoal.serving.server.launch import find_ports
from tests.conftest import Scale
from tests.support.llm import find_trained
from tests.support.once import ROOT
from tests.support.planted import write
from tests.support.service import MAIN, Service, make_repository, wait_until

DEPLOY = ROOT / "deploy"
MIB = 600


class Prometheus:
    """Prometheus with the files of ``deploy``, whose times are divided by ``faster``, and its addresses and its key."""

    def __init__(self, home: Path, services: list[Service], key: Path, faster: int) -> None:
        self.faster = faster
        (port, *_) = find_ports(0, 0, 0)
        self._url = f"http://127.0.0.1:{port}"
        targets = json.dumps([service.metrics for service in services])
        scrape = (DEPLOY / "prometheus" / "scrape.yaml").read_text(encoding="utf-8")
        scrape = scrape.replace('["127.0.0.1:8002"]', targets).replace("# authorization:", "authorization:")
        write(home / "scrape.yaml", self.hasten(scrape.replace("/etc/prometheus/shoal.key", str(key))))
        alerts = (DEPLOY / "prometheus" / "alerts.yaml").read_text(encoding="utf-8")
        write(home / "alerts.yaml", self.hasten(alerts))
        command = ["prometheus", f"--config.file={home}/scrape.yaml", f"--storage.tsdb.path={home}/data"]
        self._log = (home / "log").open("wb")
        self._process = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=self._log, stderr=self._log
        )

    def hasten(self, text: str) -> str:
        """Divide the times in a text, all of which are whole numbers of seconds or minutes."""
        seconds = {"s": 1000, "m": 60_000}
        return re.sub(r"\b(\d+)([sm])\b", lambda m: f"{int(m[1]) * seconds[m[2]] // self.faster}ms", text)

    def ask(self, query: str) -> list[tuple[dict[str, str], float]]:
        """Return the labels and the values of a query's answer; nothing, while Prometheus starts."""
        path = f"{self._url}/api/v1/query?{urllib.parse.urlencode({'query': self.hasten(query)})}"
        try:
            with urllib.request.urlopen(path) as reply:
                return [(each["metric"], float(each["value"][1])) for each in json.load(reply)["data"]["result"]]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{query}: {error.read().decode()}") from None
        except urllib.error.URLError:
            return []

    def values(self, query: str) -> list[float]:
        """Return the finite values of a query's answer."""
        return [value for _, value in self.ask(query) if math.isfinite(value)]

    def firing(self) -> set[tuple[str, str]]:
        """Names of the alerts that fire, each with its model or, if it has none, with its instance."""
        found = self.ask('ALERTS{alertstate="firing"}')
        return {(labels["alertname"], labels.get("model", labels["instance"])) for labels, _ in found}

    def wait(self, expected: set[tuple[str, str]], minutes: float) -> None:
        """Wait until these alerts fire, and no others; none but these and those that fire now may do so meanwhile."""
        known = self.firing() | expected
        if self.faster > 3:  # a restart takes seconds, which are minutes here
            known |= {("ShoalNotReady", model) for model in ("other", "second", "chain")}
        deadline = time.monotonic() + 60 * minutes / self.faster + 20
        while (firing := self.firing()) != expected:
            assert firing <= known, firing - known
            assert time.monotonic() < deadline, (firing, expected)
            time.sleep(0.2)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()


@contextmanager
def again_and_again(*asks: Callable[[], object]) -> Iterator[None]:
    """Call each function in a thread of its own, again and again."""
    stop = threading.Event()

    def call(ask: Callable[[], object]) -> None:
        while not stop.wait(0.02):
            try:
                ask()
            except ShoalError:
                stop.wait(0.1)

    threads = [threading.Thread(target=call, args=(ask,)) for ask in asks]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


class Machine:
    """The first service: the models of ``make_repository``, and of one kind with ``other``, ``broken`` and ``slow``.

    It has keys, limits the memory of its models' processes, and believes what a file says of the machine's memory.
    """

    def __init__(self, home: Path) -> None:
        self.home, self.meminfo, self.keys = home, home / "meminfo", KeyFile(home / "keys.json")
        repository = make_repository(home)
        for name in ("broken", "slow"):  # without canaries, of which an error is the end of the process
            shutil.copytree(repository / "other", repository / name)
            config = (repository / name / "config.pbtxt").read_text(encoding="utf-8")
            config = config.partition("model_warmup")[0].replace(str(home / "other"), str(home / name))
            (repository / name / "config.pbtxt").write_text(config, encoding="utf-8")
        self.meminfo.write_text(Path("/proc/meminfo").read_text(encoding="utf-8"), encoding="utf-8")
        self.key, self.prometheus = self.keys.new("team"), home / "prometheus.key"
        self.limited = self.keys.new("limited", limits={"requests_per_minute": 3})
        self.prometheus.write_text(self.keys.new("prometheus", may=["metrics"]), encoding="utf-8")
        shell = ["sh", "-c", f'mount --bind {self.meminfo} /proc/meminfo && exec "$0" "$@"', sys.executable]
        main = ["--mount", *["--map-root-user"] * bool(os.getuid()), *shell, *MAIN]
        options = ["--keys", self.keys.path, "--model-memory-mib", MIB]
        self.service = Service(repository, home / "log", *options, python="unshare", main=main)

    def tell(self, model: str, what: str) -> None:
        (self.home / model).write_text(what, encoding="utf-8")

    def caller(self, model: str, key: str) -> Callable[[], object]:
        client = Client(self.service.grpc, retries=0, timeout=60, api_key=key)
        return lambda: client.infer(model, X=[[1.0]])

    def kill(self, model: str) -> None:
        """Kill the process of a model."""
        os.kill(next(stub.pid for stub in self.service.stubs() if f"{model}_0_0" in stub.arguments()), signal.SIGKILL)

    def wait_replaced(self, cause: Callable[[], object]) -> None:
        """Wait until another server has replaced the one that is active when ``cause`` is called."""
        (server,) = self.service.servers()
        cause()
        assert wait_until(lambda: server.pid not in {each.pid for each in self.service.servers()}, 60)
        self.service.wait(is_ready=True, seconds=60)

    def ask_wrongly(self) -> None:
        """Ask with a key that is not valid."""
        with suppress(ShoalError), Client(self.service.grpc, retries=0, api_key=make_key("0" * 12)) as client:
            client.infer("chain", X=[[1.0]])


def read_queries() -> dict[str, str]:
    """Return the panel of each query of the board, with Grafana's variables as Grafana would set them."""
    board = json.loads((DEPLOY / "grafana" / "shoal.json").read_text(encoding="utf-8"))
    found = {target["expr"]: panel["title"] for panel in board["panels"] for target in panel.get("targets", [])}
    for name, value in {"$instance": ".+", "$model": ".+", "$__rate_interval": "1m"}.items():
        found = {query.replace(name, value): title for query, title in found.items()}
    assert not [query for query in found if "$" in query]
    return found


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    if not shutil.which("prometheus"):
        pytest.skip("prometheus is not installed. Type: apt-get install prometheus")
    machine = Machine(tmp_path)
    with machine.service:
        yield machine


def test_each_panel_has_data_and_each_alert_fires_in_its_scenario_alone(
    machine: Machine, tmp_path: Path, scale: Scale
) -> None:
    repository = compose(["llm"], tmp_path / "llm", weights=find_trained())
    with ExitStack() as stack:
        language = stack.enter_context(Service(repository, tmp_path / "llm.log"))
        services = [machine.service, language]
        prometheus = stack.enter_context(Prometheus(tmp_path, services, machine.prometheus, scale(15, full=3)))
        llm = Llm(stack.enter_context(Client(language.grpc, retries=0, timeout=60)), "llm")
        callers = [machine.caller(model, machine.key) for model in ("chain", "other", "slow", "broken")]
        with again_and_again(*callers, lambda: llm.generate("The cat", max_tokens=16)):
            look_at_panels(machine, prometheus)
        language.stop()
        prometheus.wait(down := {("ShoalDown", language.metrics)}, minutes=2)
        look_at_requests(machine, prometheus, down)
        look_at_processes(machine, prometheus, down)


def look_at_panels(machine: Machine, prometheus: Prometheus) -> None:
    """Each query has values, after a process was killed and a key was above its limit, and no alert fires."""
    machine.wait_replaced(lambda: machine.kill("second"))
    with Client(machine.service.grpc, retries=0, api_key=machine.limited) as client:
        for _ in range(8):
            with suppress(ShoalError):
                client.infer("other", X=[[1.0]])
    missing = {query: title for query, title in read_queries().items() if "nv_gpu_" not in query}
    assert len(missing) == len(read_queries()) - 1, "there is no GPU here, and one query is of its memory"
    deadline = time.monotonic() + 600 / prometheus.faster
    while missing and time.monotonic() < deadline:
        missing = {query: title for query, title in missing.items() if not prometheus.values(query)}
        time.sleep(0.2)
    assert not missing
    prometheus.wait(set(), minutes=1)
    positive = (
        "shoal_restarts_total{kind='died'}", "shoal_refusals_total{kind='limit'}",
        "shoal_key_requests_total{key='limited',outcome='refused'}", "shoal_first_answer_seconds_count{model='llm'}",
        "shoal_tokens_total{model='llm',kind='output'}", "shoal_queue_seconds_count{model='slow'}",
    )  # fmt: skip
    assert [query for query in positive if not any(value > 0 for value in prometheus.values(query))] == []


def look_at_requests(machine: Machine, prometheus: Prometheus, before: set[tuple[str, str]]) -> None:
    """Errors, waits, keys at their limits and wrong keys, all at once; then they end."""
    at = machine.service.metrics
    machine.tell("broken", "raise")
    machine.tell("slow", "0.7")
    keys = machine.keys.path.read_text(encoding="utf-8")
    waiting = [machine.caller("slow", machine.key) for _ in range(24)]
    callers = [machine.caller("broken", machine.key), machine.caller("other", machine.key), *waiting]
    with again_and_again(*callers, machine.caller("chain", machine.limited), machine.ask_wrongly):
        time.sleep(1)
        machine.keys.path.write_text(keys[:-40], encoding="utf-8")
        expected = {("ShoalErrors", "broken"), ("ShoalQueue", "slow"), ("ShoalRefusals", "chain")}
        prometheus.wait(before | expected | {("ShoalUnknownKeys", at), ("ShoalKeysDamaged", at)}, minutes=11)
    machine.keys.path.write_text(keys, encoding="utf-8")
    prometheus.wait(before, minutes=11)


def look_at_processes(machine: Machine, prometheus: Prometheus, before: set[tuple[str, str]]) -> None:
    """A model does not start again, another one leaks, the first one dies twice more; the machine is nearly full."""
    at = machine.service.metrics
    machine.tell("second", "refuse")
    machine.kill("second")
    prometheus.wait(before | {("ShoalNotReady", "second"), ("ShoalNotReady", "chain")}, minutes=2)
    machine.tell("second", "")
    machine.service.wait(is_ready=True, seconds=120)
    prometheus.wait(before, minutes=1)
    machine.tell("other", "leak")
    with again_and_again(machine.caller("other", machine.key)):
        assert wait_until(lambda: not machine.service.is_ready(), 60)
        machine.tell("other", "")
        assert wait_until(machine.service.is_ready, 60)
    prometheus.wait(before | {("ShoalModelMemory", at)}, minutes=1)
    for _ in range(2):
        machine.wait_replaced(lambda: machine.kill("second"))
    prometheus.wait(before | {("ShoalModelMemory", at), ("ShoalRestarts", at)}, minutes=1)
    prometheus.wait(before, minutes=11)
    found = machine.meminfo.read_text(encoding="utf-8")
    full = re.sub(r"(MemFree|MemAvailable|Buffers|Cached|SReclaimable):.*", r"\1: 1000 kB", found)
    machine.meminfo.write_text(full, encoding="utf-8")
    prometheus.wait(before | {("ShoalMachineMemory", at)}, minutes=6)
    machine.meminfo.write_text(found, encoding="utf-8")
    prometheus.wait(before, minutes=1)
