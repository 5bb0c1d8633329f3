from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InputError
from shoal.kit.component.tensors import Device
from shoal.kit.text.device import Ragged, upload
from shoal.kit.text.tokens import check_texts
from tests.support.emulation import ragged, to_strings

rows_of_ints = st.lists(st.lists(st.integers(0, 1000), max_size=12), min_size=1, max_size=8)


def test_layout() -> None:
    made = ragged([[1, 2], [], [3]])
    assert made.values.tolist() == [1, 2, 3]
    assert made.offsets.tolist() == [0, 2, 2, 3]
    assert made.lengths.tolist() == [2, 0, 1]
    assert made.row_ids.tolist() == [0, 0, 2]
    assert len(made) == 3


@given(rows_of_ints, st.integers(1, 15))
def test_pad_cuts_and_fills_each_row(rows: list[list[int]], width: int) -> None:
    expected = [(row + [-7] * width)[:width] for row in rows]
    assert ragged(rows).pad(width, -7).tolist() == expected


@given(rows_of_ints, st.integers(1, 15))
def test_torch_arrays_give_the_same(rows: list[list[int]], width: int) -> None:
    host = ragged(rows)
    other = Ragged(torch.asarray(host.values), torch.asarray(host.offsets))
    assert other.pad(width, 0).tolist() == host.pad(width, 0).tolist()
    assert other.row_ids.tolist() == host.row_ids.tolist()


@given(st.lists(st.text(), max_size=6))
def test_texts_round_trip(texts: list[str]) -> None:
    valid = [text.encode(errors="replace").decode() for text in texts]
    assert to_strings(upload(valid, Device(), "TEXT")) == valid


def test_texts_that_cannot_be_used_are_named() -> None:
    check_texts([b"", "é".encode()], name="excerpt", max_bytes=2)
    with pytest.raises(InputError, match=r"excerpt\[1\] has 3 bytes; at most 2 are allowed\. Split the text"):
        check_texts([b"a", b"abc"], name="excerpt", max_bytes=2)
    with pytest.raises(InputError, match=r"excerpt\[0\] is not valid UTF-8: byte 0xff at position 1\."):
        check_texts([b"a\xff"], name="excerpt", max_bytes=9)
