"""Exported encoders run on the device of their inputs: as far as a machine without a GPU can show it.

The meta device has shapes and no values. Like a GPU it refuses tensors of the host, so a graph that makes one there, or
that reads a value back, fails on it.
"""

from __future__ import annotations

import io
import runpy
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AlbertConfig, AlbertModel, AutoModel, AutoModelForSequenceClassification, BertModel

from shoal.authoring.check.families import check
from shoal.authoring.composition.compose import compose
from shoal.authoring.project.importing.encoders import SIGMOID, SOFTMAX, Embedder, Headed
from shoal.authoring.repository.plan import Plan
from shoal.clients.local import load
from shoal.errors import ArtifactError
from shoal.kit.backends import BACKENDS
from shoal.kit.component.files import sha256
from shoal.kit.encoders import export
from shoal.kit.encoders.encoder import Trunked
from shoal.kit.encoders.fusing import fuse
from shoal.kit.encoders.packaged import SMALL_ENCODER
from shoal.readability.encoder import Encoder, load_encoder
from shoal.readability.report import REPORT
from tests.support.published import BERT, publish, publish_roberta

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # TorchScript is deprecated, and what Triton serves
BACKEND = BACKENDS / "pytorch" / "model.py"
Make = Callable[[Path, Path, str], Trunked]


def scored(trunk: torch.nn.Module) -> Encoder:
    config: Any = trunk.config
    return Encoder(trunk, torch.nn.Linear(config.hidden_size, 1))


def embedder(folder: Path, attention: str, pooling: str) -> Embedder:
    trunk = AutoModel.from_pretrained(folder, attn_implementation=attention, add_pooling_layer=False)
    return Embedder(trunk, pooling, nn.Identity(), is_normalised=True)


def headed(folder: Path, attention: str, activation: str) -> Headed:
    model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation=attention)
    return Headed(model, activation)


def albert(attention: str) -> Encoder:
    """Its layers share their weights: one module is called several times."""
    config = AlbertConfig(**(BERT.to_dict() | {"embedding_size": 8, "model_type": "albert"}))
    config._attn_implementation = attention
    return scored(AlbertModel(config, add_pooling_layer=False))


ENCODERS: dict[str, Make] = {
    "bert": lambda bert, roberta, attention: scored(
        BertModel.from_pretrained(bert / "score", attn_implementation=attention, add_pooling_layer=False)
    ),
    "bert embedding": lambda bert, roberta, attention: embedder(bert / "score", attention, "mean"),
    "roberta embedding": lambda bert, roberta, attention: embedder(roberta, attention, "cls"),
    "distilbert classes": lambda bert, roberta, attention: headed(bert / "triage", attention, SOFTMAX),
    "bert labels": lambda bert, roberta, attention: headed(bert / "many", attention, SIGMOID),
    "roberta score": lambda bert, roberta, attention: headed(roberta, attention, ""),
    "albert": lambda bert, roberta, attention: albert(attention),
}


