"""Engines on transformers, in this process: the oracle is ``generate``, token by token."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from shoal.errors import ArtifactError, InputError, ShoalError
from shoal.kit.generation.contract import TokenRequest, pack_words
from shoal.kit.generation.sampler import Sampler, choose
from shoal.kit.generation.sampling import Sampling
from shoal.lab.tiny_llm import CONTEXT, make_tiny
from tests.conftest import Scale
from tests.support.families import make_family
from tests.support.generate import check_equal, expect, prompts, wait_for
from tests.support.llm import count_open, open_engine, token_inputs, tokens_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.generation_config = GenerationConfig()  # the folder's has an end token
    return model


@pytest.fixture(scope="module")
def opened(folder: Path) -> Iterator[Any]:
    with open_engine(folder, slots="4", cache_tokens="2048") as component:
        yield component


@pytest.fixture
def engine(opened: Any) -> Any:
    """Four slots, and room for two whole contexts; its warm-up, and what a test before it asked, have ended."""
    wait_for(lambda: count_open(opened) == 0, 30)
    return opened


@pytest.fixture(scope="module", params=["auto", "static"])
def either(request: pytest.FixtureRequest, folder: Path) -> Iterator[Any]:
    """An engine with continuous, then with static batches."""
    with open_engine(folder, batching=request.param) as component:
        yield component


def batched(component: Any) -> list[str]:
    """The requests that the library's scheduler computes."""
    return list(component.engine._manager.batch_processor.scheduler.active_requests)


def test_mixed_lengths_sixteen_at_a_time(either: Any, oracle: Any, scale: Scale) -> None:
    asked = list(zip(prompts(scale(24, 48)), [8, 16, 32, 96] * scale(6, 12), strict=True))
    streams = [either.stream(token_inputs(ids, new)) for ids, new in asked]
    found = [tokens_of(stream) for stream in streams]
    for (ids, new), tokens in zip(asked, found, strict=True):
        check_equal(tokens, expect(oracle, ids, new))


def test_settings_are_applied_as_by_generate(either: Any, oracle: Any) -> None:
    """Greedy with a penalty, forbidden words and a least length, beside neighbours that sample."""
    ids = prompts(1, 7)[0]
    plain = expect(oracle, ids, 24)[0]
    bad, end = [[plain[2]], plain[5:7]], plain[0]
    settings = {"repetition_penalty": 1.3, "min_new_tokens": 6, "bad_words_ids": bad, "eos_token_id": end}
    more = {"repetition_penalty": 1.3, "min_tokens": 6, "bad_words_list": pack_words(bad), "end_id": end}
    crowd = [either.stream(token_inputs(each, 40, temperature=1.0, runtime_top_p=1.0)) for each in prompts(3, 8)]
    found = tokens_of(either.stream(token_inputs(ids, 24, **more)))
    for stream in crowd:
        assert len(tokens_of(stream)) == 40
    tokens, gaps = expect(oracle, ids, 24, **settings)
    assert tokens != plain
    check_equal(found, ([token for token in tokens if token != end], gaps))


def test_in_fp32_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(either: Any) -> None:
    ids = prompts(1, 3)[0]
    settings = {"temperature": 1.2, "runtime_top_k": 80, "runtime_top_p": 0.95}

    def draw(seed: int | None) -> list[int]:
        return tokens_of(either.stream(token_inputs(ids, 40, seed=seed, **settings)))

    alone = draw(11)
    crowd = [either.stream(token_inputs(each, 60, temperature=1.0, runtime_top_p=1.0)) for each in prompts(6, 4)]
    assert draw(11) == alone
    assert draw(12) != alone
    assert draw(None) != draw(None)
    for stream in crowd:
        stream.close()


def test_tokens_are_drawn_as_their_probabilities_say() -> None:
    """Frequencies over 5,000 draws: within five standard deviations of transformers' own probabilities."""
    logits = torch.linspace(-2, 3, 12)[torch.randperm(12, generator=torch.Generator().manual_seed(0))]
    sampling = Sampling(temperature=0.8, top_k=8, top_p=0.95, seed=5)
    sampler = Sampler(TokenRequest((1,), 1, sampling=sampling))
    number = 5_000
    counts = np.bincount([choose(logits.numpy()[None], [(sampler, [])])[0][0] for _ in range(number)], minlength=12)
    kept = (logits / 0.8).sort(descending=True)
    chances = torch.softmax(kept.values[:8], -1)
    size = int((chances.cumsum(-1) < 0.95).sum()) + 1  # the fewest tokens that have 0.95 together
    expected = np.zeros(12)
    expected[kept.indices[:size].numpy()] = (chances[:size] / chances[:size].sum()).numpy()
    assert 1 < size < 8
    assert (counts[expected == 0] == 0).all()
    assert (np.abs(counts - number * expected) <= 5 * np.sqrt(number * expected * (1 - expected))).all()


