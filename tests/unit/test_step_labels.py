"""Names of classes: a step that selects classes gets them from the step whose scores it reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.authoring.composition.labels import give
from shoal.authoring.repository.config import ModelConfig, read_config
from tests.support.once import ROOT

SCORES = """
backend: "python" max_batch_size: 4
input {{ name: "X" data_type: TYPE_FP32 dims: 3 }}
output {{ name: "SCORES" data_type: TYPE_FP32 dims: 3 {more} }}
"""
PIPELINE = """
platform: "ensemble" max_batch_size: 4
input {{ name: "X" data_type: TYPE_FP32 dims: 3 }}
output {{ name: "LABELS" data_type: TYPE_STRING dims: -1 }}
ensemble_scheduling {{
  step {{ model_name: "{maker}" model_version: -1
    input_map {{ key: "X" value: "X" }} output_map {{ key: "SCORES" value: "S" }} }}
  step {{ model_name: "top_k" model_version: -1
    input_map {{ key: "SCORES" value: "S" }} output_map {{ key: "LABELS" value: "LABELS" }} }}
}}
"""


def make(root: Path, **makers: str) -> list[ModelConfig]:
    """`top_k`, and for each of ``makers`` a model with these labels and a pipeline of both."""
    models = [read_config(ROOT / "postprocess" / "top_k")]
    for name, labels in makers.items():
        for folder in (root / name, root / f"{name}_best"):
            (folder / "1").mkdir(parents=True)
        more = 'label_filename: "names.txt"' if labels else ""
        (root / name / "config.pbtxt").write_text(SCORES.format(more=more), encoding="utf-8")
        (root / name / "names.txt").write_text(labels, encoding="utf-8")
        (root / f"{name}_best" / "config.pbtxt").write_text(PIPELINE.format(maker=name), encoding="utf-8")
        models += [read_config(root / name), read_config(root / f"{name}_best")]
    return models


@pytest.mark.parametrize(
    ("makers", "labels"),
    [
        ({"a": "sea\nrain\ngröße\n"}, '["sea", "rain", "größe"]'),
        ({"a": "sea\nrain\n", "b": "sea\nrain\n\n"}, '["sea", "rain"]'),  # a blank line at the end
        ({"a": "sea\nrain\n", "b": "rain\nsea\n"}, ""),
        ({"a": "sea\nrain\n", "b": ""}, ""),
        ({"a": ""}, ""),
    ],
)
def test_labels_of_the_step_before(makers: dict[str, str], labels: str, tmp_path: Path) -> None:
    top_k, *others = give(make(tmp_path, **makers))
    assert top_k.spec.parameters["labels"] == labels
    assert all("labels" not in other.spec.parameters for other in others)


def test_labels_that_are_given_stay(tmp_path: Path) -> None:
    (top_k,) = give(make(tmp_path))
    top_k.message.parameters["labels"].string_value = '["mine", "yours"]'
    (tmp_path / "top_k").mkdir()
    (tmp_path / "top_k" / "config.pbtxt").write_text(str(top_k.message), encoding="utf-8")
    models = [read_config(tmp_path / "top_k"), *make(tmp_path, a="sea\nrain\n")[1:]]
    assert give(models)[0].spec.parameters["labels"] == '["mine", "yours"]'
