"""Pipelines that ``shoal serve THING`` makes, of many kinds: they answer as each one's library, over both protocols.

Each is made as ``shoal serve`` makes it, then all are served at once: a start of Triton for each would take minutes.
``test_serve_models.py`` types the command for one of each family; it also has encoders and language models.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightgbm
import numpy as np
import onnxruntime
import pytest
import skops.io
import torch
import treelite
from onnx import TensorProto, helper
from sklearn import ensemble
from torch import nn
from xgboost import XGBClassifier, XGBRegressor

import shoal
from shoal.cli.making import _make, find_or_make
from tests.support.imports import save_classifier, save_graph, save_net, save_texts
from tests.support.service import Service

ROWS = np.random.default_rng(0).standard_normal((40, 5)).astype(np.float32)
PAIRS = ROWS[:, :2].copy()
LABELS = (ROWS[:, 0] > 0).astype(int) + (ROWS[:, 1] > 0)
ASKED = 4  # rows per request
COMPONENT = """
from shoal import Component

class Halves(Component):
    inputs, outputs = ["X:FP32:5"], ["Y:FP32:5"]

    def run(self, batch):
        return {"Y": batch["X"] / 2}

class Shout(Component):
    inputs, outputs = ["TEXT:STRING:1"], ["LOUD:STRING:1"]

    def run(self, batch):
        return {"LOUD": batch["TEXT"] + b"!"}
