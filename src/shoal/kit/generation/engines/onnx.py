"""Engine on ONNX Runtime: a decoder with a cache; requests join and leave the batch between two steps.

One thread computes. The caches of all rows are padded on the left to one width, so that one call of the decoder
computes the next token of every row. Neither torch nor transformers is needed.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from shoal.errors import ArtifactError, ShoalError
from shoal.kit.component.stream import Stream
from shoal.kit.generation.answering import RunningSequence, step
from shoal.kit.generation.contract import Limits, TokenRequest
from shoal.kit.generation.sampler import Sampler
from shoal.kit.generation.weights import DECODER, Weights

_PIECE = 512  # tokens of prompts per call: between two pieces of a prompt the open requests get their next token
_STOP_SECONDS = 5.0
_END = object()
INPUTS = ("input_ids", "attention_mask", "position_ids")

_log = logging.getLogger("shoal")


class Decoder:
    """Decoder in ONNX, which returns ``logits``, and for each layer a cache of keys and a cache of values.

    Its inputs are ``input_ids``, ``attention_mask`` and ``position_ids``, INT64 [rows, tokens], and the caches so far,
    FP32 [rows, heads, tokens, head size]; models with ALiBi have no ``position_ids``. Its outputs are ``logits``, FP32
    [rows, vocabulary], and the caches with the new tokens, in the same order.
    """

    def __init__(self, weights: Weights, threads: int | None) -> None:
        path = weights.folder / DECODER
        if not path.is_file():
            raise ArtifactError(
                f"{weights.folder} has no {DECODER}.", f"Make it: shoal add-model {weights.folder} NAME --task generate"
            )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads or 0, 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its errors have no other common class
            raise ArtifactError(
                f"ONNX Runtime {onnxruntime.__version__} refuses {path}: {error}", "Export it again: --task generate"
            ) from error
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        self._inputs = tuple(each.name for each in inputs if each.name in INPUTS)
        caches = inputs[len(self._inputs) :]
        is_decoder = self._inputs in (INPUTS, INPUTS[:2]) and bool(caches)
        if not is_decoder or len(outputs) != 1 + len(caches) or outputs[0].shape[-1] != weights.vocabulary:
            raise ArtifactError(
                f"{path} is not a decoder with cache for {weights.vocabulary} tokens: its inputs begin with "
                f"{', '.join(each.name for each in inputs[:4])}.",
                "Export it again: shoal add-model FOLDER NAME --task generate",
            )
        self._names = [each.name for each in caches]
        self._sizes = [(each.shape[1], each.shape[3]) for each in caches]

    def start(self, rows: int) -> list[NDArray[Any]]:
        """Return empty caches for ``rows`` rows."""
        return [np.zeros((rows, heads, 0, size), np.float32) for heads, size in self._sizes]

    def run(
        self, ids: NDArray[Any], lengths: NDArray[Any], caches: Sequence[NDArray[Any]]
    ) -> tuple[NDArray[Any], list[NDArray[Any]]]:
        """Return the logits for the token that follows each row, and the caches with the new tokens.

        ``ids`` is INT64 [rows, tokens]; ``lengths``, INT64 [rows], counts each row's tokens in ``caches`` and
        ``ids`` together; the columns before these tokens are padding.
        """
        width = caches[0].shape[2] + ids.shape[1]
        places = np.arange(width) - (width - lengths[:, None])  # of each token in its row; padding is negative
        given = {
            "input_ids": ids,
            "attention_mask": (places >= 0).astype(np.int64),
            "position_ids": np.maximum(places[:, -ids.shape[1] :], 0),
        }
        tensors = {name: given[name] for name in self._inputs} | dict(zip(self._names, caches, strict=True))
        logits, *longer = self._session.run(None, tensors)
        return logits, longer


class _Rows:
    """Requests that are computed together. Each request has one row of the caches, with its tokens at the right end."""

    def __init__(self, decoder: Decoder, sequences: Sequence[RunningSequence] = ()) -> None:
        self.sequences = list(sequences)
        self._decoder = decoder
        self._lengths = np.zeros(len(sequences), np.int64)  # tokens in the cache
        self._caches = decoder.start(len(sequences))
        self._next: list[int] = []  # each row's last token, which is not in the cache

    def read_prompts(self) -> Iterator[None]:
        """Compute the prompts in pieces, and yield between two pieces; then choose the first new tokens."""
        sizes = np.array([len(sequence.request.ids) for sequence in self.sequences])
        widest = int(sizes.max())
        ids = np.zeros((len(sizes), widest), np.int64)
        for row, sequence in enumerate(self.sequences):
            ids[row, widest - len(sequence.request.ids) :] = sequence.request.ids
        for start in range(0, widest, _PIECE):
            piece = ids[:, start : start + _PIECE]
            self._lengths = np.maximum(0, sizes - widest + start + piece.shape[1])
            logits, self._caches = self._decoder.run(piece, self._lengths, self._caches)
            if start + _PIECE < widest:
                yield
        self._choose(logits)

    def step(self) -> None:
        """Compute and send one more token of each request."""
        self._lengths = self._lengths + 1
        logits, self._caches = self._decoder.run(np.array(self._next)[:, None], self._lengths, self._caches)
        self._choose(logits)

    def _choose(self, logits: NDArray[Any]) -> None:
        self._next = step(logits, [sequence if sequence.stream.is_open else None for sequence in self.sequences])
        kept = [row for row, sequence in enumerate(self.sequences) if not sequence.is_done and sequence.stream.is_open]
        if len(kept) < len(self.sequences):
            self._keep(kept)

    def _keep(self, kept: list[int]) -> None:
        """Drop all rows except ``kept``, and the columns of the caches that are padding in every remaining row."""
        self.sequences, self._next = [self.sequences[row] for row in kept], [self._next[row] for row in kept]
        self._lengths = self._lengths[kept]
        spare = self._caches[0].shape[2] - int(self._lengths.max(initial=0))
        self._caches = [np.ascontiguousarray(cache[kept, :, spare:]) for cache in self._caches]

    def join(self, others: _Rows) -> None:
        """Append the rows of ``others``."""
        width = max(self._caches[0].shape[2], others._caches[0].shape[2])
        self._caches = [
            np.concatenate([_widen(cache, width) for cache in pair])
            for pair in zip(self._caches, others._caches, strict=True)
        ]
        self._lengths = np.concatenate([self._lengths, others._lengths])
        self.sequences, self._next = self.sequences + others.sequences, self._next + others._next


def _widen(cache: NDArray[Any], width: int) -> NDArray[Any]:
    return np.pad(cache, ((0, 0), (0, 0), (width - cache.shape[2], 0), (0, 0)))


class OnnxEngine:
    """Continuous batching of an ONNX decoder on the host, with caches in FP32.

    ``limits.slots`` requests are computed at the same time, further requests wait in order. Memory grows with the
    tokens of the open requests.
    """

    settings = Sampler.SETTINGS

    def __init__(self, weights: Weights, limits: Limits, threads: int | None) -> None:
        self.limits = limits
        self._decoder = Decoder(weights, threads)
        self._changing = threading.Condition()
        self._waiting: deque[RunningSequence] = deque()
        self._arriving, self._open = _Rows(self._decoder), _Rows(self._decoder)
        self._pieces: Iterator[None] = iter(())  # of the arriving requests' prompts
        self._is_closing = False
        self._worker = threading.Thread(target=self._work, name="shoal-onnx", daemon=True)
        self._worker.start()

    def is_running(self) -> bool:
        """Whether the engine computes."""
        return self._worker.is_alive()

    def admit(self, request: TokenRequest, stream: Stream) -> None:
        """Begin to answer a checked request, and return at once."""
        with self._changing:
            self._waiting.append(RunningSequence(request, stream))
            self._changing.notify()

    def close(self) -> None:
        """End all streams with an error, and stop computing."""
        with self._changing:
            self._is_closing = True
            self._changing.notify()
        self._worker.join(_STOP_SECONDS)

    # --- the computing thread ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        while self._wait():
            try:
                if self._arriving.sequences:
                    self._read()
            except Exception as error:
                self._arriving = self._fail(self._arriving, error)
            try:
                if self._open.sequences:
                    self._open.step()
            except Exception as error:
                self._open = self._fail(self._open, error)
        for sequence in [*self._waiting, *self._arriving.sequences, *self._open.sequences]:
            sequence.stream.end(ShoalError("The model is being unloaded.", "Ask again later."))

    def _wait(self) -> bool:
        """Wait until there are requests, and give free slots to waiting ones; return False if the engine is closed."""
        with self._changing:
            while not (self._is_closing or self._waiting or self._arriving.sequences or self._open.sequences):
                self._changing.wait()
            self._waiting = deque(sequence for sequence in self._waiting if sequence.stream.is_open)
            if not self._arriving.sequences and (sequences := self._admit()):
                self._arriving = _Rows(self._decoder, sequences)
                self._pieces = self._arriving.read_prompts()
            return not self._is_closing

    def _admit(self) -> list[RunningSequence]:
        """Give free slots to waiting requests: to as many as fit into one call of the decoder after padding.

        The first request is taken even if it alone does not fit.
        """
        sequences: list[RunningSequence] = []
        widest = 0
        while self._waiting and len(self._open.sequences) + len(sequences) < self.limits.slots:
            widest = max(widest, len(self._waiting[0].request.ids))
            if sequences and widest * (len(sequences) + 1) > _PIECE:
                break
            sequences.append(self._waiting.popleft())
        return sequences

    def _read(self) -> None:
        """Compute the next piece of the arriving requests' prompts; after the last piece, open these requests."""
        if any(sequence.stream.is_open for sequence in self._arriving.sequences):
            if next(self._pieces, _END) is not _END:
                return
            self._open.join(self._arriving)
        self._arriving = _Rows(self._decoder)

    def _fail(self, rows: _Rows, error: Exception) -> _Rows:
        _log.exception("the decoder failed")
        for sequence in rows.sequences:
            sequence.stream.end(ShoalError(f"The model failed on this request: {error}", "Ask again."))
        return _Rows(self._decoder)
