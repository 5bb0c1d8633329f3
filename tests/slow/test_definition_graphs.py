"""Random ensembles made in Python: each is accepted by check, and loads in Triton."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shoal
from shoal.authoring.check.families import check
from shoal.authoring.check.findings import Severity
from shoal.authoring.composition.ensemble import Tensor, check_fits
from shoal.authoring.repository.config import ModelConfig, read_config
from shoal.errors import InputError
from tests.conftest import Scale
from tests.support.projects import define, write_project

pytestmark = pytest.mark.verify

BATCHED = ("read", "narrow", "wide", "count", "join", "mark")
MODELS = (*BATCHED, "single")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    write_project(root)
    return root


def fits(made: shoal.Ensemble, config: ModelConfig, name: str, each: Tensor) -> bool:
    try:
        check_fits(each, config, name, made._rows)
    except InputError:
        return False
    return True


@st.composite
def graphs(draw: st.DrawFn, project: Path, name: str) -> shoal.Ensemble:
    """A pipeline of up to eight steps, each on what the request brings or an earlier step gives."""
    made = define(project, name, max_batch_size=draw(st.sampled_from([None, None, 1, 4])))
    free: list[Tensor] = []
    used: set[str] = set()
    for number in range(draw(st.integers(1, 8))):
        config = made._models[draw(st.sampled_from(MODELS if number else BATCHED))]  # whose rows the request has
        chosen: dict[str, Tensor] = {}
        for spec in config.spec.inputs:
            if spec.is_optional and draw(st.booleans()):
                continue
            fitting = [each for each in free if fits(made, config, spec.name, each)]
            is_fresh = draw(st.sampled_from([True, False, False, False]))
            if fitting and not is_fresh:
                chosen[spec.name] = draw(st.sampled_from(fitting))
            else:
                dims = spec.dims[1:] if not config.spec.is_batched else spec.dims
                sizes = [draw(st.sampled_from([-1, 3])) if size == -1 else size for size in dims]
                may_lack = spec.is_optional and draw(st.booleans())
                fresh = made.input(f"IN_{number}_{spec.name}", spec.dtype, sizes, optional=may_lack)
                free.append(fresh)
                chosen[spec.name] = fresh
        called = draw(st.sampled_from([None, {t.name: f"t{number}_{t.name}" for t in config.spec.outputs}]))
        given = made.step(config.name, chosen, names=called)
        used |= {each.name for each in chosen.values()}
        free += given.values()
    unread = [each for each in free if each.name not in used and not each.is_requested]
    for number, each in enumerate(unread):
        made.output(f"OUT_{number}", each)
    return made


def test_random_graphs_are_accepted(project: Path, scale: Scale) -> None:
    """They are written as they were made, and accepted by check."""
    seen: list[int] = []
    number = scale(70, full=200)

    @settings(max_examples=number, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        made = data.draw(graphs(project, "random"))
        folder = made.write(project / "ensembles" / "random")
        findings = [f for f in check(folder) if f.severity == Severity.ERROR and "random" in str(f.place.path)]
        assert not findings
        assert read_config(folder).message == made.config().message
        seen.append(len(made.config().steps))

    run()
    assert len(seen) >= number
    assert max(seen) >= 5


def test_random_graphs_are_served(project: Path, tmp_path: Path, scale: Scale) -> None:
    """All in one server: each loads, and gives every output."""
    made: list[shoal.Ensemble] = []

    @settings(
        max_examples=scale(25, full=200), deadline=None, suppress_health_check=list(HealthCheck), database=None
    )  # fmt: skip
    @given(st.data())
    def run(data: st.DataObject) -> None:
        made.append(data.draw(graphs(project, f"g{len(made)}")))

    run()
    repository = tmp_path / "repository"
    shutil.copytree(project / "models", repository)
    for each in made:
        each.write(repository / each.name)
    with shoal.serve(repository) as server, shoal.Client(server.grpc_url) as client:
        for each in made:
            config = each.config().spec
            inputs = {
                t.name: np.full(
                    [1, *(3 if d == -1 else d for d in t.dims)], b"text" if t.dtype == "TYPE_STRING" else 1
                ).astype(t.numpy_dtype)
                for t in config.inputs
            }
            answer = client.infer(each.name, inputs)
            assert {t.name for t in config.outputs} == set(answer)
