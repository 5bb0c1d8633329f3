"""Fused TorchScript: the module's own answers, in fewer kernels; where that cannot be, the module itself."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.encoders.export import trace
from shoal.encoders.fusing import fuse
from shoal.encoders.packaged import SMALL_ENCODER
from shoal.readability.encoder import load_encoder


class Block(nn.Module):
    """What an encoder's layer does after attention."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.gelu = nn.GELU(approximate=approximate)

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm(x)
        mixed: Tensor = self.down(self.gelu(self.up(normal))) + normal
        return mixed


class Broadcasting(Block):
    """Its sum is wider than its product, which the fused operator does not know."""

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.down(self.up(x.mean(0, keepdim=True))) + self.norm(x)
        return mixed


class Small(Block):
    """Values of a size that an absolute tolerance would let pass, whatever they are."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1e-6


class SmallAndWrong(Broadcasting):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1e-5


class SummedUp(Broadcasting):
    """Its output has one shape, right or wrong."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().sum(0, keepdim=True)


def traced(module: nn.Module, example: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(module.eval(), (example,))


def kinds(module: Any) -> list[str]:
    return [node.kind() for node in module._fused.graph.nodes()]


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_a_layer_is_two_products(approximate: str) -> None:
    module = Block(approximate)
    fused: Any = fuse(traced(module, torch.randn(3, 16)), "fp32")
    with torch.inference_mode():
        for rows in (2, 1, 7, 300):
            x = torch.randn(rows, 16)
            torch.testing.assert_close(fused(x), module(x), rtol=0, atol=1e-5)
    assert kinds(fused).count("mkldnn::_linear_pointwise") == 2
    assert {"aten::linear", "aten::gelu", "aten::add"}.isdisjoint(kinds(fused))


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


@pytest.mark.parametrize("module", [Broadcasting(), SmallAndWrong(), SummedUp()], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("numbers", [(3, 1, 5, 2), (1, 1, 1, 1, 3), (1, 4, 1, 1)])
def test_what_fuses_wrongly_is_served_as_it_is(
    module: nn.Module, numbers: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    fused: Any = fuse(traced(module, torch.randn(3, 16)), "fp32")
    assert "aten::add" not in kinds(fused)
    with torch.inference_mode(), caplog.at_level(logging.WARNING):
        for rows in numbers * 2:
            x = torch.randn(rows, 16)
            assert torch.equal(fused(x), module(x))
    assert "TorchScript is served as it is" in caplog.text
    assert fused._module is None


def test_one_row_is_proof_enough_with_itself_backwards() -> None:
    module = Block()
    fused: Any = fuse(traced(module, torch.randn(3, 16)), "fp32")
    with torch.inference_mode():
        fused(torch.randn(1, 16))
        assert fused._module is None
        x = torch.randn(5, 16)
        torch.testing.assert_close(fused(x), module(x), rtol=0, atol=1e-5)
    assert "mkldnn::_linear_pointwise" in kinds(fused)


def test_no_rows_prove_nothing() -> None:
    fused: Any = fuse(traced(Block(), torch.randn(3, 16)), "fp32")
    with torch.inference_mode():
        assert fused(torch.randn(0, 16)).shape == (0, 16)
    assert fused._module is not None


def test_small_values_are_compared_by_their_own_size() -> None:
    fused: Any = fuse(traced(Small(), torch.randn(3, 16)), "fp32")
    with torch.inference_mode():
        fused(torch.randn(2, 16))
    assert fused._module is None
    assert "mkldnn::_linear_pointwise" in kinds(fused)


def test_one_score_near_zero_condemns_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding is all that is left of it; the next batch decides."""
    fused: Any = fuse(traced(Block(), torch.randn(3, 16)), "fp32")
    decide, rounded = fused._is_same, [False]
    monkeypatch.setattr(fused, "_is_same", lambda *both: rounded.pop() if rounded else decide(*both))
    with torch.inference_mode():
        fused(torch.randn(2, 16))
        assert fused._module is not None
        fused(torch.randn(2, 16))
    assert fused._module is None
    assert "mkldnn::_linear_pointwise" in kinds(fused)


def test_values_that_are_no_numbers_stay_what_they_are() -> None:
    module = Block()
    fused: Any = fuse(traced(module, torch.randn(3, 16)), "fp32")
    x = torch.full((2, 16), float("nan"))
    with torch.inference_mode():
        assert fused(x).isnan().all()
        assert "mkldnn::_linear_pointwise" in kinds(fused)


def test_a_request_that_fails_proves_nothing() -> None:
    module = Block()
    fused: Any = fuse(traced(module, torch.randn(3, 16)), "fp32")
    with torch.inference_mode(), pytest.raises(RuntimeError):
        fused(torch.randn(3, 15))
    with torch.inference_mode():
        x = torch.randn(4, 16)
        torch.testing.assert_close(fused(x), module(x), rtol=0, atol=1e-5)
    assert "mkldnn::_linear_pointwise" in kinds(fused)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_what_has_nothing_to_fuse_is_left_alone(dtype: str) -> None:
    module: nn.Module = nn.Tanh() if dtype == "fp32" else nn.Linear(4, 4)
    script = traced(module, torch.randn(2, 4))
    x = torch.randn(3, 4)
    assert torch.equal(fuse(script, dtype)(x), module(x))