def test_stops_end_the_answer(either: Any, oracle: Any) -> None:
    """The end token is not part of it; stop words are, because their text shows where the answer ends."""
    ids = prompts(1, 5)[0]
    tokens = expect(oracle, ids, 32)[0]
    place = next(i for i in range(3, 30) if tokens.index(tokens[i]) == i)  # the first of its kind
    stop = pack_words([tokens[place : place + 2], [0, 0, 0]])
    again = next((i for i in range(place + 2, 31) if tokens[i : i + 2] == tokens[place : place + 2]), 30)
    for more, size in (
        ({"end_id": tokens[place]}, place),
        ({"stop_words_list": stop}, place + 2),
        ({"stop_words_list": stop, "min_tokens": place + 1}, place + 2),  # complete after the least length
        ({"stop_words_list": stop, "min_tokens": place + 2}, again + 2),
    ):
        answers = list(either.stream(token_inputs(ids, 32, **more)))
        assert tokens_of(answers) == tokens[:size]
        assert answers[-1]["finish_reason"].item() == (b"length" if size == 32 else b"stop")
    (whole,) = either.stream(token_inputs(ids, 32, streaming=False, carry=b'{"stops": []}'))
    assert tokens_of([whole]) == tokens
    assert (whole["is_last"].item(), whole["finish_reason"].item()) == (True, b"length")
    assert whole["carry"].item() == b'{"stops": []}'


def test_in_bf16_a_seed_gives_the_same_tokens_alone(folder: Path) -> None:
    """In company, its rounding depends on the company, and a token may be another one."""
    ids = prompts(1, 3)[0]
    settings = {"temperature": 1.2, "runtime_top_k": 80, "runtime_top_p": 0.95}
    with open_engine(folder, dtype="bfloat16") as component:
        wait_for(lambda: count_open(component) == 0, 30)
        for seed in range(6):
            once, again = (tokens_of(component.stream(token_inputs(ids, 40, seed=seed, **settings))) for _ in range(2))
            assert once == again


