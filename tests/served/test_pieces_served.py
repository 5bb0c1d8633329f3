"""One pipeline of all pieces, on the real server and in this process: by shoal's names, and as copies under others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.authoring.check.families import check
from shoal.clients.client.client import Client
from shoal.clients.local import Pipeline, load
from shoal.errors import InputError
from tests.support.pictures import draw, save
from tests.support.pieces import PIECES

INPUTS: dict[str, Any] = {
    "PICTURE": [save(draw(300, width), "JPEG") for width in (300, 320, 400)],
    "TEXT": ["The cat sat.", "No dog, no CAT!", ""],
    "A": np.array([[3, 1, -np.inf], [0, 0, 0], [5, 1, 2]], np.float32),
    "B": np.array([[0, 1, -np.inf], [3, 2, 1], [9, 0, 0]], np.float32),
}


@pytest.fixture(scope="module")
def here(chain: Path) -> Iterator[Pipeline]:
    loaded = load(chain / "chain")
    yield loaded
    loaded.close()


def test_the_server_gives_what_this_process_gives(client: Client, here: Pipeline) -> None:
    expected, served = here(**INPUTS), client.infer("chain", INPUTS)
    assert expected.keys() == set(served)
    for name, array in expected.items():
        assert served[name].dtype == array.dtype
        assert np.array_equal(served[name], array), name


def test_it_is_the_right_answer(here: Pipeline) -> None:
    answer = here(**INPUTS)
    logits = np.stack([INPUTS["A"], INPUTS["B"]]).astype(np.float64)
    powers = np.exp(logits)
    votes = (powers / powers.sum(axis=2, keepdims=True)).mean(axis=0)
    np.testing.assert_allclose(answer["SCORE"][:, 0], votes.max(axis=1), rtol=1e-6)
    np.testing.assert_allclose(answer["TOP_SCORES"], -np.sort(-votes), rtol=1e-6, atol=1e-12)
    assert answer["ABOVE"].tolist() == (votes >= 0.5).tolist()
    assert answer["LABEL"].tolist() == [[str(column).encode()] for column in votes.argmax(axis=1)]
    assert answer["MINE"].tolist() == [[b"" if row.max() < 0.75 else b"low"] for row in votes]
    shares = np.array([[1 / 3, 1 / 3, 0, 1 / 3], [0, 1 / 4, 1 / 2, 0], [0, 0, 0, 0]])  # of: the, cat, no, a full stop
    z = (shares - [0, 1, 0.5, 1]) / [1, 2, 1, 1]
    np.testing.assert_allclose(answer["UNIT"], z / np.linalg.norm(z, axis=1, keepdims=True), rtol=1e-6, atol=1e-7)


def test_a_bad_score_gets_the_same_words(client: Client, chain: Path) -> None:
    """Asked of the piece alone: side by side with others in an ensemble Triton 24.10 may not outlive it."""
    bad = {"LOGITS": np.full((3, 3), np.nan, np.float32)}
    here = load(chain / "softmax")
    with pytest.raises(InputError) as local:
        here(**bad)
    here.close()
    with pytest.raises(InputError) as served:
        client.infer("softmax", bad)
    assert str(local.value) == str(served.value)
    assert str(local.value).startswith("LOGITS[0] holds NaN or infinity; it must be finite.")


def test_nothing_is_found_in_it(chain: Path) -> None:
    assert [finding.rule.id for finding in check(chain)] == ["several-first-steps"]  # as it is defined above
    assert check(chain, target="26.05") == []
    config = json.loads((chain / "manifest.json").read_text(encoding="utf-8"))
    assert [*config["not_warmed_up"]] == ["image"]  # which takes no text


def test_every_piece_takes_part(chain: Path) -> None:
    copies = {"my_counts": "word_counts", "my_pairs": "pair_tokenizer"}
    names = {copies.get(path.parent.name, path.parent.name) for path in chain.glob("*/config.pbtxt")}
    assert names == {*PIECES, "my_label", "chain"}
