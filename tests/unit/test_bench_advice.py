"""Advice: drawn from figures by plain rules; and followed to the letter on a real server, which gets faster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.authoring.repository.config import ModelConfig, read_config
from shoal.lab.bench.advice import Advice, Evidence, advise
from shoal.lab.bench.record import Cell, Figures
from tests.support.bench import BATCHING, LOAD, QUICK, STEP, put, write_repository

# --- followed ----------------------------------------------------------------------------------------------------


# --- the rules ---------------------------------------------------------------------------------------------------


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


def test_a_step_that_uses_all_its_threads_gets_more(configs: dict[str, ModelConfig]) -> None:
    """One caller's requests never meet, so that instances and batches would not help it."""
    parameter = 'parameters {{ key: "threads" value {{ string_value: "{}" }} }}'
    computing = {"quick": QUICK, "slow": replace(STEP, busy=0.97, cpu_ms=STEP.execution_ms)}
    for number, is_advised in (("1", True), ("2", False)):
        configs["slow"] = with_more(configs["slow"], parameter.format(number))
        advice = advise(case(configs, {Cell(1, 1): replace(LOAD, steps=computing)}))
        assert [entry.kind for entry in advice if entry.model == "slow"] == ["threads"] * is_advised
    configs["slow"] = with_more(configs["slow"], parameter.format(1))
    threads = found(advise(case(configs, {Cell(1, 1): replace(LOAD, steps=computing)})), "threads", "slow")
    assert threads.what == "Give slow more threads: threads 3."
    assert threads.lines == parameter.format(3)
    assert not advise(case(configs, {Cell(1, 1): replace(LOAD, server_cpu=0.9, steps=computing)}))[0].lines


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


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"client_cpu": 0.5}, "the client takes 2.0 cores: it is the limit."),
        ({"server_ms": 5.0, "p50_ms": 60.0}, "of a request's 60.0 ms only 5.0 are in Triton: the rest is on the way"),
        ({}, "the busiest, quick, runs 5% of the time."),
    ],
)
def test_no_step_is_the_bottleneck(configs: dict[str, ModelConfig], changed: dict[str, Any], said: str) -> None:
    lazy = replace(LOAD, steps={"quick": QUICK, "slow": replace(STEP, busy=0.02)}, **changed)
    found_one = found(advise(case(configs, {Cell(1, 8): lazy})), "bottleneck")
    assert found_one.what == "No step is the bottleneck."
    assert said in found_one.why


def test_a_server_whose_processor_time_is_not_known(configs: dict[str, ModelConfig]) -> None:
    """More instances are proposed, for cores that are free."""
    configs["slow"] = with_more(configs["slow"], BATCHING)
    steps = {"quick": QUICK, "slow": replace(STEP, cpu_ms=None)}
    advice = advise(case(configs, {Cell(1, 8): replace(LOAD, server_cpu=None, other_cpu=None, steps=steps)}))
    proposed = found(advice, "instances", "slow")
    assert proposed.what == "Give slow 2 instances."
    assert "whether cores are free cannot be seen here" in proposed.why
    assert not [entry for entry in advice if "cores are busy" in entry.why]


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