"""


class Thing(NamedTuple):
    """What is typed, and what its own library answers."""

    typed: str
    inputs: dict[str, Any]
    wanted: dict[str, Any]


def onnx_of(path: Path, **inputs: Any) -> Thing:
    session = onnxruntime.InferenceSession(str(path))
    names = [each.name for each in session.get_outputs()]
    return Thing(str(path), inputs, dict(zip(names, session.run(names, inputs), strict=True)))


def net() -> Thing:
    return onnx_of(save_net(Path("net.onnx")), x=ROWS[:ASKED])


def fixed() -> Thing:
    return onnx_of(save_net(Path("fixed.onnx"), rows=ASKED), x=ROWS[:ASKED])


def two_inputs() -> Thing:
    tensors: dict[str, tuple[int, Any]] = {name: (TensorProto.FLOAT, ["n", 5]) for name in ("a", "b")}
    made = save_graph(Path("two.onnx"), [helper.make_node("Add", ["a", "b"], ["c"])], tensors, {"c": tensors["a"]})
    return onnx_of(made, a=ROWS[:ASKED], b=ROWS[ASKED : 2 * ASKED])


def texts() -> Thing:
    path = save_texts(Path("texts.onnx"))
    return onnx_of(path, a=np.array([["a b"], ["c"]], np.object_), b=np.array([["a b"], ["d"]], np.object_))


def zipped() -> Thing:
    path = save_classifier(Path("zipped.onnx"))
    labels, scores = onnxruntime.InferenceSession(str(path)).run(None, {"x": PAIRS[:ASKED]})
    wanted = {"label": np.array(labels)[:, None], "scores": [[*row.values()] for row in scores]}
    return Thing(str(path), {"x": PAIRS[:ASKED]}, wanted)


def traced() -> Thing:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3), nn.Softmax(-1)).eval()
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.trace(module, torch.zeros(2, 5)).save("traced.pt")
        wanted = module(torch.from_numpy(ROWS[:ASKED])).numpy()
    return Thing("traced.pt", {"INPUT__0": ROWS[:ASKED]}, {"OUTPUT__0": wanted})


def forest(path: str, wanted: Any) -> Thing:
    return Thing(path, {"input__0": ROWS[:ASKED]}, {"output__0": np.asarray(wanted, np.float32).reshape(ASKED, -1)})


def xgboost_json() -> Thing:
    model = XGBClassifier(n_estimators=5, max_depth=3).fit(ROWS, LABELS)
    model.save_model("boosted.json")
    return forest("boosted.json", model.predict_proba(ROWS[:ASKED]))


def xgboost_ubj() -> Thing:
    model = XGBRegressor(n_estimators=5, max_depth=3).fit(ROWS, ROWS[:, 0])
    model.save_model("score.ubj")
    return forest("score.ubj", model.predict(ROWS[:ASKED]))


def lightgbm_classes() -> Thing:
    model = lightgbm.LGBMClassifier(n_estimators=5, min_child_samples=2, verbose=-1).fit(ROWS, LABELS)
    model.booster_.save_model("light.txt")
    return forest("light.txt", model.predict_proba(ROWS[:ASKED]))


def lightgbm_score() -> Thing:
    model = lightgbm.LGBMRegressor(n_estimators=5, min_child_samples=2, verbose=-1).fit(ROWS, ROWS[:, 0])
    model.booster_.save_model("light_score.txt")
    return forest("light_score.txt", model.predict(ROWS[:ASKED]))


def skops_forest() -> Thing:
    model = ensemble.RandomForestClassifier(5, random_state=0).fit(ROWS, LABELS)
    skops.io.dump(model, "forest.skops")
    return forest("forest.skops", model.predict_proba(ROWS[:ASKED]))


def skops_boosted() -> Thing:
    model = ensemble.GradientBoostingRegressor(n_estimators=5, random_state=0).fit(ROWS, ROWS[:, 0])
    skops.io.dump(model, "grown.skops")
    return forest("grown.skops", model.predict(ROWS[:ASKED]))


def treelite_file() -> Thing:
    model = ensemble.ExtraTreesClassifier(5, random_state=0).fit(ROWS, LABELS)
    treelite.sklearn.import_model(model).serialize("trees.tl")
    return forest("trees.tl", model.predict_proba(ROWS[:ASKED]))


def catboost_of(suffix: str) -> Thing:
    catboost: Any = importlib.import_module("catboost")
    model = catboost.CatBoostClassifier(iterations=5, verbose=0, allow_writing_files=False).fit(ROWS, LABELS)
    path = f"cat_{suffix}.{suffix}"
    model.save_model(path, format=suffix)
    wanted = {"label": model.predict(ROWS[:ASKED]), "probabilities": model.predict_proba(ROWS[:ASKED])}
    return Thing(path, {"features": ROWS[:ASKED]}, wanted)


def write_component() -> None:
    Path("mine.py").write_text(COMPONENT, encoding="utf-8")


def component() -> Thing:
    write_component()
    return Thing("mine.py:Halves", {"X": ROWS[:ASKED]}, {"Y": ROWS[:ASKED] / 2})


def component_of_texts() -> Thing:
    write_component()
    given = np.array([[b"a"], [b"f\xc3\xbc"]], np.object_)
    return Thing("mine.py:Shout", {"TEXT": given}, {"LOUD": given + b"!"})


def component_in_its_folder() -> Thing:
    write_component()
    shoal.add_model("mine.py:Halves", "halved", project="own")
    return Thing("own/models/halved/1/model.py:Halves", {"X": ROWS[:ASKED]}, {"Y": ROWS[:ASKED] / 2})


HAS_CATBOOST = importlib.util.find_spec("catboost") is not None
MAKERS: dict[str, Callable[[], Thing]] = {
    made.__name__: made
    for made in (
        net,
        fixed,
        two_inputs,
        texts,
        zipped,
        traced,
        xgboost_json,
        xgboost_ubj,
        lightgbm_classes,
        lightgbm_score,
        skops_forest,
        skops_boosted,
        treelite_file,
        component,
        component_of_texts,
        component_in_its_folder,
    )
}
if HAS_CATBOOST:
    MAKERS |= {"catboost_onnx": lambda: catboost_of("onnx"), "catboost_cbm": lambda: catboost_of("cbm")}


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, dict[str, Thing]]]:
    folder = tmp_path_factory.mktemp("things")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        found = {name: make() for name, make in MAKERS.items()}
        for name, thing in found.items():
            made = _make(thing.typed, "", name)  # a fork of this process, with its libraries' threads, would hang
            assert _make(thing.typed, "", name) == made
            shutil.copytree(made, folder / "all", dirs_exist_ok=True)
        (folder / "all" / "manifest.json").unlink()  # of the last one
        with Service(folder / "all", folder / "log") as service:
            yield service, found


@pytest.mark.parametrize("name", MAKERS)
def test_each_answers_as_its_library(things: tuple[Service, dict[str, Thing]], name: str) -> None:
    service, thing = things[0], things[1][name]
    with shoal.Client(service.grpc) as client:
        compare(client.infer(name, thing.inputs), thing.wanted)
    if name == "fixed":  # has no rows, of which that protocol's answers are
        return
    body = json.dumps({"inputs": {key: as_texts(array).tolist() for key, array in thing.inputs.items()}}).encode()
    url, head = f"http://{service.http}/v1/models/{name}:predict", {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, head)) as reply:
        rows = json.load(reply)["predictions"]
    compare({key: [row[key] for row in rows] for key in thing.wanted}, thing.wanted)


def as_texts(values: Any) -> Any:
    """The array, with texts in place of bytes."""
    array = np.asarray(values)
    texts = [each.decode() if isinstance(each, bytes) else each for each in array.ravel()]
    return np.array(texts, array.dtype).reshape(array.shape) if array.dtype == object else array


def compare(found: Any, wanted: dict[str, Any]) -> None:
    for key, values in wanted.items():
        expected = as_texts(values)
        given = as_texts(found[key]).reshape(expected.shape)
        if expected.dtype.kind in "OUS":
            assert given.tolist() == expected.tolist()
        else:
            np.testing.assert_allclose(given, expected, atol=1e-5)


@pytest.mark.parametrize("typed", ["mine.py:Halves", "repository", "."])
def test_a_component_and_where_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str) -> None:
    monkeypatch.chdir(tmp_path)
    write_component()
    if typed != "mine.py:Halves":
        shutil.copytree(_make("mine.py:Halves", "", ""), "repository")
        shutil.rmtree("build")
        assert find_or_make(Path(typed)) == Path("repository")
    with Service(Path(typed), Path("log")) as service, shoal.Client(service.grpc) as client:
        compare(client.infer("mine", {"X": ROWS[:ASKED]}), {"Y": ROWS[:ASKED] / 2})
    if typed == "mine.py:Halves":
        said = [line.strip() for line in Path("log").read_text("utf-8").splitlines() if line.startswith("  shoal ")]
        assert said == [
            "shoal add-model mine.py:Halves mine --project build/mine",
            "shoal compose mine build/mine/repository --project build/mine",
            "shoal serve build/mine/repository",
        ]
