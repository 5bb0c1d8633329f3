"""Answers that begin with the prompt, with log probabilities of its tokens: against transformers' own logits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from shoal.clients.client.client import Client
from shoal.clients.llm.client import Llm
from shoal.errors import InputError
from shoal.kit.generation.pieces import Piece, join_pieces
from tests.support.llm import token_inputs
from tests.support.service import Service

NEW = 4
PROMPT = "A river carries the moon"


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def check(piece: Piece, prompt: list[int], model: Any, number: int) -> None:
    """Compare the tokens, and the log probabilities of each but the first, with the model's."""
    first, *places = piece.logprobs
    (begin,) = first.values()
    assert (*first, begin["logprob"], begin["rank"]) == (str(prompt[0]), None, None)
    ids = [prompt[0], *(int(next(iter(place))) for place in places)]
    assert ids[: len(prompt)] == prompt
    assert len(ids) - len(prompt) == piece.num_output_tokens
    with torch.inference_mode():
        right = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1].float(), -1).numpy()
    chosen = [next(iter(place.values()))["logprob"] for place in places]
    np.testing.assert_allclose(chosen, right[np.arange(len(ids) - 1), ids[1:]], atol=1e-4, rtol=0)
    for place, row in zip(places, right, strict=True):
        top = sorted((each["logprob"] for each in place.values() if each["rank"]), reverse=True)
        np.testing.assert_allclose(top, -np.sort(-row)[:number], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("running", "name"), [("service", "llm"), ("service", "llm_bls"), ("vllm", "llm"), ("vllm", "llm_bls")]
)
def test_the_prompt_has_log_probabilities(
    running: str, name: str, model: Any, tokenizer: Tokenizer, request: pytest.FixtureRequest
) -> None:
    served: Service = request.getfixturevalue(running)
    with Client(served.grpc) as client:
        llm, ids = Llm(client, name), tokenizer.encode(PROMPT).ids
        long = random.Random(0).choices(range(20, 300), k=300)  # in several parts
        asked: Any = {"echo": True, "return_logprobs": True, "max_tokens": NEW}
        for prompt, tokens, number in ((PROMPT, ids, 0), (ids, ids, 3), (long, long, 1), (ids[:1], ids[:1], 2)):
            whole = llm.generate(prompt, **asked, top_logprobs=number)
            assert (whole.num_input_tokens, whole.num_output_tokens) == (len(tokens), NEW)
            check(whole, tokens, model, number)
            pieces = [*llm.stream(prompt, **asked, top_logprobs=number)]
            assert len(pieces) > 1
            check(join_pieces(pieces), tokens, model, number)
            assert join_pieces(pieces).text == whole.text
        assert llm.generate(PROMPT, **asked).text.startswith(PROMPT)
        alone = llm.generate(PROMPT, **asked | {"max_tokens": 0})
        assert (alone.text, alone.finish_reason, alone.num_output_tokens) == (PROMPT, "length", 0)
        check(alone, ids, model, 0)
        plain = llm.generate(PROMPT, max_tokens=NEW, stop_words=["moon", "zzz"], echo=True)
        assert plain.text == PROMPT + llm.generate(PROMPT, max_tokens=NEW).text  # a stop word of the prompt is none
        guided = llm.generate(PROMPT, **asked, guide={"choice": [" cat"]})
        assert guided.text == f"{PROMPT} cat"
        assert llm.generate(ids, max_tokens=NEW).text == llm.generate(PROMPT, max_tokens=NEW).text
        for wrong, message in (
            ([9_999_999], "prompt_ids has the token 9999999, and the model's vocabulary has"),
            ([-1, 5], "prompt_ids has the token -1"),
            ([5] * 20_000, r"The prompt has 20000 tokens; the model's context is"),
        ):
            with pytest.raises(InputError, match=message):
                llm.generate(wrong, max_tokens=NEW)


def test_an_engine_without_log_probabilities_of_prompts(service: Service, tokenizer: Tokenizer) -> None:
    with Client(service.grpc) as client:
        llm = Llm(client, "llm_onnx")
        assert llm.generate(PROMPT, echo=True, max_tokens=NEW).text.startswith(PROMPT)
        with pytest.raises(InputError, match="log probabilities with echo; this model's engine does not apply it"):
            llm.generate(PROMPT, echo=True, return_logprobs=True, max_tokens=NEW)
        rows = token_inputs(ids := tokenizer.encode(PROMPT).ids, NEW, echo=True, exclude_input_in_output=None)
        (answer,) = client.stream("llm-hf", rows | {"streaming": np.array([[False]])})
        assert answer["output_ids"][0, 0].tolist()[: len(ids)] == ids
        assert answer["sequence_length"].item() == len(ids) + NEW
