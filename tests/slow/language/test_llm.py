"""Language-model pipelines, served and in this process: the oracle is transformers' ``generate``."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shlex
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig

from shoal.clients.client.aio import AsyncClient
from shoal.clients.client.client import Client
from shoal.clients.llm.client import AsyncLlm, Llm
from shoal.clients.local import Pipeline
from shoal.errors import InputError, ServerError, ShoalError
from shoal.kit.generation.pieces import Piece, join_pieces
from shoal.lab.tiny_llm import CONTEXT
from tests.conftest import Scale
from tests.support.commands import Shoal
from tests.support.generate import TIE, check_equal, expect
from tests.support.llm import SENTENCES, cut, token_inputs, tokens_of
from tests.support.service import Service, wait_until

MODELS = ["llm", "llm_bls"]
WAYS = ["grpc", "http", "local"]
NEW = 24


@dataclass(frozen=True)
class Oracle:
    """What ``generate`` makes of each prompt; None where two logits are too near to tell."""

    texts: dict[str, str | None]
    counts: dict[str, tuple[int, int]]
    tokens: dict[str, list[int]]


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def prompts(scale: Scale) -> list[str]:
    draw = random.Random(0)
    made = []
    for index in range(scale(10, 200)):
        words = " ".join(draw.sample(SENTENCES[index % 5].split(), k=min(3, len(SENTENCES[index % 5].split()))))
        made.append(f"{words} {SENTENCES[index % 5]}"[: draw.randrange(4, 60)])
    return made


@pytest.fixture(scope="module")
def oracle(folder: Path, tokenizer: Tokenizer, prompts: list[str]) -> Oracle:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    end = model.generation_config.eos_token_id or model.config.eos_token_id
    texts: dict[str, str | None] = {}
    counts, tokens = {}, {}
    for prompt in prompts:
        ids = tokenizer.encode(prompt).ids
        config = GenerationConfig(
            max_new_tokens=NEW, eos_token_id=end, pad_token_id=0, output_scores=True, return_dict_in_generate=True
        )
        out = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), generation_config=config)
        new = [token for token in out.sequences[0, len(ids) :].tolist() if token != end]
        gaps = [float(best[0] - best[1]) for best in (scores[0].topk(2).values for scores in out.scores)]
        texts[prompt] = tokenizer.decode(new) if min(gaps) > TIE else None
        counts[prompt], tokens[prompt] = (len(ids), len(new)), new
    assert sum(text is None for text in texts.values()) <= len(texts) / 10
    return Oracle(texts, counts, tokens)


@pytest.fixture(scope="module", params=[(model, way) for model in MODELS for way in WAYS], ids="-".join)
def llm(here: Callable[[str], Pipeline], service: Service, request: pytest.FixtureRequest) -> Iterator[Llm]:
    model, way = request.param
    if way == "local":
        yield Llm(here(model))
    else:
        with Client(service.grpc if way == "grpc" else service.http, protocol=way) as client:
            yield Llm(client, model)


def check_texts(llm: Llm, prompts: list[str], oracle: Oracle) -> None:
    """16 at a time, whole and in pieces."""

    def ask(prompt: str) -> tuple[Any, Any]:
        return llm.generate(prompt, max_tokens=NEW), list(llm.stream(prompt, max_tokens=NEW))

    with ThreadPoolExecutor(16) as callers:
        for prompt, (whole, pieces) in zip(prompts, callers.map(ask, prompts), strict=True):
            text = oracle.texts[prompt]
            if text is None:
                continue
            assert whole.text == text
            assert "".join(piece.text for piece in pieces) == text
            assert (whole.num_input_tokens, whole.num_output_tokens) == oracle.counts[prompt]
            assert [piece.finish_reason for piece in pieces[:-1]] == [""] * (len(pieces) - 1)
            assert whole.finish_reason == pieces[-1].finish_reason in ("length", "stop")
            assert not any("\ufffd" in piece.text for piece in pieces) or "\ufffd" in text


def test_texts_are_those_of_generate(llm: Llm, prompts: list[str], oracle: Oracle) -> None:
    check_texts(llm, prompts, oracle)


def test_stop_words_cut_the_text(llm: Llm, prompts: list[str], oracle: Oracle) -> None:
    for prompt in prompts[:8]:
        text = oracle.texts[prompt]
        if text is None or len(text) < 8:
            continue
        stop = text[len(text) // 2 : len(text) // 2 + 3]
        pieces = list(llm.stream(prompt, max_tokens=NEW, stop_words=[stop, "never written"]))
        assert "".join(piece.text for piece in pieces) == text[: text.index(stop)]
        assert pieces[-1].finish_reason == "stop"
        assert llm.generate(prompt, max_tokens=NEW, stop_words=[stop]).text == text[: text.index(stop)]


def test_a_seed_gives_the_same_text_again(llm: Llm) -> None:
    settings: Any = {"max_tokens": NEW, "temperature": 2.0, "top_p": 0.9}
    once, again, other = (llm.generate("A cat", seed=seed, **settings).text for seed in (7, 7, 8))
    assert once == again != other


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ("", {}, "The prompt is empty"),
    ("fish " * 1200, {}, rf"The prompt has \d+ tokens; the model's context is {CONTEXT}"),
    ("fish", {"max_tokens": CONTEXT}, rf"max_tokens is {CONTEXT}: \d+ together; the model's context is {CONTEXT}"),
    ("fish", {"max_tokens": 0}, "max_tokens is 0"),
    ("fish", {"max_tokens": -3}, "max_tokens is -3"),
    ("fish", {"temperature": float("nan")}, "temperature is nan"),
    ("fish", {"temperature": -1.0}, r"temperature is -1\.0"),
    ("fish", {"top_p": 1.5}, r"top_p is 1\.5"),
    ("fish", {"top_k": -1}, "top_k is -1"),
    ("fish", {"repetition_penalty": 0.0}, r"repetition_penalty is 0\.0"),
    ("fish", {"min_tokens": 9, "max_tokens": 3}, "min_tokens is 9, and max_tokens is 3"),
    ("fish", {"stop_words": ["a"] * 65}, "stop_words has 65 entries; at most 64"),
    ([{"role": "boss", "content": "Hi"}], {}, r"messages\[0\] has the role 'boss'"),
    ([], {}, "expected a list of messages"),
]


def test_what_is_refused(llm: Llm) -> None:
    """With a clear error, while others are served."""
    neighbour = llm.stream("A cat", max_tokens=600, min_tokens=600)
    next(neighbour)
    for prompt, settings, message in REFUSED:
        with pytest.raises(InputError, match=message):
            llm.generate(prompt, **settings)
    last = list(neighbour)[-1]
    assert (last.num_output_tokens, last.finish_reason) == (600, "length")


def test_counts_and_least_lengths_with_stop_words(
    llm: Llm, prompts: list[str], oracle: Oracle, tokenizer: Tokenizer
) -> None:
    """Up to the token that completes the stop word, which also ends within tokens; as from every beginning decoded."""
    ended = 0
    for number, prompt in enumerate(prompts[:10]):
        text, new = oracle.texts[prompt], oracle.tokens[prompt]
        if text is None or len(text) < 12:
            continue
        stops, least = [text[4:7].strip("\ufffd") or "x", text[9:11].strip("\ufffd") or "y"], number % 3 * 3
        expected, reason, count = cut(tokenizer, new, stops, least)
        ended += reason == "stop"
        whole = llm.generate(prompt, max_tokens=NEW, min_tokens=least, stop_words=stops)
        pieces = join_pieces([*llm.stream(prompt, max_tokens=NEW, min_tokens=least, stop_words=stops)])
        for piece in (whole, pieces):
            if len(new) >= least:  # else min_tokens changes the tokens
                assert (piece.text, piece.num_output_tokens) == (expected, count)
                assert reason == "length" or piece.finish_reason == "stop"
    assert ended


def test_an_engine_by_itself_needs_no_carry(here: Callable[[str], Pipeline], service: Service, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.generation_config = GenerationConfig()
    inputs = token_inputs([5, 6, 7], 12)
    assert "carry" not in inputs
    right = expect(model, [5, 6, 7], 12)
    with Client(service.grpc) as client:
        for answers in ([*here("llm-hf").stream(**inputs)], [*client.stream("llm-hf", inputs)]):
            check_equal(tokens_of(answers), right)
            assert {answer["carry"].item() for answer in answers} == {b""}


@pytest.mark.parametrize("model", MODELS)
def test_texts_that_are_not_utf8(model: str, service: Service) -> None:
    with Client(service.grpc) as client, pytest.raises(InputError, match="text_input is not valid UTF-8: byte 0xff"):
        list(client.stream(model, {"text_input": np.array([[b"a\xff"]], np.object_)}))


@pytest.mark.parametrize("model", MODELS)
def test_asyncio(model: str, service: Service, prompts: list[str], oracle: Oracle) -> None:
    async def ask() -> list[tuple[str, str]]:
        async with AsyncClient(service.grpc) as client:
            llm = AsyncLlm(client, model)
            whole = await asyncio.gather(*(llm.generate(prompt, max_tokens=NEW) for prompt in prompts[:8]))
            pieces = [[piece.text async for piece in llm.stream(prompt, max_tokens=NEW)] for prompt in prompts[:8]]
        return [(one.text, "".join(parts)) for one, parts in zip(whole, pieces, strict=True)]

    for prompt, found in zip(prompts, asyncio.run(ask()), strict=False):
        if oracle.texts[prompt] is not None:
            assert set(found) == {oracle.texts[prompt]}


def test_the_metrics_have_the_chosen_way(service: Service) -> None:
    line = r'shoal_component_info{batching="continuous",instance="\S+",model="llm-hf"} 1'
    assert wait_until(lambda: bool(re.search(line, service.get("/metrics")[1])))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_service_counts_tokens(model: str, protocol: str, service: Service, prompts: list[str]) -> None:
    """Of whole answers, of pieces, and of streams that are cut."""

    def counted() -> dict[str, float]:
        page = service.get("/metrics")[1]
        kinds = {kind: rf'shoal_tokens_total{{kind="{kind}",model="{model}"}} (\S+)' for kind in ("input", "output")}
        return {kind: float(re.findall(line, page)[0]) for kind, line in kinds.items()}

    before = counted()
    with Client(service.grpc if protocol == "grpc" else service.http, protocol=protocol) as client:
        llm = Llm(client, model)
        whole: list[Piece] = [llm.generate(prompt, max_tokens=NEW) for prompt in prompts[:3]]
        whole += [list(llm.stream(prompt, max_tokens=NEW))[-1] for prompt in prompts[:3]]
        after = counted()
        assert after["input"] - before["input"] == sum(each.num_input_tokens for each in whole)
        assert after["output"] - before["output"] == sum(each.num_output_tokens for each in whole)
        cut = llm.stream(prompts[0], max_tokens=900, min_tokens=900)
        seen = [next(cut).num_output_tokens for _ in range(5)][-1]
        cut.close()
        assert wait_until(lambda: f'shoal_streams{{model="{model}"}} 0.0' in service.get("/metrics")[1])
        last = counted()
        assert last["input"] - after["input"] == whole[0].num_input_tokens
        assert seen <= last["output"] - after["output"] < 900


def test_a_text_of_shape_1(service: Service, here: Callable[[str], Pipeline]) -> None:
    """A model without batches takes it, over each protocol and in this process; its name has a dot."""
    tensor = {"name": "prompt", "shape": [1], "datatype": "BYTES", "data": ["What is a river?"]}
    request = urllib.request.Request(
        f"http://{service.http}/v2/models/llamav2.plain/versions/1/infer",
        json.dumps({"inputs": [tensor]}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        output = json.load(answer)["outputs"][0]
    assert output["shape"] == [1]
    with Client(service.grpc) as client:
        batched = client.infer("llamav2", prompt=[["What is a river?"]])["generated_text"]
        assert [text.decode() for text in batched[0]] == output["data"]
        assert np.array_equal(client.infer("llamav2.plain", prompt=["What is a river?"])["generated_text"], batched[0])
        assert np.array_equal(here("llamav2.plain")(prompt=["What is a river?"])["generated_text"], batched[0])


def test_llama_2_by_itself(service: Service, folder: Path, tokenizer: Tokenizer) -> None:
    """Answers in a batch are those of each alone; the prompt has Llama 2's form."""
    system = "You are a helpful AI assistant. Keep short answers of no more than 2 sentences."
    prompts = ["What is a river?", " Why? "]
    with Client(service.grpc) as client:
        together = client.infer("llamav2", prompt=[[prompt] for prompt in prompts])["generated_text"]
        alone = [client.infer("llamav2", prompt=[[prompt]])["generated_text"].item() for prompt in prompts]
    assert together[:, 0].tolist() == alone
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for prompt, text in zip(prompts, alone, strict=True):
        ids = tokenizer.encode(
            f"<s>[INST] <<SYS>>\n{system}\n<</SYS>>\n\n{prompt} [/INST]", add_special_tokens=False
        ).ids
        config = GenerationConfig(
            max_new_tokens=16, repetition_penalty=1.1, eos_token_id=model.config.eos_token_id, pad_token_id=0
        )
        out = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), generation_config=config)
        assert tokenizer.decode(out[0, len(ids) :].tolist()) == text.decode()


