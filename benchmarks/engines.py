"""Engines of language models in this process, in turns: tokens per second, and the time to the first token.

    python benchmarks/engines.py WEIGHTS [--rounds 5] [--kinds llm-hf,llm-openvino,llm-openvino:int8]

A kind is an engine's model folder, or openvino-genai, which is that library in a loop; behind a colon are the bits of
the weights. Each request has a prompt of 32 random tokens and gets 64 new ones, the most probable. Engines have as many
threads as the machine has cores, and no Triton and no client beside them. The result, with hardware and versions, goes
to benchmarks/results/language-engines-DATE.json.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import typer
from records import dumps, write_record

from shoal.authoring.composition.openvino_weights import make_openvino
from shoal.authoring.composition.weights import find
from shoal.kit.generation.weights import NONE, find_weights
from shoal.system.machine import describe_machine, library_versions

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.llm import open_engine, token_inputs

ROOT = Path(__file__).parents[1]
PROMPT, NEW = 32, 64
STREAMS = (1, 16)
LIBRARY = "openvino-genai"


def main(weights: Path, rounds: int = 5, kinds: str = "llm-hf,llm-openvino,llm-openvino:int8") -> None:
    """Measure and record."""
    with ExitStack() as held:
        home = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="shoal-engines-")))
        engines, starts = dict[str, Any](), dict[str, float]()
        for kind in kinds.split(","):
            engine, _, bits = kind.partition(":")
            folder, more = weights.resolve(), dict[str, Any]()
            if engine in ("llm-openvino", LIBRARY):
                folder = make_openvino(find(str(folder)), home / kind.replace(":", "-"), bits or NONE).folder
            elif bits:
                more = {"quantize": bits}
            begun = time.monotonic()
            place = ROOT / "models" / engine
            if engine == LIBRARY:
                engines[kind] = open_library(folder)
                continue
            engines[kind] = held.enter_context(open_engine(folder, place, threads=os.cpu_count() or 1, **more))
            starts[kind] = round(time.monotonic() - begun, 1)
        random = np.random.default_rng(0)
        vocabulary = find_weights(weights).vocabulary
        result = dict[str, Any]()
        for number in STREAMS:
            turns: dict[str, list[tuple[float, float]]] = {kind: [] for kind in engines}
            for at in range(-1, rounds):  # the first one warms up
                prompts = random.integers(0, vocabulary, (number, PROMPT)).tolist()
                for kind in [*engines][:: 1 if at % 2 else -1]:
                    turn = (measure_library if kind.startswith(LIBRARY) else measure)(engines[kind], prompts)
                    turns[kind] += [turn] if at >= 0 else []
            result[f"{number} streams"] = {
                kind: {
                    "tokens_a_second": round(statistics.median(rate for rate, _ in found), 1),
                    "first_token_ms": round(1e3 * statistics.median(first for _, first in found)),
                }
                for kind, found in turns.items()
            }
            print(number, dumps(result[f"{number} streams"]), flush=True)
    write_record(
        "language-engines",
        {
            "date": f"{date.today()}",
            "machine": describe_machine(),
            "versions": library_versions("torch", "transformers", "openvino", "openvino-genai", "onnxruntime"),
            "weights": weights.name,
            "rounds": rounds,
            "start_s": starts,
            "result": result,
        },
    )


def measure(engine: Any, prompts: list[list[int]]) -> tuple[float, float]:
    """Return the tokens per second of prompts that come at once, and the seconds to the first token of the first."""
    begun = time.monotonic()
    streams = [engine.stream(token_inputs(ids, NEW)) for ids in prompts]
    first, tokens = 0.0, 0
    for stream in streams:
        for answer in stream:
            first = first or time.monotonic() - begun
            tokens += answer["sequence_length"].item()
    assert tokens == NEW * len(prompts)
    return tokens / (time.monotonic() - begun), first


def open_library(folder: Path) -> Any:
    """Open the library with the settings of llm-openvino."""
    import openvino_genai

    scheduling = openvino_genai.SchedulerConfig()
    scheduling.num_kv_blocks, scheduling.max_num_seqs, scheduling.max_num_batched_tokens = 256, max(STREAMS), 256
    properties = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    return openvino_genai.ContinuousBatchingPipeline(str(folder), scheduling, "CPU", properties)


def measure_library(pipeline: Any, prompts: list[list[int]]) -> tuple[float, float]:
    """Measure the library as ``measure`` does an engine."""
    import openvino_genai

    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.eos_token_id = NEW, True, -1
    begun, first, tokens = time.monotonic(), 0.0, 0
    tensors = [openvino_genai.openvino.Tensor(np.array([ids], np.int64)) for ids in prompts]
    handles = [pipeline.add_request(number, tensor, config) for number, tensor in enumerate(tensors)]
    while pipeline.has_non_finished_requests():
        pipeline.step()
        for handle in handles:
            while handle.can_read():
                tokens += sum(len(found.generated_ids) for found in handle.read().values())
        if tokens and not first:
            first = time.monotonic() - begun
    assert tokens == NEW * len(prompts)
    return tokens / (time.monotonic() - begun), first


if __name__ == "__main__":
    typer.run(main)
