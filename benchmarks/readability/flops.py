"""What an encoder computes, and how fast this machine multiplies matrices.

The count is of matrix products alone, two FLOP a multiply-add; embeddings, norms, softmax and activations are left out,
as is usual. So a share of the matrix rate says how much of the time the products would take at their best.
"""

from __future__ import annotations

import time

import torch

# A square product, and one of BERT-large's: sixteen rows of 224 tokens into a hidden state four times as wide.
SHAPES = {"4096x4096x4096": (4096, 4096, 4096), "3584x1024x4096": (3584, 1024, 4096)}


def encoder_flop(num_tokens: int, *, layers: int, hidden: int) -> int:
    """FLOP of one row of ``num_tokens`` true tokens through a BERT trunk.

    A layer multiplies each token by 12 ``hidden``^2 weights (four projections of the attention, and up and down by a
    factor of four), and has two products of ``num_tokens``^2 by ``hidden`` in the attention.
    """
    return num_tokens * (24 * layers * hidden**2 + 4 * num_tokens * hidden * layers)


def matrix_rates(dtype: torch.dtype, *, seconds: float = 1.0) -> dict[str, float]:
    """TFLOP/s of ``torch.matmul``, by shape, with all of torch's threads; the best of several calls."""
    return {name: round(_rate(*shape, dtype, seconds), 4) for name, shape in SHAPES.items()}


def _rate(rows: int, inner: int, columns: int, dtype: torch.dtype, seconds: float) -> float:
    left, right = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
    out, best, end = torch.empty(rows, columns, dtype=dtype), float("inf"), 0.0
    torch.matmul(left[:64], right, out=out[:64])  # warm
    while not end or time.perf_counter() < end:
        start = time.perf_counter()
        torch.matmul(left, right, out=out)
        best = min(best, time.perf_counter() - start)
        end = end or start + seconds
    return 2 * rows * inner * columns / best / 1e12
