"""Stop and bad words as token ids, in TensorRT-LLM's layout: INT32 ``[2, n]``.

Row 0 has the ids of all words, one word after the other. Row 1 has the end of each word in row 0, padded with -1. The
words (5, 6) and (7,) are ``[[5, 6, 7], [2, 3, -1]]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.errors import InputError

MAX_WORDS = 64
_GREATEST = 2**31 - 1


def pack(words: Sequence[Sequence[int]], name: str = "The word list") -> np.ndarray[Any, Any]:
    """Return INT32 ``[2, n]`` for words of token ids; n is 1 if there are none. ``name`` is for errors.

    Raises:
        InputError: there are more than 64 words, a word is empty, or an id is not an INT32 from 0.
    """
    _check_number(len(words), name)
    ids = [int(token) for word in words for token in word]
    for index, word in enumerate(words):
        _check_word(len(word), index, name)
    _check_ids(ids, name)
    packed = np.full((2, max(1, len(ids))), -1, np.int32)
    packed[0] = ids or 0
    packed[1, : len(words)] = np.cumsum([len(word) for word in words])
    return packed


def unpack(array: np.ndarray[Any, Any], name: str = "The word list") -> list[list[int]]:
    """Return the words of an INT32 ``[2, n]`` array; ids behind the last word's end are padding.

    ``name``, the tensor's, is for errors.

    Raises:
        InputError: the array has another dtype or shape, more than 64 words or an empty one, or an end outside row 0.
    """
    if array.dtype != np.int32 or array.ndim != 2 or array.shape[0] != 2:
        raise InputError(
            f"{name} is {array.dtype} {list(array.shape)}.",
            "Send INT32 [2, n]: the token ids of all words, and the end of each word, padded with -1.",
        )
    ids, ends = ([int(value) for value in row] for row in array)
    while ends and ends[-1] == -1:
        ends.pop()
    _check_number(len(ends), name)
    words = []
    for index, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if not start <= end <= len(ids):
            raise InputError(
                f"{name} has the end {end} for word {index}, which begins at {start} of {len(ids)} ids.",
                f"Send ends that increase, up to {len(ids)}, then -1.",
            )
        _check_word(end - start, index, name)
        words.append(ids[start:end])
        _check_ids(words[-1], name)
    return words


def _check_number(number: int, name: str) -> None:
    if number > MAX_WORDS:
        raise InputError(f"{name} has {number} words; at most {MAX_WORDS} are allowed.", "Shorten the list.")


def _check_word(length: int, index: int, name: str) -> None:
    if not length:
        raise InputError(f"{name} has no token ids for word {index}.", "Leave empty words out.")


def _check_ids(ids: Sequence[int], name: str) -> None:
    if bad := [token for token in ids if not 0 <= token <= _GREATEST]:
        raise InputError(f"{name} has the token id {bad[0]}.", f"Send ids from 0 to {_GREATEST:,}.")
