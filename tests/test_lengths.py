"""Rows of like length are computed together: nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from numpy.typing import NDArray

from shoal.component.lengths import MAX_WASTE, MIN_TOKENS, group, lengths, run_in_groups
from shoal.serving.local import Pipeline

TOKENS = arrays_of.arrays(np.int64, st.integers(1, 80), elements=st.integers(0, 256))


@given(TOKENS)
def test_groups_hold_every_row_once_and_little_padding(num_tokens: NDArray[np.int64]) -> None:
    groups = group(num_tokens)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(num_tokens)))
    for rows in groups:
        of_group = num_tokens[rows]
        padded = int(of_group.max()) * len(rows)
        # The row that filled it up to MIN_TOKENS may be the last to waste more.
        is_small = int(of_group[:-1].sum()) < MIN_TOKENS
        assert is_small or padded - int(of_group.sum()) <= MAX_WASTE * padded


def test_no_rows() -> None:
    assert group(np.zeros(0, np.int64)) == []


def test_real_texts_in_batches_of_64_are_padded_by_at_most_2_percent(repository: Path, texts: list[str]) -> None:
    preprocess = Pipeline.load(repository / "preprocess")
    padded = used = 0
    for start in range(0, min(len(texts), 640), 64):
        mask = preprocess(INPUT0=texts[start : start + 64])["BERT_AM"]
        num_tokens = lengths(np.asarray(mask))
        padded += sum(int(num_tokens[rows].max()) * len(rows) for rows in group(num_tokens))
        used += int(num_tokens.sum())
    assert padded <= used / (1 - MAX_WASTE), padded / used


def test_a_row_is_as_long_as_its_last_token() -> None:
    mask = np.array([[1, 1, 0], [1, 0, 1], [0, 0, 0], [5, 0, 0]])
    assert lengths(mask).tolist() == [2, 3, 0, 1]


@given(TOKENS)
def test_outputs_keep_the_order_of_the_rows(num_tokens: NDArray[np.int64]) -> None:
    width = 256
    ids = np.arange(len(num_tokens) * width).reshape(len(num_tokens), width)
    mask = (np.arange(width) < num_tokens[:, None]).astype(np.int64)
    other = np.arange(len(num_tokens), dtype=np.float32)[:, None]  # one column, whatever the width

    def run(given: Any) -> list[NDArray[Any]]:
        some_ids, some_mask, some = given
        assert some_ids.flags.c_contiguous
        return [(some_ids * some_mask).sum(axis=1, keepdims=True), some]

    sums, same = run_in_groups(run, [ids, mask, other], lengths(mask))
    np.testing.assert_array_equal(sums[:, 0], (ids * mask).sum(axis=1))
    np.testing.assert_array_equal(same, other)


def test_scores_are_those_of_each_text_alone(pipeline: Pipeline, texts: list[str]) -> None:
    mixed = [text[: 40 * (i % 30) + 5] for i, text in enumerate(texts[:60])]
    together = pipeline(excerpt=mixed)["BERT_SCORE"]
    alone = np.concatenate([pipeline(excerpt=[text])["BERT_SCORE"] for text in mixed])
    np.testing.assert_allclose(together, alone, atol=1e-5)
