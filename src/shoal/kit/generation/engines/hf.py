"""Engine on transformers' continuous batching: requests join and leave the running batch at every step.

A request that the library cannot compute ends the library's batching thread, and so all other requests. Therefore
requests are checked before they reach the library, and a thread that died is replaced. The library gets only as many
requests as its cache holds, because it accepts no more requests once it has evicted requests that were cancelled. A
logits processor in this module chooses the tokens, because the library has neither seeds nor penalties per request.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from dataclasses import replace
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

from shoal.errors import SetupError, ShoalError
from shoal.kit.component.stream import Stream
from shoal.kit.generation.answering import RunningSequence, step
from shoal.kit.generation.contract import PROMPT_PLACES, Limits, TokenRequest
from shoal.kit.generation.sampler import Sampler
from shoal.kit.generation.weights import PAGE, count_cache_pages, count_pages

_STEP_TOKENS = 256  # tokens per step, of prompts and answers; memory grows with its product with the cache
_STOP_SECONDS = 5.0
_LOOK_SECONDS = 0.1  # between two checks for errors and for the end of the batching thread
_PAUSE_SECONDS = 1.0  # after a batching thread that did not start

_log = logging.getLogger("shoal")


class _NumberedSequence(RunningSequence):
    """Request in this engine, with a ``number``; ``pages`` is the greatest number of cache pages that it needs."""

    def __init__(self, number: int, request: TokenRequest, stream: Stream, sampler: Sampler | None) -> None:
        super().__init__(request, stream, sampler)
        self.number = number
        self.pages = count_pages(len(request.ids) + request.max_tokens)


class _Choice(ContinuousBatchingLogitsProcessor):
    """Logits processor that chooses each row's token and makes its logit infinite, so that the library takes it.

    The library passes one INT32 per row from the request to this processor: the number of the ``_NumberedSequence``.
    """

    supported_kwargs = {"sequence": int}  # noqa: RUF012
    ignored_kwargs = ()

    def __init__(self, engine: HfEngine) -> None:
        self._engine = engine
        self._numbers: list[int] = []  # of the step's rows: the same on the host, so that it is not read from a device

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.fill_(-1)

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        """Return the numbers of the requests that get a token in this step, one per row, then -1 for other slots."""
        sequences = [each.state.logit_processor_kwargs["sequence"] for each in requests_with_new_token]
        self._numbers = sequences + [-1] * (self._engine.limits.slots - len(sequences))
        return torch.tensor(self._numbers, dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        tokens = self._engine.step(self._numbers[: len(scores)], scores)
        return scores.scatter_(1, torch.tensor(tokens, device=scores.device)[:, None], torch.inf)


class HfEngine:
    """Continuous batching of a transformers model, on its device. Not all models can be computed so: ``batching.py``.

    ``limits.slots`` requests are computed at the same time, further requests wait in order. The cache has room for
    ``cache_tokens`` tokens, of prompts and answers together. If ``cache_tokens`` is 0, it has room for ``limits.slots``
    requests of ``limits.context`` tokens, but for at most ``CACHE_TOKENS`` tokens, or one such request. A request has
    at most as many tokens as the cache holds.
    """

    settings = Sampler.SETTINGS | {PROMPT_PLACES}

    def __init__(self, model: Any, limits: Limits, *, cache_tokens: int) -> None:
        slots, context = limits.slots, limits.context
        self._free = count_cache_pages(slots, context, cache_tokens)
        self.limits = replace(limits, context=min(context, (self._free - slots) * PAGE))
        self._config = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=self._free,
            max_batch_tokens=max(_STEP_TOKENS, slots),
            max_requests_per_batch=slots,
            max_blocks_per_request=0,
            use_async_batching=False,
            use_cuda_graph=False,
            auto_switch_to_flash=False,
            safety_margin=0.0,
        )
        self._model = model
        self._numbers = itertools.count()
        self._changing = threading.RLock()
        self._waiting: deque[_NumberedSequence] = deque()
        self._sequences: dict[int, _NumberedSequence] = {}  # requests that the batching thread computes
        self._manager: Any = None  # while its thread runs
        self._fault: Exception | None = None  # error of the first start
        self._is_ready, self._is_closing = threading.Event(), threading.Event()
        # The batching thread inherits the daemon flag of this thread, so it does not outlive a process that ends.
        self._keeper = threading.Thread(target=self._keep, name="shoal-batching", daemon=True)
        self._keeper.start()
        self._is_ready.wait()
        if self._fault is not None:
            raise SetupError(f"transformers' continuous batching does not start: {self._fault}") from self._fault

    def is_running(self) -> bool:
        """Whether the engine computes."""
        return self._manager is not None

    def admit(self, request: TokenRequest, stream: Stream, sampler: Sampler | None = None) -> None:
        """Begin to answer a checked request, and return at once."""
        with self._changing:
            sequence = _NumberedSequence(next(self._numbers), request, stream, sampler)
            self._waiting.append(sequence)
            self._fill()
        stream.on_leave(lambda: self._leave(sequence))

    def close(self) -> None:
        """End all streams with an error, and stop computing."""
        self._is_closing.set()
        self._keeper.join(2 * _STOP_SECONDS)

    # --- sequences --------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Give waiting requests to the library, in order, while slots and pages are free. The caller holds the lock."""
        while self._waiting and self._manager is not None and len(self._sequences) < self.limits.slots:
            sequence = self._waiting[0]
            if sequence.pages > self._free:
                return
            self._waiting.popleft()
            self._sequences[sequence.number] = sequence
            self._free -= sequence.pages
            added = self._manager.add_request(
                list(sequence.request.ids),
                request_id=str(sequence.number),
                max_new_tokens=sequence.request.max_tokens,
                eos_token_id=-1,
                sequence=sequence.number,
            )
            if added is None:  # the batching thread is dying: the next thread takes the request
                del self._sequences[sequence.number]
                self._free += sequence.pages
                self._waiting.appendleft(sequence)
                return

    def _leave(self, sequence: _NumberedSequence) -> None:
        """Free a request's slot and pages, whether it is computed, waits, or has ended."""
        with self._changing:
            if self._sequences.pop(sequence.number, None) is not None:
                self._free += sequence.pages
                if self._manager is not None:
                    self._manager.cancel_request(str(sequence.number))
            elif sequence in self._waiting:
                self._waiting.remove(sequence)
            self._fill()

    def step(self, numbers: list[int], logits: torch.Tensor) -> list[int]:
        """Choose and send the next tokens of the requests ``numbers``, from ``logits``. The batching thread calls this.

        A row whose request left during this step, or that has none, gets token 0.
        """
        sequences = [self._sequences.get(number) for number in numbers]
        tokens = step(logits, sequences)
        for sequence in sequences:
            if sequence is not None and sequence.is_done:
                self._leave(sequence)
        return tokens

    # --- the batching thread -----------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Run a batching thread, and a new one whenever it dies, until the engine is closed."""
        while not self._is_closing.is_set():
            try:
                self._run()
            except Exception as error:
                if not self._is_ready.is_set():
                    self._fault = error
                    self._is_ready.set()
                    return
                _log.exception("transformers' continuous batching did not start again")
                self._is_closing.wait(_PAUSE_SECONDS)
        self._end_all(ShoalError("The model is being unloaded.", "Ask again later."))

    def _run(self) -> None:
        """Run one batching thread until it ends. Its requests end with it; waiting requests go on waiting."""
        manager = self._model.init_continuous_batching(GenerationConfig(do_sample=False, eos_token_id=-1), self._config)
        processors = manager.logit_processor
        processors.logits_processor.append(_Choice(self))
        processors.supported_keys["sequence"], processors.tensors_required, processors.do_processing = int, 1, True
        manager.start()
        with self._changing:
            self._manager = manager
            self._fill()
        self._is_ready.set()
        while manager.is_running() and not self._is_closing.is_set():
            output = manager.get_result(timeout=_LOOK_SECONDS)
            if output is not None and output.error is not None:
                self._fail(int(output.request_id), output.error)
        with self._changing:
            self._manager = None
        if self._is_closing.is_set():
            manager.stop(block=True, timeout=_STOP_SECONDS, hard_stop=True)
        else:
            _log.error("transformers' batching thread died: %s", manager.background_thread_status.fatal_error)
            for number in list(self._sequences):
                self._fail(number, "its batching thread died")

    def _fail(self, number: int, why: str) -> None:
        sequence = self._sequences.get(number)
        if sequence is not None:
            sequence.stream.end(ShoalError(f"The model failed on this request: {why}.", "Ask again."))
            self._leave(sequence)

    def _end_all(self, error: ShoalError) -> None:
        with self._changing:
            sequences = [*self._sequences.values(), *self._waiting]
            self._sequences.clear()
            self._waiting.clear()
        for sequence in sequences:
            sequence.stream.end(error)
