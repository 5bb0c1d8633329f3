"""The choice of a step's tokens: all rows at once, in torch and in NumPy, beside the rule row by row.

    python benchmarks/sampling.py [--rounds 5]

16 rows of random logits, normal times 4 and, "flat", times 2; vocabularies of 128,256 (Llama 3) and 256,000 tokens. The
forms take turns. Then tokens per second of llm-hf and llm-onnx with 1 and 16 streams, for a model of 15 million
parameters beside its 128,256 embeddings, with the rule row by row, with all rows at once, and so with a guide for each
row (a list of texts as JSON), in turns. The result, with hardware and versions, goes to
benchmarks/results/sampling-DATE.json.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
import typer
from records import dumps, write_record
from transformers import LlamaConfig, LlamaForCausalLM

from shoal.authoring.project.importing.add_model import add_model
from shoal.kit.generation import answering
from shoal.kit.generation.contract import TokenRequest
from shoal.kit.generation.sampler import Sampler, choose
from shoal.kit.generation.sampling import Sampling
from shoal.lab.tiny_llm import make_tiny
from shoal.system.machine import describe_machine, library_versions

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.llm import ENGINE, open_engine, token_inputs, tokens_of
from tests.support.sampler import Reference

ROWS, STEPS = 16, 5
GUIDE = {"json": {"type": "array", "items": {"type": "string"}, "minItems": 500}}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8": {"temperature": 0.8},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top_p 0.9, flat": {"temperature": 0.8, "top_p": 0.9},
}


def choose_row_by_row(logits: Any, rows: Any) -> list[tuple[int, None]]:
    """Choose by the rule row by row, in the place of ``choose``."""
    array = logits if isinstance(logits, np.ndarray) else logits.float().numpy()
    found: list[tuple[int, None]] = []
    for row, held in zip(array, rows, strict=True):
        if held is None:
            found.append((0, None))
            continue
        sampler, ids = held
        if not hasattr(sampler, "reference"):
            sampler.reference = Reference(sampler.request)
        found.append((sampler.reference.choose(row, ids), None))
    return found


def fill_vocabulary(path: Path, size: int) -> None:
    """Give a tokenizer random words as tokens, up to a vocabulary of ``size``: masks of guides cover them."""
    document, draw = json.loads(path.read_text(encoding="utf-8")), random.Random(0)
    vocabulary = document["model"]["vocab"]
    while len(vocabulary) < size:
        word = draw.choice(["", "\u0120"]) + "".join(draw.choices("etaoinshrdlucmfwypvbgkjqxz", k=draw.randint(3, 9)))
        vocabulary.setdefault(word, len(vocabulary))
    path.write_text(json.dumps(document), encoding="utf-8")


def make_model(folder: Path) -> Path:
    """Make a Llama with random weights, a vocabulary of 128,256 tokens and 15 million parameters beside it."""
    make_tiny(folder, hidden=8, layers=1)
    fill_vocabulary(folder / "tokenizer.json", 128_256)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128_256, hidden_size=384, intermediate_size=1024, num_hidden_layers=9, num_attention_heads=6,
        num_key_value_heads=3, max_position_embeddings=1024, tie_word_embeddings=True, initializer_range=0.1,
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def measure_engines(rounds: int, new: int = 40) -> dict[str, Any]:
    """Return tokens a second by engine, streams, setting and rule: medians over rounds."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = make_model(Path(made, "weights"))
        project = Path(made, "project")
        add_model(str(folder), "big-onnx", project=project, task="generate")
        for name, model in (("llm-hf", ENGINE), ("llm-onnx", project / "models" / "big-onnx")):
            with open_engine(
                folder if name == "llm-hf" else "", model, threads=os.cpu_count() or 1, slots="16"
            ) as component:
                for streams in (1, 16):
                    for setting in ("greedy", "temperature 0.8"):
                        settings = SETTINGS[setting] | {"runtime_top_p": 1.0}
                        rates: dict[str, list[float]] = {"row by row": [], "all rows": [], "guided": []}
                        for _ in range(rounds + 1):
                            for rule, each in rates.items():
                                answering.choose = choose_row_by_row if rule == "row by row" else choose
                                own = settings | ({"guide": json.dumps(GUIDE)} if rule == "guided" else {})
                                start = time.perf_counter()
                                asked = [
                                    component.stream(token_inputs([5, 6, 7 + k], new, **own)) for k in range(streams)
                                ]
                                count = sum(len(tokens_of(stream)) for stream in asked)
                                each.append(count / (time.perf_counter() - start))
                        found.setdefault(name, {}).setdefault(f"{streams} streams", {})[setting] = {
                            rule: round(float(np.median(each[1:])), 1) for rule, each in rates.items()
                        }
    return found


def main(rounds: int = 5) -> None:
    """Measure and record; milliseconds per step, medians over rounds of the mean of 5 steps."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for size in (128_256, 256_000):
        logits = np.random.default_rng(0).normal(size=(ROWS, size))
        for name, settings in SETTINGS.items():
            given = (logits * (2 if "flat" in name else 4)).astype(np.float32)
            tensor = torch.from_numpy(given)
            requests = [TokenRequest((1,), STEPS, (), Sampling(seed=row, **settings)) for row in range(ROWS)]
            references = [Reference(request) for request in requests]
            rows: list[tuple[Sampler, list[int]]] = [(Sampler(request), []) for request in requests]
            forms: dict[str, Callable[[], Any]] = {
                "row by row": lambda references=references, given=given: [
                    one.choose(row, []) for one, row in zip(references, given, strict=True)
                ],
                "torch": lambda rows=rows, tensor=tensor: choose(tensor, rows),
                "NumPy": lambda rows=rows, given=given: choose(given, rows),
            }
            times: dict[str, list[float]] = {form: [] for form in forms}
            for _ in range(rounds + 1):
                for form, run in forms.items():
                    start = time.perf_counter()
                    for _ in range(STEPS):
                        run()
                    times[form].append(1e3 * (time.perf_counter() - start) / STEPS)
            found.setdefault(str(size), {})[name] = {
                form: round(float(np.median(each[1:])), 2) for form, each in times.items()
            }
    result = {
        "date": time.strftime("%Y-%m-%d"), "machine": describe_machine(),
        "versions": library_versions("torch", "numpy"), "rows": ROWS, "rounds": rounds, "ms_per_step": found,
        "tokens_per_second": measure_engines(rounds),
    }  # fmt: skip
    print(dumps(result))
    print(write_record("sampling", result))


if __name__ == "__main__":
    typer.run(main)
