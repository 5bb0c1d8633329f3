"""Models that code calls, in the caller's process: composed, checked, drawn and asked as if they were apart."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import Llm, load
from shoal.authoring.check.families import check
from shoal.authoring.composition.compose import compose
from shoal.authoring.composition.together import find_hosts
from shoal.authoring.draw import mermaid
from shoal.authoring.repository.call_graph import collect
from shoal.authoring.repository.config import read_config
from shoal.authoring.repository.find_graph import find_graph, find_model_folders
from shoal.authoring.repository.manifest import check_manifest, read_manifest
from shoal.authoring.repository.model_folders import read_configs
from shoal.authoring.repository.plan import Instances, Plan, Tuning
from shoal.errors import ArtifactError, InputError, SetupError, ShoalError
from shoal.kit.component.base import Component
from shoal.kit.component.context import Context
from shoal.kit.component.hosted import _Passed
from shoal.kit.component.spec import Arrays, ModelSpec, TensorSpec
from shoal.kit.component.stream import QueueStream
from shoal.kit.generation.pieces import Piece, join_pieces
from shoal.serving.gateway.core.models import find_slots
from tests.support.llm import find_trained

HOSTED = ("prompt", "llm-hf")


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compose("llm_bls", tmp_path_factory.mktemp("apart") / "r", weights=find_trained())


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compose("llm_bls", tmp_path_factory.mktemp("together") / "r", weights=find_trained(), is_together=True)


@pytest.mark.usefixtures("may_start_processes")
def test_the_models_travel_in_their_callers_folder(apart: Path, together: Path) -> None:
    assert [path.name for path in sorted(together.iterdir())] == ["llm_bls", "manifest.json", "prompt"]
    assert sorted(path.name for path in (together / "llm_bls" / "1").iterdir()) == ["model.py", "shoal", "together"]
    assert not [*(together / "llm_bls" / "1" / "together").glob("**/shoal")], "one copy of shoal is enough"
    config = read_config(together / "llm_bls")
    assert config.hosts == HOSTED
    assert config.slots == read_config(apart / "llm-hf").slots
    assert find_slots(read_configs(together)) == {"llm_bls": config.slots}
    manifest = read_manifest(together)
    assert manifest["together"] == {"llm_bls": [*HOSTED]}
    assert sorted(manifest["without_environment"]) == ["llm_bls", "prompt"]
    assert manifest["identity"] == read_manifest(apart)["identity"], "the answers are the same"
    check_manifest(together)
    assert check(together) == []
    assert sorted(find_graph(together).members) == sorted(find_graph(apart).members)
    pictures = [mermaid.draw(find_graph(each)) for each in (apart, together)]
    for name in HOSTED:
        pictures[0] = pictures[0].replace(f'"{name}<br/>python · CPU', f'"{name}<br/>python · CPU · in llm_bls')
    assert pictures[0] == pictures[1]


@pytest.mark.usefixtures("may_start_processes")
def test_token_ids_are_made_apart_where_they_cannot_be_made_here(tmp_path: Path) -> None:
    two = {"prompt": Tuning(instances=(Instances(2),))}
    repository = compose("llm_bls", tmp_path / "r", weights=find_trained(), tuning=two, is_together=True)
    assert read_config(repository / "llm_bls").hosts == ("llm-hf",)
    assert (repository / "prompt" / "config.pbtxt").is_file()


@pytest.mark.usefixtures("may_start_processes")
def test_the_same_texts(apart: Path, together: Path) -> None:
    def ask(repository: Path) -> list[Piece]:
        with load(repository) as pipeline:
            llm = Llm(pipeline)
            settings: tuple[dict[str, Any], ...] = ({}, {"stop_words": ["sat"]}, {"temperature": 1.0, "seed": 3})
            return [join_pieces([*llm.stream("What do cats do?", max_tokens=20, **each)]) for each in settings]

    assert ask(together) == ask(apart)


@pytest.mark.usefixtures("may_start_processes")
def test_errors_are_those_of_the_callee(together: Path) -> None:
    with load(together) as pipeline, pytest.raises(InputError, match="max_tokens"):
        Llm(pipeline).generate("Hello!", max_tokens=10**6)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("llm", r"No model calls others: .*llm-hf.* Leave out --together"),
        (["llm", "llm_bls"], r"llm_bls cannot run llm-hf in its process: llm needs it too, so it would be loaded"),
        ("tensorrt_llm_bls", r"cannot run tensorrt_llm in its process: it is a model of the backend tensorrtllm"),
    ],
)
def test_what_cannot_be_together(names: str | list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        compose(names, tmp_path / "r", weights=find_trained(), plan=Plan(target="26.06"), is_together=True)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("model", "tuned", "said"),
    [
        ("llm-hf", Tuning(instances=(Instances(2),)), "cannot run llm-hf in its process: llm-hf has 2 instances"),
        ("llm_bls", Tuning(instances=(Instances(2),)), "cannot run llm-hf in its process: llm_bls has 2 instances"),
    ],
)
def test_settings_that_a_hosted_model_would_not_obey(model: str, tuned: Tuning, said: str, tmp_path: Path) -> None:
    with pytest.raises(ShoalError, match=said):
        compose("llm_bls", tmp_path / "r", weights=find_trained(), tuning={model: tuned}, is_together=True)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("tuned", [Tuning(queue_delay=100), Tuning(preferred_batch_sizes=(2,))])
def test_a_hosted_model_has_no_queue(tuned: Tuning) -> None:
    models = collect("llm_bls", find_model_folders())
    with pytest.raises(InputError, match="Requests to llm-hf wait in no queue with --together"):
        find_hosts(models, {"llm-hf": tuned}, {})


def test_an_environment_that_a_model_names_itself(tmp_path: Path) -> None:
    own = tmp_path / "models" / "mine"
    shutil.copytree(find_model_folders()["llm-hf"].folder, own)
    text = (own / "config.pbtxt").read_text(encoding="utf-8").replace("llm-hf", "mine")
    more = 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "/opt/env" } }\n'
    (own / "config.pbtxt").write_text(text + more, encoding="utf-8")
    how: dict[str, Any] = {"projects": [tmp_path], "swap": {"llm-hf": "mine"}, "weights": find_trained()}
    with pytest.raises(InputError, match="cannot run mine in its process: their environments differ"):
        compose("llm_bls", tmp_path / "r", is_together=True, **how)


@pytest.mark.usefixtures("may_start_processes")
def test_a_hosted_model_that_is_damaged(tmp_path: Path) -> None:
    repository = compose("llm_bls", tmp_path / "r", weights=find_trained(), is_together=True)
    config = repository / "llm_bls" / "1" / "together" / "llm-hf" / "config.pbtxt.json"
    config.write_text(json.dumps({"inputs": 1}), encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"llm_bls hosts llm-hf, whose \S+ cannot be read\. Compose it again"):
        find_graph(repository)
    config.unlink()
    (repository / "manifest.json").unlink()
    with pytest.raises((ArtifactError, SetupError), match="llm_bls hosts llm-hf, whose"):
        load(repository / "llm_bls")


class Totals:
    """Passage of numbers that have come together: how many, and their sum."""

    is_complete = False

    def take(self, answers: Sequence[Arrays]) -> Iterable[Arrays]:
        yield {"Y": np.array([[len(answers), sum(int(each["X"][0, 0]) for each in answers)]])}

    def end(self) -> Iterable[Arrays]:
        return ()


class Late(QueueStream):
    """Stream whose answers are made when ``deferred`` is called."""

    most_ahead = 4

    def defer(self, work: Callable[[], None]) -> None:
        self.deferred = work


@pytest.fixture
def passed() -> tuple[Late, _Passed]:
    spec = ModelSpec("m", (), (TensorSpec("X", "TYPE_INT64", (1,)),), max_batch_size=1)
    other = ModelSpec("n", (), (TensorSpec("Y", "TYPE_INT64", (2,)),), max_batch_size=1)
    model, caller = (Component(Context(spec=each, folder=Path())) for each in (spec, other))
    to = Late(caller, 1)
    return to, _Passed(model, 1, to, Totals(), caller.context.device)


def _count(stream: _Passed, most: int, sent: list[int]) -> threading.Thread:
    def work() -> None:
        for number in range(most):
            stream.send({"X": np.array([[number]])})
            sent.append(number)
        stream.end()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_answers_that_wait_travel_together_and_then_the_engine_waits(passed: tuple[Late, _Passed]) -> None:
    to, stream = passed
    sent: list[int] = []
    thread = _count(stream, 6, sent)
    thread.join(0.2)
    assert sent == [0, 1, 2, 3], "the fifth waits"
    to.deferred()
    thread.join(10)
    assert len(sent) == 6
    to.deferred()
    assert [each["Y"].ravel().tolist() for each in to] == [[4, 6], [2, 9]]


def test_an_engine_that_waits_goes_on_when_its_client_leaves(passed: tuple[Late, _Passed]) -> None:
    _, stream = passed
    sent: list[int] = []
    thread = _count(stream, 9, sent)
    thread.join(0.2)
    stream.leave()
    thread.join(10)
    assert not thread.is_alive()
