"""Wrapper of perf_analyzer, NVIDIA's load generator.

It is in the wheels of tritonclient up to 2.60, and needs libb64 and libcudart on LD_LIBRARY_PATH.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shoal.errors import InputError, SetupError
from shoal.server.launch import Server

_WINDOWS = 3  # perf_analyzer averages over these
_PERCENTILE = r"p{} latency: ([\d.]+) usec"


class Analyzed(NamedTuple):
    """Figures that perf_analyzer reported."""

    rows_per_s: float
    p50_ms: float
    p99_ms: float


class PerfAnalyzer:
    """The perf_analyzer program at ``binary``.

    Raises:
        InputError: the file does not exist.
        SetupError: it does not start.
    """

    def __init__(self, binary: Path) -> None:
        self._binary = binary.resolve()
        if not self._binary.is_file():
            raise InputError(
                f"There is no {binary}.", "Unpack one of a wheel: pip download --no-deps tritonclient==2.51.0"
            )
        said = self._run("--version")
        found = re.search(r"Version (\S+)", said.stdout + said.stderr)
        if not found:
            lines = said.stderr.strip().splitlines()
            raise SetupError(
                f"{binary} does not start: {lines[-1] if lines else 'it said nothing'}.",
                "It needs libb64.so.0d and libcudart.so.12: name their folder in LD_LIBRARY_PATH.",
            )
        self.version = found[1]

    def load(
        self,
        server: Server,
        model: str,
        rows: Sequence[Mapping[str, Any]],
        *,
        batch: int,
        callers: int,
        seconds: float,
        protocol: str = "grpc",
    ) -> Analyzed:
        """Run a closed loop of ``callers`` with ``batch`` rows per request for about ``seconds``, after a warm-up.

        ``rows`` are JSON values by input. perf_analyzer reads the models' configurations, which requires the server's
        admin key.

        Raises:
            SetupError: it reported no figures.
        """
        url = server.grpc_url if protocol == "grpc" else server.http_url
        header = "triton-grpc-protocol-admin-key" if protocol == "grpc" else "admin-key"
        with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
            data = Path(folder) / "rows.json"
            data.write_text(json.dumps({"data": list(rows)}), encoding="utf-8")
            run = self._run(
                "-m", model, "-u", url, "-i", protocol, "--async", "--input-data", data,
                "-b", batch, f"--concurrency-range={callers}", "-p", int(seconds * 1000 / _WINDOWS), "-s", 999,
                "-r", 2 * _WINDOWS, "-H", f"{header}:{server.admin_key}",
            )  # fmt: skip
        return read_output(run.stdout, run.stderr)

    def _run(self, *arguments: Any) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run([self._binary, *map(str, arguments)], capture_output=True, text=True, check=False)
        except OSError as error:
            raise SetupError(
                f"{self._binary} does not start: {error.strerror}.", "Name perf_analyzer itself."
            ) from None


def read_output(printed: str, errors: str = "") -> Analyzed:
    """Parse the output of perf_analyzer: rows per second, and milliseconds.

    Raises:
        SetupError: it has no figures.
    """
    rate = re.search(r"throughput: ([\d.]+) infer/sec", printed)
    times = [re.search(_PERCENTILE.format(q), printed) for q in (50, 99)]
    if not rate or not all(times):
        said = [line for line in (errors or printed).splitlines() if line.strip()]
        raise SetupError(f"perf_analyzer gave no figure: {said[-1] if said else 'it said nothing'}.")
    p50, p99 = (float(found[1]) / 1000 for found in times if found)
    return Analyzed(float(rate[1]), p50, p99)
