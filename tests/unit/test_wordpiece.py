from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ArtifactError
from shoal.kit.text.device import Ragged, frame
from shoal.kit.text.tokens import SpecialIds, WordPiece, read_vocabulary
from tests.support.emulation import ragged

IDS = SpecialIds(cls=101, sep=102, pad=0)
TOY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat", "##s", "sat", ".", "e"]


def test_exact_ids_and_mask() -> None:
    ids, mask = WordPiece(TOY).encode(["Cats sat.", "É", "dog"])
    assert ids.tolist() == [[2, 5, 6, 7, 8, 3, 0, 0], [2, 9, 3, 0, 0, 0, 0, 0], [2, 1, 3, 0, 0, 0, 0, 0]]
    assert mask.sum(1).tolist() == [6, 3, 3]
    assert ids.dtype == mask.dtype == np.int64


def test_special_tokens_in_the_text_count_as_such() -> None:
    ids, _ = WordPiece(TOY).encode(["cat [SEP] cat"])
    assert ids[0, :5].tolist() == [2, 5, 3, 5, 3]


def test_words_of_more_than_100_characters_are_unknown() -> None:
    vocabulary = [*TOY, "a", "##a"]
    encode = WordPiece(vocabulary, max_length=256).encode
    ids, mask = encode(["a" * 100, "a" * 101])
    assert mask.sum(1).tolist() == [102, 3]
    assert ids[1, 1] == TOY.index("[UNK]")


@given(st.lists(st.lists(st.integers(1, 99), max_size=20), min_size=1, max_size=5), st.integers(3, 24))
def test_frame_on_numpy_and_torch(rows: list[list[int]], max_length: int) -> None:
    host = ragged(rows)
    ids, mask = frame(host, IDS, max_length)
    for row, framed, ones in zip(rows, ids.tolist(), mask.tolist(), strict=True):
        body = [101, *row[: max_length - 2], 102]
        assert framed == body + [0] * (len(framed) - len(body))
        assert ones == [1] * len(body) + [0] * (len(framed) - len(body))
    assert ids.shape == mask.shape == (len(rows), max_length)
    other = frame(Ragged(torch.asarray(host.values), torch.asarray(host.offsets)), IDS, max_length)
    assert [t.tolist() for t in other] == [ids.tolist(), mask.tolist()]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(3, 40))
def test_the_width_is_that_of_the_longest_row(numbers: list[int], max_length: int) -> None:
    """In steps of 8, up to the greatest that is allowed."""
    ids, mask = WordPiece(TOY, max_length=max_length).encode(["cat " * number for number in numbers])
    longest = min(max(numbers) + 2, max_length)
    width = min((longest + 7) // 8 * 8, max_length)
    assert ids.shape == mask.shape == (len(numbers), width)
    assert mask.sum(axis=1).tolist() == [min(number + 2, max_length) for number in numbers]


def test_vocabulary_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(TOY) + "\n", encoding="utf-8")
    assert read_vocabulary(path) == TOY
    path.write_text("\n".join(TOY[1:]), encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"vocab.txt lacks \[PAD\]"):
        read_vocabulary(path)
    path.write_text("\n".join([*TOY, "cat"]), encoding="utf-8")
    with pytest.raises(ArtifactError, match="holds a token twice"):
        read_vocabulary(path)
