"""Configurations and the graphs they make."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shoal.authoring.draw.mermaid import draw
from shoal.authoring.repository.call_graph import collect
from shoal.authoring.repository.config import Artifact, read_config, write_config
from shoal.authoring.repository.find_graph import find_model_folders
from shoal.authoring.repository.graph import Graph
from shoal.errors import ArtifactError
from tests.support.once import ROOT


def test_a_configuration_as_records() -> None:
    config = read_config(ROOT / "preprocess" / "readability")
    assert (config.name, config.backend, config.spec.max_batch_size) == ("preprocess", "python", 512)
    assert [(t.name, t.dtype, t.dims) for t in config.spec.outputs] == [
        ("BERT_IDS", "TYPE_INT64", (-1,)),
        ("BERT_AM", "TYPE_INT64", (-1,)),
        ("TREE_FEATS", "TYPE_FP32", (207,)),
    ]
    assert config.artifacts == (Artifact(("preprocess.json",), True), Artifact(("vocab.txt",), True))
    post = read_config(ROOT / "postprocess" / "readability")
    assert post.artifacts == (Artifact(("postprocess.json",), False),)
    assert [t.is_optional for t in post.spec.inputs] == [True, False, False]


def test_written_configurations_read_the_same(tmp_path: Path) -> None:
    for leaf in find_model_folders().values():
        write_config(leaf.message, tmp_path / "config.pbtxt", comment="é")
        again = read_config(tmp_path)
        assert (again.spec, again.steps, again.backend) == (leaf.spec, leaf.steps, leaf.backend)


def test_faults_name_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").write_text('name: "x"\nmax_batch: 3\n', encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"config\.pbtxt:2:1 : .*max_batch"):
        read_config(tmp_path)
    with pytest.raises(ArtifactError, match="is not a model folder"):
        read_config(tmp_path / "nowhere")


def test_a_nameless_configuration_is_named_after_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").write_text('backend: "python"\n', encoding="utf-8")
    assert read_config(tmp_path).name == tmp_path.name


def test_names_are_the_source_documents() -> None:
    """Models, tensors and the maps between them, as published."""
    models = collect("ensemble_all", find_model_folders())
    graph = Graph.build(models[-1], {model.name: model for model in models})
    tensors = {
        name: ([t.name for t in c.spec.inputs], [t.name for t in c.spec.outputs]) for name, c in graph.members.items()
    }
    assert tensors == {
        "preprocess": (["INPUT0"], ["BERT_IDS", "BERT_AM", "TREE_FEATS"]),
        "bert-large": (["INPUT__0", "INPUT__1"], ["OUTPUT__0"]),
        "cuml": (["input__0"], ["output__0"]),
        "postprocess": (
            ["BERT_WEIGHT_INPUT", "BERT_LARGE_SCORE", "CUML_SCORE"],
            ["OUTPUT0", "BERT_SCORE", "FOREST_SCORE"],
        ),
        "ensemble_all": (["excerpt", "BERT_WEIGHT"], ["SCORE", "BERT_SCORE", "FOREST_SCORE"]),
    }
    assert {e.name for e in graph.edges() if e.target is not None} == {
        "excerpt", "BERT_WEIGHT", "bert_input_ids", "bert_attention_masks", "tree_feats", "bert_large_score",
        "cuml_score",
    }  # fmt: skip
    assert all(step.version == 1 for step in graph.steps)


def test_a_mapping_to_a_tensor_that_is_not_there(repository: Path, tmp_path: Path) -> None:
    for direction, name in (("input", "input__0"), ("output", "output__0")):
        copy = tmp_path / name
        shutil.copytree(repository, copy)
        config = copy / "ensemble_all" / "config.pbtxt"
        config.write_text(config.read_text(encoding="utf-8").replace(f'"{name}"', '"NOPE"'), encoding="utf-8")
        with pytest.raises(
            ArtifactError, match=f"maps {direction} NOPE of model cuml, which has no such .* are: {name}"
        ):
            Graph.load(copy / "ensemble_all")


def test_a_single_model_is_a_graph_of_one_step(repository: Path) -> None:
    graph = Graph.load(repository / "cuml")
    assert [step.model for step in graph.steps] == ["cuml"]
    assert 's0 -->|"output__0<br/>FP32 [1]"| answer' in draw(graph)
