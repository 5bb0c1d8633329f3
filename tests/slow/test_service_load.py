"""``shoal serve`` under more than it can do, and for long."""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import shoal
from shoal.system.processes import find_process
from tests.conftest import Scale
from tests.support.service import Callers, Service, arrive, make_repository

pytestmark = pytest.mark.verify


@pytest.fixture
def home(tmp_path: Path) -> Path:
    make_repository(tmp_path)
    return tmp_path


def serve(home: Path, *arguments: object) -> Service:
    return Service(home / "repository", home / "log", *arguments)


def test_overload(home: Path, scale: Scale, record: Callable[..., None]) -> None:
    """At ten times what the model can do: answers and "too many requests"; who is let in does not wait long."""
    with serve(home, "--max-wait", 0.2) as service:
        (home / "other").write_text("0.05", encoding="utf-8")
        with Callers(service, 16, "other") as callers:
            time.sleep(scale(4, full=30))
        assert not callers.failures
        normal = statistics.quantiles(callers.seconds, n=100)[98]
        rate = callers.num_answers / scale(4, full=30)
        before = memory_mib(service)
        refused, seconds, lock, others = Counter[bool](), list[float](), threading.Lock(), Counter[str]()
        with shoal.Client(service.grpc, retries=0, timeout=60) as client:

            def ask(_: int) -> None:
                start = time.monotonic()
                try:
                    client.infer("other", X=[[1.0]])
                except shoal.ServerError as error:
                    with lock:
                        refused["Too many requests for other" in str(error)] += 1
                        if "Too many requests for other" not in str(error):
                            others[str(error)] += 1
                else:
                    with lock:
                        seconds.append(time.monotonic() - start)

            arrive(ask, rate=10 * rate, seconds=scale(8, full=600), most_callers=200)
        slow = statistics.quantiles(seconds, n=100)[98]
        growth = memory_mib(service) - before
        record(
            "overload",
            accepted=len(seconds), refused=refused[True], p99_s=round(slow, 3), normal_p99_s=round(normal, 3),
            growth_mib=round(growth, 1),
        )  # fmt: skip
        assert refused[True] > len(seconds)
        assert not others
        assert slow < (2 * normal if scale.is_full else 30)  # a sample may run beside other tests
        assert growth < 50
        assert service.is_ready()


def memory_mib(service: Service) -> float:
    fields = Path(f"/proc/{service.process.pid}/status").read_text(encoding="utf-8").split("VmRSS:")[1].split()
    return int(fields[0]) / 1024


def test_soak(home: Path, scale: Scale, record: Callable[..., None]) -> None:
    """Memory and descriptors of the service and its server stay where they are, at 70 % of what they can do."""
    seconds = scale(10, full=3600)
    with serve(home) as service:
        with Callers(service) as callers:
            time.sleep(4)
        rate = 0.7 * callers.num_answers / 4
        pids = [service.process.pid, service.servers()[0].pid, *(stub.pid for stub in service.stubs())]
        samples = list[tuple[float, float, int]]()
        has_ended = threading.Event()

        def look() -> None:
            start = time.monotonic()
            while not has_ended.wait(seconds / 50):
                mib = sum(p.resident_bytes for pid in pids if (p := find_process(pid))) / 2**20
                num_files = sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids)
                samples.append((time.monotonic() - start, mib, num_files))

        with shoal.Client(service.grpc, retries=0, timeout=60) as client, ThreadPoolExecutor(1) as pool:

            def ask(index: int) -> None:
                assert client.infer("chain", X=[[float(index)]])["Z"][0, 0] == 4 * np.float32(index)

            looking = pool.submit(look)
            arrive(ask, rate=rate, seconds=seconds, most_callers=64)
            has_ended.set()
            looking.result()
        late = [sample for sample in samples if sample[0] > seconds / 6]
        slope = 3600 * float(np.polyfit([s[0] for s in late], [s[1] for s in late], 1)[0])
        record(
            "soak", seconds=seconds, rate=round(rate, 1), mib_an_hour=round(slope, 2), files=late[-1][2] - late[0][2]
        )
        assert abs(late[-1][2] - late[0][2]) <= 8
        if scale.is_full:
            assert slope < 5
        assert late[-1][1] - late[0][1] < 30
