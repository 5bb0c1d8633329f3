"""A language model of `llm-hf` in 8 bits beside itself: memory, agreement, tokens per second.

    python benchmarks/quantised.py WEIGHTS [--rounds 5]

WEIGHTS is a model's folder; torchao is needed. The models read shoal's passages, at most 150 tokens of each: agreement
with FP32 is the share of places with the same most probable next token, perplexity that of the passages' own tokens.
Then engines in FP32, BF16 and with int8 of both take turns: tokens a second in one stream and in sixteen, of 32 new
tokens each. The result, with hardware and versions, goes to benchmarks/results/quantised-DATE.json.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
import typer
from records import dumps, write_record
from transformers import AutoTokenizer

from shoal.kit.generation.engines.loading import load_model
from shoal.kit.generation.weights import find_weights
from shoal.readability.corpus import read_passages
from shoal.system.machine import describe_machine, library_versions

sys.path.append(str(Path(__file__).parents[1]))
from tests.slow.test_quantised import weigh
from tests.support.llm import open_engine, token_inputs, tokens_of

FORMS = (("float32", "none"), ("float32", "int8"), ("bfloat16", "none"), ("bfloat16", "int8"))
CORES = os.cpu_count() or 1
NEW, MOST = 32, 150  # tokens


def read(model: Any, prompts: list[list[int]]) -> tuple[Any, Any]:
    """Return the most probable next token at each place, and the log probability of each token that is there."""
    tokens, sure = [], []
    with torch.inference_mode():
        for ids in prompts:
            given = torch.tensor([ids])
            logits = model(given).logits[0, :-1].float()
            tokens.append(logits.argmax(-1))
            sure.append(logits.log_softmax(-1).gather(1, given[0, 1:, None])[:, 0])
    return torch.cat(tokens), torch.cat(sure)


def main(weights: str, rounds: int = 5) -> None:
    """Measure and record; rates are medians over rounds."""
    folder = Path(weights).resolve()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(text).input_ids[:MOST] for text in read_passages().texts]
    found: dict[str, dict[str, Any]] = {}
    right = None
    for dtype, kind in FORMS:
        model = load_model(find_weights(folder), dtype, CORES, quantized=kind)
        tokens, sure = read(model, prompts)
        right = tokens if right is None else right
        found[f"{dtype} {kind}"] = {
            "bytes of weights": weigh(model), "agreement": round(float((tokens == right).float().mean()), 4),
            "perplexity": round(float((-sure.mean()).exp()), 3),
        }  # fmt: skip
    rates: dict[tuple[str, int], list[float]] = {}
    with ExitStack() as stack:
        engines = {
            f"{dtype} {kind}": stack.enter_context(
                open_engine(folder, threads=CORES, dtype=dtype, quantize=kind, context="512")
            )
            for dtype, kind in FORMS
        }
        for _ in range(rounds + 1):
            for form, engine in engines.items():
                for streams in (1, 16):
                    start = time.perf_counter()
                    asked = [engine.stream(token_inputs(prompts[k][:20], NEW)) for k in range(streams)]
                    count = sum(len(tokens_of(stream)) for stream in asked)
                    rates.setdefault((form, streams), []).append(count / (time.perf_counter() - start))
    for (form, streams), each in rates.items():
        found[form][f"tokens per second, {streams}"] = round(float(np.median(each[1:])), 1)
    result = {
        "date": time.strftime("%Y-%m-%d"), "machine": describe_machine(), "model": folder.name,
        "versions": library_versions("torch", "torchao", "transformers", "numpy"), "rounds": rounds,
        "places": sum(len(ids) - 1 for ids in prompts), "forms": found,
    }  # fmt: skip
    print(dumps(result))
    print(write_record("quantised", result))


if __name__ == "__main__":
    typer.run(main)
