"""Cost of weights in 8 and 4 bits to a language model on OpenVINO: memory, agreement, perplexity.

    python benchmarks/quantised.py WEIGHTS

WEIGHTS is a model's folder. The models read shoal's passages, at most 150 tokens of each: agreement with transformers
in FP32 is the share of places with the same most probable next token, perplexity that of the passages' own tokens. The
result, with hardware and versions, goes to benchmarks/results/quantised-DATE.json.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import openvino
import torch
import typer
from records import dumps, write_record
from transformers import AutoTokenizer

from shoal.authoring.composition.openvino_weights import make_openvino
from shoal.authoring.composition.weights import find
from shoal.kit.generation.engines.loading import load_model
from shoal.kit.generation.weights import OPENVINO, OPENVINO_WEIGHTS, QUANTIZED, find_weights
from shoal.readability.corpus import read_passages
from shoal.system.machine import describe_machine, library_versions

MOST = 150  # tokens
Logits = Callable[[list[int]], torch.Tensor]


def read(compute: Logits, prompts: list[list[int]]) -> tuple[Any, Any]:
    """Return the most probable next token at each place, and the log probability of each token that is there."""
    tokens, sure = [], []
    for ids in prompts:
        logits = compute(ids)[:-1].double()
        tokens.append(logits.argmax(-1))
        sure.append(logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
    return torch.cat(tokens), torch.cat(sure)


def open_torch(weights: Path) -> Logits:
    model = load_model(find_weights(weights), "float32", os.cpu_count() or 1)

    def compute(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return torch.as_tensor(model(torch.tensor([ids])).logits[0])

    return compute


def open_openvino(folder: Path) -> Logits:
    """The whole model, with the state that keeps keys and values empty before each text."""
    request = openvino.Core().compile_model(folder / OPENVINO, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    running = request.create_infer_request()

    def compute(ids: list[int]) -> torch.Tensor:
        running.reset_state()
        places = np.arange(len(ids), dtype=np.int64)[None]
        whole = {
            "input_ids": np.array([ids], np.int64), "attention_mask": np.ones_like(places), "position_ids": places,
            "beam_idx": np.zeros(1, np.int32),
        }  # fmt: skip
        names = {name for each in request.inputs for name in each.get_names()}
        found = running.infer({name: value for name, value in whole.items() if name in names})
        return torch.tensor(found["logits"][0])

    return compute


def main(weights: Path) -> None:
    """Measure and record."""
    weights = weights.resolve()
    tokenizer = AutoTokenizer.from_pretrained(weights)
    prompts = [tokenizer(text).input_ids[:MOST] for text in read_passages().texts]
    right, sure = read(open_torch(weights), prompts)
    found: dict[str, Any] = {"transformers": {"perplexity": round(float((-sure.mean()).exp()), 3)}}
    with tempfile.TemporaryDirectory(prefix="shoal-quantised-") as home:
        for kind in QUANTIZED:
            folder = make_openvino(find(str(weights)), Path(home) / kind, kind).folder
            tokens, sure = read(open_openvino(folder), prompts)
            found[f"OpenVINO, {kind}"] = {
                "bytes of weights": (folder / OPENVINO_WEIGHTS).stat().st_size,
                "agreement": round(float((tokens == right).float().mean()), 4),
                "perplexity": round(float((-sure.mean()).exp()), 3),
            }
    result = {
        "date": time.strftime("%Y-%m-%d"), "machine": describe_machine(), "model": weights.name,
        "versions": library_versions("torch", "transformers", "openvino", "openvino-genai", "nncf"),
        "places": sum(len(ids) - 1 for ids in prompts), "forms": found,
    }  # fmt: skip
    print(dumps(result))
    print(write_record("quantised", result))


if __name__ == "__main__":
    typer.run(main)