# --- other engines -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize(("place", "model"), [("service", "llm_onnx"), ("vllm", "llm"), ("vllm", "llm_bls")])
def test_other_engines_write_the_same(
    place: str, model: str, protocol: str, request: pytest.FixtureRequest, prompts: list[str], oracle: Oracle
) -> None:
    running: Service = request.getfixturevalue(place)
    with Client(running.grpc if protocol == "grpc" else running.http, protocol=protocol) as client:
        check_texts(Llm(client, model), prompts, oracle)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stop", ["", "mat"])
def test_requests_in_the_form_of_nvidias_openai_front(
    model: str, stop: str, service: Service, prompts: list[str]
) -> None:
    """Its form for all models but vLLM's own; it adds up the output tokens of a stream's answers."""
    inputs: dict[str, Any] = {
        "text_input": [[prompts[0]]],
        "max_tokens": np.array([[NEW]], np.int32),
        "top_p": np.array([[1.0]], np.float32),
        "frequency_penalty": np.array([[0.0]], np.float32),
        "presence_penalty": np.array([[0.0]], np.float32),
        "seed": np.array([[7]], np.uint64),
        "temperature": np.array([[1.0]], np.float32),
        "return_num_input_tokens": np.array([[True]], np.bool_),
        "return_num_output_tokens": np.array([[True]], np.bool_),
        **({"stop_words": [[stop]]} if stop else {}),
    }
    with Client(service.grpc) as client:
        (whole,) = client.stream(model, {**inputs, "stream": np.array([[False]], np.bool_)})
        answers = list(client.stream(model, {**inputs, "stream": np.array([[True]], np.bool_)}))
    assert len(answers) > 2
    assert b"".join(each["text_output"].item() for each in answers) == whole["text_output"].item()
    assert sum(each["num_output_tokens"].item() for each in answers) == whole["num_output_tokens"].item() > 0
    assert {each["num_input_tokens"].item() for each in answers} == {whole["num_input_tokens"].item()}


