"""Answers of engines: packing and reading them, and the rows of a batch.

Answers have a leading dimension of rows. ``split_rows`` yields each row by itself, ``join_rows`` joins such rows again.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from shoal.kit.component.spec import BATCH_INDEX, Array, Arrays
from shoal.kit.generation.contract import LogProbs, TokenRequest

_PADDING = {"top_token_ids": -1, "logprobs": b"null"}  # of rows that are shorter or did not ask; others have 0
_first_stream = secrets.randbits(31) << 32
_streams = itertools.count()


def new_stream_id() -> int:
    """Return a new stream id: random bits of this process, then a counter."""
    return _first_stream + next(_streams)


def pack_answer(
    ids: Sequence[int],
    *,
    stream_id: int,
    passthrough: str = "",
    is_last: bool = False,
    reason: str = "",
    dtype: Any = np.int32,
) -> dict[str, Any]:
    """Return the outputs of one answer to a request of one row.

    ``output_ids`` INT32 [1, 1, tokens] (rows, beams, new tokens: none, one or several; with the tokens of a stop
    sequence, without the end token), ``sequence_length`` INT32 [1, 1], ``stream_id`` INT64 [1, 1], ``is_last`` BOOL
    [1, 1], ``carry`` and ``finish_reason`` STRING [1, 1]. ``passthrough``, the request's ``carry``, is for its first
    answer, ``reason`` (``stop`` or ``length``) for its last answer.
    """
    return {
        "output_ids": np.array([[ids]], dtype).reshape(1, 1, len(ids)),
        "sequence_length": np.array([[len(ids)]], dtype),
        "stream_id": np.array([[stream_id]], np.int64),
        "is_last": np.array([[is_last]], np.bool_),
        "carry": np.array([[passthrough.encode()]], np.object_),
        "finish_reason": np.array([[reason.encode()]], np.object_),
    }


def pack_log_probs(request: TokenRequest, places: Sequence[LogProbs], total: float) -> dict[str, Any]:
    """Return those outputs of log probabilities that the request asks for, for the tokens of one answer.

    ``output_log_probs`` FP32 [1, 1, tokens] are those of the tokens in ``output_ids``; ``cum_log_probs`` FP32 [1, 1] is
    ``total``, the sum over the request's tokens so far; ``top_log_probs`` FP32 and ``top_token_ids`` INT32, [1, tokens,
    n], are those of the n most probable tokens at each place, the most probable one first. Where a prompt begins, they
    are not numbers, and the ids are -1.
    """
    shape = (1, len(places), request.sampling.top_logprobs)
    made: dict[str, Callable[[], Any]] = {
        "output_log_probs": lambda: np.array([[[place.chosen for place in places]]], np.float32),
        "cum_log_probs": lambda: np.array([[total]], np.float32),
        "top_log_probs": lambda: np.array([place.top for place in places], np.float32).reshape(shape),
        "top_token_ids": lambda: np.array([place.top_ids for place in places], np.int32).reshape(shape),
    }
    return {name: made[name]() for name in request.returns}


def read_log_probs(answer: Arrays) -> list[LogProbs]:
    """Return the places of one answer, or of a row of a whole answer; none if it has no ``output_log_probs``."""
    if "output_log_probs" not in answer:
        return []
    chosen = answer["output_log_probs"][0, 0].tolist()
    if "top_log_probs" not in answer:
        return [LogProbs(value) for value in chosen]
    ids, top = answer["top_token_ids"][0], answer["top_log_probs"][0]
    number = int((ids >= 0).any(axis=0).sum())  # the other columns are padding
    return [*map(LogProbs, chosen, ids[:, :number].tolist(), top[:, :number].tolist())]


def split_rows(answer: Arrays) -> Iterator[tuple[int, dict[str, Array]]]:
    """Yield the rows of an answer with their numbers: those in ``batch_index``, else their order."""
    numbers = answer[BATCH_INDEX][:, 0] if BATCH_INDEX in answer else range(len(answer["output_ids"]))
    for at, number in enumerate(map(int, numbers)):
        yield number, {name: array[at : at + 1] for name, array in answer.items()}


def join_rows(rows: Sequence[Arrays]) -> dict[str, Array]:
    """Join answers of one row each; arrays that are shorter than others, or missing, are padded."""
    if len(rows) == 1:
        return dict(rows[0])
    joined: dict[str, Array] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        given = [row.get(name) for row in rows]
        there = [array for array in given if array is not None]
        shape = np.max([array.shape[1:] for array in there], axis=0).astype(int)
        joined[name] = np.full((len(rows), *shape), _PADDING.get(name, 0), there[0].dtype)
        for at, array in enumerate(given):
            if array is not None:
                joined[name][(at, *map(slice, array.shape[1:]))] = array[0]
    return joined
