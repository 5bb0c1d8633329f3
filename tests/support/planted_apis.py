"""Mistakes in what a model serves in OpenAI's API."""

from __future__ import annotations

from tests.support.page_plants import page
from tests.support.planted import MODEL, Plant, change

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


def plant(name: str, old: str, new: str) -> Plant:
    """A parameter ``api`` that does not fit; or the tensors beside it."""
    return change(SCORE, "api-misfit", name, old, new, "", '"api"', good=FILES)


PLANTS = (
    page("api-misfit", SCORE, FILES),
    page("labels-misfit", SCORE, {**FILES, "score/labels.txt": "calm\nglad\nsad\n"}),
    plant("an api that does not exist", "classify=SCORES", "clasify=SCORES"),
    plant("an api of a text", "classify=SCORES", "classify=NAME"),
    plant("an api of several outputs", "classify=SCORES", "classify"),
    plant("an api whose kind has no output", "classify=SCORES", "language=SCORES"),
    plant("an api of a language model that is none", "classify=SCORES", "language"),
    plant("an api of one text that needs two", "classify=SCORES", "rerank=Z"),
    plant("an api beside a number that must be given", " optional: true", ""),
    plant("an api without rows", "max_batch_size: 8\n", ""),
    Plant(
        "labels that are not UTF-8", "labels-misfit", SCORE, "labels.txt", {"score/labels.txt": b"calm\n\xe4\n"}, FILES
    ),
)
