"""Ensembles made in Python: what they write, and what they refuse."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.authoring.repository.config import read_config
from shoal.errors import InputError
from tests.support.once import ROOT
from tests.support.projects import define, write_project


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    write_project(root)
    return root


def test_the_first_pipeline_is_the_same_in_python(tmp_path: Path) -> None:
    made = shoal.Ensemble("ensemble_all", projects=[])
    text = made.input("excerpt", "STRING", [1])
    weight = made.input("BERT_WEIGHT", "FP32", [1], optional=True)
    read = made.step(
        "preprocess", INPUT0=text,
        names={"BERT_IDS": "bert_input_ids", "BERT_AM": "bert_attention_masks", "TREE_FEATS": "tree_feats"},
    )  # fmt: skip
    bert = made.step(
        "bert-large", INPUT__0=read["BERT_IDS"], INPUT__1=read["BERT_AM"],
        names={"OUTPUT__0": "bert_large_score"},
    )  # fmt: skip
    trees = made.step("cuml", input__0=read["TREE_FEATS"], names={"output__0": "cuml_score"})
    blend = made.step(
        "postprocess", BERT_WEIGHT_INPUT=weight, BERT_LARGE_SCORE=bert["OUTPUT__0"], CUML_SCORE=trees["output__0"],
    )  # fmt: skip
    for name, output in (("SCORE", "OUTPUT0"), ("BERT_SCORE", "BERT_SCORE"), ("FOREST_SCORE", "FOREST_SCORE")):
        made.output(name, blend[output])
    shipped = ROOT / "ensembles" / "ensemble_all"
    expected = read_config(shipped).message
    for step in expected.ensemble_scheduling.step:
        step.model_version = -1  # the file names version 1
    del expected.parameters["api"]  # what it serves to OpenAI's clients, which is no part of the graph
    assert made.config().message == expected
    written = made.write(tmp_path / "ensemble_all")
    assert read_config(written).message == expected


def test_only_what_is_used_is_mapped_and_rows_are_the_least(project: Path) -> None:
    made = define(project)
    read = made.step("read", T=made.input("TEXT", "STRING", [1]))
    made.output("SCORE", made.step("narrow", N=read["A"])["Y"])
    config = made.config()
    assert config.spec.max_batch_size == 4
    assert [dict(step.outputs) for step in config.steps] == [{"A": "read_A"}, {"Y": "SCORE"}]
    assert [step.version for step in config.steps] == [-1, -1]


def test_steps_of_one_model_get_unique_names(project: Path) -> None:
    made = define(project)
    first = made.step("wide", W=made.input("X", "FP32", [-1]))
    second = made.step("wide", W=first["Y"])
    made.output("OUT", second["Y"])
    assert first["Y"].name == "wide_Y"
    assert second["Y"].name == "wide_Y_2"
    assert second["Y"].dtype == "TYPE_FP32"
    assert second["Y"].dims == (-1,)
    assert set(first) == {"Y", "L"}
    assert len(first) == 2


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p, t, r: p.step("nope", X=t), "There is no model nope for mine to call. Known: bert-large, "),
        (lambda p, t, r: p.step("rread", T=t), "There is no model rread for mine to call. Did you mean read?"),
        (lambda p, t, r: p.step("mine", X=t), "There is no model mine for mine to call."),
        (lambda p, t, r: p.step("narrow", N=t), "Input N of model narrow is TYPE_FP32, and TEXT of mine is"),
        (lambda p, t, r: p.step("count", I=r["A"]), "Input I of model count is TYPE_INT64, and read_A of read is"),
        (lambda p, t, r: p.step("narrow", M=t), "Model narrow has no input M. It has: N."),
        (lambda p, t, r: r["D"], "Model read has no output D. It has: A, B, C."),
        (lambda p, t, r: p.step("mark", S=t), "The step mark of mine is not given X. Model mark takes: S STRING"),
        (lambda p, t, r: p.step("read"), "The step read of mine is not given T."),
        (lambda p, t, r: p.step("flat", X=r["A"]), "Input X of model flat has shape [5], and read_A of"),
        (lambda p, t, r: p.input("TEXT", "FP32", [1]), "mine has a tensor TEXT already."),
        (lambda p, t, r: p.input("X", "FLOAT", [1]), "Input X of mine has dtype 'FLOAT'. Known: BOOL, "),
        (lambda p, t, r: p.input("X", "FP32", []), "Input X of mine has dims []"),
        (lambda p, t, r: p.input("X", "FP32", [0]), "Input X of mine has dims [0]"),
        (lambda p, t, r: p.output("OUT", t), "Output OUT of mine would be its input TEXT."),
        (lambda p, t, r: p.output("TEXT", r["C"]), "mine has a tensor TEXT already."),
        (lambda p, t, r: [p.output(n, r["C"]) for n in "PQ"], "read_C is output P of mine already."),
        (lambda p, t, r: p.step("read", T=t, names={"A": "TEXT"}), "mine has a tensor TEXT already."),
        (lambda p, t, r: p.step("read", T=t, names={"D": "d"}), "Model read has no output D."),
        (lambda p, t, r: p.config(), "mine never uses read."),
        (
            lambda p, t, r: p.step("join", X=p.input("MAY", "FP32", [3], optional=True)),
            "Input X of model join must be given, and MAY of mine may be left out.",
        ),
    ],
)  # fmt: skip
def test_mismatches_are_refused_at_the_call(project: Path, spoil: Any, message: str) -> None:
    made = define(project)
    text = made.input("TEXT", "STRING", [1])
    read = made.step("read", T=text)
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        spoil(made, text, read)


def test_outputs_that_are_read_are_refused_either_way(project: Path) -> None:
    made = define(project)
    read = made.step("read", T=made.input("TEXT", "STRING", [1]))
    made.output("A", read["A"])
    with pytest.raises(InputError, match="Output A of mine is also read by its step narrow"):
        made.step("narrow", N=read["A"])
    made.step("count", I=read["B"])
    with pytest.raises(InputError, match="Output B of mine is also read by its step count"):
        made.output("B", read["B"])


def test_tensors_of_another_pipeline_are_refused(project: Path) -> None:
    one, other = define(project), define(project, "other")
    text = other.input("TEXT", "STRING", [1])
    with pytest.raises(InputError, match="Tensor TEXT belongs to other, not to mine"):
        one.step("read", T=text)
    with pytest.raises(InputError, match="belongs to other"):
        one.output("OUT", text)


def test_idle_steps_and_too_many_rows_are_refused(project: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="max_batch_size is -1"):
        define(project, max_batch_size=-1)
    made = define(project, max_batch_size=5)
    read = made.step("read", T=made.input("TEXT", "STRING", [1]))
    made.output("SCORE", made.step("narrow", N=read["A"])["Y"])
    with pytest.raises(InputError, match="allows maximum batch size 5, but it contains model narrow which only allows"):
        made.write(tmp_path / "mine")
    with pytest.raises(InputError, match="mine has no output"):
        define(project).config()
    made = define(project)
    made.input("IDLE", "FP32", [1])
    read = made.step("read", T=made.input("TEXT", "STRING", [1]))
    made.output("SCORE", read["A"])
    with pytest.raises(InputError, match="mine never uses IDLE"):
        made.config()
    made = define(project)
    text = made.input("TEXT", "STRING", [1])
    made.output("SCORE", made.step("read", T=text)["A"])
    made.step("read", T=text)
    with pytest.raises(InputError, match="mine never uses read"):
        made.write(tmp_path / "mine")


def test_a_model_is_not_written_over(project: Path) -> None:
    made = define(project)
    made.output("SCORE", made.step("read", T=made.input("TEXT", "STRING", [1]))["A"])
    with pytest.raises(InputError, match="holds a model that is not an ensemble"):
        made.write(project / "models" / "read")


def test_models_without_rows(project: Path) -> None:
    """A model without batches may be part of an ensemble with or without them."""
    rowless = define(project, "rowless")
    rowless.output("OUT", rowless.step("flat", X=rowless.input("IN", "FP32", [5]))["Y"])
    assert rowless.config().spec.max_batch_size == 0
    assert rowless.config().spec.outputs[0].dims == (5,)
    mixed = define(project, "mixed")
    read = mixed.step("read", T=mixed.input("TEXT", "STRING", [1]))
    mixed.output("OUT", mixed.step("single", X=read["A"])["Y"])
    assert mixed.config().spec.max_batch_size == 8
    assert mixed.config().spec.outputs[0].dims == (3,)
    for made in (rowless, mixed):
        made.write(project / "ensembles" / made.name)
