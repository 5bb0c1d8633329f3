"""Fused TorchScript: the module's own answers, in fewer kernels; where that cannot be, the module itself."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.kit.encoders.export import trace
from shoal.kit.encoders.fusing import fuse
from shoal.kit.encoders.packaged import SMALL_ENCODER
from shoal.readability.encoder import load_encoder


class Block(nn.Module):
    """The part of an encoder layer after attention."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.gelu = nn.GELU(approximate=approximate)

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm(x)
        mixed: Tensor = self.down(self.gelu(self.up(normal))) + normal
        return mixed


def traced(module: nn.Module, example: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(module.eval(), (example,))


def kinds(module: Any) -> list[str]:
    return [node.kind() for node in module.graph.nodes()]


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_a_layer_is_two_products(approximate: str) -> None:
    module = Block(approximate)
    fused: Any = fuse(traced(module, torch.randn(3, 16)), "fp32")
    with torch.inference_mode():
        for rows in (2, 1, 7, 300):
            x = torch.randn(rows, 16)
            torch.testing.assert_close(fused(x), module(x), rtol=0, atol=1e-5)
    assert kinds(fused).count("mkldnn::_linear_pointwise") == 2
    assert {"aten::linear", "aten::gelu"}.isdisjoint(kinds(fused))


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("bf16", 1e-2)])
def test_an_encoder_gives_the_same(dtype: str, tolerance: float) -> None:
    encoder = load_encoder(SMALL_ENCODER, seed=0).candidates.pick("mean")
    script = trace(encoder)
    if dtype == "bf16":
        script.trunk.to(torch.bfloat16)
    fused: Any = fuse(script, dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for rows, width in ((2, 9), (1, 8), (5, 40)):
            ids = torch.randint(0, 30_000, (rows, width), generator=generator)
            mask = torch.ones_like(ids)
            mask[0, width // 2 :] = 0
            torch.testing.assert_close(fused(ids, mask), encoder(ids, mask), rtol=0, atol=tolerance)
    if dtype == "bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert fused is script, "this processor packs no weights in BF16"
        return
    assert kinds(fused).count("mkldnn::_linear_pointwise") == 36
    assert kinds(fused).count("aten::linear") == 1  # the head, of one output


def test_every_shape_of_inputs_gives_the_same() -> None:
    """Without a batch, without rows, and with strides of all kinds."""
    module = Block()
    fused: Any = fuse(traced(module, torch.randn(3, 16)), "fp32")
    inputs = (torch.randn(16), torch.randn(0, 16), torch.randn(2, 3, 4, 16), torch.randn(16, 5).t())
    with torch.inference_mode():
        for x in (*inputs, torch.randn(1, 16).expand(4, 16), torch.randn(4, 7, 32)[:, ::2, :16]):
            torch.testing.assert_close(fused(x), module(x), rtol=0, atol=1e-5)


def test_nan_and_infinity_are_kept() -> None:
    module = Block()
    fused: Any = fuse(traced(module, torch.randn(3, 16)), "fp32")
    x = torch.full((2, 16), float("nan"))
    with torch.inference_mode():
        assert fused(x).isnan().all()


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_graphs_without_fusible_layers_are_unchanged(dtype: str) -> None:
    module: nn.Module = nn.Tanh() if dtype == "fp32" else nn.Linear(4, 4)
    script = traced(module, torch.randn(2, 4))
    x = torch.randn(3, 4)
    assert torch.equal(fuse(script, dtype)(x), module(x))
