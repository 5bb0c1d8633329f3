"""`shoal graph` and `shoal describe`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal import cli
from shoal.authoring.draw.mermaid import draw
from shoal.authoring.draw.picture import png, svg
from shoal.authoring.repository.call_graph import collect
from shoal.authoring.repository.config import read_config, write_config
from shoal.authoring.repository.find_graph import find_model_folders
from shoal.authoring.repository.graph import Graph
from shoal.authoring.repository.model_folders import CATEGORIES
from shoal.authoring.repository.placement import place
from shoal.authoring.repository.plan import Plan
from shoal.errors import ArtifactError, InputError, SetupError, ShoalError
from tests.support.graphs import Member, make_graph, ten_steps, write_ensemble
from tests.support.once import ROOT
from tests.support.planted import write
from tests.support.streams import FILES

Shoal = Callable[..., bytes]
LEAF = ROOT / "ensembles" / "ensemble_all"


@pytest.fixture
def shoal() -> Shoal:
    """Run a command in this process; what it wrote on standard output."""

    def run(*arguments: object) -> bytes:
        result = CliRunner().invoke(cli.app, [str(a) for a in arguments])
        if isinstance(result.exception, ShoalError):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result.stdout_bytes

    return run


def ensemble_all() -> Graph:
    leaves = find_model_folders()
    return Graph.build(leaves["ensemble_all"], leaves)


def write_placed(repository: Path, placement: str) -> Path:
    """The configurations that `shoal compose` would write, without the models."""
    for config in collect("ensemble_all", find_model_folders()):
        (repository / config.name).mkdir(parents=True)
        write_config(place(config, Plan(placement)), repository / config.name / "config.pbtxt", comment="A test's.")
    return repository


def test_each_format(shoal: Shoal, tmp_path: Path) -> None:
    drawn = ensemble_all()
    contents = {"mmd": draw(drawn).encode(), "svg": svg(drawn).encode(), "png": png(drawn)}
    for option, (suffix, content) in zip(("--out", "--output", "-o"), contents.items(), strict=True):
        out = tmp_path / f"picture.{suffix}"
        assert shoal("graph", LEAF, option, out) == f"picture: {out}\n".encode()
        assert out.read_bytes() == content
    assert shoal("graph", LEAF) == contents["mmd"]
    assert shoal("graph", LEAF, "--format", "svg") == contents["svg"]
    assert shoal("graph", LEAF, "--format", "png") == contents["png"]  # into a pipe
    out = tmp_path / "picture.svg"
    shoal("graph", LEAF, "--format", "mermaid", "--output", out)
    assert out.read_bytes() == contents["mmd"]


def test_pictures_that_cannot_be_written(shoal: Shoal, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be derived from its name\. End it in \.svg, \.png or \.mmd"):
        shoal("graph", LEAF, "--out", tmp_path / "picture")
    with pytest.raises(SetupError, match=r"nowhere/picture\.svg cannot be written: No such file or directory"):
        shoal("graph", LEAF, "--out", tmp_path / "nowhere" / "picture.svg")


@pytest.mark.usefixtures("may_start_processes")
def test_a_png_is_not_for_a_terminal() -> None:
    ours, theirs = os.openpty()
    command = [str(Path(sys.executable).with_name("shoal")), "graph", str(LEAF), "--format", "png"]
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, text=True, check=False)
    os.close(ours)
    os.close(theirs)
    assert done.returncode == 1
    assert done.stderr == "error: A PNG cannot be printed on a terminal.\n  Name a file: --out ensemble.png\n"


@pytest.mark.parametrize("form", ["svg", "png"])
@pytest.mark.parametrize("library", ["matplotlib", "pygraphviz"])
def test_a_picture_needs_libraries(shoal: Shoal, monkeypatch: pytest.MonkeyPatch, library: str, form: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(SetupError, match=rf"{library} is not installed\. Type: pip install 'shoal\[draw\]'"):
        shoal("graph", LEAF, "--format", form)
    assert shoal("graph", LEAF).startswith(b"flowchart")  # Mermaid needs none


def test_a_repository_means_its_only_top_ensemble(shoal: Shoal, tmp_path: Path) -> None:
    make_graph(tmp_path, [Member("one", ["x"], ["y"])], ["x"], ["y"], name="inner")
    outer = read_config(tmp_path / "inner").message
    outer.name = "outer"
    outer.ensemble_scheduling.step[0].model_name = "inner"
    (tmp_path / "outer").mkdir()
    write_config(outer, tmp_path / "outer" / "config.pbtxt", comment="Calls the other.")
    assert b'"inner<br/>ensemble"' in shoal("graph", tmp_path)
    assert b'"one<br/>python' in shoal("graph", tmp_path, "--model", "inner")
    assert b'"one<br/>python' in shoal("graph", tmp_path / "inner")
    with pytest.raises(InputError, match=r"There is no model two in .*\. Known: inner, one, outer\."):
        shoal("graph", tmp_path, "--model", "two")


def test_a_repository_that_means_nothing(shoal: Shoal, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="is neither a model's folder nor a repository"):
        shoal("graph", tmp_path)
    member = Member("one", ["x"], ["y"])
    write_ensemble(tmp_path, [member], ["x"], ["y"], name="a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "config.pbtxt").write_text(
        (tmp_path / "a" / "config.pbtxt").read_text(encoding="utf-8").replace('name: "a"', 'name: "b"'), "utf-8"
    )
    with pytest.raises(
        InputError, match=r"has 2 ensembles that no other ensemble calls: a, b\. Name one, such as --model a"
    ):
        shoal("graph", tmp_path)
    assert [line.partition("(")[0] for line in shoal("describe", tmp_path).decode().splitlines()[:2]] == ["a", "b"]
    found = json.loads(shoal("describe", tmp_path, "--json"))
    assert [each["name"] for each in found["pipelines"]] == ["a", "b"]
    (tmp_path / "manifest.json").write_text('{"ensembles": ["b"]}', encoding="utf-8")
    assert shoal("describe", tmp_path).startswith(b"b: 1 step, ")


def test_repositories_without_an_ensemble(shoal: Shoal, tmp_path: Path) -> None:
    write_ensemble(tmp_path, [Member("one", ["x"], ["y"])], ["x"], ["y"])
    shutil.rmtree(tmp_path / "ensemble")
    assert b'"one<br/>python' in shoal("graph", tmp_path)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    with pytest.raises(InputError, match="has 2 models and no ensemble: one, two"):
        shoal("graph", tmp_path)


def test_a_leaf_finds_its_members_in_other_rooms(shoal: Shoal, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="3 ensembles that no other ensemble calls: ensemble, ensemble_all, llm"):
        shoal("graph", ROOT / "ensembles")
    for room in CATEGORIES:
        shutil.copytree(ROOT / room, tmp_path / room)
    config = tmp_path / "models" / "cuml" / "config.pbtxt"
    config.write_text(config.read_text(encoding="utf-8").replace("KIND_CPU", "KIND_GPU"), encoding="utf-8")
    assert b'"cuml<br/>fil \xc2\xb7 GPU"' in shoal("graph", tmp_path / "ensembles" / "ensemble_all")  # one's own wins
    shutil.copytree(LEAF, tmp_path / "repository" / "ensemble_all")
    with pytest.raises(ArtifactError, match="bert-large is not a model folder"):
        shoal("graph", tmp_path / "repository" / "ensemble_all")


def test_describe_fits_eighty_columns(shoal: Shoal, tmp_path: Path) -> None:
    printed = shoal("describe", LEAF).decode()
    assert printed.startswith("ensemble_all: 4 steps, up to 512 rows per request\nin OpenAI's API: classify=SCORE\n")
    rows = [line.split() for line in printed.splitlines()]
    assert max(map(len, printed.splitlines())) <= 80
    assert ["2", "bert-large", "pytorch", "CPU", "1", "512", "dynamic"] in rows
    assert ["bert-large", "INPUT__0", "INT64", "[-1]", "<-", "bert_input_ids"] in rows
    assert ["tree_feats", "FP32", "[207]", "preprocess", "cuml"] in rows
    ten_steps(tmp_path)
    printed = shoal("describe", tmp_path).decode()
    rows = [line.split() for line in printed.splitlines()]
    assert max(map(len, printed.splitlines())) <= 80
    assert ["boxes", "FP32", "[-1,4]", "text_detector", "box_cropper", "host"] in rows
    assert ["crops", "FP32", "[-1,3,48,320]", "box_cropper", "text_recognizer", "to", "GPU"] in rows


def test_names_of_any_length_are_not_cut(shoal: Shoal, tmp_path: Path) -> None:
    name = "[bold]a_name_of_sixty_characters_that_no_table_has_room_for[/]"
    write_ensemble(tmp_path, [Member("one", ["x"], [name])], ["x"], [name])
    printed = shoal("describe", tmp_path).decode()
    assert max(map(len, printed.splitlines())) <= 80
    letters = [letter for line in printed.splitlines() for letter in line if line.strip()]
    assert Counter(letters) >= Counter(name * 3)  # of the step, of the ensemble, on its way


def test_describe_as_json(shoal: Shoal, tmp_path: Path) -> None:
    write_placed(tmp_path, "gpu")
    found = json.loads(shoal("describe", tmp_path, "--json"))
    assert (found["name"], found["max_batch_size"]) == ("ensemble_all", 512)
    assert [(step["name"], step["level"], step["device"]) for step in found["steps"]] == [
        ("preprocess", 1, "GPU 0"),
        ("bert-large", 2, "GPU 0"),
        ("cuml", 2, "GPU 0"),
        ("postprocess", 3, "GPU 0"),
    ]
    assert found["steps"][2] == {
        "name": "cuml", "level": 2, "model": "cuml", "content": "", "backend": "fil", "instances": 1,
        "max_batch_size": 512, "batching": "dynamic", "device": "GPU 0", "calls": [], "hosts": [],
        "inputs": [{"name": "input__0", "dtype": "FP32", "dims": [207], "tensor": "tree_feats"}],
        "outputs": [{"name": "output__0", "dtype": "FP32", "dims": [1], "tensor": "cuml_score"}],
    }  # fmt: skip
    assert found["tensors"][5] == {
        "name": "BERT_WEIGHT", "dtype": "FP32", "dims": [1], "from": "request", "to": "postprocess",
        "crossing": "to GPU", "is_repeated": False,
    }  # fmt: skip


def test_answers_in_pieces_and_calls(shoal: Shoal, tmp_path: Path) -> None:
    for path, text in FILES.items():
        write(tmp_path / path, text)
    printed = shoal("describe", tmp_path / "sums").decode().splitlines()
    assert max(map(len, printed)) <= 80
    assert [line.split()[:2] for line in printed if " * " in line] == [["number", "*"], ["stream", "*"], ["SUM", "*"]]
    assert printed[-1] == "* many times per request"
    printed = shoal("describe", tmp_path / "asks").decode().splitlines()
    assert "asks calls counts" in printed
    found = json.loads(shoal("describe", tmp_path / "asks", "--json"))
    assert (found["steps"][0]["calls"], [t["is_repeated"] for t in found["tensors"]]) == (["counts"], [False, True])
    assert "many times" not in shoal("describe", tmp_path / "adds").decode()


def test_a_model_called_twice(shoal: Shoal, tmp_path: Path) -> None:
    folder = write_ensemble(tmp_path, [Member("one", ["x"], ["y"], "gpu")], ["x"], ["y"])
    message = read_config(folder).message
    second = message.ensemble_scheduling.step.add(model_name="one", model_version=1)
    second.input_map["x"], second.output_map["y"] = "y", "z"
    message.output[0].name = "z"
    write_config(message, folder / "config.pbtxt", comment="Twice.")
    model = read_config(tmp_path / "one").message
    model.dynamic_batching.max_queue_delay_microseconds = 100
    model.input.add(name="seed", data_type="TYPE_INT64", dims=[1], optional=True)
    write_config(model, tmp_path / "one" / "config.pbtxt", comment="It waits, and has an input that is not mapped.")
    found = json.loads(shoal("describe", tmp_path, "--json"))
    assert [step["name"] for step in found["steps"]] == ["one #1", "one #2"]
    assert found["steps"][0]["batching"] == "dynamic, 100 us"
    assert found["steps"][0]["inputs"][1]["tensor"] is None
    assert [(t["name"], t["from"], t["to"]) for t in found["tensors"]] == [
        ("x", "request", "one #1"),
        ("y", "one #1", "one #2"),
        ("z", "one #2", "answer"),
    ]


def test_pictures_of_the_placements(shoal: Shoal, tmp_path: Path) -> None:
    """Nothing goes to the host and back in any of them; the picture in the docs is the one of `gpu`."""
    for placement in ("cpu", "hybrid", "gpu"):
        drawn = shoal("graph", write_placed(tmp_path / placement, placement), "--format", "svg").decode()
        assert "host round trip" not in drawn
        for device, count in (("GPU 0", {"cpu": 0, "hybrid": 2, "gpu": 4}), ("CPU", {"cpu": 4, "hybrid": 2, "gpu": 0})):
            assert drawn.count(f"· {device}</text>") == count[placement]
    assert drawn == (ROOT / "docs" / "ensemble_all.svg").read_text(encoding="utf-8")


def test_a_repository_means_what_it_was_composed_for(shoal: Shoal, tmp_path: Path) -> None:
    repository = write_placed(tmp_path, "hybrid")
    message = read_config(repository / "ensemble_all").message
    message.name = "second"
    (repository / "second").mkdir()
    write_config(message, repository / "second" / "config.pbtxt", comment="The same steps.")
    with pytest.raises(InputError, match="has 2 ensembles"):
        shoal("graph", repository)
    (repository / "manifest.json").write_text('{"ensembles": ["ensemble_all"]}', encoding="utf-8")
    assert b"preprocess<br/>" in shoal("graph", repository)


def test_the_only_composed_repository_in_a_folder_is_found(shoal: Shoal, tmp_path: Path) -> None:
    repository = write_placed(tmp_path / "mine" / "repository", "cpu")
    (repository / "manifest.json").write_text('{"ensembles": ["ensemble_all"]}', encoding="utf-8")
    for command in ("graph", "describe"):
        assert shoal(command, tmp_path) == shoal(command, repository)
