"""The encoder as TorchScript: traced, written, loaded again and compared."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shoal.component.ties import METADATA, dump_ties
from shoal.errors import ArtifactError
from shoal.training.encoder import Encoder, quiet_transformers

TOLERANCE = 1e-5  # between the encoder that was trained and the TorchScript that is served
COMPARED_SHAPES = ((1, 8), (1, 9), (2, 16), (3, 40), (8, 64))


def trace(encoder: Encoder) -> Any:
    """The encoder as TorchScript, good for every batch size and width.

    The example is padded: with a mask of ones alone the attention would take a shortcut and the trace keep it.
    """
    ids = torch.randint(0, _limits(encoder)[0], (2, 13))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    with torch.inference_mode(), quiet_transformers(), warnings.catch_warnings():
        # transformers branches on sizes that do not matter here; what matters is compared afterwards, at other shapes
        warnings.simplefilter("ignore")
        return torch.jit.trace(encoder.eval(), (ids, mask), check_trace=False)


def _limits(encoder: Encoder) -> tuple[int, int]:
    """How many tokens and positions the trunk knows."""
    config: Any = encoder.trunk.config
    return int(config.vocab_size), int(config.max_position_embeddings)


def export_encoder(encoder: Encoder, path: Path, *, ties: Mapping[str, str]) -> None:
    """Write ``model.pt``, load it again and compare it with ``encoder``.

    Raises:
        ArtifactError: scores differ by more than 1e-5 at some shape.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is deprecated, and what Triton serves
        torch.jit.save(trace(encoder), str(path), _extra_files={METADATA: dump_ties(ties)})
        served = torch.jit.load(str(path))
    difference = compare(served, encoder, COMPARED_SHAPES)
    if not difference <= TOLERANCE:
        raise ArtifactError(
            f"{path.name} differs from the trained encoder by {difference:g}.", f"Allowed: {TOLERANCE:g}."
        )


def compare(served: Any, encoder: Encoder, shapes: Sequence[tuple[int, int]]) -> float:
    """The greatest difference of scores over batches of these shapes, padded and unpadded."""
    differences = []
    num_tokens, num_positions = _limits(encoder)
    generator = torch.Generator().manual_seed(0)
    for rows, widest in shapes:
        width = min(widest, num_positions)
        ids = torch.randint(0, num_tokens, (rows, width), generator=generator)
        padded = torch.ones_like(ids)
        padded[:, max(2, width // 2) :] = 0
        for mask in (torch.ones_like(ids), padded):
            with torch.inference_mode():
                differences.append((served(ids, mask) - encoder(ids, mask)).abs().max())
    return float(torch.stack(differences).max())  # NaN where one of them is
