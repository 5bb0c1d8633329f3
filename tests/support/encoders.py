"""Encoders asked in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

import shoal

WIDTH = 24


def ask(folder: str | Path, kind: Any, ids: NDArray[Any], mask: NDArray[Any]) -> Any:
    """Return transformers' answer."""
    model = kind.from_pretrained(folder).eval()
    with torch.inference_mode():
        return model(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask))


def embed(hidden: torch.Tensor, mask: NDArray[Any], pooling: str, *, is_normalised: bool) -> NDArray[Any]:
    """Embed texts as in the model card of sentence-transformers/all-MiniLM-L6-v2."""
    expanded = torch.from_numpy(mask).unsqueeze(-1).expand(hidden.size()).float()
    mean = (hidden * expanded).sum(1) / expanded.sum(1).clamp(min=1e-9)
    pooled = hidden[:, 0] if pooling == "cls" else mean
    return (torch.nn.functional.normalize(pooled, p=2, dim=1) if is_normalised else pooled).numpy()


def pipeline(project: Path, encoder: str, tokenizer: str, name: str) -> None:
    made = shoal.Ensemble(name, projects=[project])
    tokens = made.step(tokenizer, TEXT=made.input("TEXT", "STRING", [1]))
    out = made.step(encoder, INPUT__0=tokens["input_ids"], INPUT__1=tokens["attention_mask"])
    made.output("ANSWER", out["OUTPUT__0"])
    made.write(project / "ensembles" / name)
