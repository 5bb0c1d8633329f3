"""The choice of a step's tokens: all rows at once, in torch and in NumPy, beside the rule row by row.

    python benchmarks/sampling.py [--rounds 5]

16 rows of random logits, normal times 4 and, "flat", times 2; vocabularies of 128,256 (Llama 3) and 256,000 tokens. The
forms take turns. The result, with hardware and versions, goes to benchmarks/results/sampling-DATE.json.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
import typer
from records import dumps, write_record

from shoal.generation.choosing import Chooser, choose
from shoal.generation.contract import TokenRequest
from shoal.generation.sampling import Sampling
from shoal.machine import describe_machine, library_versions

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.sampler import Reference

ROWS, STEPS = 16, 5
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8": {"temperature": 0.8},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top_p 0.9, flat": {"temperature": 0.8, "top_p": 0.9},
}


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
            rows: list[tuple[Chooser, list[int]]] = [(Chooser(request), []) for request in requests]
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
    }  # fmt: skip
    print(dumps(found))
    print(write_record("sampling", result))


if __name__ == "__main__":
    typer.run(main)
