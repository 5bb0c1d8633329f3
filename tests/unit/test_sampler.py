"""The choice of the next token, against transformers' own processors on random logits."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.generation import logits_process as processors

from shoal.kit.generation.contract import TokenRequest
from shoal.kit.generation.sampler import HOST, Sampler, _Device, choose, read_logits
from shoal.kit.generation.sampling import Sampling
from tests.conftest import Scale
from tests.support.sampler import PROMPT, Put, check_all_rows, check_log_probabilities, check_not_finite, take

EACH = pytest.mark.parametrize("put", [np.asarray, torch.from_numpy], ids=["NumPy", "torch"])
VOCABULARY = 300
ENDS = (2, 11)
BANS = (
    (17,),
    (2,),
    (40, 7, 8),
    (7, 30),
    (99, 98),
    (1, 2, 3, 4, 5, 6, 7, 8, 9, 10),
)  # (2,) is an end token: it counts not
SETTINGS = [
    Sampling(temperature, top_k, top_p, penalty, min_tokens=least)
    for temperature, top_k, top_p, penalty, least in itertools.product(
        (0.0, 0.3, 1.0, 1.7), (0, 1, 5, 1000), (0.05, 0.8, 1.0), (1.0, 1.4), (0, 3)
    )
]


def adjusted(sampler: Sampler, logits: NDArray[np.float32], ids: list[int]) -> NDArray[np.float32]:
    """Return the logits after the bias, the penalties and the bans."""
    found = logits.copy()
    sampler.adjust(found, ids, HOST)
    return found


def oracle(logits: NDArray[np.float32], request: TokenRequest, ids: list[int]) -> NDArray[np.float64]:
    """The probability of each token, by transformers' processors in the order of ``generate``."""
    sampling = request.sampling
    found: Any = processors.LogitsProcessorList()
    found.append(processors.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if request.bans:
        found.append(processors.NoBadWordsLogitsProcessor([[*word] for word in request.bans], [*request.end_ids]))
    found.append(processors.MinNewTokensLengthLogitsProcessor(len(PROMPT), sampling.min_tokens, [*request.end_ids]))
    if not sampling.is_greedy:
        found.append(processors.TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            found.append(processors.TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            found.append(processors.TopPLogitsWarper(sampling.top_p))
    scores = found(torch.tensor([[*request.ids, *ids]]), torch.from_numpy(logits[None].copy()))[0]
    if sampling.is_greedy:
        chosen: NDArray[np.float64] = np.eye(len(logits))[int(scores.argmax())]
        return chosen
    return np.asarray(torch.softmax(scores, -1, dtype=torch.float64).numpy())


@pytest.mark.parametrize("scale", [0.5, 6.0], ids=["flat", "peaked"])
def test_the_same_tokens_as_transformers(scale: float) -> None:
    random = np.random.default_rng(1)
    for settings in SETTINGS:
        for bans, ids in ((BANS, [7, 99]), (BANS, [40, 7]), ((), [1, 2, 3, 4])):
            request = TokenRequest(PROMPT, 50, ENDS, settings, bans=bans)
            logits = (random.normal(size=VOCABULARY) * scale).astype(np.float32)
            given = logits.copy()
            shares = oracle(logits, request, ids)
            ends = shares.cumsum()
            for seed in range(4):
                sampler = Sampler(
                    TokenRequest(PROMPT, 50, ENDS, Sampling(**{**vars(settings), "seed": seed}), bans=bans)
                )
                for point in np.random.default_rng(seed).random(4):
                    wanted = int(np.searchsorted(ends, point * ends[-1], side="right"))
                    assert take(sampler, logits, ids) == wanted, settings
            assert (logits == given).all()  # they are the engine's


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_penalties_over_the_new_tokens(temperature: float) -> None:
    """As OpenAI and vLLM define them, after the repetition penalty; not over the prompt."""
    random = np.random.default_rng(2)
    for frequency, presence, repetition in itertools.product((0.0, 0.7, -1.3, 2.0), (0.0, 0.6, -2.0), (1.0, 1.2)):
        logits = random.normal(size=VOCABULARY).astype(np.float32) * 3
        ids = random.integers(0, 12, 40).tolist()
        expected = logits.copy()
        factor = np.float32(repetition)
        for token in {*PROMPT, *ids}:
            expected[token] = expected[token] * factor if expected[token] < 0 else expected[token] / factor
        for token in set(ids):
            expected[token] -= np.float32(frequency) * np.float32(ids.count(token))
            expected[token] -= np.float32(presence)
        settings: dict[str, Any] = {"temperature": temperature, "seed": 1}
        wanted = take(Sampler(TokenRequest(PROMPT, 50, (), Sampling(**settings))), expected, [])
        penalties: dict[str, Any] = {
            "frequency_penalty": frequency,
            "presence_penalty": presence,
            "repetition_penalty": repetition,
        }
        sampler = Sampler(TokenRequest(PROMPT, 50, (), Sampling(**settings, **penalties)))
        assert np.array_equal(adjusted(sampler, logits, ids), expected), penalties
        assert take(sampler, logits, ids) == wanted
        plain = Sampler(TokenRequest(PROMPT, 50, (), Sampling(repetition_penalty=repetition)))
        assert np.array_equal(adjusted(sampler, logits, []), adjusted(plain, logits, []))


def test_draws_follow_the_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    sampler = Sampler(TokenRequest((0,), 5, (), Sampling(seed=3)))
    counts = Counter(take(sampler, logits, []) for _ in range(20000))
    assert [counts[token] / 20000 for token in range(4)] == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.02)


def test_seeds() -> None:
    logits = np.random.default_rng(0).normal(size=VOCABULARY).astype(np.float32)

    def draw(seed: int | None) -> list[int]:
        sampler = Sampler(TokenRequest(PROMPT, 50, (), Sampling(seed=seed)))
        return [take(sampler, logits, []) for _ in range(8)]

    assert draw(2**64 - 1) == draw(2**64 - 1) != draw(1)
    assert draw(None) != draw(None)


def test_logits_that_leave_one_token() -> None:
    """Extreme settings keep the best token: nothing else has a share that FP64 can hold."""
    logits = np.full(VOCABULARY, -1e4, np.float32)
    logits[33] = 1e4
    for settings in (
        Sampling(0.001),
        Sampling(top_p=1e-6),
        Sampling(top_p=1e-20),
        Sampling(top_k=VOCABULARY),
        Sampling(1e6, top_p=1e-9),
    ):
        assert take(Sampler(TokenRequest(PROMPT, 9, (), settings)), logits, []) == 33


@pytest.mark.parametrize("scale", [0.5, 6.0, 1e4])
def test_log_probabilities_are_those_of_torch(scale: float) -> None:
    random = np.random.default_rng(3)
    for number in (0, 1, 5, 20, VOCABULARY):
        logits = (random.normal(size=VOCABULARY) * scale).astype(np.float32)
        given, token = logits.copy(), int(random.integers(VOCABULARY))
        place = read_logits(logits, token, number)
        right = torch.log_softmax(torch.from_numpy(logits).double(), -1)
        best = right.topk(number)
        np.testing.assert_allclose(place.chosen, right[token], rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(place.top, best.values.numpy(), rtol=1e-9, atol=1e-9)
        assert list(place.top_ids) == best.indices.tolist()
        assert (logits == given).all()


def test_log_probabilities_of_equal_and_of_impossible_tokens() -> None:
    logits = np.array([1, -np.inf, 3, 3, 1, 3], np.float32)
    assert list(read_logits(logits, 2, 2).top_ids) == [2, 3]
    assert list(read_logits(logits, 2, 6).top_ids) == [2, 3, 5, 0, 4, 1]
    assert read_logits(logits, 1, 0) == (-np.inf, (), ())


# --- all rows at once, in NumPy and in torch -------------------------------------------------------------------------


@pytest.mark.parametrize("size", [50, 255, 256, 257, 5000])
@pytest.mark.parametrize("kind", ["normal", "flat", "peaked", "half is -inf"])
def test_all_rows_at_once_are_the_rows_one_by_one(size: int, kind: str, scale: Scale) -> None:
    """The reference chooses row by row; NumPy and torch choose the same, step by step, with and without company."""
    check_all_rows(size, kind, scale, torch.from_numpy)


@EACH
def test_logits_that_are_not_finite_give_no_token(put: Put) -> None:
    check_not_finite(put)


@pytest.mark.parametrize("more", [0, 512], ids=["small", "great"])  # of which exp is infinite in FP32
def test_a_device_draws_what_the_host_draws(more: float) -> None:
    """The code for GPUs, here on the CPU."""
    random = np.random.default_rng(5)
    logits = (random.normal(size=(60, VOCABULARY)) * 3 + more).astype(np.float32)
    choices = ((0.3, 1.0, 1.7), (0.0, 1.0, 5.0), (0.05, 0.8, 1.0, 1e-20))
    settings = np.array([[*map(random.choice, choices), random.random()] for _ in logits])
    drawn = _Device(torch.device("cpu")).draw(torch.from_numpy(logits), settings)
    assert drawn.tolist() == HOST.draw(logits, settings).tolist()
    assert drawn.min() >= 0


@EACH
def test_rows_without_a_request_get_token_0(put: Put) -> None:
    given = np.zeros((3, 300), np.float32)
    given[:, 7] = 9
    logits = put(given)
    logits = logits if isinstance(logits, np.ndarray) else logits.bfloat16()
    request = TokenRequest(PROMPT, 9, (), Sampling(0.0))
    assert choose(logits, [None, (Sampler(request), []), None]) == [(0, None), (7, None), (0, None)]
    assert choose(logits, [None] * 3) == [(0, None)] * 3


@pytest.mark.parametrize("number", [0, 1, 5, 20])
def test_log_probabilities_of_torch_are_those_of_numpy(number: int) -> None:
    check_log_probabilities(number, torch.from_numpy)
