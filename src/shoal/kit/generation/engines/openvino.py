"""Engine on OpenVINO GenAI's continuous batching, on the host: pages of keys and values, and prompts in pieces.

One thread computes. The library chooses the tokens, with settings of its own for each request; it is imported only when
an engine is made.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
from collections import deque
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from shoal.errors import ArtifactError, SetupError, ShoalError, needs
from shoal.kit.component.stream import Stream
from shoal.kit.generation.answering import Answering
from shoal.kit.generation.contract import Limits, LogProbs, TokenRequest
from shoal.kit.generation.weights import OPENVINO, PAGE, Weights, choose_dtype, count_cache_pages

_PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}  # OpenVINO's names
DTYPES = ("auto", *_PRECISIONS)
_STEP_TOKENS = 256  # of prompts and answers in one step: between two pieces of a prompt, the others get their tokens
_STOP_SECONDS = 5.0

_log = logging.getLogger("shoal")


class _Running(NamedTuple):
    """A request that is computed: the library's handle, and the answers to it."""

    handle: Any
    answering: Answering


class OpenVinoEngine:
    """Continuous batching of a model in OpenVINO's format, on the host.

    ``limits.slots`` requests are computed at the same time, further requests wait in order. ``dtype`` is the one that
    is computed in; ``auto`` is the weights' own, but FP32 on a host that does not compute in it. Keys and values are
    FP32, or FP16 if ``dtype`` has 16 bits. ``cache_tokens`` is as in ``HfEngine``. Log probabilities are given of
    the chosen tokens alone.

    Raises:
        SetupError: openvino_genai is not installed, or the cache does not fit into memory.
        ArtifactError: the folder has no such model, or OpenVINO does not read it.
    """

    # Not its frequency and presence penalties: it adds them to logits below zero, and makes such tokens likelier.
    settings = frozenset("temperature top_k top_p repetition_penalty seed min_tokens echo".split())

    def __init__(self, weights: Weights, limits: Limits, *, dtype: str, cache_tokens: int, threads: int | None) -> None:
        if not (weights.folder / OPENVINO).is_file():
            raise ArtifactError(
                f"{weights.folder} has no {OPENVINO}.", "Compose it: shoal compose ... --engine openvino"
            )
        pages = count_cache_pages(limits.slots, limits.context, cache_tokens)
        context = min(limits.context, (pages - limits.slots) * PAGE)
        self.limits = replace(limits, context=context, top_logprobs=0)
        with needs("openvino"):
            import openvino_genai
        self._genai = openvino_genai
        self._scheduling = openvino_genai.SchedulerConfig()
        self._scheduling.num_kv_blocks = pages
        self._scheduling.max_num_seqs = limits.slots
        self._scheduling.max_num_batched_tokens = max(_STEP_TOKENS, limits.slots)
        self._scheduling.dynamic_split_fuse = True
        # In 2026.4.1, prompts that are the same, or begin so, and come at the same time get wrong tokens with it.
        self._scheduling.enable_prefix_caching = False
        precision = _PRECISIONS[choose_dtype(weights, dtype, on_gpu=False)]
        cache = "f32" if precision == "f32" else "f16"  # without AVX-512, a cache in BF16 is refused
        self._properties: dict[str, Any] = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": cache}
        if threads is not None:
            self._properties["INFERENCE_NUM_THREADS"] = threads
        self._folder = weights.folder
        self._numbers = itertools.count()
        self._changing = threading.Condition()
        self._waiting: deque[tuple[TokenRequest, Stream]] = deque()
        self._running: list[_Running] = []
        self._is_closing = False
        self._pipeline = self._load()
        self._worker = threading.Thread(target=self._work, name="shoal-openvino", daemon=True)
        self._worker.start()

    def is_running(self) -> bool:
        """Whether the engine computes."""
        return self._worker.is_alive()

    def admit(self, request: TokenRequest, stream: Stream) -> None:
        """Begin to answer a checked request, and return at once."""
        with self._changing:
            if not self._is_closing:
                self._waiting.append((request, stream))
                self._changing.notify()
                return
        stream.end(_unloaded())

    def close(self) -> None:
        """End all streams with an error, and stop computing."""
        with self._changing:
            self._is_closing = True
            self._changing.notify()
        self._worker.join(_STOP_SECONDS)

    def _load(self) -> Any:
        try:
            return self._genai.ContinuousBatchingPipeline(str(self._folder), self._scheduling, "CPU", self._properties)
        except Exception as error:  # RuntimeError for everything
            reason = next(reversed([line for line in str(error).splitlines() if line.strip()]), type(error).__name__)
            raise SetupError(
                f"OpenVINO {self._genai.get_version()} does not start with {self._folder}: {reason.strip()}",
                "Give less context, slots or cache_tokens; or compose again, from the weights in safetensors",
            ) from error

    # --- the computing thread ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._take():
                try:
                    self._pipeline.step()
                    self._running = [each for each in self._running if self._send(each)]
                except Exception:
                    _log.exception("OpenVINO failed")
                    self._end(ShoalError("The model failed on this request.", "Ask again."))
                    self._pipeline = self._load()  # the requests that it holds are lost
        finally:  # also if it does not start again
            with self._changing:
                self._is_closing = True
            self._end(_unloaded())

    def _take(self) -> bool:
        """Wait until there are requests, and give them to the library; return False if the engine is closed."""
        with self._changing:
            while not (self._is_closing or self._waiting or self._running):
                self._changing.wait()
            taken = [*self._waiting]
            self._waiting.clear()
        for request, stream in taken:
            answering = Answering(request, stream)
            try:
                ids = self._genai.openvino.Tensor(np.array([request.ids], np.int64))
                handle = self._pipeline.add_request(next(self._numbers), ids, self._configure(request))
                self._running.append(_Running(handle, answering))
            except Exception:  # its text has paths of its sources
                _log.exception("OpenVINO refuses a request")
                stream.end(ShoalError("OpenVINO refuses this request.", "See the server's log."))
        return not self._is_closing

    def _configure(self, request: TokenRequest) -> Any:
        """Return the library's settings of a request; without a seed, each request draws other numbers."""
        sampling, config = request.sampling, self._genai.GenerationConfig()
        config.max_new_tokens = request.max_tokens
        config.eos_token_id, config.stop_token_ids = -1, {*request.end_ids}  # the request's end tokens alone count
        config.ignore_eos = not request.end_ids
        config.min_new_tokens = sampling.min_tokens if request.end_ids else 0
        config.logprobs = int(bool(request.returns))
        config.repetition_penalty = sampling.repetition_penalty
        config.do_sample = not sampling.is_greedy
        if config.do_sample:
            config.temperature, config.top_p = sampling.temperature, sampling.top_p
            config.rng_seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
            if sampling.top_k:
                config.top_k = sampling.top_k
        return config

    def _send(self, each: _Running) -> bool:
        """Send the new tokens of a request; return whether it goes on."""
        handle, answering = each
        while handle.can_read():
            for found in handle.read().values():
                for token, chosen in zip(found.generated_ids, found.generated_log_probs, strict=True):
                    place = LogProbs(chosen) if answering.request.returns else None
                    if not answering.add(token, place, beside=len(self._running)):
                        handle.cancel()
                        return False
        if not answering.stream.is_open:
            handle.cancel()
            return False
        if handle.get_status() != self._genai.GenerationStatus.RUNNING:
            answering.stream.end(ShoalError("The model ended this answer too early.", "See the server's log."))
            return False
        return True

    def _end(self, error: ShoalError) -> None:
        with self._changing:
            streams = [each.answering.stream for each in self._running] + [stream for _, stream in self._waiting]
            self._running, self._waiting = [], deque()
        for stream in streams:
            stream.end(error)


def _unloaded() -> ShoalError:
    return ShoalError("The model is being unloaded.", "Ask again later.")
