"""Every line of the page "Serve a model that you have", with models of no size; all are served at once.

``test_serve_models.py`` types the command for a server of each family.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shlex
import shutil
import textwrap
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import onnxruntime
import openvino
import pytest
import skops.io
import torch
import treelite
from numpy.typing import NDArray
from sklearn.ensemble import RandomForestClassifier
from torch import nn
from typer.testing import CliRunner
from xgboost import XGBClassifier

import shoal
from shoal.cli import app
from shoal.cli.making import _make
from shoal.kit.encoders.encoder import _locate
from shoal.kit.encoders.packaged import SMALL_ENCODER
from shoal.lab.tiny_llm import make_tiny
from tests.support.gguf_files import write_gguf
from tests.support.imports import save_classifier, save_net
from tests.support.once import ROOT
from tests.support.published import LABELS, publish
from tests.support.service import Service

PAGE = (ROOT / "docs" / "serve-a-model.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.*) \| (.*`shoal .*) \| (.*) \|$", PAGE, re.MULTILINE)
DATA = np.random.default_rng(0).standard_normal((40, 5)).astype(np.float32)
CLASSES = (DATA[:, 0] > 0).astype(int) + (DATA[:, 1] > 0)
ASKED = DATA[:4]
TEXTS = ["w1 w2 w3", "w4"]
Wanted = dict[str, tuple[dict[str, NDArray[Any]], str, NDArray[Any]]]  # by model: inputs, an output, and its values


def is_here(row: tuple[str, ...]) -> bool:
    """Whether the packages that a row names are installed."""
    names = " ".join(re.findall("pip install ([a-z ]+)", row[0])).split()
    return all(importlib.util.find_spec(name) for name in names)


def make_files() -> Wanted:
    """Write the files that the lines name, and return what their own libraries answer."""
    save_net(Path("net.onnx"))
    (net,) = onnxruntime.InferenceSession("net.onnx").run(None, {"x": ASKED})
    save_classifier(Path("pipeline.onnx"))
    (labels, _) = onnxruntime.InferenceSession("pipeline.onnx").run(None, {"x": ASKED[:, :2]})
    openvino.save_model(openvino.convert_model("net.onnx"), "repository/ir/1/model.xml", compress_to_fp16=False)
    mine, config = (
        textwrap.dedent(text) for text in re.findall(r"(?:^(?:    .*)?\n)+", PAGE, re.MULTILINE) if text.strip()
    )
    Path("mine.py").write_text(mine, encoding="utf-8")
    Path("repository/ir/config.pbtxt").write_text(config, encoding="utf-8")
    module = nn.Linear(5, 3).eval()
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.trace(module, torch.zeros(2, 5)).save("traced.pt")
        traced = module(torch.from_numpy(ASKED)).numpy()
    boosted = XGBClassifier(n_estimators=5, max_depth=3).fit(DATA, CLASSES)
    boosted.save_model("boosted.ubj")
    light = lightgbm.LGBMClassifier(n_estimators=5, min_child_samples=2, verbose=-1).fit(DATA, CLASSES)
    light.booster_.save_model("light.txt")
    forest = RandomForestClassifier(5, random_state=0).fit(DATA, CLASSES)
    skops.io.dump(forest, "forest.skops")
    treelite.sklearn.import_model(forest).serialize("trees.tl")
    others: Wanted = {}
    if importlib.util.find_spec("catboost"):
        cat = importlib.import_module("catboost").CatBoostClassifier(iterations=5, verbose=0, allow_writing_files=False)
        cat.fit(DATA, CLASSES).save_model("cat.cbm")
        others["cat"] = ({"features": ASKED}, "probabilities", cat.predict_proba(ASKED))
    forests = {"boosted": boosted, "light": light, "forest": forest, "trees": forest}
    return {
        "net": ({"x": ASKED}, "y", net),
        "ir": ({"x": ASKED}, "y", net),
        "pipeline": ({"x": ASKED[:, :2]}, "label", labels[:, None]),
        "traced": ({"INPUT__0": ASKED}, "OUTPUT__0", traced),
        "mine": ({"X": ASKED}, "Y", ASKED / 2),
        **others,
        **{name: ({"input__0": ASKED}, "output__0", each.predict_proba(ASKED)) for name, each in forests.items()},
    }


def make_folders(tiny_bert: Path) -> None:
    """Write the folders that the lines name."""
    Path("my-encoder").symlink_to(_locate(SMALL_ENCODER, None)[0])
    published = publish(tiny_bert, Path("published"))
    (published / "triage").rename("my-classifier")
    (published / "score").rename("my-reranker")
    make_tiny(Path("my-llama"))
    if all(map(importlib.util.find_spec, ("gguf", "accelerate"))):
        write_gguf(Path("my-llama"), Path("chat.gguf"))
    Path("my-engine").mkdir()
    Path("my-engine/config.json").write_text('{"pretrained_config": {}, "build_config": {}}', encoding="utf-8")
    Path("my-engine/rank0.engine").write_bytes(b"built elsewhere")


def type_line(line: str) -> None:
    """Make what a line of the page makes; all that is served here is joined in the folder ``all``."""
    _, command, thing, *rest = words = shlex.split(line)
    if command == "serve" and "--print" not in rest:
        task = rest[rest.index("--task") + 1] if rest else ""
        made = (
            Path(thing) if thing == "repository" else _make(thing, task, "")
        )  # without a fork, beside threads of torch
        shutil.copytree(made, "all", dirs_exist_ok=True)
        return
    done = CliRunner().invoke(app, words[1:])
    assert done.exit_code == 0, (line, done.output, done.exception)
    if words[-1] == "--print":
        Path(f"{Path(thing).name}.sh").write_text(done.output, encoding="utf-8")


@pytest.fixture(scope="module")
def wanted(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wanted]:
    """Expected answers of the models; the current folder has what the lines have made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("newcomer"))
        found = make_files()
        make_folders(tiny_bert)
        for row in filter(is_here, ROWS):
            for line in re.findall("`(shoal [^`]+)`", row[1]):
                type_line(line)
        Path("all/manifest.json").unlink()  # of the last one
        yield found


