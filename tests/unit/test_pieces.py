"""Pieces over numbers: small cases, and what NumPy, SciPy and scikit-learn give. Those over texts: test_text_pieces."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from scipy.special import softmax
from sklearn.preprocessing import StandardScaler, normalize
from tokenizers import Tokenizer, models
from typer.testing import CliRunner

from shoal import cli
from shoal.authoring.check.families import check
from shoal.errors import InputError
from shoal.kit.component.ledger import CONTROL, DOWN
from shoal.kit.component.spec import Array
from shoal.kit.component.tensors import Device
from tests.support.once import ROOT
from tests.support.pieces import PIECES, POSTPROCESS, TRIO, ask, examples, leaf, start, zscore
from tests.support.pretend import PretendGpu

NAN, INF = float("nan"), float("inf")
numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
tables = arrays(np.float32, array_shapes(min_dims=2, max_dims=2, max_side=6), elements=numbers)


def fp32(*rows: Sequence[float]) -> Array:
    return np.array(rows, np.float32)


def texts(array: Array) -> list[list[str]]:
    return [[text.decode() for text in row] for row in array]


# --- small cases -------------------------------------------------------------------------------------------------


def test_blend() -> None:
    first, second = fp32([0.25, 0.75], [1, 0]), fp32([0.75, 0.25], [0, 1])
    assert ask(start("blend"), first, second)[0].tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert ask(start("blend", weights="[3, 1]"), first, second)[0].tolist() == [[0.375, 0.625], [0.75, 0.25]]
    assert ask(start("blend", weights="[0, 2]"), first, second)[0].tolist() == second.tolist()
    trio = start("blend", changes={"inputs": TRIO}, weights="[1, 1, 2]")
    assert ask(trio, first, second, first)[0].tolist() == [[0.375, 0.625], [0.75, 0.25]]


def test_softmax() -> None:
    (got,) = ask(start("softmax"), fp32([0, 0], [math.log(3), 0], [3e38, -3e38], [1, -INF]))
    np.testing.assert_allclose(got, fp32([0.5, 0.5], [0.75, 0.25], [1, 0], [1, 0]), rtol=1e-7)


def test_threshold() -> None:
    (above,) = ask(start("threshold"), fp32([0.25, 0.5], [0.75, -INF]))
    assert above.dtype == np.bool_
    assert above.tolist() == [[False, True], [True, False]]
    # 0.7 is not an FP32 number; the score nearest to it reaches the threshold.
    assert ask(start("threshold", threshold="0.7"), fp32([0.7, np.nextafter(np.float32(0.7), np.float32(0))]))[
        0
    ].tolist() == [[True, False]]


def test_label() -> None:
    scores = fp32([0.25, 0.5, 0.25], [0.25, 0.25, 0.125], [-1, -2, -INF])
    label, score = ask(start("label", labels='["low", "höher", "top"]'), scores)
    assert texts(label) == [["höher"], ["low"], ["low"]]
    assert score.tolist() == [[0.5], [0.25], [-1]]
    label, score = ask(start("label", least="0.5", otherwise="none of them"), scores)
    assert texts(label) == [["1"], ["none of them"], ["none of them"]]
    assert score.tolist() == [[0.5], [0.25], [-1]]


def test_top_k() -> None:
    scores = fp32([0.25, 0.5, 0.25], [3, 1, 2])
    labels, best = ask(start("top_k", labels='["a", "b", "c"]', k="2"), scores)
    assert texts(labels) == [["b", "a"], ["a", "c"]]
    assert best.tolist() == [[0.5, 0.25], [3, 2]]
    assert texts(ask(start("top_k"), scores)[0]) == [["1", "0", "2"], ["0", "2", "1"]]
    declared = start("top_k", dims={"LABELS": [2], "TOP_SCORES": [2]})
    assert texts(ask(declared, scores)[0]) == [["1", "0"], ["0", "2"]]


def test_l2_normalise() -> None:
    (unit,) = ask(start("l2_normalise"), fp32([3, 4], [0, 0], [3e38, 0], [0, -1e-45]))
    np.testing.assert_allclose(unit, fp32([0.6, 0.8], [0, 0], [1, 0], [0, -1]), rtol=1e-7)


def test_zscore(tmp_path: Path) -> None:
    piece = start("zscore", zscore(tmp_path, [1, -2.5], [2, 0.5]))
    np.testing.assert_array_equal(ask(piece, fp32([1, -2.5], [3, NAN]))[0], fp32([0, 0], [1, NAN]))


# --- other ways to the same answer -------------------------------------------------------------------------------


@examples
@given(st.data(), tables)
def test_blend_is_numpys_average(data: st.DataObject, first: Array) -> None:
    second = data.draw(arrays(np.float32, first.shape, elements=numbers))
    weights = data.draw(st.lists(st.floats(0.0625, 100), min_size=3, max_size=3))
    piece = start("blend", changes={"inputs": TRIO}, weights=json.dumps(weights))
    expected = np.average(np.stack([first, second, first]).astype(np.float64), axis=0, weights=weights)
    largest = np.maximum(np.abs(first), np.abs(second))
    assert (np.abs(ask(piece, first, second, first)[0] - expected) <= 1e-7 * largest + 1e-45).all()
    assert np.array_equal(ask(piece, first, first, first)[0], first)


@examples
@given(arrays(np.float32, array_shapes(min_dims=2, max_dims=3, max_side=5), elements=numbers))
def test_softmax_is_scipys(logits: Array) -> None:
    piece = start("softmax", dims={"LOGITS": [-1] * (logits.ndim - 1), "PROBABILITIES": [-1] * (logits.ndim - 1)})
    (got,) = ask(piece, logits)
    np.testing.assert_allclose(got, softmax(logits.astype(np.float64), axis=-1), rtol=1e-6, atol=1e-30)
    np.testing.assert_allclose(got.sum(axis=-1), 1, rtol=1e-6)


@examples
@given(tables, numbers)
def test_threshold_is_pythons_comparison(scores: Array, threshold: float) -> None:
    (above,) = ask(start("threshold", threshold=repr(threshold)), scores)
    assert above.tolist() == [[score >= threshold for score in row] for row in scores.tolist()]


@examples
@given(tables, st.data())
def test_the_best_are_pythons_sorted(scores: Array, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, scores.shape[1]))
    expected = [sorted(range(len(row)), key=lambda c: (-row[c], c))[:k] for row in scores.tolist()]
    labels, best = ask(start("top_k", k=str(k)), scores)
    assert texts(labels) == [[str(column) for column in columns] for columns in expected]
    assert np.array_equal(best, np.take_along_axis(scores, np.array(expected), axis=1))
    label, score = ask(start("label"), scores)
    assert texts(label) == [[str(columns[0])] for columns in expected]
    assert np.array_equal(score, scores.max(axis=1, keepdims=True))


@examples
@given(tables)
def test_l2_normalise_is_scikit_learns(embeddings: Array) -> None:
    embeddings = np.where(np.abs(embeddings) < 1e-9, np.float32(0), embeddings)  # which takes the least for zeros
    (unit,) = ask(start("l2_normalise"), embeddings)
    np.testing.assert_allclose(unit, normalize(embeddings.astype(np.float64)), rtol=1e-6, atol=1e-44)


def test_zscore_is_scikit_learns(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(3, 10, (1000, 20)).astype(np.float32)
    scaler = StandardScaler().fit(x.astype(np.float64))
    piece = start("zscore", zscore(tmp_path, scaler.mean_.tolist(), scaler.scale_.tolist()))
    assert np.array_equal(ask(piece, x)[0], scaler.transform(x.astype(np.float64)).astype(np.float32))


# What comes down from a GPU for seven rows of three: a byte a row and input, or the scores that texts are made of.
DOWNLOADS: dict[str, tuple[str, int]] = {
    "blend": (CONTROL, 14),
    "softmax": (CONTROL, 7),
    "threshold": (CONTROL, 7),
    "l2_normalise": (CONTROL, 7),
    "label": ("LABEL", 84),
    "top_k": ("LABELS", 84),
}


@pytest.mark.parametrize("name", [*POSTPROCESS, "zscore"])
def test_a_gpus_arrays_give_the_same(name: str, tmp_path: Path) -> None:
    zscore(tmp_path, [1, 2, 3], [4, 5, 6])
    device, generator = PretendGpu(), np.random.default_rng(1)
    here, there = start(name, tmp_path), start(name, tmp_path, device=device)
    inputs = [generator.normal(size=(7, 3)).astype(np.float32) for _ in here.context.spec.inputs]
    uploaded = [device.put(array, "(test)") for array in inputs]
    device.ledger.end_setup()
    answers = ask(there, *uploaded)
    moved = {
        (edge.name, traffic.num_bytes) for edge, traffic in device.ledger.traffic.items() if edge.direction == DOWN
    }
    assert moved == ({DOWNLOADS[name]} if name in DOWNLOADS else set())
    for expected, got in zip(ask(here, *inputs), answers, strict=True):
        assert device.owns(got) == (name not in ("label", "top_k"))
        found = device.fetch(got, "(test)")
        if found.dtype == np.float32:
            np.testing.assert_allclose(found, expected, rtol=1e-6)
        else:
            assert found.tolist() == expected.tolist()


# --- requests that are refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("threshold", [[[1.0], [NAN]]], "SCORE[1] holds NaN, which is not a number. Look at the output"),
        ("label", [[[1.0, NAN]]], "SCORES[0] holds NaN, which is not a number."),
        ("top_k", [[[1.0, 2.0], [NAN, 1.0]]], "SCORES[1] holds NaN, which is not a number."),
        ("softmax", [[[1.0, NAN]]], "LOGITS[0] holds NaN or infinity; it must be finite."),
        ("softmax", [[[1.0, INF]]], "LOGITS[0] holds NaN or infinity; it must be finite."),
        ("softmax", [[[-INF, -INF]]], "LOGITS[0] holds NaN or infinity; it must be finite."),
        ("blend", [[[1.0], [2.0]], [[1.0], [INF]]], "SECOND[1] holds NaN or infinity; it must be finite."),
        ("blend", [[[1.0, 2.0]], [[1.0]]], "The tensors to blend have different shapes: FIRST [1, 2], SECOND [1, 1]."),
        ("l2_normalise", [[[INF, 0.0]]], "EMBEDDING[0] holds NaN or infinity; it must be finite."),
        ("zscore", [[[1.0, 2.0, 3.0]]], "X has 3 columns; zscore.json has 2. Send as many."),
        ("label", [[[]]], "SCORES has 0 columns for the best 1. Send one score for each class."),
    ],
)  # fmt: skip
@pytest.mark.parametrize("device", [Device(), PretendGpu()], ids=["host", "gpu"])
def test_a_bad_request_fails_alone(name: str, values: list[Any], message: str, device: Device, tmp_path: Path) -> None:
    piece = start(name, zscore(tmp_path, [0, 0], [1, 1]), device=device)
    names = [tensor.name for tensor in piece.context.spec.inputs]
    bad = {key: np.array(value, np.float32) for key, value in zip(names, values, strict=True)}
    good = {key: np.ones((2, 2), np.float32) for key in names}
    first, error, last = piece.process([good, bad, good])
    assert isinstance(error, InputError)
    assert str(error).startswith(message)
    assert isinstance(first, dict)
    assert isinstance(last, dict)


def test_widths_that_labels_do_not_fit() -> None:
    with pytest.raises(InputError, match=r"^SCORES has 3 columns for 2 labels\. Send one score for each class\.$"):
        ask(start("label", labels='["a", "b"]'), fp32([1, 2, 3]))
    with pytest.raises(InputError, match=r"^SCORES has 1 columns for the best 2\."):
        ask(start("top_k", k="2"), fp32([1]))


@pytest.mark.parametrize("name", PIECES)
def test_each_leaf_is_without_findings(name: str) -> None:
    assert check(leaf(name).folder) == []


def test_each_command_of_the_page_makes_a_component(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("my-encoder", "build"):
        (tmp_path / folder).mkdir()
    Tokenizer(models.WordLevel({"?": 0}, unk_token="?")).save("my-encoder/tokenizer.json")
    zscore(tmp_path / "build", [0], [1])
    (tmp_path / "urgent.txt").write_text("urgent\nnow\n", encoding="utf-8")
    page = (ROOT / "docs" / "components.md").read_text(encoding="utf-8").replace("\\\n", "")
    commands = [shlex.split(line) for line in re.findall(r"^    shoal (new component .*)$", page, re.MULTILINE)]
    for command in commands:
        result = CliRunner().invoke(cli.app, command)
        assert result.exit_code == 0, (command, result)
        assert [*tmp_path.glob(f"*process/{command[2]}/config.pbtxt")]
    assert {command[command.index("--like") + 1] for command in commands} == set(PIECES)