@pytest.fixture(scope="module")
def folders(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("encoders")
    return publish(tiny_bert, root / "bert"), publish_roberta(tmp_path_factory.mktemp("roberta"))


@pytest.fixture(params=[(name, attention) for name in ENCODERS for attention in ("sdpa", "eager")], ids="-".join)
def encoder(request: pytest.FixtureRequest, folders: tuple[Path, Path]) -> Trunked:
    name, attention = request.param
    torch.manual_seed(0)
    return ENCODERS[name](*folders, attention).eval()


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(5, 300, (3, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return ids, mask


def frozen(module: Any) -> tuple[Any, list[Tensor]]:
    """The frozen graph as a function of the inputs and then of its tensors, and those."""
    graph = torch.jit.freeze(module).graph.copy()
    tensors = []
    for node in graph.findAllNodes("prim::Constant"):
        if node.hasAttribute("value") and node.kindOf("value") == "t":
            tensors.append(node.t("value"))
            given = graph.addInput()
            given.setType(node.output().type())
            node.output().replaceAllUsesWith(given)
            node.destroy()
    graph.eraseInput(0)  # the module, of which nothing is left
    return torch._C._create_function_from_graph("frozen", graph), tensors


def find_bound(module: Any) -> list[str]:
    """The constants of a traced module that lie on a device, or name one."""
    graph = module.inlined_graph  # nodes live as long as their graph is held
    constants = graph.findAllNodes("prim::Constant")
    is_bound = ("DeviceObjType", "TensorType")
    return [str(node) for node in constants if node.output().type().kind() in is_bound]


def test_no_constant_is_bound_to_a_device(encoder: Trunked) -> None:
    module = export.trace(encoder)
    assert find_bound(module) == []
    inputs = batch()
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    elsewhere: Any = torch.jit.load(file, map_location="meta")
    assert elsewhere(*(x.to("meta") for x in inputs)).device.type == "meta"
    call, tensors = frozen(module)
    assert call(*(x.to("meta") for x in (*inputs, *tensors))).device.type == "meta"
    with torch.inference_mode():
        assert torch.equal(call(*inputs, *tensors), module(*inputs))


def test_answers_are_those_of_the_bound_trace(encoder: Trunked, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = batch()
    config: Any = encoder.trunk.config
    # A trace of eager attention keeps its softmax in FP32, in front of values in BF16: it is served in FP32 alone.
    for dtype in ("fp32", "bf16") if config._attn_implementation == "sdpa" else ("fp32",):
        free = export.trace(encoder)
        with monkeypatch.context() as patch:
            patch.setattr(export, "unbind", lambda module: None)
            bound = export.trace(encoder)
        assert find_bound(bound) != []
        with torch.inference_mode():
            if dtype == "bf16":
                free.trunk.to(torch.bfloat16)
                bound.trunk.to(torch.bfloat16)
            assert torch.equal(free(*inputs), bound(*inputs))
            both = fuse(free, dtype), fuse(bound, dtype)
            for _ in range(2):  # TorchScript optimises the graph after the first batch
                assert torch.equal(both[0](*inputs), both[1](*inputs))


def test_an_old_file_is_refused_on_another_device(tiny_bert: Path) -> None:
    check = runpy.run_path(str(BACKEND))["_check_device"]
    encoder = scored(AutoModel.from_pretrained(tiny_bert, add_pooling_layer=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bound: Any = torch.jit.trace(encoder.eval(), export._example(encoder), check_trace=False)
    check(bound, "cpu")
    check(export.trace(encoder), "cuda:0")
    with pytest.raises(ArtifactError, match=r"model\.pt is bound to cpu and cannot run on cuda:0\.\s+Export it again"):
        check(bound, "cuda:0")


def test_old_artifacts_are_for_the_host_alone(artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "old"
    shutil.copytree(artifacts, old)
    (old / REPORT).unlink()  # which has the digest of the new model.pt
    encoder = load_encoder(SMALL_ENCODER, seed=0).candidates.pick("mean")
    with monkeypatch.context() as patch:
        patch.setattr(export, "unbind", lambda module: None)
        export.export_encoder(encoder, old / "model.pt", ties={"vocab.txt": sha256(old / "vocab.txt")})
    repository = compose("ensemble_all", tmp_path / "cpu", artifacts=old, plan=Plan(dtype="fp32"))
    assert {finding.rule.id for finding in check(repository)} == {"torchscript-bound"}
    pipeline = load(repository / "ensemble_all")
    assert np.isfinite(pipeline(excerpt=["The cat sat."])["SCORE"]).all()
    with pytest.raises(ArtifactError, match=r"model\.pt:\d+ has an error.*torchscript-device.*\s+.*shoal train"):
        compose("ensemble_all", tmp_path / "gpu", artifacts=old, plan=Plan(placement="gpu", target="26.06"))
    compose("ensemble_all", tmp_path / "gpu", artifacts=artifacts, plan=Plan(placement="gpu", target="26.06"))
