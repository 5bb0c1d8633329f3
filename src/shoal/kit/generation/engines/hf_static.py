"""Engine with static batches: requests are collected, padded, and computed together until the last one ends."""

from __future__ import annotations

import threading
import time
from queue import Empty, Queue
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from shoal.errors import ShoalError
from shoal.kit.component.stream import Stream
from shoal.kit.generation.answering import RunningSequence, step
from shoal.kit.generation.contract import PROMPT_PLACES, Limits, TokenRequest
from shoal.kit.generation.sampler import Sampler

_WAIT_SECONDS = 0.02  # for more requests, after the first one of a batch
_STOP_SECONDS = 5.0


class _Choice(LogitsProcessor):
    """Logits processor that chooses and sends each row's token, and makes its logit infinite, so that it is taken."""

    def __init__(self, sequences: list[RunningSequence]) -> None:
        self._sequences = sequences

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        tokens = step(scores, [None if sequence.is_done else sequence for sequence in self._sequences])
        return scores.scatter_(1, torch.tensor(tokens, device=scores.device)[:, None], torch.inf)


class _Ends(StoppingCriteria):
    def __init__(self, sequences: list[RunningSequence], closing: threading.Event) -> None:
        self._sequences, self._closing = sequences, closing

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:  # noqa: ARG002
        is_closing = self._closing.is_set()
        ends = [is_closing or sequence.is_done or not sequence.stream.is_open for sequence in self._sequences]
        return torch.tensor(ends, device=input_ids.device)


class HfStaticEngine:
    """Static batches of a transformers model, on its device: for models without continuous batching, and to compare.

    At most ``limits.slots`` requests are computed together with ``generate``. Requests that come later wait until all
    of these have ended. A batch, that is, its longest prompt with its longest answer, has at most ``together`` tokens;
    a request with more tokens is computed alone.
    """

    settings = Sampler.SETTINGS | {PROMPT_PLACES}

    def __init__(self, model: Any, limits: Limits, *, together: int) -> None:
        self.limits = limits
        self._model, self._together = model, together
        self._next: RunningSequence | None = None  # the first of the next batch, if it did not fit into this one
        self._waiting: Queue[RunningSequence] = Queue()
        self._is_closing = threading.Event()
        self._worker = threading.Thread(target=self._work, name="shoal-static", daemon=True)
        self._worker.start()

    def is_running(self) -> bool:
        """Whether the engine computes."""
        return self._worker.is_alive()

    def admit(self, request: TokenRequest, stream: Stream, sampler: Sampler | None = None) -> None:
        """Begin to answer a checked request, and return at once."""
        self._waiting.put(RunningSequence(request, stream, sampler))

    def close(self) -> None:
        """End all streams with an error, and stop computing."""
        self._is_closing.set()
        self._worker.join(_STOP_SECONDS)

    def _work(self) -> None:
        sequences: list[RunningSequence] = []
        while not self._is_closing.is_set():
            sequences = self._collect()
            try:
                if sequences:
                    self._generate(sequences)
            except Exception as error:  # of this batch
                self._end(sequences, error)
        sequences += [self._next] if self._next else []
        while not self._waiting.empty():
            sequences.append(self._waiting.get())
        self._end(sequences, ShoalError("The model is being unloaded.", "Ask again later."))

    def _collect(self) -> list[RunningSequence]:
        """Return the next batch: the first request and those of the next 20 ms; empty if none comes for 100 ms."""
        sequences: list[RunningSequence] = []
        until = time.monotonic() + 0.1
        while len(sequences) < self.limits.slots:
            try:
                sequence = self._next or self._waiting.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                break
            self._next = None
            if not sequences:
                until = time.monotonic() + _WAIT_SECONDS
            if not sequence.stream.is_open:
                continue
            if sequences and not self._fits([*sequences, sequence]):
                self._next = sequence
                break
            sequences.append(sequence)
        return sequences

    def _fits(self, sequences: list[RunningSequence]) -> bool:
        """Whether the requests may be computed together. All rows of a batch get as many tokens as the longest one."""
        requests = [sequence.request for sequence in sequences]
        return max(len(each.ids) for each in requests) + max(each.max_tokens for each in requests) <= self._together

    def _generate(self, sequences: list[RunningSequence]) -> None:
        widest = max(len(sequence.request.ids) for sequence in sequences)
        most = max(sequence.request.max_tokens for sequence in sequences)
        ids = torch.zeros((len(sequences), widest), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, sequence in enumerate(sequences):
            start = widest - len(sequence.request.ids)
            ids[row, start:] = torch.tensor(sequence.request.ids)
            mask[row, start:] = 1
        self._model.generate(
            ids.to(self._model.device),
            attention_mask=mask.to(self._model.device),
            generation_config=GenerationConfig(do_sample=False, max_new_tokens=most, pad_token_id=0),
            logits_processor=LogitsProcessorList([_Choice(sequences)]),
            stopping_criteria=StoppingCriteriaList([_Ends(sequences, self._is_closing)]),
        )

    @staticmethod
    def _end(sequences: list[RunningSequence], error: Exception) -> None:
        for sequence in sequences:
            sequence.stream.end(error)
