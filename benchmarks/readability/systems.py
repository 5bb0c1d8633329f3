"""The systems that take turns: shoal's pipeline as it is served, the bare models, and the recipe in this process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flops import encoder_flop

from shoal import Client
from shoal.component.base import Component
from shoal.local import load_component
from shoal.repository.config import read_config

ENSEMBLE = "ensemble_all"
TIMEOUT = 3600.0


@dataclass(frozen=True)
class Walk:
    """Texts in an endless round: every system gets the same requests in the same order."""

    texts: Sequence[str]

    def request(self, index: int, num_rows: int) -> list[str]:
        """The texts of the request with this number, of those with ``num_rows`` each."""
        return [self.texts[(index * num_rows + k) % len(self.texts)] for k in range(num_rows)]


class Ours:
    """``ensemble_all`` on a server, asked over gRPC."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def score(self, texts: Sequence[str]) -> Any:
        """FP32 ``[len(texts)]``."""
        return self._client.infer(ENSEMBLE, excerpt=list(texts), timeout=TIMEOUT)["SCORE"][:, 0]


@dataclass
class Prepared:
    """What a batch of texts is to the models, and what it costs the encoder."""

    tensors: dict[str, Any]  # the preprocessing component's outputs
    num_tokens: Any  # INT64 [rows], true tokens
    flop: int


@dataclass
class Spent:
    """Seconds in the models since it was last asked, and what they computed."""

    encoder: float = 0.0
    forest: float = 0.0
    rows: int = 0
    flop: int = 0


@dataclass
class Bare:
    """The components of a repository, each called by itself in this process.

    ``send`` runs encoder and forest on tensors that were prepared before: no text, no server, no blend. It is the limit
    of what a pipeline around these models can reach. ``preprocess`` is timed on texts that it has not seen.
    """

    repository: Path
    walk: Walk
    batch: int
    geometry: Mapping[str, int]
    spent: Spent = field(default_factory=Spent)

    def __post_init__(self) -> None:
        self.encoder, self.forest, self.preprocess, self.postprocess = (
            self._load(name) for name in ("bert-large", "cuml", "preprocess", "postprocess")
        )
        reader = self._load("preprocess")
        number = max(1, len(self.walk.texts) // self.batch)
        self.batches = [self._prepare(reader, index) for index in range(number)]
        self._next = number // 2
        for index in range(self._next):  # words of a language repeat: a server has met most of them
            run_component(self.preprocess, INPUT0=self._excerpts(index))

    def _load(self, name: str) -> Component:
        return load_component(read_config(self.repository / name))

    def _excerpts(self, index: int) -> Any:
        return np.array([[text.encode()] for text in self.walk.request(index, self.batch)], np.object_)

    def _prepare(self, reader: Component, index: int) -> Prepared:
        tensors = run_component(reader, INPUT0=self._excerpts(index))
        num_tokens = tensors["BERT_AM"].sum(axis=1)
        return Prepared(tensors, num_tokens, sum(encoder_flop(n, **self.geometry) for n in num_tokens.tolist()))

    def send(self, index: int) -> int:
        """Run the models on a batch."""
        prepared = self.batches[index % len(self.batches)]
        start = time.perf_counter()
        self.run_encoder(prepared)
        middle = time.perf_counter()
        self.forest.run({"input__0": prepared.tensors["TREE_FEATS"]})
        self.spent.encoder += middle - start
        self.spent.forest += time.perf_counter() - middle
        self.spent.rows += self.batch
        self.spent.flop += prepared.flop
        return self.batch

    def run_encoder(self, prepared: Prepared) -> Any:
        """Scores of a prepared batch: FP32 ``[rows, 1]``."""
        ids, mask = prepared.tensors["BERT_IDS"], prepared.tensors["BERT_AM"]
        return self.encoder.run({"INPUT__0": ids, "INPUT__1": mask})["OUTPUT__0"]

    def steps(self) -> dict[str, float]:
        """Milliseconds a sample by component, of what was run since it was last asked, and TFLOP/s of the encoder."""
        spent, self.spent = self.spent, Spent()
        scores = np.zeros((self.batch, 1), np.float32)
        pre, post = [], []
        for _ in range(3):
            excerpts = self._excerpts(self._next)
            self._next += 1
            pre.append(_seconds(self.preprocess, INPUT0=excerpts))
            post.append(_seconds(self.postprocess, BERT_LARGE_SCORE=scores, CUML_SCORE=scores))
        sample = {
            "preprocess": float(np.median(pre)) / self.batch,
            "encoder": spent.encoder / spent.rows,
            "forest": spent.forest / spent.rows,
            "postprocess": float(np.median(post)) / self.batch,
        }
        share = 1 - sample["encoder"] / sum(sample.values())
        milliseconds = {f"{name}_ms_a_sample": round(1e3 * seconds, 5) for name, seconds in sample.items()}
        tflops = spent.flop / spent.encoder / 1e12
        return {
            **milliseconds,
            "share_of_all_but_the_encoder": round(share, 5),
            "encoder_tflop_per_s": round(tflops, 4),
        }

    def dtype(self) -> str:
        """The dtype that the encoder's trunk runs in."""
        return self.encoder.context.spec.parameters.get("dtype", "fp32")

    def tokens(self) -> dict[str, Any]:
        """True tokens a sample, and which share of the computed ones is padding: by the three ways of padding."""
        true = sum(int(prepared.num_tokens.sum()) for prepared in self.batches)
        rows = self.batch * len(self.batches)
        longest = sum(int(prepared.num_tokens.max()) * self.batch for prepared in self.batches)
        computed = [self._computed(prepared) for prepared in self.batches[:2]]
        known = sum(int(prepared.num_tokens.sum()) for prepared in self.batches[:2])
        return {
            "true_tokens_a_sample": round(true / rows, 1),
            "padding_share": {
                "to 256": round(1 - true / (256 * rows), 4),
                "to the longest row of the batch": round(1 - true / longest, 4),
                "as shoal's backend computes": round(1 - known / sum(computed), 4) if all(computed) else None,
            },
        }

    def _computed(self, prepared: Prepared) -> int:
        """Tokens that the backend gives to the module for a batch, padding included; 0 where that cannot be seen."""
        sizes: list[int] = []
        call = getattr(self.encoder, "call", None)
        if call is None:
            return 0

        def spy(arrays: Sequence[Any]) -> Any:
            sizes.append(arrays[0].size)
            return call(arrays)

        self.encoder.call = spy
        try:
            self.run_encoder(prepared)
        finally:
            del self.encoder.call
        return sum(sizes)


def run_component(component: Component, **inputs: Any) -> dict[str, Any]:
    """The outputs of one request."""
    (answer,) = component.process([inputs])
    if isinstance(answer, Exception):
        raise answer
    return dict(answer)


def _seconds(component: Component, **inputs: Any) -> float:
    start = time.perf_counter()
    run_component(component, **inputs)
    return time.perf_counter() - start
