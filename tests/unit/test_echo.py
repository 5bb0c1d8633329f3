"""Answers that begin with their prompt, and prompts of token ids."""

from __future__ import annotations

import json

import pytest

from shoal.kit.generation.completions import TextStream
from shoal.kit.generation.contract import LogProbs
from shoal.kit.generation.detokenizer import find_specials
from shoal.kit.generation.pieces import Piece
from shoal.kit.generation.prompts import Prompts
from tests.support.tokenizers import trained

BPE = trained("byte-level")


@pytest.mark.parametrize("is_alone", [False, True])
def test_an_echo(is_alone: bool) -> None:
    """The prompt is not counted, ends at no stop word, and its first token has no log probability."""
    ids = list(BPE.encode("The cat sat on the mat", add_special_tokens=False).ids)
    stream = TextStream(BPE, ["cat"], 4, 0, False, ["logprobs", "cumulative_logprob"], 4, echoes_alone=is_alone)
    places = [LogProbs.make_first(1), *(LogProbs(-0.5, (7,), (-0.25,)) for _ in ids[1:])]
    piece = stream.step(ids, last=True, reason="stop", log_probs=places)
    taken = ids[:4] if is_alone else ids
    assert piece == Piece(BPE.decode(taken), "length" if is_alone else "stop", 4, len(taken) - 4)
    packed = stream.pack(piece)
    first, *others = json.loads(packed["logprobs"].item())
    assert first == {str(ids[0]): {"logprob": None, "rank": None, "decoded_token": BPE.decode(ids[:1])}}
    assert len(others) == len(taken) - 1
    assert packed["cumulative_logprob"].item() == -0.5 * (len(taken) - 4)


def test_special_tokens_of_a_prompt_are_no_part_of_the_text() -> None:
    """They have no bytes, so that places in the text can be counted."""
    begin, ids = next(iter(find_specials(BPE).values())), BPE.encode("The cat").ids
    stream = TextStream(BPE, returns=["logprobs"], num_echoed=3)
    places = [LogProbs.make_first(0), *(LogProbs(-0.5) for _ in ids)]
    piece = stream.step([begin, *ids], last=True, log_probs=places)
    described = [next(iter(place.values())) for place in json.loads(stream.pack(piece)["logprobs"].item())]
    assert described[0]["bytes"] == []
    spelled = [bytes(place.get("bytes", place["decoded_token"].encode())) for place in described]
    assert b"".join(spelled).decode() == piece.text == "The cat"


def test_an_echo_and_token_ids() -> None:
    prompts = Prompts(BPE, None, context=100)
    ids = prompts.encode("The cat")
    request = prompts.request({"prompt_ids": ids, "echo": True, "max_tokens": 0})
    assert (request["input_ids"], request["request_output_len"], request["echo"]) == (ids, 1, True)
    assert json.loads(request["carry"]) == {
        "stops": [], "num_input_tokens": len(ids), "min_tokens": 0, "num_echoed": len(ids), "echoes_alone": True
    }  # fmt: skip
