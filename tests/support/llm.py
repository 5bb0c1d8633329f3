"""Language models for tests: an engine's component on one, and ``generate`` as the oracle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import json_format
from tokenizers import Tokenizer

from shoal.authoring.repository.config import read_config
from shoal.authoring.repository.loading import component_class
from shoal.kit.component.context import Context
from shoal.kit.component.spec import DTYPES, ModelSpec
from shoal.kit.component.tensors import Device
from shoal.kit.generation.sampling import NUMBERS
from shoal.lab.tiny_llm import make_tiny
from tests.support.once import ROOT, once

ENGINE = ROOT / "models" / "llm-hf"
SENTENCES = [
    "The cat sat on the mat, and watched the rain.",
    "Der Fluss trägt den Regen von den Hügeln zum Meer, größer und größer.",
    "Однажды маленькая рыба потеряла свою стаю.",
    "从前有一条小鱼，它问月亮回家的路。",
    "كان البحر هادئا في ذلك الصباح. 🐟🌊",
]


def find_trained() -> Path:
    """Return the weights of a tiny model that was trained to answer six questions. Nothing may be changed in there."""
    depends_on = [ROOT / "src" / "shoal" / "lab" / "tiny_llm.py"]
    return once("tiny-llm", lambda folder: make_tiny(folder, steps=150), depends_on=depends_on)


def engine_spec(model: str | Path, folder: Path = ENGINE, **parameters: str) -> ModelSpec:
    """The declaration of an engine, by its model folder, with these parameters."""
    message = read_config(folder).message
    spec = ModelSpec.from_config(json_format.MessageToDict(message, preserving_proto_field_name=True))
    return replace(spec, parameters={**spec.parameters, "model": str(model), **parameters})


@contextmanager
def open_engine(
    model: str | Path, folder: Path = ENGINE, device: Device | None = None, *, threads: int = 1, **parameters: str
) -> Iterator[Any]:
    """The component of an engine in this process, by default with one compute thread, and on the host."""
    spec = engine_spec(model, folder, **parameters)
    component = component_class(folder / "1" / "model.py")(
        Context(spec, folder / "1", device or Device(), num_threads=threads)
    )
    try:
        yield component
    finally:
        component.close()


def token_inputs(ids: list[int], new: int, **more: Any) -> dict[str, Any]:
    """The inputs of one request, greedy unless ``more`` says otherwise, without an end token."""
    dtypes: dict[str, Any] = {row.tensor: DTYPES[f"TYPE_{row.dtype}"] for row in NUMBERS}
    dtypes |= {"streaming": np.bool_, "stop": np.bool_, "return_log_probs": np.bool_, "carry": np.object_}
    dtypes["guide"] = np.object_
    given = {"input_lengths": len(ids), "request_output_len": new, "end_id": -1, "temperature": 0.0} | more
    arrays = {
        name: np.asarray(value, dtypes.get(name, np.int32)).reshape((1, *(np.shape(value) or (1,))))
        for name, value in given.items()
        if value is not None
    }
    return {"input_ids": np.array([ids], np.int32), **arrays}


def tokens_of(answers: Any) -> list[int]:
    """All tokens of a stream's answers, each of which says how many it has."""
    found: list[int] = []
    for answer in answers:
        assert answer["sequence_length"].item() == answer["output_ids"].shape[2]
        found += answer["output_ids"].ravel().tolist()
    return found


def open_sequences(component: Any) -> list[Any]:
    """The requests that the component's engine, on transformers or ONNX Runtime, computes or lets wait."""
    engine = component.engine
    if hasattr(engine, "_sequences"):
        return [*engine._sequences.values(), *engine._waiting]  # also those that have ended, and hold pages yet
    sequences = {*engine._waiting, *engine._arriving.sequences, *engine._open.sequences}
    return [sequence for sequence in sequences if sequence.stream.is_open]


def count_open(component: Any) -> int:
    return len(open_sequences(component))


def cut(tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str], least: int = 0) -> tuple[str, str, int]:
    """Text, reason and count of an answer, from every beginning of its tokens: the plainest reference.

    The first beginning, of more than ``least`` tokens, with a new stop string ends the answer. Incomplete characters at
    its end are not text yet.
    """
    seen = max(len(tokenizer.decode(list(ids[:number])).rstrip("\ufffd")) for number in range(least + 1))
    for number in range(least + 1, len(ids) + 1):
        text = tokenizer.decode(list(ids[:number])).rstrip("\ufffd")
        places = [(text.find(stop, max(0, seen + 1 - len(stop))), len(stop)) for stop in stops]
        if ends := [(place + size, place) for place, size in places if place >= 0]:
            return text[: min(ends)[1]], "stop", number
    return tokenizer.decode(list(ids)), "length", len(ids)
