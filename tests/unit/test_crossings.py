"""Devices and order of steps, and the tensors that move between devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.authoring.repository.find_graph import find_model_folders
from shoal.authoring.repository.graph import Graph
from shoal.errors import ArtifactError
from tests.support.graphs import Member, Type, make_graph, ten_steps


def chain(repository: Path, *devices: str, types: dict[str, Type] | None = None, **last: str) -> Graph:
    """Steps in a row, t0 -> t1 -> ...; the last one may differ."""
    names = [f"t{index}" for index in range(len(devices) + 1)]
    members = [
        Member(f"m{index}", [names[index]], [names[index + 1]], device, **(last if index == len(devices) - 1 else {}))
        for index, device in enumerate(devices)
    ]
    return make_graph(repository, members, ["t0"], [names[-1]], types)


def crossings(graph: Graph) -> dict[str, str]:
    return {edge.name: edge.crossing for edge in graph.edges() if edge.crossing}


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("cpu", "CPU"),
        ("gpu 0", "GPU 0"),
        ("gpu 1 0", "GPU 0, 1"),
        ("gpu 1+gpu 0", "GPU 0, 1"),
        ("gpu", "GPU"),
        ("gpu 0+gpu", "GPU"),
        ("gpu 0+cpu", "GPU 0 + CPU"),
        ("auto", "auto"),
        ("model", "by model"),
        ("", "auto"),
    ],
)
def test_the_device_of_a_step(tmp_path: Path, device: str, name: str) -> None:
    assert chain(tmp_path, device).device(0) == name


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (["cpu", "cpu"], {}),
        (["cpu", "gpu 0"], {"t1": "to GPU", "t2": "to host"}),
        (["gpu 0", "gpu 0"], {"t0": "to GPU", "t2": "to host"}),
        (["gpu 0", "cpu"], {"t0": "to GPU", "t1": "to host"}),
        (["gpu 0", "cpu", "gpu 0"], {"t0": "to GPU", "t1": "host round trip", "t2": "to GPU", "t3": "to host"}),
        (["gpu 0", "cpu", "cpu", "gpu 0"], {"t0": "to GPU", "t1": "host round trip", "t3": "to GPU", "t4": "to host"}),
        (["gpu 0", "gpu 1"], {"t0": "to GPU", "t1": "to another GPU", "t2": "to host"}),
        (["gpu 0 1", "gpu 1"], {"t0": "to GPU", "t2": "to host"}),  # it may be the same
        (["gpu", "gpu 1"], {"t0": "to GPU", "t2": "to host"}),
        (["gpu 0", "auto", "gpu 0"], {"t0": "to GPU", "t3": "to host"}),  # Triton decides
        (["gpu 0+cpu", "cpu"], {}),
    ],
)
def test_ways_between_devices(tmp_path: Path, devices: list[str], expected: dict[str, str]) -> None:
    assert crossings(chain(tmp_path, *devices)) == expected


@pytest.mark.parametrize(
    ("backend", "force", "crossing"),
    [
        ("python", "", "host round trip"),
        ("python", "yes", "host round trip"),
        ("python", "no", None),
        ("pytorch", "", None),  # the native one never asks
    ],
)
def test_python_models_get_copies_on_the_host_unless_they_say_no(
    tmp_path: Path, backend: str, force: str, crossing: str | None
) -> None:
    graph = chain(tmp_path, "gpu 0", "gpu 0", backend=backend, force=force)
    assert crossings(graph).get("t1") == crossing


def test_a_backend_written_in_python_gets_them_too(tmp_path: Path) -> None:
    graph = chain(tmp_path, "gpu 0", "gpu 0", backend="pytorch", force="")
    graph.members["m1"].message.runtime = "model.py"
    assert crossings(graph)["t1"] == "host round trip"


def test_texts_never_leave_the_host(tmp_path: Path) -> None:
    graph = chain(tmp_path, "gpu 0", "cpu", "gpu 0", types={"t0": ("STRING", [1]), "t1": ("STRING", [1])})
    assert crossings(graph) == {"t2": "to GPU", "t3": "to host"}


def test_only_the_branch_that_goes_back_is_a_round_trip(tmp_path: Path) -> None:
    members = [
        Member("first", ["x"], ["a"]),
        Member("log", ["a"], ["seen"], "cpu"),
        Member("crop", ["a"], ["b"], "cpu"),
        Member("last", ["b"], ["y"]),
    ]
    graph = make_graph(tmp_path, members, ["x"], ["y", "seen"])
    ways = {(e.name, e.target): e.crossing for e in graph.edges() if e.source == 0}
    assert ways == {("a", 1): "to host", ("a", 2): "host round trip"}


def test_steps_of_one_level_run_side_by_side(tmp_path: Path) -> None:
    graph = ten_steps(tmp_path)
    by_level: dict[int, list[str]] = {}
    for step, level in zip(graph.steps, graph.levels(), strict=True):
        by_level.setdefault(level, []).append(step.model)
    assert by_level == {
        1: ["image_preprocess", "tokenizer"],
        2: ["vision_encoder", "text_detector", "text_encoder"],
        3: ["box_cropper", "pooler"],
        4: ["text_recognizer"],
        5: ["fusion"],
        6: ["decide"],
    }
    assert Graph.build(find_model_folders()["cuml"], {}).levels() == [1]


def test_a_circle_is_an_error(tmp_path: Path) -> None:
    members = [Member("one", ["x", "b"], ["a"]), Member("two", ["a"], ["b"], "cpu"), Member("three", ["b"], ["y"])]
    graph = make_graph(tmp_path, members, ["x"], ["y"])
    assert crossings(graph) == {"x": "to GPU", "a": "host round trip", "b": "to GPU", "y": "to host"}
    with pytest.raises(ArtifactError, match="steps wait for one another in a circle: b"):
        graph.levels()


def test_a_tensor_without_a_writer(tmp_path: Path) -> None:
    members = [Member("one", ["x", "nobodys"], ["a"]), Member("two", ["x"], ["y"])]
    with pytest.raises(ArtifactError, match="no step writes the tensor nobodys"):
        make_graph(tmp_path / "1", members, ["x"], ["y"]).levels()
    with pytest.raises(ArtifactError, match="no step writes the tensor z"):
        make_graph(tmp_path / "2", members[1:], ["x"], ["y", "z"]).levels()


def test_a_member_that_is_not_there(tmp_path: Path) -> None:
    graph = chain(tmp_path, "cpu", "cpu")
    with pytest.raises(ArtifactError, match=r"has a step of model m1, which is not there\. Known: m0"):
        Graph.build(graph.config, {"m0": graph.members["m0"]})
