"""Mistakes in what a model serves in OpenAI's API."""

from __future__ import annotations

from tests.support.page_plants import page
from tests.support.planted import MODEL, Plant

SCORE = "score/config.pbtxt"
CONFIG = """backend: "python"
max_batch_size: 8
input { name: "X" data_type: TYPE_STRING dims: [ 1 ] }
input { name: "MORE" data_type: TYPE_FP32 dims: [ 1 ] optional: true }
output { name: "SCORES" data_type: TYPE_FP32 dims: [ 2 ] label_filename: "labels.txt" }
output { name: "Z" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "NAME" data_type: TYPE_STRING dims: [ 1 ] }
dynamic_batching { default_queue_policy { max_queue_size: 64 } }
instance_group [ { kind: KIND_CPU } ]
parameters { key: "api" value { string_value: "classify=SCORES" } }
"""
FILES = {SCORE: CONFIG, "score/1/model.py": MODEL, "score/labels.txt": "calm\nglad\n"}


PLANTS = (
    page("api-misfit", SCORE, FILES),
    page("labels-misfit", SCORE, {**FILES, "score/labels.txt": "calm\nglad\nsad\n"}),
    Plant(
        "labels that are not UTF-8", "labels-misfit", SCORE, "labels.txt", {"score/labels.txt": b"calm\n\xe4\n"}, FILES
    ),
)