# --- the command line --------------------------------------------------------------------------------------------


def test_generate(shoal: Shoal, service: Service, repository: Path, prompts: list[str], oracle: Oracle) -> None:
    prompt = next(prompt for prompt in prompts if oracle.texts[prompt])
    asked = ["generate", prompt, "--max-tokens", NEW, "--model", "llm"]
    served = [*asked, "--url", service.grpc]
    text = f"{oracle.texts[prompt]}\n"
    assert shoal(*served) == text
    assert shoal(*served, "--stream") == text
    assert shoal(*asked, "--url", service.http, "--protocol", "http") == text
    assert shoal(*asked, "--local", "--repository", repository, "--stream") == text
    for is_stream in (False, True):
        more = ["--stream"] if is_stream else []
        found = json.loads(shoal(*served, "--json", *more))
        assert (found["text"], found["num_input_tokens"]) == (oracle.texts[prompt], oracle.counts[prompt][0])
    assert shoal(*served, "--set", "frequency_penalty=-2", "--set", "repetition_penalty=0.5") != text
    for fault, message in (
        (("--model", "lm"), "Did you mean llm"),
        (("--top-p", "2"), r"top_p is 2\.0"),
        (("--set", "top_logprobs=2"), "--set top_logprobs changes nothing in the text. Add --json"),
        (("--set", "top_q=1"), "Unknown setting 'top_q'. Did you mean top_p"),
        (("--set", "min_tokens=few"), "'min_tokens=few' has no number"),
        (("--set", "echo=1"), "'echo=1' is neither true nor false"),
        (("--max-tokens", str(2**40)), "max_tokens cannot be read as TYPE_INT32"),
    ):
        with pytest.raises(ShoalError, match=message):
            shoal(*served, *fault)


