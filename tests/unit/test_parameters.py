"""Errors of components at start, about their config.pbtxt and their artifacts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ArtifactError
from shoal.kit.component.spec import TensorSpec
from tests.support.pieces import TRIO, start, zscore

FIVE = {"SCORES": [5]}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("threshold", {"threshold": "high"},
         "Parameter threshold of model threshold is 'high'; expected a number that FP32 can hold. Write it in"
         " config.pbtxt: parameters { key: \"threshold\" value { string_value: '0.5' } }"),
        ("threshold", {"threshold": "nan"}, "is 'nan'; expected a number that FP32 can hold."),
        ("threshold", {"threshold": "1e39"}, "is '1e39'; expected a number that FP32 can hold."),
        ("blend", {"weights": "[1]"}, "is '[1]'; expected 2 weights, one per input, none negative and not all 0."),
        ("blend", {"weights": "[1, -1]"}, "is '[1, -1]'; expected 2 weights"),
        ("blend", {"weights": "[0, 0]"}, "is '[0, 0]'; expected 2 weights"),
        ("blend", {"weights": "0.5, 0.5"}, "is '0.5, 0.5'; expected a JSON list of numbers."),
        ("blend", {"weights": "[1, NaN]"}, "is '[1, NaN]'; expected a JSON list of finite numbers."),
        ("blend", {"weights": "[1, true]"}, "is '[1, true]'; expected a JSON list of finite numbers."),
        ("label", {"labels": "a, b"}, "is 'a, b'; expected a JSON list of texts."),
        ("label", {"labels": "[1, 2]"}, "is '[1, 2]'; expected a JSON list of texts."),
        ("label", {"labels": '["\\ud800"]'}, "expected texts that UTF-8 can hold."),
        ("label", {"labels": '["a", "b"]', "dims": FIVE},
         "Model label declares dims: [ 5 ]; its parameter labels has 2. Write dims: [ 2 ] in its config.pbtxt, or -1"),
        ("label", {"least": "some"}, "Parameter least of model label is 'some'; expected a number"),
        ("top_k", {"k": "0"}, "Parameter k of model top_k is '0'; expected a whole number from 1 to 2,147,483,647."),
        ("top_k", {"k": "two"}, "Parameter k of model top_k is 'two'; expected a whole number"),
        ("top_k", {"k": "2", "dims": {"LABELS": [3], "TOP_SCORES": [3]}},
         "Model top_k declares dims: [ 3 ]; its parameter k is 2."),
        ("top_k", {"k": "6", "dims": FIVE}, "5 scores per row, fewer than the best 6 that the model returns"),
        ("top_k", {"k": "3", "labels": '["a", "b"]'}, "2 scores per row, fewer than the best 3"),
        ("threshold", {"dims": {"SCORE": [3], "ABOVE": [2]}},
         "Model threshold declares FP32[3] -> BOOL[2]; it needs FP32[n] -> BOOL[n]. Change the tensors in its"
         " config.pbtxt: their names are free, their order counts."),
        ("softmax", {"dims": {"LOGITS": [2, 3]}}, "declares FP32[2,3] -> FP32[-1]; it needs FP32[...] -> FP32[...]."),
        ("label", {"dims": {"LABEL": [2]}}, "declares FP32[-1] -> STRING[2], FP32[1]; it needs FP32[n] -> STRING[1],"),
        ("blend", {"changes": {"inputs": TRIO[:1]}}, "declares FP32[-1] -> FP32[-1]; it needs FP32[...], FP32[...] ->"),
        ("blend", {"changes": {"inputs": (*TRIO[:2], replace(TRIO[2], is_optional=True))}},
         "declares FP32[-1], FP32[-1], optional FP32[-1] -> FP32[-1]; it needs FP32[...], FP32[...], FP32[...] ->"),
        ("l2_normalise", {"changes": {"inputs": (TensorSpec("X", "TYPE_FP64", (4,)),)}},
         "Model l2_normalise declares FP64[4] -> FP32[-1]; it needs FP32[n] -> FP32[n]."),
        ("softmax", {"changes": {"max_batch_size": 0}}, "Model softmax has max_batch_size 0; it needs rows. Write max"),
        ("softmax", {"changes": {"outputs": ()}}, "Model softmax declares FP32[-1] -> ; it needs FP32[...] -> FP32"),
    ],
)  # fmt: skip
def test_wrong_settings_are_named(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ArtifactError) as refused:
        start(name, **settings)
    assert message in str(refused.value)


def test_a_parameter_that_is_misspelt_is_not_passed_over() -> None:
    parameters = {"treshold": "0.9", "owner": "me"}
    with pytest.raises(ArtifactError, match=r"has the parameter treshold, and none called threshold\. Write threshold"):
        start("threshold", changes={"parameters": parameters})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"mean": [1], "std": [0]}, "std of column 0 is 0, expected a number above 0. Write {\"mean\": [...]"),
        ({"mean": [1, 2], "std": [1]}, "mean has 2 entries and std 1, expected the same number."),
        ({"mean": [1]}, "it lacks std."),
        ({"mean": 1, "std": [1]}, "mean is 1, expected a list of numbers."),
        ({"mean": [], "std": []}, "mean is [], expected a list of numbers."),
        ({"mean": [True], "std": [1]}, "mean holds True, expected finite numbers."),
        ({"mean": [1], "std": [1e-39]}, "mean 1 and std 1e-39 of column 0 give z-scores that FP32 cannot hold."),
        ({"mean": [1], "std": [1], "var": [1]}, "it holds 'var', which this shoal does not know."),
        ([1], "it is the JSON value [1], expected an object."),
    ],
)  # fmt: skip
def test_means_and_deviations_are_checked(content: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "zscore.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ArtifactError) as refused:
        start("zscore", tmp_path)
    assert message in str(refused.value)
    assert "shoal train" not in str(refused.value)


def test_means_for_another_number_of_columns(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"declares dims: \[ 3 \]; the columns of zscore\.json are 2\."):
        start("zscore", zscore(tmp_path, [0, 0], [1, 1]), dims={"X": [3]})
    with pytest.raises(ArtifactError, match=r"misses its artifact zscore\.json in .*\. Write \{\"mean\""):
        start("zscore")
