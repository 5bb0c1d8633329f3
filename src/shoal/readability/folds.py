"""Grouped splits: all copies of one text are in the same fold."""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.errors import InputError
from shoal.readability.corpus import Corpus

Rows = np.ndarray[Any, np.dtype[np.int64]]
INNER_SHARE, MAX_INNER = 0.1, 300  # of the rows to train on; more rows would only cost time


def make_folds(corpus: Corpus, num_folds: int, *, seed: int) -> list[tuple[Rows, Rows]]:
    """Return each fold's rows to train on and rows to predict; every row is predicted once.

    Without duplicates these are the folds of scikit-learn's ``KFold(num_folds, shuffle=True, random_state=seed)``,
    which cuts a permutation of the rows into parts. A duplicate is left out of the permutation and placed with the
    first copy of its text. With few duplicates, only rows near the cuts are in another fold than scikit-learn's.

    Raises:
        InputError: there are too few different texts.
    """
    groups, firsts = corpus.groups, np.unique(corpus.groups, return_index=True)[1]
    needed = max(10, 2 * num_folds)
    if len(firsts) < needed:
        raise InputError(
            f"{corpus.name} has {len(firsts)} different {corpus.kind}; {num_folds} folds need at least {needed}.",
            "Add texts, or give fewer --folds.",
        )
    order = np.random.RandomState(seed).permutation(len(corpus))
    parts = np.array_split(groups[order[np.isin(order, firsts)]], num_folds)
    return [(np.flatnonzero(~np.isin(groups, part)), np.flatnonzero(np.isin(groups, part))) for part in parts]


def hold_out(corpus: Corpus, num_rows: int, *, seed: int) -> tuple[Rows, Rows]:
    """Hold out at most ``num_rows`` rows, drawn with ``seed``; return kept and held-out row numbers, in drawn order.

    Rows with the same text are kept together; each side has at least one text.
    """
    groups = corpus.groups
    sizes = np.bincount(groups)
    order = np.random.default_rng(seed).permutation(len(sizes))
    held: list[int] = []
    room = num_rows
    for group in order[:-1]:
        if sizes[group] <= room:
            held.append(int(group))
            room -= int(sizes[group])
    held = held or [int(sizes.argmin())]
    drawn = np.argsort(np.argsort(order)[groups], kind="stable")  # the rows in the order of their texts' draw
    is_held = np.isin(groups[drawn], held)
    return drawn[~is_held], drawn[is_held]


def split_inner(corpus: Corpus, *, seed: int) -> tuple[Corpus, Corpus]:
    """Return texts to train on, and the inner split: held-out texts that choose the encoder's head and when to stop."""
    kept, inner = hold_out(corpus, min(MAX_INNER, max(1, round(INNER_SHARE * len(corpus)))), seed=seed)
    return corpus.take(np.sort(kept)), corpus.take(np.sort(inner))