def test_the_commands_that_serve_prints(shoal: Shoal, service: Service) -> None:
    assert service.process.stdout is not None
    names = ["INT32", "UINT32", "llamav2", "llamav2.plain", "llm", "llm-hf", "llm_bls", "llm_onnx", "tiny-onnx"]
    commands: list[list[str]] = []
    while len(commands) < len(names):
        line = service.process.stdout.readline().split()
        commands += [line[1:]] if line[:1] == ["shoal"] else []
    assert sorted(command[command.index("--model") + 1] for command in commands) == names
    for command in commands:
        assert shoal(*shlex.split(" ".join(command)), typed="Hello!" if "chat" in command else "")


def test_tokens(shoal: Shoal, service: Service, folder: Path, tokenizer: Tokenizer, oracle: Oracle) -> None:
    prompt = next(prompt for prompt, text in oracle.texts.items() if text)
    ids = tokenizer.encode(prompt).ids
    asked = ["--url", service.grpc, "--output-length", NEW]
    printed = shoal("tokens", ",".join(map(str, ids)), *asked)
    assert tokenizer.decode([int(token) for token in printed.split(",")]) == oracle.texts[prompt]
    assert shoal("tokens", prompt, *asked, "--tokenizer", folder).endswith(f"{oracle.texts[prompt]}\n")
    assert json.loads(shoal("tokens", " ".join(map(str, ids)), *asked, "--json"))["input_ids"] == ids
    for arguments, message in (
        (("A text",), "is not a list of token ids"),
        (("1,2,70000",), r"input_ids has 70000 at place 2, and the model's vocabulary has \d+ tokens"),
        (("1", "--model", "llm"), "Model llm has no input input_ids: it is not an engine"),
        (("1", "--output-length", "0"), "request_output_len is 0"),
        (("A", "--tokenizer", "/nowhere"), "tokenizer.json is not a fast tokenizer of Hugging Face's: it is missing"),
    ):
        with pytest.raises(ShoalError, match=message):
            shoal("tokens", *arguments, *asked[:2])


@pytest.mark.verify  # test_tutorial.py types it
def test_quickstart(shoal: Shoal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.lab.llm_quickstart._STEPS", 2)
    printed = shoal("quickstart", "--llm", "--out", tmp_path / "build")
    assert "What do fish do?" in printed
    assert f"next: shoal serve {tmp_path / 'build' / 'repository'}" in printed


def test_quickstart_in_a_folder_that_triton_does_not_support(shoal: Shoal, tmp_path: Path) -> None:
    with pytest.raises((InputError, ServerError), match="does not support"):
        shoal("quickstart", "--llm", "--out", tmp_path / "a b")
