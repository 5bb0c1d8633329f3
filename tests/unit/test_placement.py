"""Leaf folders, and where their models run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.authoring.composition.artifacts import choose_precisions
from shoal.authoring.repository.call_graph import collect
from shoal.authoring.repository.config import read_config
from shoal.authoring.repository.devices import PYTHON_BASED_BACKENDS
from shoal.authoring.repository.find_graph import find_model_folders
from shoal.authoring.repository.placement import place
from shoal.authoring.repository.plan import Plan
from shoal.authoring.repository.precision import choose_precision
from shoal.errors import ArtifactError, InputError, SetupError
from shoal.kit.backends import BACKENDS
from shoal.system.machine import computes_bf16
from shoal.system.paths import shipped_root
from tests.support.once import ROOT

MODELS = {"preprocess", "bert-large", "cuml", "postprocess", "ensemble_all"}


def test_collect_brings_members_before_ensembles() -> None:
    names = [config.name for config in collect("ensemble_all", find_model_folders())]
    assert set(names) == MODELS
    assert names[-1] == "ensemble_all"
    with pytest.raises(
        ArtifactError, match=r"There is no model nope\. Known: bert-large, blend, checked_text, completion"
    ):
        collect("nope", find_model_folders())


def test_ensembles_in_a_circle_are_named(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / "ensembles" / name).mkdir(parents=True)
        (tmp_path / "ensembles" / name / "config.pbtxt").write_text(
            f'name: "{name}" platform: "ensemble" ensemble_scheduling {{ step {{ model_name: "{other}" }} }}',
            encoding="utf-8",
        )
    with pytest.raises(ArtifactError, match=r"circular dependency between ensembles: a -> b -> a\."):
        collect("a", find_model_folders([tmp_path]))


def test_a_users_leaf_takes_the_place_of_ours(tmp_path: Path) -> None:
    mine = tmp_path / "models" / "mine"
    mine.mkdir(parents=True)
    (mine / "config.pbtxt").write_text('name: "cuml"\nbackend: "python"\n', encoding="utf-8")
    assert find_model_folders([tmp_path])["cuml"].backend == "python"
    assert shipped_root() == ROOT


def test_targets_differ_in_the_lines_of_python_based_backends_only() -> None:
    leaves = find_model_folders()
    assert {p.name for p in BACKENDS.iterdir() if (p / "model.py").is_file()} == set(PYTHON_BASED_BACKENDS)
    for name in MODELS:
        embedded, native = (place(leaves[name], Plan(target=target)) for target in ("embedded", "26.06"))
        if name in ("bert-large", "cuml"):
            assert (embedded.runtime, native.runtime) == ("model.py", "")
            embedded.runtime = ""
            for tensor in embedded.input:
                assert tensor.allow_ragged_batch == (name == "bert-large")
                tensor.allow_ragged_batch = False
        assert embedded == native
        kinds = [group.kind for group in embedded.instance_group]
        assert kinds == ([] if name == "ensemble_all" else [embedded.instance_group[0].KIND_CPU])


@pytest.mark.parametrize("backend", ["pytorch", "onnxruntime"])
@pytest.mark.parametrize(("mask", "own", "placed"), [("I", False, True), ("", False, False), ("", True, True)])
def test_requests_are_padded_if_there_is_a_mask(
    backend: str, mask: str, own: bool, placed: bool, tmp_path: Path
) -> None:
    """Without one an answer would depend on its neighbours; who knows better says so in the leaf."""
    (tmp_path / "config.pbtxt").write_text(
        f'name: "m" backend: "{backend}" max_batch_size: 8'
        f' input {{ name: "I" data_type: TYPE_INT64 dims: -1 allow_ragged_batch: {str(own).lower()} }}'
        f' input {{ name: "J" data_type: TYPE_INT64 dims: 2 }}'
        f' parameters {{ key: "attention_mask" value {{ string_value: "{mask}" }} }}',
        encoding="utf-8",
    )
    message = place(read_config(tmp_path), Plan())
    assert [tensor.allow_ragged_batch for tensor in message.input] == [placed, False]


@pytest.mark.parametrize("gpus", [(0,), (0, 1), (3,), (0, 1, 2, 3)])
def test_instances_are_pinned(gpus: tuple[int, ...]) -> None:
    leaves = find_model_folders()
    for placement, on_gpu in (("gpu", MODELS - {"ensemble_all"}), ("hybrid", {"bert-large", "cuml"})):
        for name in MODELS - {"ensemble_all"}:
            message = place(leaves[name], Plan(placement=placement, gpus=gpus))
            (group,) = message.instance_group
            kind, pinned = (group.KIND_GPU, list(gpus)) if name in on_gpu else (group.KIND_CPU, [])
            assert (group.kind, list(group.gpus)) == (kind, pinned)
            assert ("FORCE_CPU_ONLY_INPUT_TENSORS" in message.parameters) == (name in on_gpu)


def test_the_first_gpu_is_the_choice_of_a_plan_without_one() -> None:
    assert [Plan(placement=name).gpus for name in ("cpu", "hybrid", "gpu")] == [(), (0,), (0,)]
    assert Plan(placement="hybrid", gpus=()).gpus == ()


@pytest.mark.parametrize(
    ("plan", "is_fast", "can_convert", "dtype"),
    [
        (Plan(), True, True, "bf16"),
        (Plan(), False, True, "fp32"),
        (Plan(), True, False, "fp32"),
        (Plan(dtype="fp32"), True, True, "fp32"),
        (Plan(dtype="bf16"), False, True, "bf16"),
        (Plan(placement="gpu"), True, True, "fp32"),
        (Plan(placement="hybrid", gpus=()), True, True, "bf16"),
        (Plan(target="26.06"), True, True, "fp32"),
    ],
)
def test_auto_is_the_fastest_dtype_that_can_be_had(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, is_fast: bool, can_convert: bool, dtype: str
) -> None:
    monkeypatch.setattr("shoal.authoring.repository.precision.computes_bf16", lambda: is_fast)
    assert choose_precision(plan, is_imported=False, has_trunk=lambda: can_convert).dtype == dtype
    asked = "fp32" if plan.dtype == "auto" else plan.dtype
    assert choose_precision(plan, is_imported=True, has_trunk=lambda: can_convert).dtype == asked


def test_native_backends_run_the_file_as_it_is_and_engines_in_the_dtype_that_is_asked_for() -> None:
    plan = Plan(target="26.06", dtype="bf16")
    with pytest.raises(InputError, match=r"The native backends of 26\.06 run model\.pt in the dtype of its file"):
        choose_precision(plan, is_imported=True, has_trunk=lambda: True)
    engine = [find_model_folders()["llm-hf"]]
    assert choose_precisions(engine, None, plan)["llm-hf"].dtype == "bf16"


@pytest.mark.parametrize(
    ("said", "flags", "is_so"), [("1", "", True), ("0", "bf16", False), ("", "bf16", True), ("", "avx2", False)]
)
def test_bf16_may_be_said_for_the_machine(monkeypatch: pytest.MonkeyPatch, said: str, flags: str, is_so: bool) -> None:
    monkeypatch.setenv("SHOAL_BF16", said)
    monkeypatch.setattr("shoal.system.machine.describe_machine", lambda: {"flags": flags})
    assert computes_bf16() == is_so
    monkeypatch.setenv("SHOAL_BF16", "yes")
    with pytest.raises(SetupError, match=r"SHOAL_BF16 is 'yes'\. Set it to 0 or 1"):
        computes_bf16()


def test_a_dtype_that_no_model_takes_is_refused() -> None:
    forest = collect("cuml", find_model_folders())
    with pytest.raises(InputError, match=r"No model can run in dtype bf16: only models of shoal's pytorch backend can"):
        choose_precisions(forest, None, Plan(dtype="bf16"))
    assert choose_precisions(forest, None, Plan(dtype="fp32")) == {}


def test_dtype_is_the_encoders() -> None:
    leaves = find_model_folders()
    placed = {name: place(leaves[name], Plan(dtype="bf16")) for name in MODELS}
    assert {name for name, message in placed.items() if "dtype" in message.parameters} == {"bert-large"}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"placement": "moon"}, "Unknown placement 'moon'. Known: cpu, hybrid, gpu"),
        ({"dtype": "fp8"}, "Unknown dtype 'fp8'. Known: auto, fp32, bf16, fp16"),
        ({"target": "latest"}, "Unknown target 'latest'. Known: embedded, or a release"),
        ({"placement": "gpu", "gpus": ()}, "Placement gpu needs a GPU. Name one, --gpu 0"),
        ({"placement": "cpu", "gpus": (0,)}, "Placement cpu uses no GPU. Leave --gpu out"),
        ({"placement": "gpu", "gpus": (1, 1)}, r"GPUs \[1, 1\] are not different indices from 0 up"),
        ({"placement": "gpu", "gpus": (-1,)}, r"GPUs \[-1\] are not different"),
        ({"concurrency": 0}, "The concurrency is 0; it must be at least 1"),
    ],
)
def test_plans_that_cannot_be(fault: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Plan(**fault)


@pytest.mark.parametrize(("placement", "is_placed"), [("", False), ("cpu", True)])
def test_a_plan_with_another_dtype_still_places_as_much(placement: str, is_placed: bool) -> None:
    """A plan file of `shoal tune` changes the dtype; the models' own instance groups stay."""
    plan = replace(Plan(placement), dtype="bf16")
    assert (plan.placement, plan.is_placed) == ("cpu", is_placed)
