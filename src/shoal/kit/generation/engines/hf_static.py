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
from shoal.kit.component.streaming import Stream
from shoal.kit.generation.answering import Seat, step
from shoal.kit.generation.choosing import Chooser
from shoal.kit.generation.contract import Limits, TokenRequest

_WAIT_SECONDS = 0.02  # for more requests, after the first one of a batch
_STOP_SECONDS = 5.0


class _Choice(LogitsProcessor):
    """Logits processor that chooses and sends each row's token, and makes its logit infinite, so that it is taken."""

    def __init__(self, seats: list[Seat]) -> None:
        self._seats = seats

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        tokens = step(scores, [None if seat.is_done else seat for seat in self._seats])
        return scores.scatter_(1, torch.tensor(tokens, device=scores.device)[:, None], torch.inf)


class _Ends(StoppingCriteria):
    def __init__(self, seats: list[Seat], closing: threading.Event) -> None:
        self._seats, self._closing = seats, closing

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:  # noqa: ARG002
        is_closing = self._closing.is_set()
        ends = [is_closing or seat.is_done or not seat.stream.is_open for seat in self._seats]
        return torch.tensor(ends, device=input_ids.device)


class HfStaticEngine:
    """Static batches of a transformers model, on its device: for models without continuous batching, and to compare.

    At most ``limits.slots`` requests are computed together with ``generate``. Requests that come later wait until all
    of these have ended. A batch, that is, its longest prompt with its longest answer, has at most ``together`` tokens;
    a request with more tokens is computed alone.
    """

    settings = Chooser.SETTINGS

    def __init__(self, model: Any, limits: Limits, *, together: int) -> None:
        self.limits = limits
        self._model, self._together = model, together
        self._next: Seat | None = None  # the first of the next batch, if it did not fit into this one
        self._waiting: Queue[Seat] = Queue()
        self._is_closing = threading.Event()
        self._worker = threading.Thread(target=self._work, name="shoal-static", daemon=True)
        self._worker.start()

    def is_running(self) -> bool:
        """Whether the engine computes."""
        return self._worker.is_alive()

    def admit(self, request: TokenRequest, stream: Stream, chooser: Chooser | None = None) -> None:
        """Begin to answer a checked request, and return at once."""
        self._waiting.put(Seat(request, stream, chooser))

    def close(self) -> None:
        """End all streams with an error, and stop computing."""
        self._is_closing.set()
        self._worker.join(_STOP_SECONDS)

    def _work(self) -> None:
        seats: list[Seat] = []
        while not self._is_closing.is_set():
            seats = self._collect()
            try:
                if seats:
                    self._generate(seats)
            except Exception as error:  # of this batch
                self._end(seats, error)
        seats += [self._next] if self._next else []
        while not self._waiting.empty():
            seats.append(self._waiting.get())
        self._end(seats, ShoalError("The model is being unloaded.", "Ask again later."))

    def _collect(self) -> list[Seat]:
        """Return the next batch: the first request and those of the next 20 ms; empty if none comes for 100 ms."""
        seats: list[Seat] = []
        until = time.monotonic() + 0.1
        while len(seats) < self.limits.slots:
            try:
                seat = self._next or self._waiting.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                break
            self._next = None
            if not seats:
                until = time.monotonic() + _WAIT_SECONDS
            if not seat.stream.is_open:
                continue
            if seats and not self._fits([*seats, seat]):
                self._next = seat
                break
            seats.append(seat)
        return seats

    def _fits(self, seats: list[Seat]) -> bool:
        """Whether the requests may be computed together. All rows of a batch get as many tokens as the longest one."""
        requests = [seat.request for seat in seats]
        return max(len(each.ids) for each in requests) + max(each.max_tokens for each in requests) <= self._together

    def _generate(self, seats: list[Seat]) -> None:
        widest = max(len(seat.request.ids) for seat in seats)
        ids = torch.zeros((len(seats), widest), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, seat in enumerate(seats):
            start = widest - len(seat.request.ids)
            ids[row, start:] = torch.tensor(seat.request.ids)
            mask[row, start:] = 1
        self._model.generate(
            ids.to(self._model.device),
            attention_mask=mask.to(self._model.device),
            generation_config=GenerationConfig(
                do_sample=False, max_new_tokens=max(seat.request.max_tokens for seat in seats), pad_token_id=0
            ),
            logits_processor=LogitsProcessorList([_Choice(seats)]),
            stopping_criteria=StoppingCriteriaList([_Ends(seats, self._is_closing)]),
        )

    @staticmethod
    def _end(seats: list[Seat], error: Exception) -> None:
        for seat in seats:
            seat.stream.end(error)
