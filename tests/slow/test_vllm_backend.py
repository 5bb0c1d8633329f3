"""NVIDIA's own vLLM backend beside the pipelines with llm-vllm: the same weights, prompts and environment.

SHOAL_VLLM_BACKEND names a clone of https://github.com/triton-inference-server/vllm_backend.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from shoal.authoring.composition.compose import compose
from shoal.authoring.composition.environments import ALL
from shoal.authoring.repository.config import read_config, write_config
from shoal.authoring.repository.plan import Plan
from shoal.clients.client.client import Client
from shoal.clients.llm.client import Llm
from shoal.lab.tiny_llm import make_tiny
from shoal.serving.server.launch import serve
from tests.conftest import Record, Scale
from tests.support.once import ROOT
from tests.support.vllm import ARGUMENTS, SPIN, find_vllm

OWN = "SHOAL_VLLM_BACKEND"
PROMPTS = [f"{animal} {place}" for animal in ("A cat", "The fish", "Ein Fisch", "Маленькая рыба") for place in "abcd"]
PIPELINES = ("llm", "llm_bls", "together")  # the last is llm_bls with the engine in its process
# Of commit 8de0c14, for vLLM 0.32 in a stub of Triton 24.10: the stub's locale is C, and two names have moved.
CHANGES = {
    "model.py": ("import asyncio\n", 'import locale\n\nlocale.setlocale(locale.LC_CTYPE, "C.UTF-8")\nimport asyncio\n'),
    "utils/metrics.py": (
        "from vllm.v1.metrics.loggers import StatLoggerBase, build_1_2_5_buckets\n",
        "from vllm.v1.metrics.buckets import build_1_2_5_buckets\nfrom vllm.v1.metrics.loggers import StatLoggerBase\n",
    ),
    "utils/request.py": ("from vllm.inputs.data import TokensPrompt\n", "from vllm.inputs import TokensPrompt\n"),
}
Stream: TypeAlias = Callable[[str, str, int], Iterator[str]]


@pytest.fixture(scope="module")
def client(scale: Scale, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Both pipelines, and ``vllm`` with NVIDIA's code, which runs as a model of the Python backend."""
    if OWN not in os.environ:
        pytest.skip(f"{OWN} names no clone of NVIDIA's vllm_backend")
    place = tmp_path_factory.mktemp("backend")
    size = {"hidden": 512, "layers": 6} if scale.is_full else {}
    weights, environment = make_tiny(place / "weights", **size), find_vllm()
    own = shutil.copytree(ROOT / "models" / "llm-vllm", place / "own" / "models" / "llm-vllm") / "config.pbtxt"
    own.write_text(own.read_text(encoding="utf-8").replace('"{}"', f"'{ARGUMENTS}'"), encoding="utf-8")
    how: dict[str, Any] = {"projects": [place / "own"], "weights": weights, "swap": {"llm-hf": "llm-vllm"}}
    repository = compose(PIPELINES[:2], place / "repository", environments={"llm-vllm": environment}, **how)
    hosting = compose("llm_bls", place / "hosting", environments={ALL: environment}, is_together=True, **how)
    message = read_config(shutil.copytree(hosting / "llm_bls", repository / "together")).message
    message.name = "together"
    write_config(message, repository / "together" / "config.pbtxt", comment="For a comparison.")
    apart = compose("vllm", place / "apart", weights=weights, plan=Plan(target="26.06"))
    shutil.copytree(apart / "vllm", repository / "vllm")
    engine = read_config(repository / "llm-vllm").message
    (repository / "manifest.json").unlink()  # what follows it does not know
    _install(Path(os.environ[OWN]) / "src", repository / "vllm", engine.parameters["EXECUTION_ENV_PATH"].string_value)
    with serve(repository, timeout=400) as server, Client(server.grpc_url) as found:
        yield found


def _install(source: Path, folder: Path, environment: str) -> None:
    shutil.copytree(source, folder / "1", dirs_exist_ok=True)
    for name, (old, new) in CHANGES.items():
        path = folder / "1" / name
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{name} is of another version"
        path.write_text(text.replace(old, new), encoding="utf-8")
    path = folder / "1" / "model.json"
    arguments = json.loads(path.read_text(encoding="utf-8")) | json.loads(ARGUMENTS)
    arguments["dtype"] = "float32"  # as llm-vllm; vLLM's own choice for such weights has 16 bits
    path.write_text(json.dumps(arguments), encoding="utf-8")
    message = read_config(folder).message
    message.backend = "python"
    message.parameters["EXECUTION_ENV_PATH"].string_value = environment
    write_config(message, folder / "config.pbtxt", comment="For a comparison.")


@pytest.fixture(scope="module")
def stream(client: Client) -> Stream:
    """The pieces of a greedy answer of exactly so many tokens, of a pipeline or of NVIDIA's backend."""

    def ask(model: str, prompt: str, new: int) -> Iterator[str]:
        if model != "vllm":
            return (piece.text for piece in Llm(client, model).stream(prompt, max_tokens=new, min_tokens=new))
        settings = json.dumps({"temperature": 0, "max_tokens": new, "min_tokens": new})
        given: dict[str, Any] = {"text_input": [prompt], "stream": [True], "sampling_parameters": [settings]}
        return (answer["text_output"].item().decode() for answer in client.stream(model, given))

    return ask


def test_texts_are_those_of_nvidias_backend(stream: Stream) -> None:
    """But for an unfinished character at the end, which vLLM leaves out of a stream."""
    with ThreadPoolExecutor(len(PROMPTS)) as callers:
        theirs, *ours = (
            list(callers.map(lambda prompt, m=model: "".join(stream(m, prompt, 24)).rstrip("\ufffd"), PROMPTS))
            for model in ("vllm", *PIPELINES)
        )
    assert len(set(theirs)) > 1
    for found in ours:
        assert found == theirs


def test_speed_compared_with_nvidias_backend(stream: Stream, scale: Scale, record: Record) -> None:
    """Milliseconds to the first piece of one stream, and tokens per second of 16 streams, in turns."""
    new, rounds = scale(8, 100), scale(1, 5)
    models = ("vllm", *PIPELINES)
    first: dict[str, list[float]] = {model: [] for model in models}
    rates: dict[str, list[float]] = {model: [] for model in models}
    with ThreadPoolExecutor(len(PROMPTS)) as callers:
        for _ in range(rounds):
            for model in models:
                time.sleep(scale(0, SPIN))
                start = time.perf_counter()
                pieces = stream(model, PROMPTS[0], 8)
                next(piece for piece in pieces if piece)
                first[model].append(1000 * (time.perf_counter() - start))
                assert list(pieces)
                start = time.perf_counter()
                texts = list(callers.map(lambda prompt, m=model: "".join(stream(m, prompt, new)), PROMPTS))
                rates[model].append(len(PROMPTS) * new / (time.perf_counter() - start))
                assert all(texts)
    for claim, found in (("ms to the first token", first), ("tokens per second, 16 streams", rates)):
        medians = {model: round(statistics.median(each), 1) for model, each in found.items()}
        record(f"vLLM by NVIDIA's backend and by ours: {claim}", **medians, rounds=rounds)
