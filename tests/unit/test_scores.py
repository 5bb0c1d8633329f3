from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.errors import InputError
from shoal.kit.blocks import blend, check_weight


def test_blend_row_by_row() -> None:
    weight = np.array([[0], [0.25], [1]], np.float32)
    bert, forest = np.full((3, 1), 4, np.float32), np.full((3, 1), 8, np.float32)
    for convert in (np.asarray, torch.asarray):
        assert blend(convert(weight), convert(bert), convert(forest)).tolist() == [[8], [7], [4]]


def test_a_number_weighs_as_a_tensor_does() -> None:
    generator = np.random.default_rng(0)
    bert, forest = generator.normal(size=(2, 500, 1)).astype(np.float32)
    weights = np.full((500, 1), 0.7, np.float32)
    assert np.array_equal(blend(0.7, bert, forest), blend(weights, bert, forest))
    assert blend(0.7, bert, forest).dtype == np.float32


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1, 1.1])
def test_weights_outside_0_to_1_are_named(value: float) -> None:
    with pytest.raises(InputError, match=rf"BERT_WEIGHT\[1\] is {value:g}; it must lie between 0 and 1\. Leave it out"):
        check_weight(np.array([[0.5], [value]], np.float32), name="BERT_WEIGHT")


def test_bounds_are_weights() -> None:
    check_weight(np.array([[0.0], [1.0]], np.float32), name="BERT_WEIGHT")