def test_static_batches_stay_within_the_context(tmp_path: Path) -> None:
    """All rows of a batch go on with its longest answer: a model with a position for each token has no more of them."""
    folder = make_family("opt", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.generation_config = GenerationConfig()
    asked = [(list(range(3, 3 + size)), new) for size, new in ((100, 20), (5, 120), (40, 60), (2, 3), (120, 8))]
    with open_engine(folder, batching="static") as component:
        streams = [component.stream(token_inputs(ids, new)) for ids, new in asked]
        for (ids, new), stream in zip(asked, streams, strict=True):
            check_equal(tokens_of(stream), expect(model, ids, new))


def test_leaving_frees_the_slot_and_the_cache(engine: Any, oracle: Any, scale: Scale) -> None:
    free = engine.engine._free
    long = [engine.stream(token_inputs(ids, 970)) for ids in prompts(2, 1)]  # all of the cache but three pages
    wait_for(lambda: len(batched(engine)) == 2, 30)
    number = str(min(engine.engine._sequences))
    short = engine.stream(token_inputs([5, 6, 7] * 20, 12))  # four pages
    time.sleep(0.1)
    assert len(batched(engine)) == 2  # it waits for room
    start = time.monotonic()
    long[0].close()
    assert wait_for(lambda: number not in batched(engine), 10) < (0.2 if scale.is_full else 5)
    check_equal(tokens_of(short), expect(oracle, [5, 6, 7] * 20, 12))
    assert time.monotonic() - start < scale(20, 2)
    assert long[1].is_open
    long[1].close()
    wait_for(lambda: count_open(engine) == 0 and engine.engine._free == free, 30)


def test_a_request_that_waits_can_leave(engine: Any) -> None:
    long = [engine.stream(token_inputs(ids, 900)) for ids in prompts(2, 1)]
    waiting = engine.stream(token_inputs([5], 900))
    assert count_open(engine) == 3
    waiting.close()
    assert count_open(engine) == 2
    assert tokens_of(waiting) == []
    for stream in long:
        stream.close()


def test_a_short_request_ends_before_long_ones(engine: Any) -> None:
    long = [engine.stream(token_inputs(ids, 300)) for ids in prompts(3, 2)]
    wait_for(lambda: len(batched(engine)) == 3, 30)
    assert len(tokens_of(engine.stream(token_inputs([5, 6], 8)))) == 8
    assert all(stream.is_open for stream in long)
    assert [len(tokens_of(stream)) for stream in long] == [300] * 3


def test_a_long_prompt_joins_those_that_go_on(engine: Any, oracle: Any) -> None:
    """It takes several steps, in which it has a row of logits and no new token."""
    asked = [(prompts(1, 1)[0], 8), *((ids, 60) for ids in prompts(3, 2)), (prompts(1, 9)[0] * 100, 12)]
    asked[-1] = (asked[-1][0][:700], 12)
    streams = [engine.stream(token_inputs(ids, new)) for ids, new in asked]
    for (ids, new), stream in zip(asked, streams, strict=True):
        check_equal(tokens_of(stream), expect(oracle, ids, new))


def test_more_requests_than_the_cache_holds(folder: Path, oracle: Any) -> None:
    """The library's eviction is never needed: requests wait for room, and a whole context fits."""
    asked = [*zip(prompts(11, 6), [60] * 11, strict=True), (prompts(1, 9)[0] * 100, 24)]
    asked[-1] = (asked[-1][0][: CONTEXT - 24], 24)
    with open_engine(folder, slots="4", cache_tokens=str(CONTEXT)) as component:
        wait_for(lambda: count_open(component) == 0, 30)  # the warm-up
        free = component.engine._free
        streams = [component.stream(token_inputs(ids, new)) for ids, new in asked]
        for (ids, new), stream in zip(asked, streams, strict=True):
            check_equal(tokens_of(stream), expect(oracle, ids, new))
        wait_for(lambda: component.engine._free == free, 30)


def test_bad_requests_leave_neighbours_unharmed(engine: Any, oracle: Any) -> None:
    ids = prompts(1, 2)[0]
    neighbour = engine.stream(token_inputs(ids, 60))
    for inputs, words in (
        (token_inputs([5, 484], 4), "vocabulary has 484 tokens"),
        (token_inputs([-1], 4), "input_ids has -1"),
        (token_inputs([5], 4, input_lengths=0), "has no tokens"),
        (token_inputs([5], 1024), "1025 together, and the context has 1024"),
        (token_inputs([5], 4, temperature=float("nan")), "temperature is nan"),
    ):
        with pytest.raises(InputError, match=words):
            list(engine.stream(inputs))
    check_equal(tokens_of(neighbour), expect(oracle, ids, 60))


def test_the_batching_thread_dies_and_is_replaced(engine: Any, oracle: Any, scale: Scale) -> None:
    ids = prompts(1, 2)[0]
    streams = [engine.stream(token_inputs(each, 400)) for each in prompts(3, 2)]
    streams.append(engine.stream(token_inputs(ids, 900)))  # waits for room
    wait_for(lambda: len(batched(engine)) >= 2, 30)
    before = engine.engine._manager
    start = time.monotonic()
    assert engine.is_ready()
    before.add_request([10**6], request_id="-1", max_new_tokens=2, sequence=-1)  # past every check: kills the thread
    for stream in streams[:2]:
        with pytest.raises(ShoalError, match="The model failed on this request"):
            list(stream)
    assert time.monotonic() - start < scale(10, 1)
    check_equal(tokens_of(engine.stream(token_inputs([5, 6], 8))), expect(oracle, [5, 6], 8))
    assert time.monotonic() - start < scale(30, 2 + 1)  # the second is for those that waited before it
    assert engine.engine._manager is not before
    assert engine.is_ready()
    for stream in streams:
        stream.close()


def test_an_engine_whose_thread_died_is_not_ready(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.engine, "_manager", None)  # as between two batching threads
    assert not engine.is_ready()


def test_an_engine_that_is_closed_ends_its_streams(folder: Path) -> None:
    others = threading.enumerate()
    with open_engine(folder, slots="2") as component:
        streams = [component.stream(token_inputs([5], 900)) for _ in range(3)]
        wait_for(lambda: len(batched(component)) == 2, 30)
    for stream in streams:
        with pytest.raises(ShoalError):
            list(stream)
    assert not [each for each in threading.enumerate() if each.name == "shoal-batching" and each not in others]


def test_static_requests_that_leave_do_not_hold_up_the_batch(folder: Path, scale: Scale) -> None:
    with open_engine(folder, batching="static") as component:
        long = component.stream(token_inputs([5], 900))
        next(iter(long))
        long.close()
        start = time.monotonic()
        assert len(tokens_of(component.stream(token_inputs([5, 6], 4)))) == 4
        assert time.monotonic() - start < scale(10, 1)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"model": ""}, "Parameter model of model llm-hf is ''"),
        ({"model": "tiny"}, "expected the absolute path"),
        ({"dtype": "int8"}, "expected auto or float32 or bfloat16 or float16"),
        ({"slots": "0"}, "expected a whole number from 1 to 1,024"),
        ({"batching": "fast"}, "expected auto or continuous or static or single"),
    ],
)
def test_parameters(parameters: dict[str, str], words: str, folder: Path) -> None:
    given: dict[str, Any] = {"model": folder, **parameters}
    with pytest.raises(ArtifactError) as error, open_engine(**given):
        pass
    assert words in str(error.value)


def test_damaged_weights(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    whole = tmp_path / "model.safetensors"
    tensors = load_file(whole)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, whole, {"format": "pt"})
    with (
        pytest.raises(ArtifactError, match=r"misses 1 of the model's weights: model.layers.1.mlp"),
        open_engine(tmp_path),
    ):
        pass
    whole.write_bytes(whole.read_bytes()[:10_000])
    with pytest.raises(ArtifactError, match="it has 10,000 of its"), open_engine(tmp_path):
        pass


def test_a_model_that_was_trained_answers(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    folder = make_tiny(tmp_path / "trained", hidden=64, layers=2, steps=150)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("<s><|user|>Was ist das Meer?<|assistant|>", add_special_tokens=False).ids
    with open_engine(folder) as component:
        answers = list(component.stream(token_inputs(ids, 100, end_id=None)))
    assert tokenizer.decode(tokens_of(answers)).startswith("Das Meer ist groß, blau und tief;")
    assert answers[-1]["finish_reason"].item() == b"stop"
