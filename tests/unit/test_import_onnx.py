"""Facts derived from ONNX graphs, and graphs that cannot be served."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from shoal.authoring.project.importing.add_model import add_model
from shoal.authoring.repository.config import Artifact
from shoal.errors import ArtifactError, InputError, SetupError
from tests.support.imports import (
    FLOAT,
    INT64,
    add,
    declared,
    here,
    save_classifier,
    save_column,
    save_graph,
    save_net,
    save_tokens,
)

FEATURES = np.random.default_rng(0).standard_normal((100, 5)).astype(np.float32)


def test_an_onnx_graph_says_all_of_it(tmp_path: Path) -> None:
    config, said = add(tmp_path, save_net(tmp_path / "net.onnx"), "net")
    assert declared(config) == ["x FP32 [5]", "y FP32 [3]"]
    assert (config.backend, config.spec.max_batch_size, config.artifacts) == (
        "onnxruntime",
        512,
        (Artifact(("model.onnx",), True),),
    )
    assert config.message.HasField("dynamic_batching")
    assert said == [
        "ONNX, from net.onnx: opsets ai.onnx 17", "inputs: x FP32 [rows, 5]", "outputs: y FP32 [rows, 3]",
        "rows counts rows",
    ]  # fmt: skip
    config, _ = add(tmp_path, save_column(tmp_path / "column.onnx"), "column", max_batch_size=16)
    assert declared(config) == ["x FP32 [5]", "y FP32 [1] column"]
    assert config.spec.max_batch_size == 16


def test_dictionaries_of_scores_become_tensors(tmp_path: Path) -> None:
    """As CatBoost and skl2onnx end classifiers: with a ZipMap, and without ONNX's own operators."""
    save_classifier(tmp_path / "topics.onnx")
    config, said = add(tmp_path, tmp_path / "topics.onnx", "topics")
    assert declared(config) == ["x FP32 [2]", "label STRING [1] column", "scores FP32 [3]"]
    assert said[0].startswith("ONNX, from topics.onnx: opsets ai.onnx.ml")
    assert said[-1] == "without the node ZipMap, so that they are tensors: scores"
    answer = here(tmp_path, "topics", x=np.eye(2, dtype=np.float32))
    np.testing.assert_allclose(answer["scores"].sum(1), 1, rtol=1e-6)
    assert answer["label"].shape == (2, 1)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(InputError, match=r"a\.parquet is a table, which cannot be added"):
        add_model(tmp_path / "a.parquet", "rows", project=tmp_path)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_file_of_catboost(is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class CatBoost:
        def load_model(self, path: str) -> CatBoost:
            assert path.endswith("trees.cbm")
            return self

        def save_model(self, path: str, format: str) -> None:  # noqa: A002  # as CatBoost calls it
            assert format == "onnx"
            save_net(Path(path))

    class Module:
        CatBoostError = RuntimeError

    Module.CatBoost = CatBoost  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "catboost", Module if is_there else None)
    (tmp_path / "trees.cbm").touch()
    if is_there:
        config, said = add(tmp_path, tmp_path / "trees.cbm", "trees")
        assert declared(config) == ["x FP32 [5]", "y FP32 [3]"]
        assert said[0].startswith("ONNX, from trees.cbm")
        return
    with pytest.raises(SetupError, match=r"CatBoost, which reads .*trees\.cbm, .* pip install catboost\. Or save it"):
        add_model(tmp_path / "trees.cbm", "trees", project=tmp_path)


def test_a_fixed_batch_size_is_not_batched(tmp_path: Path) -> None:
    config, said = add(tmp_path, save_net(tmp_path / "fixed.onnx", rows=2), "fixed")
    assert declared(config) == ["x FP32 [2, 5]", "y FP32 [2, 3]"]
    assert config.spec.max_batch_size == 0
    assert not config.message.HasField("dynamic_batching")
    assert "no batches, max_batch_size 0: the first dimension of x is fixed at 2" in said
    assert here(tmp_path, "fixed", x=FEATURES[:2])["y"].shape == (2, 3)
    with pytest.raises(InputError, match=r"takes no batches: the first dimension of x is fixed at 2\. Export it with"):
        add_model(tmp_path / "fixed.onnx", "other", project=tmp_path, max_batch_size=8)
    config, said = add(tmp_path, save_net(tmp_path / "open.onnx"), "alone", max_batch_size=0)
    assert declared(config) == ["x FP32 [-1, 5]", "y FP32 [-1, 3]"]
    assert "no batches, max_batch_size 0, as given" in said


