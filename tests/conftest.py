"""Tiers are folders: unit, served, slow, gpu. What all of them share; fixtures are in tests/support."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Before torch is imported: active waiting at OpenMP barriers collapses beside the server's own threads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import pytest

from benchmarks.records import RESULTS, write_record
from shoal.clients.client.client import Client
from shoal.serving.server.launch import Server
from shoal.system.machine import describe_machine, library_versions
from tests.support.durations import Durations
from tests.support.report import Regions, Report
from tests.support.secured import VARIABLE

PROCESSOR = "SHOAL_TEST_PROCESSOR"  # an environment variable: avx2 hides what newer processors have
if os.environ.get(PROCESSOR) == "avx2":  # before torch is imported
    os.environ |= {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "SHOAL_BF16": "0"}
pytest_plugins = [
    f"tests.support.{name}"
    for name in ("artifacts", "buckets", "bulk", "commands", "disks", "environments", "skeletons")
]
if find_spec("xdist"):
    pytest_plugins.append("tests.support.groups")
if find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    # An example, and making one, may take long where other work uses the processor.
    settings.register_profile("shoal", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("shoal")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--verify", action="store_true", help="full sizes, recorded under benchmarks/results")
    parser.addoption("--store-durations", action="store_true", help="write the seconds of each file to the ledger")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # not in xdist's workers
        config.pluginmanager.register(Report(), "shoal-report")
        config.pluginmanager.register(Durations(config), "shoal-durations")
    config.pluginmanager.register(Regions(), "shoal-regions")


@pytest.fixture(scope="module", autouse=True)
def variables() -> Iterator[None]:
    """Take back variables that a module's tests set, such as the visible GPUs of an engine in this process."""
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="session", autouse=True)
def processor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide the newer instructions of this processor from the code, if the run shall be one on a processor with AVX2."""
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get(PROCESSOR) == "avx2":
            known = tmp_path_factory.mktemp("processor") / "cpuinfo"
            text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
            known.write_text(re.sub(r" (avx512|amx|avx_vnni)\w*", "", text), encoding="utf-8")
            patch.setattr("shoal.system.machine._CPUS", known)
        yield


@pytest.fixture(scope="session", autouse=True)
def fp32() -> Iterator[None]:
    """Tests compute in FP32 on every machine, and so are their tolerances; those about BF16 say so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.authoring.repository.precision.computes_bf16", lambda: False)
        patch.setattr("shoal.readability.fit.has_fast_bf16", lambda device: False)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    mark = item.get_closest_marker("without_keys")
    if mark is not None and os.environ.get(VARIABLE):
        pytest.skip(mark.args[0])
    if item.get_closest_marker("verify") and not item.config.getoption("--verify"):
        pytest.skip("with --verify")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the service of a failed test said."""
    report = yield
    log = getattr(getattr(item, "funcargs", {}).get("service"), "log", None)
    if report.failed and isinstance(log, Path) and log.is_file():
        report.sections.append(("the service's log", log.read_text(encoding="utf-8", errors="replace")[-5000:]))
    return report


def verified(*values: Any) -> list[Any]:
    """Return further parameters, which are tried only with ``--verify``."""
    return [pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.verify) for each in values]


Record = Callable[..., None]


@dataclass(frozen=True)
class Scale:
    """Samples in `make test`, everything in `make verify`."""

    is_full: bool

    def __call__(self, sample: int, full: int) -> int:
        return full if self.is_full else sample


@pytest.fixture(scope="session")
def scale(request: pytest.FixtureRequest) -> Scale:
    return Scale(bool(request.config.getoption("--verify")))


@pytest.fixture(scope="session")
def record(scale: Scale) -> Iterator[Record]:
    """Keep a claim's figures; written to the day's file when the full sizes ran, beside those that others wrote."""
    figures: dict[str, Any] = {}

    def keep(claim: str, **values: Any) -> None:
        figures[claim] = values

    yield keep
    if scale.is_full and figures:
        libraries = ("numpy", "tokenizers", "torch", "transformers", "treelite", "tritonclient", "nvidia-pytriton")
        result = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": describe_machine(),
            "versions": library_versions(*libraries),
            "claims": figures,
        }
        path = RESULTS / f"verify-{result['date']}.json"
        if path.is_file():
            result["claims"] = json.loads(path.read_text(encoding="utf-8"))["claims"] | figures
        write_record("verify", result)


@pytest.fixture(params=["grpc", "http"])
def client(request: pytest.FixtureRequest, server: Server) -> Iterator[Client]:
    """A client of the shared server, once over each protocol."""
    url = server.grpc_url if request.param == "grpc" else server.http_url
    with Client(url, protocol=request.param) as connected:
        yield connected


def as_bytes(texts: list[str]) -> Any:
    """A TYPE_STRING tensor, [len(texts), 1]."""
    array = np.empty((len(texts), 1), np.object_)
    array[:, 0] = [text.encode() for text in texts]
    return array
