"""Instances and dynamic batching that compose writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shoal.authoring.composition.compose import compose
from shoal.authoring.repository.config import read_config
from shoal.authoring.repository.find_graph import find_model_folders
from shoal.authoring.repository.placement import place, place_all, tune
from shoal.authoring.repository.plan import Instances, Plan, Tuning
from shoal.cli.repository import _parse_tuning
from shoal.errors import InputError, ShoalError
from tests.support.commands import Shoal

GPUS = Plan(placement="gpu", gpus=(0, 1, 2))


def test_the_written_configuration(shoal: Shoal, tmp_path: Path) -> None:
    asked = ["--instances", "softmax=2", "--preferred-batch", "softmax=4,8", "--queue-delay", "softmax=300"]
    shoal("compose", "softmax", tmp_path / "repository", *asked)
    message = read_config(tmp_path / "repository" / "softmax").message
    assert [(group.count, group.kind) for group in message.instance_group] == [(2, message.instance_group[0].KIND_CPU)]
    assert list(message.dynamic_batching.preferred_batch_size) == [4, 8]
    assert message.dynamic_batching.max_queue_delay_microseconds == 300


def test_groups_on_gpus() -> None:
    """Write {count: 2, gpus: [0]}, {count: 3, gpus: [1, 2]}; and two instances on each GPU of the plan."""
    available = find_model_folders()
    for groups, expected in (
        ((Instances(2, (0,)), Instances(3, (1, 2))), [(2, [0]), (3, [1, 2])]),
        ((Instances(2),), [(2, [0, 1, 2])]),
    ):
        message = place(available["softmax"], replace(GPUS, tuning={"softmax": Tuning(groups)}))
        assert [(group.count, list(group.gpus)) for group in message.instance_group] == expected
        assert {group.kind for group in message.instance_group} == {message.instance_group[0].KIND_GPU}


def test_omitted_settings_are_kept() -> None:
    model = find_model_folders()["llamav2"]
    (tuned,) = tune([model], {"llamav2": Tuning(queue_delay=0)})
    assert list(tuned.message.dynamic_batching.preferred_batch_size) == [2, 4, 8]
    assert tuned.message.dynamic_batching.max_queue_delay_microseconds == 0
    assert tuned.message.instance_group == model.message.instance_group


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"instances": ["softmax=0"]}, "softmax is to have 0 instances"),
        ({"instances": ["softmax=2@1"]}, r"placement cpu, and GPU 1 is listed .*--instances softmax=2\)"),
        ({"instances": ["sofmax=2"]}, "no model sofmax in this repository. Did you mean softmax"),
        ({"instances": ["softmax"]}, "--instances softmax cannot be read. For example: --instances scorer=2"),
        ({"sizes": ["softmax=4,1024"]}, "must be <= max batch size"),
        ({"sizes": ["softmax=a"]}, "--preferred-batch softmax=a cannot be read"),
        ({"delays": ["softmax=-1"]}, "--queue-delay softmax=-1 cannot be read"),
    ],
)
def test_refused_settings(options: dict[str, list[str]], message: str, tmp_path: Path) -> None:
    given = {"instances": None, "sizes": None, "delays": None} | options
    with pytest.raises(ShoalError, match=message):
        compose("softmax", tmp_path / "repository", tuning=_parse_tuning(**given))


@pytest.mark.parametrize("option", ["tuning", "environments", "stubs", "swap"])
def test_options_name_models_of_the_repository(option: str, tmp_path: Path) -> None:
    """Each option of the form MODEL=VALUE; the others are refused in the same words for a model that takes none."""
    given = {"tuning": Tuning(queue_delay=1), "swap": "label"}.get(option, tmp_path)
    for name in ("nope", "label"):  # which does not exist, and which is not composed
        with pytest.raises(ShoalError, match=rf"{name}"):
            compose("softmax", tmp_path / "repository", **{option: {name: given}})  # type: ignore[arg-type]
    assert not (tmp_path / "repository").exists()


def test_models_that_cannot_be_tuned() -> None:
    available = find_model_folders()
    for name, tuning, plan, message in (
        ("llm", Tuning((Instances(2),)), Plan(), "llm is an ensemble"),
        ("vllm", Tuning(queue_delay=5), Plan(), r"gets each request alone \(max_batch_size: 0\)"),
        ("llm-hf", Tuning(queue_delay=300), Plan(), "llm-hf is an engine, .* Set its parameter slots"),
        ("llm-hf", Tuning(preferred_batch_sizes=(2,)), Plan(), "llm-hf is an engine, which makes its own batches"),
        ("softmax", Tuning((Instances(1, (0, 3)),)), GPUS, "GPU 3 is listed for softmax.* Say --gpu 0,1,2,3"),
    ):
        with pytest.raises(InputError, match=message):
            place_all(tune([available[name]], {name: tuning}), replace(plan, tuning={name: tuning}))
