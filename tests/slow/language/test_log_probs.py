"""Log probabilities of every engine, as token ids and as text, against transformers' own logits."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from shoal.clients.client.client import Client
from shoal.clients.llm.client import Llm
from shoal.errors import InputError
from shoal.kit.generation.contract import LOG_PROB_OUTPUTS
from shoal.kit.generation.pieces import Piece, join_pieces
from tests.conftest import Scale
from tests.support.llm import token_inputs, tokens_of
from tests.support.rows import stack
from tests.support.service import Service

PIPELINES = {"llm-hf": ("llm", "llm_bls"), "tiny-onnx": ("llm_onnx",), "llm-vllm": ("llm", "llm_bls")}
NEW = 12
CLOSE, CLOSE_SUM = 1e-4, 1e-3
PROMPTS = ["What do cats do?", "A river carries", "Das Meer ist groß", "Once upon a time", "moon 🐟"]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6, "seed": 1},
    {"temperature": 1.7, "top_k": 40, "seed": 2},
    {"repetition_penalty": 1.4},
    {"temperature": 1.1, "top_p": 0.8, "frequency_penalty": 0.9, "presence_penalty": -0.5, "seed": 3},
]
TENSORS = {"top_k": "runtime_top_k", "top_p": "runtime_top_p"}


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    """The log probabilities [new tokens, vocabulary] at the places of new tokens."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()

    def read(prompt: list[int], new: list[int]) -> NDArray[np.float32]:
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *new]])).logits[0, len(prompt) - 1 : -1]
        return np.asarray(torch.log_softmax(logits.float(), -1).numpy())

    return read


