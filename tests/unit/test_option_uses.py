"""Options of the commands that add models and ask them in this process: each value is obeyed.

A line for each option, as in ``test_option_repositories.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xgboost

from tests.support.counting import write_counting
from tests.support.imports import Tagger, save_net, save_tokens, script
from tests.support.options import TEXT, Both, Elsewhere, Shoal, Table, check_both, check_steady, rows
from tests.support.projects import write_model
from tests.support.published import publish

SCRIPT = "add-model tagger.pt net"
ONNX = "add-model net.onnx net"
ENCODER = "add-model published/triage net --task embeddings --pooling mean"
INFER = "infer --local"
X = f"{INFER} --model probe X=[1,2,3,4,5,6]"
FILE = f"{INFER} --model probe --input rows.csv"
TEXTS = f"{INFER} --model text"
TABLE: Table = {
    "add-model --input": Both(
        SCRIPT, "--input INT64:-1 --input INT64:-1", "--input ids:INT64:-1 --input mask:INT64:-1"
    ),
    "add-model --mask": Both("add-model tokens.onnx net", "", "--mask padding"),
    "add-model --label": Both("add-model forest.json net", "--label a --label b", "--label c --label d"),
    "add-model --task": Both("add-model published/triage net", "--task embeddings --pooling mean", "--task classify"),
    "add-model --pooling": Both("add-model published/triage net --task embeddings", "--pooling mean", "--pooling cls"),
    "add-model --normalise": Both(ENCODER, "", "--normalise", "*.pt"),
    "add-model --tokenizer": Both(ENCODER, "", "--tokenizer tokens"),
    "add-model --max-length": Both(
        ENCODER, "--tokenizer tokens", "--tokenizer tokens --max-length 8", "*/config.pbtxt"
    ),
    "add-model --revision": Both(ENCODER, "", "--revision abc"),
    "add-model --format": Both(ENCODER, "", "--format onnx"),
    "add-model --max-batch-size": Both(ONNX, "", "--max-batch-size 4", "*/config.pbtxt"),
    "add-model --project": Both(ONNX, "", "--project mine"),
    "add-model --dry-run": Both(ONNX, "", "--dry-run"),
    "infer --input": Both(f"{INFER} --model probe", "--input rows.csv", "--input more.csv"),
    "infer --output": Both(FILE, "--output a.csv", "--output a.jsonl"),
    "infer --format": Both(FILE, "--format csv", "--format jsonl"),
    "infer --input-format": Both(f"texts.csv | {TEXTS} --format csv", "--input-format csv", "--input-format txt"),
    "infer --text-column": Both(f"{TEXTS} --input texts.csv", "--text-column text", "--text-column other"),
    "infer --set": Both(X, "--set SCALE=1", "--set SCALE=2"),
    "infer --column": Both(
        f"{INFER} --model probe --input columns.csv", "--column X=a,b,c,d,e,f", "--column X=f,e,d,c,b,a"
    ),
    "infer --url": Both(f"{X} --curl", "--url 10.0.0.1:8000", "--url 10.0.0.2:8000"),
    "infer --model": Both(INFER + " hello", "--model text", "--model shout"),
    "infer --local": Both("infer --model text hello", "", "--local"),
    "infer --repository": Both(TEXTS + " hello", "", "--repository second"),
    "infer --batch-size": Both(FILE, "--batch-size 1", "--batch-size 4"),
    "infer --concurrency": Both(f"{FILE} --batch-size 1", "--concurrency 1", "--concurrency 4"),
    "infer --shard-rows": Elsewhere("unit/test_bulk_shards.py::test_plans_that_are_refused"),
    "infer --workers": Elsewhere("unit/test_bulk_shards.py::test_each_row_is_there_once_in_order"),
    "infer --ray": Elsewhere("slow/test_shards_killed.py::test_killed_on_ray"),
    "infer --worker": Elsewhere("slow/test_shards_killed.py::test_killed_at_random_moments"),
    "shards status --json": Elsewhere("unit/test_bulk_shards.py::test_the_commands_that_look_at_a_folder"),
    "shards merge --output": Elsewhere("unit/test_bulk_shards.py::test_each_row_is_there_once_in_order"),
    "infer --stream": Both(f"{INFER} --model count COUNT=3", "", "--stream"),
    "infer --full": Both(X, "", "--full"),
    "infer --curl": Both(X, "", "--curl"),
    "infer --json": Both(X, "", "--json"),
}

PROBE = """
import threading, time
import numpy as np
from shoal import Component


class Probe(Component):
    lock, now, most = threading.Lock(), 0, 0

    def run(self, batch):
        kind = type(self)
        with self.lock:
            kind.now += 1
            kind.most = max(kind.most, kind.now)
        time.sleep(0.01)
        with self.lock:
            kind.now -= 1
        rows = np.full((len(batch["X"]), 1), len(batch["X"]), np.int64)
        each = batch["X"] * batch.get("SCALE", np.float32(1))
        return {"EACH": each, "ROWS": rows, "CALLS": 0 * rows + min(kind.most, 2)}


TritonPythonModel = Probe.for_triton()
"""


def write(root: Path, name: str, inputs: list[Any], outputs: list[Any], code: str) -> None:
    write_model(root, name, inputs, outputs, optional=("SCALE",))
    (root / name / "1" / "model.py").write_text(code)


@pytest.fixture(scope="module")
def world(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    script(Tagger(), root / "tagger.pt")
    save_net(root / "net.onnx")
    save_tokens(root / "tokens.onnx", names=("input_ids", "padding"))
    data = xgboost.DMatrix(np.eye(4, dtype=np.float32), label=np.array([0, 1, 0, 1]))
    xgboost.train({"objective": "binary:logistic"}, data, 2).save_model(root / "forest.json")
    publish(tiny_bert, root / "published")
    numbers, text = ["X", "FP32", [6]], ["TEXT", "STRING", [1]]
    for name, way in (("build/repository", "upper"), ("second", "title")):
        repository = root / name
        write(
            repository, "probe", [numbers, ["SCALE", "FP32", [1]]],
            [["EACH", "FP32", [6]], ["ROWS", "INT64", [1]], ["CALLS", "INT64", [1]]], PROBE,
        )  # fmt: skip
        write(repository, "text", [text], [["OUT", "STRING", [1]]], TEXT.replace("WAY", way))
        write(repository, "shout", [text], [["OUT", "STRING", [1]]], TEXT.replace("WAY", "lower"))
    write_counting(root / "build" / "repository")
    vectors = ["[1,2,3,4,5,6]"] * 8
    (root / "rows.csv").write_text("\n".join(["X", *(f'"{v}"' for v in vectors)]) + "\n")
    (root / "more.csv").write_text("\n".join(["X", *(f'"{v}"' for v in vectors[:3])]) + "\n")
    (root / "columns.csv").write_text("a,b,c,d,e,f\n1,2,3,4,5,6\n")
    (root / "texts.csv").write_text("text,other\none,two\n")
    return root


@pytest.fixture(scope="module")
def shoal(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Shoal:
    return Shoal(world, tmp_path_factory.mktemp("runs"))


@pytest.mark.usefixtures("may_start_processes")
@pytest.mark.parametrize("entry", rows(TABLE))
def test_two_values_give_two_results(entry: Both, shoal: Shoal) -> None:
    check_both(shoal, entry)


@pytest.mark.usefixtures("may_start_processes")
def test_one_value_gives_one_result(shoal: Shoal) -> None:
    check_steady(shoal, TABLE)
