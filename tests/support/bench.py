"""Repositories and figures for ``shoal bench``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.lab.bench.record import BenchSettings, Figures
from shoal.lab.bench.run import Loads, Source, bench
from shoal.lab.bench.steps import StepFigures
from shoal.lab.bench.target import find_targets

CONFIG = """
backend: "python"
max_batch_size: 4
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ 1 ] }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }} ]
instance_group [ {{ kind: KIND_CPU }} ]
{more}
"""
ENSEMBLE = """
name: "both"
platform: "ensemble"
max_batch_size: 4
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
ensemble_scheduling {
  step [
    {
      model_name: "quick" model_version: 1
      input_map { key: "X" value: "X" } output_map { key: "Y" value: "between" }
    },
    {
      model_name: "slow" model_version: 1
      input_map { key: "X" value: "between" } output_map { key: "Y" value: "Y" }
    }
  ]
}
"""
CODE = """
import time
from shoal.kit.component.base import Component

class Sleeper(Component):
    def run(self, batch):
        time.sleep({seconds})
        return {{"Y": batch["X"]}}

TritonPythonModel = Sleeper.for_triton()
"""
BATCHING = "dynamic_batching { }"


def write_repository(folder: Path, *, seconds: str, more: str = "") -> Path:
    """A quick step, which batches, and one that sleeps for so many seconds."""
    for name, sleep, lines in (("quick", "0", BATCHING), ("slow", seconds, more)):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(CONFIG.format(more=lines), encoding="utf-8")
        (folder / name / "1" / "model.py").write_text(CODE.format(seconds=sleep), encoding="utf-8")
    (folder / "both" / "1").mkdir(parents=True)
    (folder / "both" / "config.pbtxt").write_text(ENSEMBLE, encoding="utf-8")
    (folder / "rows.csv").write_text("X\n" + "\n".join(map(str, range(8))) + "\n", encoding="utf-8")
    return folder


def put(text: str, lines: str) -> str:
    """Replace the fields of the configuration ``text`` that ``lines`` set, as a user would."""
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    config, proposed = model_config_pb2.ModelConfig(), model_config_pb2.ModelConfig()
    text_format.Parse(text, config)
    text_format.Parse(lines, proposed)
    for field, _ in proposed.ListFields():
        config.ClearField(field.name)
    config.MergeFrom(proposed)
    return str(text_format.MessageToString(config, as_utf8=True))


def measure_rows(repository: Path, settings: BenchSettings, loads: Loads) -> dict[str, Any]:
    """Measure a repository of ``write_repository``."""
    source = Source(lambda: ("", ()), repository / "rows.csv")
    return bench(find_targets([repository]), settings, source, loads)


def run(repository: Path) -> tuple[float, list[dict[str, Any]]]:
    """Rows a second of twelve callers with a row each, and the advice that helps."""
    # Many executions in each window, for one at its edge is counted whole or not at all.
    settings = BenchSettings(seconds=2, warm_seconds=0.2, repeats=1)
    record = measure_rows(repository, settings, Loads((1,), (12,)))
    (rate,) = (load["median"]["rows_per_s"] for load in record["loads"] if load["callers"] == 12)
    (advice,) = record["advice"].values()
    assert "quick" not in {entry["model"] for entry in advice if entry["lines"]}
    return rate, [entry for entry in advice if entry["helps"]]


STEP = StepFigures(
    requests_per_execution=1.0, rows_per_execution=1.0, queue_ms=70.0, input_ms=0.0, infer_ms=10.0, output_ms=0.0,
    execution_ms=10.0, busy=0.98, cpu_ms=0.2,
)  # fmt: skip
QUICK = replace(STEP, queue_ms=0.1, infer_ms=0.5, execution_ms=0.5, busy=0.05, cpu_ms=0.4)
LOAD = Figures(
    rows_per_s=100.0, requests=100, p50_ms=80.0, p90_ms=81.0, p99_ms=82.0, max_ms=90.0, server_cpu=0.2, client_cpu=0.1,
    other_cpu=0.0, server_ms=80.0, local_ms=None, steps={"quick": QUICK, "slow": STEP},
)  # fmt: skip


def table(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def check_record(record: Mapping[str, Any]) -> None:
    assert [entry["placement"] for entry in record["repositories"]] == ["cpu", "hybrid"]
    loads = {(load["repository"], load["batch"], load["callers"]): load for load in record["loads"]}
    assert len(loads) == 6
    for (label, batch, _), entry in loads.items():
        assert len(entry["repeats"]) == 2
        low, high = entry["min_max"]["rows_per_s"]
        assert 0 < low <= entry["median"]["rows_per_s"] <= high
        for figures in entry["repeats"]:
            assert 0 < figures["p50_ms"] <= figures["p90_ms"] <= figures["p99_ms"] <= figures["max_ms"]
            assert figures["server_cpu"] + figures["client_cpu"] + figures["other_cpu"] <= 1.1
            assert list(figures["steps"]) == (["cuml"] if label == "hybrid" else ["preprocess", "cuml"])
            for step in figures["steps"].values():
                assert step["rows_per_execution"] >= batch * (1 - 1e-9)
                assert 0 < step["busy"] <= 1.1
                assert step["cpu_ms"] >= 0
            assert (figures["local_ms"] is None) == (label != "hybrid")
            assert 0 <= (figures["local_ms"] or 0) < figures["max_ms"]
            assert (figures["server_ms"] is None) == (label == "hybrid")
