"""Composition of models that code calls, and replacement of one model by another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal import cli
from shoal.authoring.composition.compose import compose
from shoal.authoring.repository.call_graph import collect
from shoal.authoring.repository.config import read_config
from shoal.authoring.repository.find_graph import find_graph, find_model_folders
from shoal.authoring.repository.graph import Graph
from shoal.authoring.repository.manifest import read_manifest
from shoal.errors import ArtifactError, InputError, ShoalError
from tests.support.streams import DECOUPLED, FILES, write_project, write_twin


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return write_project(tmp_path / "project")


def models(repository: Path) -> list[str]:
    return sorted(path.parent.name for path in repository.glob("*/config.pbtxt"))


def call(project: Path, model: str, called: str) -> None:
    path = next(project.glob(f"*/{model}/config.pbtxt"))
    text = re.sub(r'parameters \{ key: "calls".*\n', "", path.read_text(encoding="utf-8"))
    path.write_text(f'{text}parameters {{ key: "calls" value {{ string_value: "{called}" }} }}\n', encoding="utf-8")


def test_called_models_are_composed_too(project: Path) -> None:
    call(project, "asks", "sums  bert-large")  # an ensemble, whose steps come too, and a model of shoal's own
    call(project, "adds", "softmax")
    found = [config.name for config in collect("asks", find_model_folders([project]))]
    assert found == ["counts", "softmax", "adds", "sums", "bert-large", "asks"]


def test_a_composed_repository_has_what_its_code_calls(project: Path, tmp_path: Path) -> None:
    repository = compose("asks", tmp_path / "repository", projects=[project])
    assert models(repository) == ["asks", "counts"]
    calling = [path.parents[4].name for path in repository.glob("*/1/shoal/kit/component/callees.py")]
    assert calling == ["asks"]
    assert (repository / "counts" / "1" / "model.py").is_file()
    assert read_config(repository / "counts").spec.parameters["shoal_repository"]
    manifest = read_manifest(repository)
    assert (manifest["ensembles"], manifest["swap"], manifest["load_seconds"]) == (["asks"], {}, 90)
    assert sorted(find_graph(repository).members) == sorted(find_graph(project / "postprocess" / "asks").members)
    assert find_graph(repository).calls() == [("asks", "counts")]
    plan = CliRunner().invoke(cli.app, ["plan", "asks", "--project", str(project)])
    assert "counts: host" in plan.output
    assert Graph.load(repository / "asks").repeats(0)


def test_the_current_folder_is_the_default_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    assert "counts: host" in CliRunner().invoke(cli.app, ["plan", "asks"]).output
    with pytest.raises(ArtifactError, match=r"no model ask\. Did you mean asks\?"):
        CliRunner().invoke(cli.app, ["plan", "ask"], catch_exceptions=False)


def test_the_identity_depends_on_callees(project: Path, tmp_path: Path) -> None:
    write_twin(project, "other")
    one = compose("asks", tmp_path / "one", projects=[project])
    again = compose("asks", tmp_path / "again", projects=[project])
    other = compose("asks", tmp_path / "two", projects=[project], swap={"counts": "other"})
    identities = [read_manifest(each)["identity"] for each in (one, again, other)]
    assert identities[0] == identities[1] != identities[2]


def test_a_callee_that_is_not_there_has_a_near_miss(project: Path, tmp_path: Path) -> None:
    call(project, "asks", "count")
    with pytest.raises(ArtifactError, match=r"no model count, which asks calls\. Did you mean counts\?"):
        compose("asks", tmp_path / "repository", projects=[project])
    assert not (tmp_path / "repository").exists()
    call(project, "asks", "asks")
    with pytest.raises(ArtifactError, match=r"call one another in a circle: asks -> asks\."):
        compose("asks", tmp_path / "repository", projects=[project])
    call(project, "counts", "sums")
    with pytest.raises(ArtifactError, match=r"in a circle: sums -> counts -> sums\."):
        compose("sums", tmp_path / "repository", projects=[project])


def test_no_streaming_component_is_started(project: Path, tmp_path: Path) -> None:
    engine = project / "models" / "counts" / "1" / "model.py"
    marker = tmp_path / "started"
    engine.write_text(f"open({str(marker)!r}, 'wb').close()\n" + FILES["counts/1/model.py"], encoding="utf-8")
    repository = compose(["sums", "asks"], tmp_path / "repository", projects=[project])
    assert not marker.exists()
    assert not any(read_config(repository / name).message.model_warmup for name in ("counts", "adds", "asks"))
    reasons = read_manifest(repository)["not_warmed_up"]
    assert sorted(reasons) == ["adds", "asks", "counts"]
    assert (
        reasons["counts"] == reasons["asks"] == "it is decoupled, and is not started here; it can warm up in its setup"
    )
    assert reasons["adds"] == "it follows a decoupled model, whose answers are not known here"


def test_calling_models_are_not_warmed_up(project: Path, tmp_path: Path) -> None:
    call(project, "adds", "counts")
    repository = compose("adds", tmp_path / "repository", projects=[project])
    assert read_manifest(repository)["not_warmed_up"]["adds"] == "it calls counts, which may load after it"
    assert not read_config(repository / "adds").message.model_warmup


@pytest.mark.parametrize("value", ["soon", "nan", "-1", "inf"])
def test_load_seconds_that_are_no_time(project: Path, tmp_path: Path, value: str) -> None:
    path = project / "models" / "counts" / "config.pbtxt"
    path.write_text(path.read_text(encoding="utf-8").replace('"90"', f'"{value}"'), encoding="utf-8")
    with pytest.raises(ArtifactError, match=rf"load_seconds of model counts is '{value}'"):
        compose("sums", tmp_path / "repository", projects=[project])


def test_without_load_seconds_the_manifest_has_none(project: Path, tmp_path: Path) -> None:
    path = project / "models" / "counts" / "config.pbtxt"
    path.write_text(path.read_text(encoding="utf-8").replace("load_seconds", "seconds"), encoding="utf-8")
    assert "load_seconds" not in read_manifest(compose("sums", tmp_path / "repository", projects=[project]))


def test_a_model_takes_the_place_of_another(project: Path, tmp_path: Path) -> None:
    write_twin(project, "faster", ("dims: [ 1 ] }\noutput", "dims: [ -1 ] }\noutput"))
    arguments = ["compose", "sums", "asks", str(tmp_path / "repository"), "--project", str(project)]
    result = CliRunner().invoke(cli.app, [*arguments, "--swap", "counts=faster"])
    assert result.exit_code == 0, result.output
    repository = tmp_path / "repository"
    assert models(repository) == ["adds", "asks", "faster", "sums"]
    assert [step.model for step in read_config(repository / "sums").steps] == ["faster", "adds"]
    assert read_config(repository / "asks").calls == ("faster",)
    assert read_manifest(repository)["swap"] == {"counts": "faster"}
    for odd, said in (
        ("counts", "--swap 'counts' is not MODEL=MODEL."),
        ("=faster", "--swap '=faster' is not MODEL=MODEL."),
        ("counts=", "There is no model  to swap."),
    ):
        result = CliRunner().invoke(cli.app, [*arguments, "--swap", odd])
        assert str(result.exception).startswith(said), result.exception
    result = CliRunner().invoke(cli.app, [*arguments, "--swap", "counts=faster", "--swap", "counts=adds"])
    assert "--swap counts=... is given twice." in str(result.exception)


def test_a_model_may_call_the_one_that_it_replaces(project: Path, tmp_path: Path) -> None:
    write_twin(project, "cached")
    call(project, "cached", "counts")
    repository = compose("sums", tmp_path / "repository", projects=[project], swap={"counts": "cached"})
    assert models(repository) == ["adds", "cached", "counts", "sums"]
    assert read_config(repository / "cached").calls == ("counts",)


NUMBER = 'name: "NUMBER" data_type: TYPE_INT32 dims: [ 1 ]'


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (('"COUNT"', '"TOTAL"'), r"input COUNT of counts \(INT32 \[1\]\) is used, and other has no such input"),
        (
            (NUMBER, NUMBER.replace("INT32", "INT64")),
            r"output NUMBER of counts \(INT32 \[1\]\) does not fit NUMBER of other \(INT64",
        ),
        (
            (NUMBER, NUMBER.replace("1", "2", 2).replace("INT22", "INT32")),
            r"\(INT32 \[1\]\) does not fit NUMBER of other",
        ),
        (('"stream_id"', '"id"'), r"output stream_id of counts \(INT64 \[1\]\) is used, and other has no such output"),
        (
            (" optional: true", ""),
            r"other needs the input DELAY of other \(FP32 \[1\]\), which sums does not give counts",
        ),
        ((DECOUPLED, ""), r"other is not decoupled, and counts is\."),
    ],
)
def test_a_model_that_does_not_fit_is_refused(
    project: Path, tmp_path: Path, edit: tuple[str, str], message: str
) -> None:
    write_twin(project, "other", edit)
    with pytest.raises(InputError, match=rf"other cannot take the place of counts in sums: .*{message}"):
        compose("sums", tmp_path / "repository", projects=[project], swap={"counts": "other"})
    assert not (tmp_path / "repository").exists()


def test_unused_inputs_of_a_callee_may_be_missing(project: Path, tmp_path: Path) -> None:
    """A step maps tensors; for calls from code, only the callee's declaration is known."""
    write_twin(project, "other", ('input { name: "DELAY" data_type: TYPE_FP32 dims: [ 1 ] optional: true }\n', ""))
    compose(["sums", "asks"], tmp_path / "repository", projects=[project], swap={"counts": "other"})
    write_twin(project, "third", ('output { name: "stream_id" data_type: TYPE_INT64 dims: [ 1 ] }\n', ""))
    with pytest.raises(InputError, match="in asks: output stream_id of counts"):
        compose("asks", tmp_path / "more", projects=[project], swap={"counts": "third"})