@pytest.mark.parametrize(
    ("shapes", "why"),
    [
        ((["rows"], ["rows", 1]), "a has only one dimension"),
        ((["rows", 1], ["tokens", 1]), "the first dimension of a is rows, and that of b is tokens"),
    ],
)
def test_first_dimensions_that_do_not_count_rows(shapes: tuple[list[Any], list[Any]], why: str, tmp_path: Path) -> None:
    nodes = [helper.make_node("Add", ["a", "b"], ["c"])]
    path = save_graph(
        tmp_path / "two.onnx", nodes, {"a": (FLOAT, shapes[0]), "b": (FLOAT, shapes[1])}, {"c": (FLOAT, ["n", "m"])}
    )
    config, said = add(tmp_path, path, "two")
    assert config.spec.max_batch_size == 0
    assert f"no batches, max_batch_size 0: {why}" in said


def test_the_input_that_gives_row_lengths(tmp_path: Path) -> None:
    config, said = add(tmp_path, save_tokens(tmp_path / "bert.onnx"), "bert")
    assert config.spec.parameters["attention_mask"] == "attention_mask"
    assert said[-1] == "attention_mask gives row lengths, since the inputs are BERT's: parameter attention_mask"
    other = save_tokens(tmp_path / "other.onnx", names=("tokens", "padding"))
    config, _ = add(tmp_path, other, "unnamed")
    assert "attention_mask" not in config.spec.parameters
    config, said = add(tmp_path, other, "named", mask="padding")
    assert config.spec.parameters["attention_mask"] == "padding"
    assert said[-1] == "padding gives row lengths, as given: parameter attention_mask"
    deaf = save_tokens(tmp_path / "deaf.onnx", is_masked=False)
    config, said = add(tmp_path, deaf, "deaf")
    assert "attention_mask" not in config.spec.parameters
    assert said[-1] == "no length bucketing: columns where attention_mask is 0 change the answer"
    with pytest.raises(InputError, match=r"attention_mask does not give row lengths: columns where attention_ma"):
        add_model(deaf, "deafer", project=tmp_path, mask="attention_mask")
    with pytest.raises(ArtifactError, match=r"no required input mask of one dimension"):
        add_model(other, "misnamed", project=tmp_path, mask="mask")
    with pytest.raises(InputError, match=r"Model alone has no batches: no input gives row lengths"):
        add_model(other, "alone", project=tmp_path, mask="padding", max_batch_size=0)


def test_an_open_output_leaves_rows_as_they_are(tmp_path: Path) -> None:
    shape = ["rows", "width"]
    path = save_graph(
        tmp_path / "tags.onnx", [helper.make_node("Mul", ["input_ids", "attention_mask"], ["tags"])],
        {"input_ids": (INT64, shape), "attention_mask": (INT64, shape)}, {"tags": (INT64, shape)},
    )  # fmt: skip
    config, said = add(tmp_path, path, "tags")
    assert "attention_mask" not in config.spec.parameters
    assert said[-1].startswith("no length bucketing: Output tags of model tags has a dimension of -1;")


def test_weights_in_other_files_come_along(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    path = save_net(
        tmp_path / "saved" / "net.onnx", save_as_external_data=True, location="net.weights", size_threshold=0,
        convert_attribute=False,
    )  # fmt: skip
    _, said = add(tmp_path, path, "net")
    assert said[-1] == "weights beside it: net.weights"
    assert (tmp_path / "models" / "net" / "1" / "net.weights").is_file()
    whole = save_net(tmp_path / "whole.onnx")
    add(tmp_path, whole, "whole")
    assert np.array_equal(here(tmp_path, "net", x=FEATURES)["y"], here(tmp_path, "whole", x=FEATURES)["y"])
    (tmp_path / "saved" / "net.weights").unlink()
    with pytest.raises(ArtifactError, match=r"takes weights from net\.weights, which is not there\. Copy it to "):
        add_model(path, "again", project=tmp_path)
    model = onnx.load(str(path), load_external_data=False)
    model.graph.initializer[0].external_data[0].value = "../net.weights"
    onnx.save(model, str(path))
    with pytest.raises(ArtifactError, match=r"takes weights from \.\./net\.weights, which is not beside it\."):
        add_model(path, "again", project=tmp_path)


def save_value(path: Path, dtype: int, shape: Any) -> Path:
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    return save_graph(path, nodes, {"x": (dtype, shape)}, {"y": (dtype, shape)})


def save_ensemble_of_rows(path: Path) -> Path:
    """Each answer holds a sum over all rows."""
    nodes = [
        helper.make_node("ReduceSum", ["x", "axis"], ["s"], keepdims=1),
        helper.make_node("Add", ["x", "s"], ["y"]),
    ]
    return save_graph(path, nodes, {"x": (FLOAT, ["rows", 2])}, {"y": (FLOAT, ["rows", 2])}, {"axis": np.array([0])})


def save_reshaped(path: Path) -> Path:
    """Exported with one row, which stayed in it."""
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["y"])]
    return save_graph(
        path, nodes, {"x": (FLOAT, ["rows", 2, 3])}, {"y": (FLOAT, ["rows", 6])}, {"shape": np.array([1, 6])}
    )


