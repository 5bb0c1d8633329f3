"""Advice: drawn from figures by plain rules; and followed to the letter on a real server, which gets faster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.authoring.repository.config import ModelConfig, read_config
from shoal.lab.bench.advice import Advice, Evidence, advise
from shoal.lab.bench.record import BenchSettings, Cell, Figures
from shoal.lab.bench.run import bench
from shoal.lab.bench.steps import StepFigures

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


# --- followed ----------------------------------------------------------------------------------------------------


def run(repository: Path) -> tuple[float, list[dict[str, Any]]]:
    """Rows a second of twelve callers with a row each, and the advice that helps."""
    # Many executions in each window, for one at its edge is counted whole or not at all.
    settings = BenchSettings(seconds=2, warm_seconds=0.2, repeats=1)
    record = bench([repository], settings, rows=repository / "rows.csv", batches=(1,), callers=(12,))
    (rate,) = (load["median"]["rows_per_s"] for load in record["loads"] if load["callers"] == 12)
    (advice,) = record["advice"].values()
    assert "quick" not in {entry["model"] for entry in advice if entry["lines"]}
    return rate, [entry for entry in advice if entry["helps"]]


# --- the rules ---------------------------------------------------------------------------------------------------

STEP = StepFigures(
    requests_per_execution=1.0, rows_per_execution=1.0, queue_ms=70.0, input_ms=0.0, infer_ms=10.0, output_ms=0.0,
    execution_ms=10.0, busy=0.98, cpu_ms=0.2,
)  # fmt: skip
QUICK = replace(STEP, queue_ms=0.1, infer_ms=0.5, execution_ms=0.5, busy=0.05, cpu_ms=0.4)
LOAD = Figures(
    rows_per_s=100.0, requests=100, p50_ms=80.0, p90_ms=81.0, p99_ms=82.0, max_ms=90.0, server_cpu=0.2, client_cpu=0.1,
    other_cpu=0.0, server_ms=80.0, local_ms=None, steps={"quick": QUICK, "slow": STEP},
)  # fmt: skip


@pytest.fixture
def configs(tmp_path: Path) -> dict[str, ModelConfig]:
    folder = write_repository(tmp_path / "r", seconds="0")
    return {name: read_config(folder / name) for name in ("quick", "slow")}


def with_more(config: ModelConfig, lines: str) -> ModelConfig:
    path = config.folder / "config.pbtxt"
    path.write_text(put(path.read_text(encoding="utf-8"), lines), encoding="utf-8")
    return read_config(config.folder)


def case(configs: Mapping[str, ModelConfig], cells: Mapping[Cell, Figures]) -> Evidence:
    return Evidence(cells, configs, 4)


def found(advice: list[Advice], kind: str, model: str = "") -> Advice:
    (one,) = [entry for entry in advice if (entry.kind, entry.model) == (kind, model)]
    return one


def test_requests_that_run_one_by_one_are_to_be_joined(configs: dict[str, ModelConfig]) -> None:
    advice = advise(case(configs, {Cell(1, 8): LOAD}))
    batching = found(advice, "batching", "slow")
    assert batching.lines == BATCHING
    assert "each execution has 1.0 requests of the 4 rows" in batching.why
    assert "a request waits 70.0 of 80.0 ms" in batching.why
    assert not [entry for entry in advice if entry.kind == "instances"]  # first the one, then measure
    idle = found(advice, "idle")
    assert not idle.helps
    assert idle.what == "More instances of quick would not help."


def test_no_batching_advice_for_one_caller(configs: dict[str, ModelConfig]) -> None:
    assert "batching" not in {entry.kind for entry in advise(case(configs, {Cell(1, 1): LOAD}))}


def test_a_step_that_is_always_busy_gets_instances_as_far_as_cores_are_free(configs: dict[str, ModelConfig]) -> None:
    configs["slow"] = with_more(configs["slow"], f"{BATCHING} instance_group [ {{ count: 3 kind: KIND_CPU }} ]")
    advice = advise(case(configs, {Cell(1, 8): LOAD}))
    assert found(advice, "instances", "slow").what == "Give slow 6 instances."
    assert put("", found(advice, "instances", "slow").lines).split() == [
        "instance_group", "{", "count:", "6", "kind:", "KIND_CPU", "}",
    ]  # fmt: skip
    hungry = {"quick": QUICK, "slow": replace(STEP, cpu_ms=6.0)}  # 1.8 cores in three instances; 1.4 are free
    advice = advise(case(configs, {Cell(1, 8): replace(LOAD, server_cpu=0.55, steps=hungry)}))
    assert found(advice, "instances", "slow").what == "Give slow 5 instances."
    advice = advise(case(configs, {Cell(1, 8): replace(LOAD, server_cpu=0.78, steps=hungry)}))
    assert not found(advice, "instances", "slow").helps
    unknown = {"quick": QUICK, "slow": replace(STEP, cpu_ms=None)}
    (proposed,) = [a for a in advise(case(configs, {Cell(1, 8): replace(LOAD, steps=unknown)})) if a.lines]
    assert proposed.what == "Give slow 6 instances."
    assert proposed.why.endswith("while the cores are busy 30%.")
    full = replace(LOAD, server_cpu=0.9, steps=unknown)  # it may be what takes them
    assert "instances" not in {entry.kind for entry in advise(case(configs, {Cell(1, 8): full}))}


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ("count: 1 kind: KIND_GPU gpus: [ 0, 1 ]", "Give slow 4 instances, 2 on each of its GPUs."),
        ("count: 1 kind: KIND_GPU gpus: [ 1 ]", "Give slow 2 instances."),
        ("count: 2 kind: KIND_GPU", "Give slow 4 instances on each GPU."),
    ],
)
def test_a_count_is_for_each_gpu(configs: dict[str, ModelConfig], group: str, words: str) -> None:
    configs["slow"] = with_more(configs["slow"], f"{BATCHING} instance_group [ {{ {group} }} ]")
    assert found(advise(case(configs, {Cell(1, 8): LOAD})), "instances", "slow").what == words


def test_requests_that_fill_the_batch_are_not_to_be_joined(configs: dict[str, ModelConfig]) -> None:
    assert found(advise(case(configs, {Cell(2, 8): LOAD})), "batching", "slow").helps
    assert found(advise(case(configs, {Cell(3, 8): LOAD})), "instances", "slow").helps


def test_advice_for_one_load_is_not_contradicted_for_another(configs: dict[str, ModelConfig]) -> None:
    configs["slow"] = with_more(configs["slow"], BATCHING)
    lazy = replace(LOAD, rows_per_s=200.0, steps={"quick": QUICK, "slow": replace(STEP, busy=0.3)})
    advice = advise(case(configs, {Cell(1, 8): LOAD, Cell(2, 8): lazy, Cell(4, 8): LOAD}))
    assert found(advice, "instances", "slow").helps
    assert found(advice, "idle").what == "More instances of quick would not help."
    assert found(advice, "callers").what == "Increase the load: use more callers."  # larger requests were no better


def test_cores_that_are_full_end_the_matter(configs: dict[str, ModelConfig]) -> None:
    configs["slow"] = with_more(configs["slow"], f'{BATCHING} backend: "pytorch"')
    steps = {"quick": QUICK, "slow": replace(STEP, cpu_ms=30.0)}
    cells = {Cell(1, 8): replace(LOAD, server_cpu=0.85, steps=steps)}
    advice = advise(case(configs, cells))
    assert found(advice, "cpu").what == "More instances of CPU-bound steps would not help: quick, slow."
    assert not found(advice, "cpu").helps
    assert not found(advice, "instances", "slow").helps
    assert "4 cores are busy 95% of the time: the server takes 85%, the client 10%" in found(advice, "cpu").why
    assert "99% of all steps'" in found(advice, "cost", "slow").why
    assert not [entry for entry in advice if entry.lines]


def test_full_cores_and_a_step_that_waits_for_something_else(configs: dict[str, ModelConfig]) -> None:
    configs["slow"] = with_more(configs["slow"], BATCHING)
    advice = advise(case(configs, {Cell(1, 8): replace(LOAD, other_cpu=0.7)}))
    assert found(advice, "instances", "slow").helps


def test_full_cores_and_requests_one_by_one(configs: dict[str, ModelConfig]) -> None:
    """Joined requests help where rows of larger ones were seen to be cheaper, and not where they were not."""
    crowd = replace(LOAD, server_cpu=0.9)
    for rate, is_proposed in ((150.0, True), (105.0, False)):
        cells = {Cell(1, 8): crowd, Cell(8, 2): replace(crowd, rows_per_s=rate)}
        kinds = {entry.kind for entry in advise(case(configs, cells)) if entry.helps}
        assert ("batching" in kinds) is is_proposed


def test_more_callers_are_advised_if_no_step_is_busy(configs: dict[str, ModelConfig]) -> None:
    lazy = replace(LOAD, steps={"quick": QUICK, "slow": replace(STEP, busy=0.3)})
    callers = found(advise(case(configs, {Cell(1, 2): lazy})), "callers")
    assert "no step runs more than 30% of the time, and the cores are busy 30%" in callers.why
    callers = found(advise(case(configs, {Cell(1, 2): replace(lazy, client_cpu=0.25)})), "callers")
    assert "The client itself takes 1.0 cores" in callers.why


def test_queue_delay_is_named_for_one_caller(configs: dict[str, ModelConfig]) -> None:
    configs["slow"] = with_more(
        configs["slow"], "dynamic_batching { preferred_batch_size: 8 max_queue_delay_microseconds: 5000 }"
    )
    slow = replace(STEP, queue_ms=5.1, infer_ms=1.0)
    alone = replace(LOAD, p50_ms=20.0, server_ms=14.0, steps={"quick": QUICK, "slow": slow})
    advice = advise(case(configs, {Cell(1, 1): alone}))
    delay = found(advice, "delay", "slow")
    assert "waits there 5.1 of 20.0 ms" in delay.why
    assert put("", delay.lines).split() == ["dynamic_batching", "{", "preferred_batch_size:", "8", "}"]


def test_the_size_of_requests(configs: dict[str, ModelConfig]) -> None:
    cells = {Cell(n, 2): replace(LOAD, rows_per_s=rate) for n, rate in ((1, 50.0), (8, 195.0), (32, 200.0))}
    advice = advise(case(configs, cells))
    assert found(advice, "rows").what == "Send 8 rows per request where possible."
    assert found(advice, "more rows").what == "Requests of more than 8 rows would not help the rate."
    alone = {Cell(1, 1): replace(LOAD, rows_per_s=50.0)}  # fewer callers: no rate to compare with
    kinds = {entry.kind for entry in advise(case(configs, alone | {Cell(8, 2): LOAD}))}
    assert not kinds & {"rows", "more rows"}


def test_lines_take_the_place_of_what_they_name() -> None:
    text = 'name: "a"\nmax_batch_size: 4\ninstance_group [ { kind: KIND_GPU gpus: [ 0, 1 ] } ]\n'
    assert put(text, "instance_group { count: 2 }").split() == [
        "name:", '"a"', "max_batch_size:", "4", "instance_group", "{", "count:", "2", "}",
    ]  # fmt: skip
