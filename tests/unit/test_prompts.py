"""Prompts: chats and texts to ids, limits, and the rows that an engine gets."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from shoal.errors import ArtifactError, InputError, ShoalError
from shoal.kit.component.base import Component
from shoal.kit.generation.chats import llama2, read_messages
from shoal.kit.generation.contract import Limits, TokenRequest, unpack_words
from shoal.kit.generation.prompts import Prompts
from shoal.kit.generation.templates import ChatTemplate
from tests.support.llm import cut
from tests.support.pieces import start
from tests.support.pretend import PretendGpu
from tests.support.prompts import CHAT, TEXT, ask, make_tokenizer, texts
from tests.support.tokenizers import FAMILIES, TEXTS, trained

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def make_metaspace_tokenizer() -> Tokenizer:
    """A tokenizer as Llama 2's: a word's first token holds the space before it, also where there is none."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=200, show_progress=False))
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


@pytest.fixture
def prompts(tokenizer: Tokenizer) -> Prompts:
    return Prompts(tokenizer, llama2, context=100, max_tokens=20)


@pytest.fixture
def weights(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "bos_token": {"content": "<s>"}, "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 100}', encoding="utf-8")
    return tmp_path


@pytest.fixture
def prompt(weights: Path) -> Iterator[Component]:
    component = start("prompt", model=str(weights))
    yield component
    component.close()


# --- chats -------------------------------------------------------------------------------------------------------


def test_messages() -> None:
    chat = [{"role": role, "content": f" {role} é "} for role in ("system", "user", "assistant", "tool")]
    assert read_messages(json.dumps(chat)) == chat


@pytest.mark.usefixtures("may_start_processes")
@pytest.mark.parametrize("place", [0, 1, 3])
def test_answers_may_be_empty(place: int, tokenizer: Tokenizer) -> None:
    """At the beginning, in the middle or at the end of a chat: models give such answers, and clients send them back."""
    chat = [{"role": "user", "content": "x"} for _ in range(4)]
    chat[place] = {"role": "assistant", "content": ""}
    assert read_messages(json.dumps(chat)) == chat
    prompts = Prompts(tokenizer, ChatTemplate(TEMPLATE, {"bos_token": "<s>"}), context=512)
    assert "assistant: \n" in tokenizer.decode(prompts.encode(messages=chat))
    prompts.close()


@pytest.mark.usefixtures("may_start_processes")
@pytest.mark.parametrize(
    ("template", "said", "wanted"),
    [
        (TEMPLATE, "the tide", "user: The cat\nassistant: the tide"),
        (TEMPLATE, "the tide ", "user: The cat\nassistant: the tide "),
        (TEMPLATE, "", "user: The cat\nassistant: "),
        (TEMPLATE, "The cat", "user: The cat\nassistant: The cat"),
        (TEMPLATE.replace("m.content", "m.content | trim"), "the tide \n", "user: The cat\nassistant: the tide"),
    ],
)
def test_the_last_answer_is_continued(template: str, said: str, wanted: str, tokenizer: Tokenizer) -> None:
    """As transformers does with ``continue_final_message``."""
    prompts = Prompts(tokenizer, ChatTemplate(template, {"bos_token": "<s>"}), context=512)
    chat = [*CHAT, {"role": "assistant", "content": said}]
    found = prompts.encode(messages=chat, variables={"continue_final_message": True})
    assert tokenizer.decode(found, skip_special_tokens=False) == f"<s>{wanted}"
    assert prompts.encode(messages=chat, variables={"continue_final_message": False}) == prompts.encode(messages=chat)
    prompts.close()


@pytest.mark.usefixtures("may_start_processes")
def test_what_cannot_be_continued(tokenizer: Tokenizer) -> None:
    said = [*CHAT, {"role": "assistant", "content": "the tide"}]
    for template, chat, reason in (
        (ChatTemplate(TEMPLATE), CHAT, "its last message is not the assistant's"),
        (llama2, said, "its template cannot"),
        (ChatTemplate("{{ messages[0].content }}"), said, "The chat template leaves out the last message"),
    ):
        prompts = Prompts(tokenizer, template, context=512)
        with pytest.raises(InputError, match=reason):
            prompts.encode(messages=chat, variables={"continue_final_message": True})
        prompts.close()


@pytest.mark.usefixtures("may_start_processes")
def test_a_template_may_read_a_participants_name() -> None:
    chat = read_messages('[{"role": "user", "content": "x", "name": "Ann"}, {"role": "user", "content": "y"}]')
    source = "{% for each in messages %}{{ each.name or 'someone' }}: {{ each.content }};{% endfor %}"
    template = ChatTemplate(source)
    try:
        assert template.render(chat) == "Ann: x;someone: y;"
    finally:
        template.close()


def test_llama2_is_as_published() -> None:
    """The first user's message keeps its spaces; later ones and answers lose theirs."""
    system, first = {"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi \n"}
    later = [{"role": "assistant", "content": " Hello! "}, {"role": "user", "content": "  Why?  "}]
    assert llama2([system, first]) == "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n Hi \n [/INST]"
    assert llama2([system, first, *later]) == (
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n Hi \n [/INST] Hello! </s><s>[INST] Why? [/INST]"
    )
    assert llama2([first]) == "<s>[INST]  Hi \n [/INST]"


@pytest.mark.parametrize("roles", ["s", "a", "ua", "us", "uu", "usu", "ut", "uauau" + "a", "ssu"])
def test_llama2_refuses_other_orders(roles: str) -> None:
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    with pytest.raises(InputError, match=r"The chat has the roles .*, which Llama 2 cannot take"):
        llama2([{"role": names[role], "content": "x"} for role in roles])


# --- ids ---------------------------------------------------------------------------------------------------------


def test_special_tokens_are_the_tokenizers_or_the_templates(prompts: Prompts, tokenizer: Tokenizer) -> None:
    begin = tokenizer.token_to_id("<s>")
    ids = prompts.encode("The cat")
    assert ids[0] == begin
    assert begin not in ids[1:]
    chat = prompts.encode(messages=CHAT)
    assert chat.count(begin) == 1
    assert tokenizer.decode(chat, skip_special_tokens=False) == "<s>[INST] The cat [/INST]"


def test_a_tokenizers_own_truncation_is_off() -> None:
    tokenizer = make_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    assert len(Prompts(tokenizer, None, context=1000).encode("mat " * 9)) > 9
    assert len(Prompts(tokenizer, None, context=1000).encode("mat")) < 9


def test_context(prompts: Prompts) -> None:
    assert len(prompts.encode("\x00" * 98)) == 99
    with pytest.raises(InputError, match=r"The prompt has 100 tokens; the model's context is 100.*99 tokens or fewer"):
        prompts.encode("\x00" * 99)
    # an explicit length does not give way, the default does
    assert prompts.request({"text_input": b"\x00" * 90, "max_tokens": 9})["request_output_len"] == 9
    with pytest.raises(InputError, match="has 91 tokens and max_tokens is 10: 101 together; the model's context is 10"):
        prompts.request({"text_input": b"\x00" * 90, "max_tokens": 10})
    with pytest.raises(InputError, match=r"max_tokens is 2147483647: .* Set max_tokens to 98 or less"):
        prompts.request({"text_input": b"\x00", "max_tokens": 2**31 - 1})
    assert prompts.request({"text_input": b"\x00" * 90})["request_output_len"] == 9
    assert prompts.request({"text_input": b"\x00"})["request_output_len"] == 20


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "has none of text_input, messages, prompt_ids"),
        ({"text_input": b"a", "prompt_ids": [5]}, "has text_input and prompt_ids"),
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"prompt_ids": [5, -2]}, "prompt_ids has the token -2, and the model's vocabulary has"),
        ({"prompt_ids": [5] * 100}, "The prompt has 100 tokens; the model's context is 100"),
        ({"text_input": b"a", "messages": json.dumps(CHAT).encode()}, "has text_input and messages"),
        ({"text_input": b""}, "The prompt is empty"),
        ({"text_input": b"a\xff"}, "text_input is not valid UTF-8: byte 0xff at position 1"),
        ({"messages": b"\xff"}, "messages is not valid UTF-8"),
        ({"text_input": b"a" * 2**20 + b"a"}, "text_input has 1048577 bytes; at most 1048576 are allowed"),
        ({"text_input": b"a", "max_tokens": 0}, "max_tokens is 0. Set it to 1 or more"),
        ({"text_input": b"a", "max_tokens": -5}, "max_tokens is -5"),
        ({"text_input": b"a", "min_tokens": 9, "max_tokens": 8}, "min_tokens is 9, and max_tokens is 8"),
        ({"text_input": b"a", "temperature": float("nan")}, "temperature is nan"),
        ({"text_input": b"a", "top_p": 1.5}, "top_p is 1.5"),
        ({"text_input": b"a", "top_k": -1}, "top_k is -1"),
        ({"text_input": b"a", "stop_words": [b"x"] * 65}, "stop_words has 65 entries; at most 64"),
        ({"text_input": b"a", "bad_words": [b"x"] * 65}, "bad_words has 65 entries; at most 64"),
        ({"text_input": b"a", "stop_words": [b"\xff"]}, r"stop_words\[0\] is not valid UTF-8"),
        ({"text_input": b"a", "stop_words": [b"x" * 5000]}, r"stop_words has 5000 characters; at most 4096"),
        ({"text_input": b"a", "stop_words": ["é".encode() * 4000]}, r"stop_words has \d+ bytes as JSON; at most 4096"),
        ({"text_input": b"a", "bad_words": [b"x" * 3000] * 2}, r"bad_words has 6000 characters; at most 4096"),
        (
            {"text_input": b"a", "embedding_bias_words": [b"x" * 5000], "embedding_bias_weights": [1.0]},
            r"embedding_bias_words has 5000 characters; at most 4096",
        ),
        ({"text_input": b"a", "logit_bias": b"[5]"}, r"logit_bias is b'\[5\]'\. Send an object of numbers by token id"),
        ({"text_input": b"a", "logit_bias": b'{"a": 5}'}, "logit_bias is b'{"),
        ({"text_input": b"a", "logit_bias": b'{"5": 101}'}, r"logit_bias is 101\.0 for the token 5"),
        ({"text_input": b"a", "logit_bias": b'{"5": NaN}'}, r"logit_bias is nan for the token 5"),
        ({"text_input": b"a", "logit_bias": b'{"99999": 1}'}, "logit_bias has the token 99999, and the model's voca"),
        (
            {"text_input": b"a", "logit_bias": json.dumps(dict.fromkeys(range(1025), 1)).encode()},
            "logit_bias has 1025 tokens; at most 1024 are read",
        ),
    ],
)
def test_bad_requests(prompts: Prompts, row: Mapping[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        prompts.request(row)


def test_biases_of_words_and_tokens_are_added(prompts: Prompts, tokenizer: Tokenizer) -> None:
    (token,) = tokenizer.encode("a", add_special_tokens=False).ids
    words: dict[str, Any] = {"embedding_bias_words": [b"a"], "embedding_bias_weights": [1.5]}
    bias = prompts.request({"text_input": b"a", "logit_bias": f'{{"{token}": -4, "0": 2}}'.encode(), **words})
    assert (bias["embedding_bias"][token], bias["embedding_bias"][0]) == (-2.5, 2)


def test_a_model_without_chats(tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="The model has no chat template, and the request has messages"):
        Prompts(tokenizer, None, context=100).encode(messages=CHAT)


def test_greedy_unless_chance_is_asked_for(prompts: Prompts) -> None:
    plain = prompts.request({"text_input": b"a", "repetition_penalty": 1.5})
    assert (plain["runtime_top_k"], plain["temperature"], plain["runtime_top_p"]) == (1, 1, 1)
    assert prompts.request({"text_input": b"a", "temperature": 0.7})["runtime_top_k"] == 0
    assert prompts.request({"text_input": b"a", "top_p": 0.9})["runtime_top_k"] == 0
    assert prompts.request({"text_input": b"a", "top_k": 5})["runtime_top_k"] == 5
    seeds = {prompts.request({"text_input": b"a"})["seed"] for _ in range(3)}
    assert len(seeds) == 3
    assert prompts.request({"text_input": b"a", "seed": 2**64 - 1})["seed"] == 2**64 - 1


def test_the_switches_of_nvidias_clients(prompts: Prompts) -> None:
    row = {"text_input": b"a", "seed": 1}
    plain = prompts.request(row)
    assert "counts_each" not in json.loads(plain["carry"])
    quiet = {"return_num_input_tokens": False, "return_num_output_tokens": False}
    assert str(prompts.request({**row, **quiet})) == str(plain)
    asked = prompts.request({**row, **dict.fromkeys(quiet, True), "frequency_penalty": 0.5, "presence_penalty": -0.5})
    assert json.loads(asked["carry"]) == {**json.loads(plain["carry"]), "counts_each": True}
    assert not plain["return_log_probs"]
    for given, returns in (
        ({"return_logprobs": True}, ["logprobs"]),
        ({"return_cumulative_logprob": True, "return_logprobs": False}, ["cumulative_logprob"]),
        ({"top_logprobs": 3}, ["logprobs"]),
        ({"return_cumulative_logprob": True, "top_logprobs": 3}, ["cumulative_logprob", "logprobs"]),
    ):
        made = prompts.request({**row, **given})
        assert json.loads(made["carry"]) == {**json.loads(plain["carry"]), "returns": returns}
        assert made["return_log_probs"]
        assert made["top_logprobs"] == given.get("top_logprobs", 0)
    assert (asked["frequency_penalty"], asked["presence_penalty"]) == (0.5, -0.5)
    assert asked["runtime_top_k"] == 1  # a penalty alone does not ask for chance


def test_an_empty_word_is_none(prompts: Prompts) -> None:
    """Clients of TensorRT-LLM send an empty text for no words."""
    plain, empty, both = (
        prompts.request({"text_input": b"a", **{name: words for name in ("stop_words", "bad_words") if words}})
        for words in ([], [b""], [b"", b"b"])
    )
    assert (empty["stop_words_list"] == plain["stop_words_list"]).all()
    assert (empty["bad_words_list"] == plain["bad_words_list"]).all()
    assert empty["carry"] == plain["carry"]
    assert both["bad_words_list"][1].tolist() == [1]
    assert json.loads(both["carry"])["stops"] == ["b"]


def test_stop_words_reach_the_engine_where_they_are_exact(tokenizer: Tokenizer) -> None:
    row = {"text_input": b"The", "stop_words": [b"STOP", "é".encode()]}
    exact = Prompts(tokenizer, None, context=100).request(row)
    stop, accent = (tokenizer.encode(word, add_special_tokens=False).ids for word in ("STOP", "é"))
    ends = [len(stop), len(stop) + len(accent)]
    assert exact["stop_words_list"][0].tolist() == stop + accent
    assert exact["stop_words_list"][1].tolist()[:2] == ends
    # here the ids of the stop word would take the space before it along
    spaced = Prompts(make_metaspace_tokenizer(), None, context=100).request(row)
    assert (spaced["stop_words_list"][1:] == -1).all()
    for made in (exact, spaced):
        assert json.loads(made["carry"])["stops"] == ["STOP", "é"]


@pytest.mark.parametrize("name", FAMILIES)
def test_stop_words_that_reach_the_engine_are_written_wherever_their_ids_occur(name: str) -> None:
    """Or it would stop where the text has no stop word: WordPiece writes no space before the first token."""
    tokenizer, draw = trained(name), random.Random(0)
    prompts = Prompts(tokenizer, None, context=100)
    reached = 0
    for _ in range(150):
        text = draw.choice(TEXTS)
        start = draw.randrange(len(text))
        stop = draw.choice(["", "", " "]) + text[start : start + draw.randint(1, 6)]
        packed = prompts.request({"text_input": b"a", "stop_words": [stop.encode()]})["stop_words_list"]
        for ids in unpack_words(packed, "stop_words_list"):
            reached += 1
            for size in (0, 1, 3):
                before = draw.choices(range(tokenizer.get_vocab_size()), k=size)
                assert cut(tokenizer, [*before, *ids], [stop])[1] == "stop", (stop, ids, before)
    assert reached or name != "byte-level"


def test_bad_words_that_the_tokens_cannot_write() -> None:
    prompts = Prompts(make_metaspace_tokenizer(), None, context=100)
    assert prompts.request({"text_input": b"The", "bad_words": [b"cat"]})["bad_words_list"][1, 0] >= 1
    with pytest.raises(InputError, match="bad_words has 'x日y', which the model's tokens cannot write"):
        prompts.request({"text_input": b"The", "bad_words": ["x日y".encode()]})


# --- the model folder --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("may_start_processes")
def test_outputs_are_an_engines_inputs(prompt: Component, tokenizer: Tokenizer) -> None:
    inputs = {
        "messages": texts(json.dumps(CHAT)),
        "max_tokens": np.array([[7]], np.int32),
        "temperature": np.array([[0.7]], np.float32),
        "seed": np.array([[2**63]], np.uint64),
        "stream": np.array([[False]]),
        "stop_words": texts("STOP"),
        "bad_words": texts("mat", " mat"),
    }
    answer = ask(prompt, **inputs)
    text = "<s>user: The cat\nassistant:"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    request = TokenRequest.read(answer, Limits(vocabulary=tokenizer.get_vocab_size(), context=100, slots=1))
    assert request.ids == tuple(ids)
    assert (request.max_tokens, request.is_streaming) == (7, False)
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.seed) == (0.7, 0, 2**63)
    assert request.stops == (tuple(tokenizer.encode("STOP", add_special_tokens=False).ids),)
    assert len(request.bans) == 2
    assert json.loads(request.passthrough) == {"stops": ["STOP"], "num_input_tokens": len(ids), "min_tokens": 0}


@pytest.mark.usefixtures("may_start_processes")
def test_a_joined_batch_is_padded_and_equal_to_single_requests(prompt: Component) -> None:
    words = [texts("STOP", "\n"), texts("cat", "The cat sat on"), texts("😀", "b")]
    seed = np.array([[1]], np.uint64)
    requests = [
        {"text_input": texts("The cat " * number), "stop_words": words[number - 1], "seed": seed}
        for number in (1, 3, 2)
    ]
    answers = prompt.process(requests)
    widths = set()
    for request, joined in zip(requests, answers, strict=True):
        alone = ask(prompt, **request)
        assert not isinstance(joined, ShoalError)
        for name, expected in alone.items():
            found = joined[name]
            if name in ("input_ids", "stop_words_list"):
                size = expected.shape[-1]
                pad = found[..., size:]
                found = found[..., :size]
                assert (pad == 0).all() if name == "input_ids" else (pad[:, 1] == -1).all()
            np.testing.assert_array_equal(found, expected, name)
        widths.add((joined["input_ids"].shape[1], joined["stop_words_list"].shape[2]))
    assert len(widths) == 1  # they were joined


def test_numbers_on_a_gpu_are_read(weights: Path) -> None:
    device = PretendGpu()
    piece = start("prompt", device=device, changes={"parameters": {"model": str(weights), "template": "llama2"}})
    numbers = {"max_tokens": np.array([[7]], np.int32), "temperature": np.array([[0.7]], np.float32)}
    answer = ask(piece, text_input=texts("a"), **{name: device.put(array, name) for name, array in numbers.items()})
    assert answer["request_output_len"].tolist() == [[7]]
    assert answer["temperature"].tolist() == numbers["temperature"].tolist()


@pytest.mark.usefixtures("may_start_processes")
def test_a_bad_row_fails_alone(prompt: Component) -> None:
    requests = [{"text_input": texts(text)} for text in ("The cat", "", "x" * 200, b"\xff", "The mat")]
    answers = prompt.process([*requests, {"messages": texts("[]")}, {}])
    kinds = [type(answer) for answer in answers]
    assert kinds == [dict, InputError, InputError, InputError, dict, InputError, InputError]


@pytest.mark.usefixtures("may_start_processes")
def test_the_row_that_is_refused_is_named(prompt: Component) -> None:
    """In its own request's numbers, also if requests were joined."""
    three = np.concatenate([texts("The cat"), texts("The mat"), texts("")])
    good, bad, none = prompt.process(
        [{"text_input": texts("The cat")}, {"text_input": three}, {"text_input": three[:0]}]
    )
    assert isinstance(good, dict)
    assert str(bad) == "Row 2: The prompt is empty. Send a text of at least one token."
    assert str(none) == "The request has no rows. Send one prompt or more."


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("model", "", "Parameter model of model prompt is ''; expected the absolute path of a folder"),
        ("model", "weights", "is 'weights'; expected the absolute path"),
        ("template", "llama3", "Parameter template of model prompt is 'llama3'; expected one of llama2, default"),
        ("context", "x", "Parameter context of model prompt is 'x'"),
        ("max_tokens", "0", "Parameter max_tokens of model prompt is '0'"),
    ],
)
def test_settings(weights: Path, name: str, value: str, reason: str) -> None:
    with pytest.raises(ArtifactError, match=reason):
        start("prompt", changes={"parameters": {"model": str(weights), name: value}})