def save_sequence(path: Path) -> Path:
    graph = helper.make_graph(
        [helper.make_node("SequenceConstruct", ["x"], ["y"])], "g",
        [helper.make_tensor_value_info("x", FLOAT, ["rows", 2])],
        [helper.make_tensor_sequence_value_info("y", FLOAT, ["rows", 2])],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))
    return path


def save_shapeless(path: Path) -> Path:
    save_value(path, FLOAT, ["rows", 2])
    model = onnx.load(str(path))
    model.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save(model, str(path))
    return path


def save_foreign(path: Path) -> Path:
    nodes = [helper.make_node("Mystery", ["x"], ["y"], domain="com.example")]
    return save_graph(path, nodes, {"x": (FLOAT, ["n", 1])}, {"y": (FLOAT, ["n", 1])})


def save_lowered(path: Path) -> Path:
    """StringNormalizer, in a locale that no machine has."""
    node = helper.make_node("StringNormalizer", ["t"], ["y"], case_change_action="LOWER", locale="xx_XX.UTF-8")
    return save_graph(path, [node], {"t": (TensorProto.STRING, [1])}, {"y": (TensorProto.STRING, [1])})


@pytest.mark.parametrize(
    ("save", "message"),
    [
        (
            lambda p: save_value(p, TensorProto.BFLOAT16, ["n", 2]),
            r"Input x of .* is BFLOAT16, which clients cannot take",
        ),
        (lambda p: save_value(p, FLOAT, []), r"Input x of .* is a scalar, and Triton's tensors have a dimension\."),
        (
            save_sequence,
            r"Output y of .* is a sequence_type, not a tensor\. .*\{'zipmap': False\}; with onnxmltools.* else take",
        ),
        (save_shapeless, r"Output y of .* has no known number of dimensions\."),
        (save_ensemble_of_rows, r"The rows of .* cannot be batched: a row's answer depends on the rows beside it\."),
        (save_reshaped, r"The rows of .* cannot be batched: .*; or use --max-batch-size 0"),
        (save_lowered, r"This machine lacks the locale xx_XX.UTF-8; .* Install it: locale-gen xx_XX.UTF-8"),
        (save_foreign, r"ONNX Runtime .* refuses .*m\.onnx: "),
        (
            lambda p: p.write_bytes(b"<html></html>"),
            r"m\.onnx is not an ONNX model: it is a web page or XML\. Export or copy",
        ),
        (lambda p: p.write_bytes(b""), r"m\.onnx is not an ONNX model: it is empty\."),
        (lambda p: p.write_bytes(save_net(p).read_bytes()[:-40]), r"m\.onnx is not an ONNX model: it is cut off"),
    ],
)
def test_graphs_that_cannot_be(save: Any, message: str, tmp_path: Path) -> None:
    save(tmp_path / "m.onnx")
    with pytest.raises(ArtifactError, match=message):
        add_model(tmp_path / "m.onnx", "m", project=tmp_path)
    assert not (tmp_path / "models").exists()


def test_a_graph_without_outputs(tmp_path: Path) -> None:
    model = onnx.load(str(save_net(tmp_path / "m.onnx")))
    del model.graph.output[:]
    onnx.save(model, str(tmp_path / "m.onnx"))
    with pytest.raises(ArtifactError, match=r"m\.onnx is not an ONNX model: it is cut off, or another"):
        add_model(tmp_path / "m.onnx", "m", project=tmp_path)
