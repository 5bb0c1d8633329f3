"""Answers of every host and engine, on tokenizers of different kinds: texts, ends and counts are one reference's."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

import shoal
from shoal.authoring.composition.compose import compose
from shoal.authoring.repository.config import read_config, write_config
from shoal.clients.llm.client import Llm
from shoal.kit.generation.pieces import Piece, join_pieces
from tests.conftest import Scale, verified
from tests.support.generate import TIE
from tests.support.imports import add
from tests.support.llm import cut
from tests.support.tokenizers import TEXTS, trained

KINDS = ("byte-level", "sentencepiece", "gemma", "metaspace", "wordpiece", "wordpiece-raw")
ENGINES = ("continuous", "static", "onnx")
NEW = 24
Ask = Callable[[str, dict[str, Any]], Piece]


@dataclass(frozen=True)
class Oracle:
    """transformers' model of a folder, and its tokenizer."""

    model: Any
    tokenizer: Tokenizer
    end: int

    def generate(self, prompt: str, least: int, penalty: float, new: int) -> tuple[list[int], float]:
        """The greedy tokens, with the end token, and the least lead of a best logit."""
        ids = self.tokenizer.encode(prompt).ids
        config = GenerationConfig(
            max_new_tokens=new, min_new_tokens=least, repetition_penalty=penalty, eos_token_id=self.end,
            pad_token_id=0, output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
        given = torch.tensor([ids])
        out = self.model.generate(given, attention_mask=torch.ones_like(given), generation_config=config)
        leads = [float(best[0] - best[1]) for best in (scores[0].topk(2).values for scores in out.scores)]
        return out.sequences[0, len(ids) :].tolist(), min(leads)

    def answer(self, prompt: str, stops: list[str], least: int, penalty: float) -> tuple[str, str, int] | None:
        """Text, reason and count; None if two logits are too close."""
        ids, lead = self.generate(prompt, least, penalty, NEW)
        if lead <= TIE:
            return None
        text, reason, number = cut(self.tokenizer, [token for token in ids if token != self.end], stops, least)
        return text, "stop" if ids[-1] == self.end else reason, number


@pytest.fixture(scope="module", params=[*KINDS[:3], *verified(*KINDS[3:])])  # unit/test_completion.py has all of them
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a seed of its own, whose end token is one that it writes now and then."""
    folder = tmp_path_factory.mktemp("weights")
    tokenizer = trained(request.param)
    tokenizer.save(str(folder / "tokenizer.json"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(KINDS.index(request.param))
        config = LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(), hidden_size=32, intermediate_size=64, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3,
        )  # fmt: skip
        model: Any = LlamaForCausalLM(config).eval()
        with torch.no_grad():  # an incomplete character makes all bytes beside it unreadable: fewer of them
            for token, number in tokenizer.get_vocab().items():
                if token.startswith("<0x") and int(token[3:5], 16) > 127:
                    model.lm_head.weight[number] = 0
    written = [oracle(model, tokenizer, -1).generate(text, 0, 1.2, NEW)[0][15] for text in TEXTS]
    model.config.eos_token_id = model.generation_config.eos_token_id = written[0]
    model.save_pretrained(folder)
    return folder


def oracle(model: Any, tokenizer: Tokenizer, end: int) -> Oracle:
    model.generation_config = GenerationConfig()
    return Oracle(model, tokenizer, end)


@pytest.fixture(params=ENGINES)
def repository(folder: Path, tmp_path: Path, request: pytest.FixtureRequest, scale: Scale) -> Path:
    kind = int(str(request.node.callspec.indices["folder"]))
    if not scale.is_full and kind != ENGINES.index(request.param):
        pytest.skip("by turns; all with --verify")
    if request.param == "onnx":
        add(tmp_path / "project", folder, "tiny-onnx", task="generate")
        swap = {"llm-hf": "tiny-onnx"}
        return compose(
            ["llm", "llm_bls"], tmp_path / "made", projects=[tmp_path / "project"], weights=folder, swap=swap
        )
    made = compose(["llm", "llm_bls"], tmp_path / "made", weights=folder)
    message = read_config(made / "llm-hf").message
    message.parameters["batching"].string_value = request.param
    write_config(message, made / "llm-hf" / "config.pbtxt", comment="Static.")
    return made


@pytest.fixture
def ways(repository: Path) -> Iterator[dict[str, Ask]]:
    """The ensemble and BLS, in this process, whole and in pieces."""
    with shoal.load(repository / "llm") as first, shoal.load(repository / "llm_bls") as second:
        llms = {"llm": Llm(first), "llm_bls": Llm(second)}

        def whole(llm: Llm) -> Ask:
            return lambda prompt, settings: llm.generate(prompt, **settings)

        def in_pieces(llm: Llm) -> Ask:
            return lambda prompt, settings: join_pieces([*llm.stream(prompt, **settings)])

        yield {f"{name} {way.__name__}": way(llm) for name, llm in llms.items() for way in (whole, in_pieces)}


def make_stops(draw: random.Random, text: str) -> list[str]:
    """Parts of the text, some with a space in front, and one that it does not have."""
    starts = [draw.randrange(len(text) + 1) for _ in range(draw.randrange(3))]
    found = [text[start : start + draw.randint(1, 5)] for start in starts]
    found += [" " + word for word in draw.sample(text.split(), k=min(1, len(text.split()))) if draw.random() < 0.3]
    return [*{stop: None for each in found if (stop := each.strip("\ufffd"))}, "never written"]


def test_counts_stop_words_and_least_lengths(folder: Path, ways: dict[str, Ask], scale: Scale) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    plain = oracle(AutoModelForCausalLM.from_pretrained(folder).eval(), tokenizer, config["eos_token_id"])
    draw = random.Random(str(tokenizer.get_vocab_size()))
    reasons = []
    for number in range(wanted := scale(12, 20)):
        text = draw.choice(TEXTS)
        prompt = text[draw.randrange(len(text) - 3) :][: draw.randint(2, 20)]
        least, penalty = draw.choice([0, 0, 1, 4, 10, 24]), draw.choice([1.0, 1.2])
        written = tokenizer.decode(plain.generate(prompt, least, penalty, NEW)[0])
        stops = make_stops(draw, written)
        expected = plain.answer(prompt, stops, least, penalty)
        if expected is None:
            continue
        reasons.append(expected[1])
        settings = {
            "max_tokens": NEW, "min_tokens": least, "repetition_penalty": penalty, "stop_words": stops,
        }  # fmt: skip
        for name, ask in ways.items():
            piece = ask(prompt, settings)
            found = piece.text, piece.finish_reason, piece.num_output_tokens
            assert found == expected, (name, number, prompt, settings)
            assert piece.num_input_tokens == len(tokenizer.encode(prompt).ids)
    assert len(reasons) >= wanted * 5 / 6
    assert {"stop", "length"} == {*reasons}