@pytest.fixture(scope="module")
def service(wanted: Wanted) -> Iterator[Service]:
    with Service(Path("all"), Path("log"), *(word for name in wanted for word in ("--expose", name))) as service:
        yield service


def test_each_row_is_typed() -> None:
    assert len(ROWS) == 18
    assert all(re.search("GGUF|CatBoost", row[0]) for row in ROWS if not is_here(row))


def test_models_of_tensors(service: Service, wanted: Wanted) -> None:
    with shoal.Client(service.grpc) as client:
        for name, (inputs, output, values) in wanted.items():
            answer = client.infer(name, inputs)[output]
            if values.dtype == object:
                assert [text.decode() for text in answer.ravel()] == [*values.ravel()]
            else:
                np.testing.assert_allclose(answer, values, atol=1e-5, err_msg=name)


def post(service: Service, path: str, **body: Any) -> Any:
    url, content = f"http://{service.http}{path}", json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, content, {"Content-Type": "application/json"})) as reply:
        return json.load(reply)


def test_models_of_texts(service: Service) -> None:
    embedded = post(service, "/v1/embeddings", model="my-encoder", input=TEXTS)
    assert [len(each["embedding"]) for each in embedded["data"]] == [384, 384]
    classified = post(service, "/v1/classify", model="my-classifier", input=TEXTS)
    assert {each["label"] for each in classified["data"]} <= {*LABELS.values()}
    for path, more in (
        ("rerank", {"query": TEXTS[0], "documents": TEXTS}),
        ("score", {"text_1": TEXTS[0], "text_2": TEXTS}),
    ):
        ranked = post(service, f"/v1/{path}", model="my-reranker", **more)
        assert sorted(each["index"] for each in ranked["results" if path == "rerank" else "data"]) == [0, 1]
    messages = [{"role": "user", "content": "Hello"}]
    for model in ("my-llama", "chat")[: 1 + Path("chat.gguf").exists()]:
        said = post(service, "/v1/chat/completions", model=model, messages=messages, max_tokens=4)
        assert said["usage"]["completion_tokens"] == 4


def test_commands_for_containers(wanted: Wanted) -> None:
    del wanted
    for folder, image in (("vllm", "26.06-vllm-python-py3"), ("trtllm", "26.07-trtllm-python-py3")):
        assert f"nvcr.io/nvidia/tritonserver:{image}" in Path(f"{folder}.sh").read_text(encoding="utf-8")
