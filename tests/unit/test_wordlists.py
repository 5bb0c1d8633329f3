"""Word lists in TensorRT-LLM's layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InputError
from shoal.kit.generation.contract import pack_words, unpack_words

ids = st.integers(0, 2**31 - 1)


def as_int32(values: Any) -> Any:
    return np.array(values, np.int32)


def trt_llm(words: list[list[int]]) -> Any:
    """The arrays as `to_word_list_format` of TensorRT-LLM's preprocessing step has them, for one row."""
    flat = [token for word in words for token in word]
    ends = np.cumsum([len(word) for word in words]).tolist()
    size = max(1, len(flat))
    flat_ids = np.pad(flat, (0, size - len(flat)), constant_values=0)
    offsets = np.pad(ends, (0, size - len(ends)), constant_values=-1)
    return np.array([[flat_ids], [offsets]], np.int32).transpose((1, 0, 2))[0]


@given(st.lists(st.lists(ids, min_size=1, max_size=5), max_size=64), st.integers(0, 5), ids)
def test_pack_and_unpack(words: list[list[int]], padding: int, padded_with: int) -> None:
    packed = pack_words(words)
    assert packed.dtype == np.int32
    assert np.array_equal(packed, trt_llm(words))
    assert unpack_words(packed, "X") == [*map(tuple, words)]
    wider = np.concatenate([packed, np.array([[padded_with], [-1]], np.int32).repeat(padding, axis=1)], axis=1)
    assert unpack_words(wider, "X") == [*map(tuple, words)]


def test_the_layout() -> None:
    assert pack_words([[5, 6], [7]]).tolist() == [[5, 6, 7], [2, 3, -1]]
    assert pack_words([]).tolist() == [[0], [-1]]
    assert unpack_words(np.zeros((2, 0), np.int32), "X") == []


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (as_int32([[1, 2], [3, -1]]), "bad_words_list has the end 3 for word 0, which begins at 0 of 2 ids."),
        (as_int32([[1, 2], [2, 1]]), "bad_words_list has the end 1 for word 1, which begins at 2 of 2 ids."),
        (as_int32([[1, 2], [-1, 2]]), "bad_words_list has the end -1 for word 0, which begins at 0 of 2 ids."),
        (as_int32([[1, 2], [-2, -1]]), "bad_words_list has the end -2 for word 0, which begins at 0 of 2 ids."),
        (as_int32([[1, 2], [0, -1]]), "bad_words_list has the end 0 for word 0, which begins at 0 of 2 ids."),
        (as_int32([[1, 2], [1, 1]]), "bad_words_list has the end 1 for word 1, which begins at 1 of 2 ids."),
        (np.arange(1, 66, dtype=np.int32) * as_int32([[1], [1]]), "bad_words_list has 65 words; at most 64"),
    ],
)  # fmt: skip
def test_invalid_word_lists(array: Any, message: str) -> None:
    with pytest.raises(InputError) as refused:
        unpack_words(np.asarray(array), "bad_words_list")
    assert str(refused.value).startswith(message)