@pytest.mark.parametrize(
    ("swap", "message"),
    [
        ({"count": "adds"}, r"no model count to swap\. Did you mean counts\?"),
        ({"counts": "add"}, r"no model add to swap\. Did you mean adds\?"),
        ({"asks": "counts"}, "Nothing that is composed uses asks"),
    ],
)
def test_a_swap_of_what_is_not_there(project: Path, tmp_path: Path, swap: dict[str, str], message: str) -> None:
    with pytest.raises(ShoalError, match=message):
        compose("sums", tmp_path / "repository", projects=[project], swap=swap)


def test_a_nested_ensemble_is_as_decoupled_as_its_members(project: Path, tmp_path: Path) -> None:
    text = FILES["sums/config.pbtxt"].replace('"sums"', '"inner"', 1).partition("ensemble_scheduling")[0]
    outer = text.replace('"inner"', '"outer"') + (
        'ensemble_scheduling { step [ { model_name: "sums" model_version: -1'
        ' input_map { key: "COUNT" value: "COUNT" } output_map { key: "SUM" value: "SUM" } } ] }\n'
    )
    folder = project / "ensembles" / "outer"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(outer, encoding="utf-8")
    repository = compose("outer", tmp_path / "repository", projects=[project])
    for graph in (Graph.load(repository / "outer"), find_graph(folder)):
        assert graph.members["sums"].spec.is_decoupled
        assert graph.repeats(0)
    assert sorted(read_manifest(repository)["not_warmed_up"]) == ["adds", "counts"]