@pytest.mark.usefixtures("may_start_processes")
def test_the_models_files(weights: Path) -> None:
    config = weights / "tokenizer_config.json"
    config.write_text('{"chat_template": "{% if %}"}', encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"tokenizer_config.json: The model's chat template is not valid: Template"):
        start("prompt", model=str(weights))
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "The mat"}]
    config.write_text(json.dumps({"chat_template": several}), encoding="utf-8")
    (weights / "config.json").write_text('{"text_config": {"max_position_embeddings": 40}}', encoding="utf-8")
    chat, long = texts(json.dumps(CHAT)), texts("\x00" * 60)
    piece = start("prompt", model=str(weights))
    assert ask(piece, messages=chat)["input_lengths"].item() == len(make_tokenizer().encode("The mat").ids) - 1
    with pytest.raises(InputError, match="has 61 tokens; the model's context is 40"):
        ask(piece, text_input=long)
    piece.close()
    (weights / "chat_template.jinja").write_text("The cat sat", encoding="utf-8")  # newer: it counts
    piece = start("prompt", model=str(weights), context="90")
    assert ask(piece, messages=chat)["input_lengths"].item() == len(make_tokenizer().encode("The cat sat").ids) - 1
    assert ask(piece, text_input=long)["request_output_len"].item() == 29
    piece.close()
    size = make_tokenizer().get_vocab_size()
    (weights / "config.json").write_text(f'{{"n_positions": 40, "vocab_size": {size}}}', encoding="utf-8")
    config.write_text('{"pad_token": "<image>"}', encoding="utf-8")
    piece = start("prompt", model=str(weights))
    assert ask(piece, text_input=texts("The cat"))["input_lengths"].item() > 1
    with pytest.raises(
        InputError, match=r"The prompt has '<image>', which the model has no weights for\. Leave it out"
    ):
        ask(piece, text_input=texts("The <image> cat"))
    piece.close()
    (weights / "config.json").write_text('{"n_positions": 0}', encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"config\.json has n_positions 0, expected a whole number"):
        start("prompt", model=str(weights))
    (weights / "config.json").write_text('{"max_position_embeddings": 40}', encoding="utf-8")
    (weights / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"tokenizer\.json is not a fast tokenizer"):
        start("prompt", model=str(weights))


def test_ids_with_gaps() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "x": 1, "b": 9}, unk_token="a"))
    assert Prompts(tokenizer, None, context=10).encode("b") == [9]
    with pytest.raises(InputError, match="which the model has no weights for"):
        Prompts(tokenizer, None, context=10, vocabulary=9).encode("b")
