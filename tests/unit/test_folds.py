from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.model_selection import KFold

from shoal.errors import InputError
from shoal.readability.corpus import Corpus
from shoal.readability.folds import hold_out, make_folds, split_inner


def made_of(texts: list[str]) -> Corpus:
    return Corpus("made up", tuple(texts), np.arange(len(texts), dtype=np.float64))


@pytest.mark.parametrize(("size", "num_folds", "seed"), [(103, 5, 0), (100, 5, 1), (4724, 5, 0), (20, 3, 7)])
def test_without_duplicates_these_are_scikit_learns_folds(size: int, num_folds: int, seed: int) -> None:
    corpus = made_of([f"text {i}" for i in range(size)])
    expected = KFold(num_folds, shuffle=True, random_state=seed).split(np.zeros(size))
    for (known, unseen), (train, test) in zip(make_folds(corpus, num_folds, seed=seed), expected, strict=True):
        assert np.array_equal(known, train)
        assert np.array_equal(unseen, test)


@pytest.mark.corpus
def test_the_corpus_has_nearly_scikit_learns_folds(corpus: Corpus) -> None:
    """Two of its texts differ in case and spacing alone."""
    expected = KFold(5, shuffle=True, random_state=0).split(np.zeros(len(corpus)))
    for (_, unseen), (_, test) in zip(make_folds(corpus, 5, seed=0), expected, strict=True):
        assert len(set(unseen.tolist()) ^ set(test.tolist())) <= 4


@given(st.lists(st.integers(0, 30), min_size=60, max_size=120), st.integers(2, 6), st.integers(0, 1000))
def test_a_duplicate_never_straddles(numbers: list[int], num_folds: int, seed: int) -> None:
    """Whatever its case and spacing, and in the inner split too."""
    texts = [(" Text\n{}  " if i % 2 else "text {}").format(n) for i, n in enumerate([*range(31), *numbers])]
    corpus = made_of(texts)
    seen: Counter[int] = Counter()
    for known, unseen in make_folds(corpus, num_folds, seed=seed):
        assert not set(corpus.groups[known]) & set(corpus.groups[unseen])
        assert len(known) + len(unseen) == len(corpus)
        seen.update(unseen.tolist())
        kept, inner = split_inner(corpus.take(known), seed=seed)
        squeezed = [{" ".join(text.lower().split()) for text in part.texts} for part in (kept, inner)]
        assert not squeezed[0] & squeezed[1]
        assert len(kept) + len(inner) == len(known)
    assert seen == Counter(range(len(corpus)))


def test_holding_out() -> None:
    corpus = made_of([f"text {i}" for i in range(50)])
    known, unseen = hold_out(corpus, 10, seed=0)
    assert (len(known), len(unseen)) == (40, 10)
    assert sorted([*known, *unseen]) == list(range(50))
    assert not np.array_equal(known, np.sort(known))  # a draw, so that the first rows are a sample
    again = hold_out(corpus, 10, seed=0)
    assert np.array_equal(known, again[0])
    assert not np.array_equal(np.sort(unseen), np.sort(hold_out(corpus, 10, seed=1)[1]))


def test_a_text_that_is_repeated_often_is_not_held_out() -> None:
    """It would be all there is on that side."""
    corpus = made_of(["n/a"] * 200 + [f"text {i}" for i in range(12)])
    for seed in range(50):
        known, unseen = hold_out(corpus, 10, seed=seed)
        assert set(range(200)) <= set(known.tolist())
        assert len(unseen) == 10
    for texts in (["one"] * 9 + ["two"], ["one"] * 5 + ["two"] * 5):
        known, unseen = hold_out(made_of(texts), 1, seed=0)
        assert len(known) >= 5
        assert len(unseen) >= 1


@pytest.mark.parametrize("size", [10, 11, 12])
def test_the_inner_split_of_next_to_nothing(size: int) -> None:
    for known, _ in make_folds(corpus := made_of([f"text {i}" for i in range(size)]), 2, seed=0):
        kept, inner = split_inner(corpus.take(known), seed=0)
        assert (len(kept), len(inner)) == (len(known) - 1, 1)


def test_too_few_texts() -> None:
    with pytest.raises(InputError, match="made up has 1 different texts; 5 folds need at least 10"):
        make_folds(made_of(["a"] * 50), 5, seed=0)
