"""Answers and refusals of the real server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.authoring.composition.compose import compose
from shoal.authoring.repository.plan import Plan
from shoal.clients.client.client import Client
from shoal.clients.local import Pipeline, load
from shoal.errors import InputError
from shoal.serving.server.launch import Server

TEXTS = ["The cat sat.", "It is nonetheless imperative that epistemology be considered.", "", "漢字 🐟 \0 שלום"]


def test_the_weight_blends_row_by_row(client: Client) -> None:
    weights = [0.0, 1.0, 0.25, 0.5]
    answer = client.infer("ensemble_all", excerpt=TEXTS, BERT_WEIGHT=weights)
    w = np.array(weights, np.float32)[:, None]
    expected = w * answer["BERT_SCORE"] + (1 - w) * answer["FOREST_SCORE"]
    assert np.array_equal(answer["SCORE"], expected)
    assert answer["SCORE"].shape == (4, 1)
    assert answer["SCORE"].dtype == np.float32


def test_without_a_weight_it_is_the_plain_average(client: Client) -> None:
    plain = client.infer("ensemble_all", excerpt=TEXTS)
    assert np.array_equal(plain["SCORE"], client.infer("ensemble_all", excerpt=TEXTS, BERT_WEIGHT=[0.5] * 4)["SCORE"])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"excerpt": ["a", "b"], "BERT_WEIGHT": [0.5, 1.5]}, "BERT_WEIGHT[1] is 1.5; it must lie between 0 and 1."),
        ({"excerpt": ["a"], "BERT_WEIGHT": [float("nan")]}, "BERT_WEIGHT[0] is nan; it must lie between 0 and 1."),
        ({"excerpt": [b"a\xff"]}, "excerpt[0] is not valid UTF-8: byte 0xff at position 1."),
        ({"excerpt": ["a" * 65537]}, "excerpt[0] has 65537 bytes; at most 65536 are allowed."),
    ],
)
def test_bad_values_get_the_same_words_on_every_way_in(
    client: Client, pipeline: Pipeline, inputs: dict[str, list[object]], message: str
) -> None:
    with pytest.raises(InputError) as here:
        pipeline(**inputs)
    with pytest.raises(InputError) as served:
        client.infer("ensemble_all", inputs)
    assert str(here.value).startswith(message)
    assert str(here.value) == str(served.value)


def test_a_bad_neighbour_fails_alone(server: Server, pipeline: Pipeline) -> None:
    from concurrent.futures import ThreadPoolExecutor

    good = [f"The cat number {k} sat." for k in range(40)]
    with Client(server.grpc_url) as client, ThreadPoolExecutor(16) as callers:

        def ask(text: object) -> Any:
            try:
                return float(client.infer("ensemble_all", excerpt=[text])["SCORE"][0, 0])
            except InputError as error:
                return str(error)

        answers = list(callers.map(ask, [t for text in good for t in (text, b"\xff")]))
    assert all("not valid UTF-8" in str(answer) for answer in answers[1::2])
    np.testing.assert_allclose(answers[::2], pipeline(excerpt=good)["SCORE"][:, 0], atol=1e-5)


def test_bf16_is_close(artifacts: Path, tmp_path: Path, pipeline: Pipeline) -> None:
    repository = compose("ensemble_all", tmp_path / "bf16", artifacts=artifacts, plan=Plan(dtype="bf16"))
    texts = TEXTS[:2] * 4
    got, expected = load(repository / "ensemble_all")(excerpt=texts), pipeline(excerpt=texts)
    assert 0 < np.abs(got["BERT_SCORE"] - expected["BERT_SCORE"]).max() <= 0.02