@pytest.fixture(scope="module", params=PIPELINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def running(engine: str, request: pytest.FixtureRequest) -> Service:
    """The service that has the engine."""
    found: Service = request.getfixturevalue("vllm" if engine == "llm-vllm" else "service")
    return found


def make_requests(number: int) -> list[tuple[str, dict[str, Any], int]]:
    """Prompts, settings, and how many of the most probable tokens."""
    draw = random.Random(4)
    return [(draw.choice(PROMPTS), SETTINGS[index % len(SETTINGS)], draw.randrange(6)) for index in range(number)]


def check_places(right: NDArray[Any], new: list[int], chosen: Any, total: float, top_ids: Any, top: Any) -> None:
    """Compare what an engine gave with the oracle, which may order two nearly equal tokens the other way."""
    own = right[np.arange(len(new)), new]
    np.testing.assert_allclose(chosen, own, atol=CLOSE, rtol=0)
    assert abs(total - own.sum()) < CLOSE_SUM
    best = -np.sort(-right, axis=1)[:, : top.shape[1]]
    np.testing.assert_allclose(top, best, atol=CLOSE, rtol=0)
    np.testing.assert_allclose(np.take_along_axis(right, top_ids, 1), best, atol=CLOSE, rtol=0)
    assert all(len(set(row)) == len(row) for row in top_ids.tolist())


def join(answers: list[Any], name: str, axis: int) -> Any:
    return np.concatenate([answer[name] for answer in answers], axis)[0]


def test_token_ids(engine: str, running: Service, oracle: Any, tokenizer: Tokenizer, scale: Scale) -> None:
    with Client(running.grpc) as client:
        for index, (prompt, settings, number) in enumerate(make_requests(scale(15, 100))):
            ids = tokenizer.encode(prompt).ids
            given = {TENSORS.get(name, name): value for name, value in settings.items()}
            given |= {"runtime_top_p": 1.0} if given.keys() == {"temperature", "seed"} else {}  # else greedy
            given |= {"return_log_probs": True, "top_logprobs": number, "streaming": index % 2 == 0}
            answers = [*client.stream(engine, token_inputs(ids, NEW, **given))]
            new = tokens_of(answers)
            assert len(new) == NEW
            assert (len(answers) > 1) == given["streaming"]
            right, chosen = oracle(ids, new), join(answers, "output_log_probs", 2)[0]
            top_ids, top = np.zeros((NEW, 0), np.int64), np.zeros((NEW, 0))
            if number:
                top_ids, top = join(answers, "top_token_ids", 1), join(answers, "top_log_probs", 1)
            assert top.shape == (NEW, number)
            check_places(right, new, chosen, answers[-1]["cum_log_probs"].item(), top_ids, top)
            so_far = np.cumsum([answer["output_log_probs"].sum() for answer in answers])
            np.testing.assert_allclose([answer["cum_log_probs"].item() for answer in answers], so_far, atol=1e-4)


def test_nothing_is_returned_unasked_and_too_many_are_refused(engine: str, running: Service) -> None:
    with Client(running.grpc) as client:
        (answer,) = client.stream(engine, token_inputs([5, 6], 3, streaming=False, return_log_probs=False))
        assert not LOG_PROB_OUTPUTS & {*answer}
        (answer,) = client.stream(engine, token_inputs([5, 6], 3, streaming=False, top_logprobs=2))
        assert "output_log_probs" not in answer
        assert answer["top_log_probs"].shape == (1, 3, 2)
        with pytest.raises(InputError, match=r"top_logprobs is 21. Send from 0 to 20"):
            [*client.stream(engine, token_inputs([5, 6], 3, top_logprobs=21))]
        for name in PIPELINES[engine]:
            with pytest.raises(InputError, match=r"top_logprobs is 21. Send from 0 to 20"):
                Llm(client, name).generate("A", top_logprobs=21)


def check_biased(oracle: Any, prompt: list[int], new: list[int], bias: NDArray[Any], penalty: float) -> None:
    """Each token has the greatest of the model's logits plus the bias, less the penalty for tokens that were there."""
    scores = oracle(prompt, new) + bias
    for place, row in enumerate(scores):
        tokens, counts = np.unique(np.array(new[:place], np.int64), return_counts=True)
        row[tokens] -= penalty * counts
        assert row[new[place]] >= row.max() - CLOSE


def test_bias_of_token_ids(engine: str, running: Service, oracle: Any, tokenizer: Tokenizer) -> None:
    draw, size = np.random.default_rng(7), oracle([5], [6]).shape[1]
    with Client(running.grpc) as client:

        def ask(ids: list[int], bias: list[float] | NDArray[Any], **more: Any) -> list[int]:
            inputs = token_inputs(ids, NEW, **more) | {"embedding_bias": np.array([bias], np.float32)}
            return tokens_of(client.stream(engine, inputs))

        for index, text in enumerate(PROMPTS):
            ids, bias, penalty = tokenizer.encode(text).ids, np.zeros(size, np.float32), 0.7 * (index % 2)
            bias[draw.integers(0, size, 40)] = draw.normal(0, 5, 40)
            new = ask(ids, bias, frequency_penalty=penalty)
            check_biased(oracle, ids, new, bias, penalty)
            plain = ask(ids, [], frequency_penalty=penalty)
            assert plain == ask(ids, bias * 0, frequency_penalty=penalty) != new
            drawn = ask(ids, bias, temperature=0.8, runtime_top_p=1.0, seed=1)
            assert drawn == ask(ids, bias, temperature=0.8, runtime_top_p=1.0, seed=1)
        only = ask(ids, [0.0] * 9 + [1000.0])
        assert only == [9] * NEW
        with pytest.raises(
            InputError, match=rf"embedding_bias has {size + 1} numbers, .* vocabulary has {size} tokens"
        ):
            ask(ids, [0.0] * (size + 1))
        with pytest.raises(InputError, match=r"embedding_bias is nan for the token 1. Send finite numbers"):
            ask(ids, [0.0, np.nan])


@pytest.mark.parametrize("model", PIPELINES["llm-hf"])
def test_bias_of_words(model: str, service: Service, oracle: Any, tokenizer: Tokenizer) -> None:
    """All tokens of a word have its weight, and a token of two words has both."""
    words, weights = ["river", " cat", "", "river and"], [3.5, 6.0, 9.0, -2.25]
    bias = np.zeros(oracle([5], [6]).shape[1], np.float32)
    for word, weight in zip(words, weights, strict=True):
        for token in tokenizer.encode(word, add_special_tokens=False).ids:
            bias[token] += weight
    given = {"max_tokens": [NEW], "return_logprobs": [True], "stream": [False]}
    given |= {"embedding_bias_words": [words], "embedding_bias_weights": [weights]}
    with Client(service.grpc) as client:
        for text in PROMPTS:
            (answer,) = client.stream(model, {"text_input": [text], **given})
            new = [int(next(iter(place))) for place in json.loads(answer["logprobs"].item())]
            check_biased(oracle, tokenizer.encode(text).ids, new, bias, 0)
        with pytest.raises(InputError, match=r"embedding_bias_words has 4 entries, and embedding_bias_weights has 1\."):
            [*client.stream(model, {"text_input": ["A"], **given, "embedding_bias_weights": [[1.0]]})]


def check_text(piece: Piece, prompt: list[int], oracle: Any, tokenizer: Tokenizer, number: int) -> None:
    new = [int(next(iter(place))) for place in piece.logprobs]
    assert len(new) == piece.num_output_tokens
    right = oracle(prompt, new)
    chosen = [next(iter(place.values()))["logprob"] for place in piece.logprobs]
    ranked = [
        sorted((value["rank"], int(token), value["logprob"]) for token, value in place.items() if value["rank"])
        for place in piece.logprobs
    ]
    top = np.array(ranked, np.float64).reshape(len(new), number, 3)
    assert (top[:, :, 0] == np.arange(1, number + 1)).all()
    assert piece.cumulative_logprob is not None
    check_places(right, new, chosen, piece.cumulative_logprob, top[:, :, 1].astype(np.int64), top[:, :, 2])
    for place in piece.logprobs:
        assert all(value["decoded_token"] == tokenizer.decode([int(token)], skip_special_tokens=False)
                   for token, value in place.items())  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "model", "way"),
    [
        (engine, model, way)
        for engine, models in PIPELINES.items()
        for model in models
        for way in ("grpc", "http", "local")
        if (engine, way) != ("llm-vllm", "local")  # it runs in an environment of its own
    ],
    indirect=["engine"],
)
def test_texts(
    model: str, way: Any, engine: str, here: Any, running: Service, oracle: Any, tokenizer: Tokenizer, scale: Scale
) -> None:
    """Whole and in pieces, and also where a stop word cuts the text."""
    num_cut = 0
    source: Any = here(model) if way == "local" else Client(getattr(running, way), protocol=way)
    llm = Llm(source, "" if way == "local" else model)
    asked = {"return_logprobs": True, "return_cumulative_logprob": True, "max_tokens": NEW}
    for prompt, settings, number in make_requests(scale(5, 30)):
        given: Any = {**settings, **asked, "top_logprobs": number}
        ids = tokenizer.encode(prompt).ids
        whole = llm.generate(prompt, **given)
        check_text(whole, ids, oracle, tokenizer, number)
        check_text(join_pieces([*llm.stream(prompt, **given)]), ids, oracle, tokenizer, number)
        stop = whole.text[3:6].strip("\ufffd")
        if ("seed" in settings and engine == "llm-vllm") or not stop:
            continue
        num_cut += 1
        cut = llm.generate(prompt, **{**given, "stop_words": [stop]})
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert cut.num_output_tokens <= whole.num_output_tokens
        check_text(cut, ids, oracle, tokenizer, number)
        check_text(join_pieces([*llm.stream(prompt, **given, stop_words=[stop])]), ids, oracle, tokenizer, number)
    assert num_cut
    plain, ranked = llm.generate("A", max_tokens=3), llm.generate("A", max_tokens=3, top_logprobs=1)
    assert (plain.cumulative_logprob, plain.logprobs, ranked.cumulative_logprob) == (None, (), None)
    assert len(ranked.logprobs) == 3
    if way != "local":
        source.close()


