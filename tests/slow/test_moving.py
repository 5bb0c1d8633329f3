"""Every block of the page about moving over, typed in order beside the hand-written repository that it shows."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal
from tests.support.once import ROOT
from tests.support.pages import BLOCK
from tests.support.planted import write
from tests.support.published import LABELS, publish
from tests.support.reader import Reader

PAGE = (ROOT / "docs" / "moving.md").read_text(encoding="utf-8")
CODES = [each for each in re.findall(r"(?:^(?:    .*)?\n)+", BLOCK.sub("", PAGE), re.MULTILINE) if each.strip()]
FIRST, SECOND = ("The invoice is wrong.", "w1 w2 w3"), ("No internet since noon.", "w548")
TENSOR = '{{ name: "{}" data_type: TYPE_{} dims: [ {} ] }}'
MAP = '{}_map {{ key: "{}" value: "{}" }}'
STEPS = {  # of the ensemble: what their inputs and outputs are called in it
    "tokens": ({"TEXT": "TEXT"}, {"input_ids": "ids", "attention_mask": "mask"}),
    "classifier": ({"INPUT__0": "ids", "INPUT__1": "mask"}, {"OUTPUT__0": "scores"}),
    "labels": ({"SCORES": "scores"}, {"LABEL": "LABEL", "SCORE": "SCORE"}),
}


def write_config(folder: Path, inputs: str, outputs: str, more: str) -> None:
    """Write a ``config.pbtxt`` of eight rows a batch; ``inputs`` and ``outputs`` are words like ``TEXT:STRING:1``."""
    sides = (", ".join(TENSOR.format(*each.split(":")) for each in side.split()) for side in (inputs, outputs))
    write(folder / "config.pbtxt", "max_batch_size: 8\ninput [ {} ]\noutput [ {} ]\n{}".format(*sides, more))


def write_old(folder: Path, tiny_bert: Path) -> None:
    """Write ``old``, which the reader of the page has."""
    checkpoint = publish(tiny_bert, folder / "published") / "triage"
    shoal.add_model(checkpoint, "classifier", task="classify", format="onnx", project=folder / "exported")
    old, python = folder / "old", 'backend: "python"\ninstance_group [ { kind: KIND_CPU } ]\n'
    shutil.copytree(folder / "exported" / "models" / "classifier", old / "classifier")
    write_config(old / "tokens", "TEXT:STRING:1", "input_ids:INT64:-1 attention_mask:INT64:-1", python)
    write_config(old / "labels", "SCORES:FP32:3", "LABEL:STRING:1 SCORE:FP32:1", python)
    for name, code in zip(("tokens", "labels"), CODES, strict=True):
        write(old / name / "1" / "model.py", textwrap.dedent(code).strip("\n") + "\n")
    for path in checkpoint.glob("*token*"):
        shutil.copy(path, old / "tokens" / "1")
    write(old / "labels" / "1" / "labels.json", json.dumps([*LABELS.values()]))
    steps = []
    for name, sides in STEPS.items():
        maps = [MAP.format(kind, *pair) for kind, side in zip(("input", "output"), sides, strict=True)
                for pair in side.items()]  # fmt: skip
        steps.append(f'{{ model_name: "{name}" model_version: -1 {" ".join(maps)} }}')
    ensemble = f'platform: "ensemble"\nensemble_scheduling {{ step [ {", ".join(steps)} ] }}\n'
    write_config(old / "topic", "TEXT:STRING:1", "LABEL:STRING:1 SCORE:FP32:1", ensemble)
    write(old / "topic" / "1" / ".gitkeep", "")


@pytest.fixture
def reader(tiny_bert: Path, tmp_path: Path) -> Iterator[Reader]:
    write_old(tmp_path, tiny_bert)
    reader = Reader(tmp_path)
    reader.environment["PATH"] = f"{Path(sys.executable).parent}:{reader.environment['PATH']}"
    yield reader
    reader.stop()


def test_every_block_works(reader: Reader) -> None:
    """With texts of words that the tiny model knows. Old and new give the same answers, without a server too."""
    printed = []
    for language, block in BLOCK.findall(PAGE):
        known = block.replace("--quick", "--batches 1 --seconds 0.3 --repeats 1").replace(*FIRST).replace(*SECOND)
        printed.append(reader.type(language, known))
    _, old, _, _, _, compared, new = printed
    table, _, predicted = old.rpartition("\n{")
    assert new == f"{table}\n"
    (answer,) = json.loads(f"{{{predicted}")["predictions"]
    assert re.search(rf"w1 w2 w3 .* {answer['LABEL']} . {answer['SCORE']:.3f} ", table)
    assert len({*re.findall("|".join(LABELS.values()), table)}) == 2
    assert "No mistakes found." in compared
    assert "The answers of" not in compared  # differ
