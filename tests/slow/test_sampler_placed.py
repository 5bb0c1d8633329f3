"""The choice of tokens on a pretended accelerator: the host's tokens, and one copy to the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.conftest import Scale
from tests.support.accelerator import DEVICE, copies, largest
from tests.support.sampler import check_all_rows, check_log_probabilities, check_not_finite


def put(logits: NDArray[np.float32]) -> Any:
    return torch.from_numpy(logits).to(DEVICE)


@pytest.mark.parametrize("size", [50, 257, 5000])
@pytest.mark.parametrize("kind", ["normal", "flat", "peaked", "half is -inf"])
def test_the_hosts_tokens(size: int, kind: str, scale: Scale) -> None:
    before = copies["to_host"], copies["reads"]
    largest.clear()  # of other tests in this process
    steps = 0

    def count(logits: NDArray[np.float32]) -> Any:
        nonlocal steps
        steps += 1
        return put(logits)

    check_all_rows(size, kind, scale, count)
    assert (copies["to_host"] - before[0], copies["reads"] - before[1]) == (steps, 0)
    assert largest["to_host"] < 50  # elements: the tokens, and never the logits


@pytest.mark.parametrize("number", [0, 1, 5, 20])
def test_the_hosts_log_probabilities(number: int) -> None:
    check_log_probabilities(number, put)


def test_logits_that_are_not_finite_give_no_token() -> None:
    check_not_finite(put)