@pytest.mark.parametrize("way", ["grpc", "http"])
def test_rows_of_a_whole_answer_are_padded(way: Any, service: Service, oracle: Any, tokenizer: Tokenizer) -> None:
    prompts = [[*tokenizer.encode(text).ids] for text in PROMPTS]
    lengths = [3, 9, 1, 5, 7]
    numbers = [0, 2, 4, 4, 1]
    asked = stack(prompts, "INT32", request_output_len=np.array(lengths, np.int32)[:, None])
    asked |= {
        "return_log_probs": np.array([[True], [True], [False], [True], [True]]),
        "top_logprobs": np.array(numbers, np.int32)[:, None],
    }
    with Client(service.grpc if way == "grpc" else service.http, protocol=way) as client:
        answer = client.infer("INT32", asked)
        without = {name: array for name, array in asked.items() if "log" not in name}
        assert sorted(answer.keys() - client.infer("INT32", without).keys()) == [
            "cum_log_probs", "output_log_probs", "top_log_probs", "top_token_ids",
        ]  # fmt: skip
    assert answer["output_log_probs"].shape == (5, 1, 9)
    assert answer["top_log_probs"].shape == answer["top_token_ids"].shape == (5, 9, 4)
    for row, (prompt, length, number) in enumerate(zip(prompts, lengths, numbers, strict=True)):
        new = answer["output_ids"][row, 0, :length].tolist()
        chosen, total = answer["output_log_probs"][row, 0], answer["cum_log_probs"][row, 0]
        top, top_ids = answer["top_log_probs"][row], answer["top_token_ids"][row]
        assert (chosen[length:] == 0).all()
        assert (top[length:] == 0).all()
        assert (top[:, number:] == 0).all()
        assert (top_ids[length:] == -1).all()
        assert (top_ids[:, number:] == -1).all()
        right = oracle(prompt, new)
        if row == 2:
            assert (chosen == 0).all()
            assert total == 0
            chosen, total = right[np.arange(length), new], right[np.arange(length), new].sum()
        check_places(right, new, chosen[:length], total, top_ids[:length, :number], top[:length, :number])
