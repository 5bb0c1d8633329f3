"""OpenAI's API of a real service, asked by OpenAI's and Anthropic's own clients, unchanged."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
from tokenizers import Tokenizer

from shoal.clients.client.client import Client
from shoal.clients.llm.client import Llm
from shoal.serving.gateway.v1.chat import _name
from tests.support.apis import CHATS, LABELS, TEXTS, chat, connect, post
from tests.support.service import Service

RANKINGS = ["/v1/rerank", "/v1/score", "/v2/rerank", "/rerank"]


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[openai.OpenAI]:
    with connect(service) as connected:
        yield connected


# --- models ---------------------------------------------------------------------------------------------------------


def test_models(client: openai.OpenAI) -> None:
    """All models that clients may ask, with what they serve; another name is one of them."""
    found = {model.id: model.model_dump() for model in client.models.list()}
    chats = ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions", "/v1/messages/count_tokens"]
    assert found["llm"]["serves"] == [*chats, "/tokenize", "/detokenize"]
    assert found["llm_bls"]["serves"] == found["gpt-4o"]["serves"] == [*chats, "/tokenize"]
    assert found["embedder"]["serves"] == ["/v1/embeddings", "/v1/models/embedder:predict"]
    assert found["reader"]["serves"] == ["/v1/classify", "/v1/models/reader:predict"]
    assert found["ranker"]["serves"] == [*RANKINGS, "/v1/models/ranker:predict"]
    assert all(model["ready"] for model in found.values())
    assert client.models.retrieve("gpt-4o").id == "gpt-4o"
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("nothing")
    assert refused.value.code == "model_not_found"
    assert "Models: gpt-4o, llamav2, llm, llm_bls, embedder, " in refused.value.message


# --- chats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [*CHATS, "gpt-4o"])
def test_a_chat(model: str, service: Service, client: openai.OpenAI) -> None:
    """Whole and in pieces the text of shoal's own client, with reasons and numbers of tokens."""
    name = "llm_bls" if model == "gpt-4o" else model
    with Client(service.grpc) as own:
        expected = Llm(own, name).generate([{"role": "user", "content": "Hello"}], max_tokens=12, temperature=0)
    whole = client.chat.completions.create(model=model, **chat("Hello"))
    pieces = [
        *client.chat.completions.create(
            model=model, **chat("Hello"), stream=True, stream_options={"include_usage": True}
        )
    ]
    (choice,) = whole.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", expected.text, "length")
    counts = expected.num_input_tokens, 12, expected.num_input_tokens + 12
    *answers, last = pieces
    assert last.choices == []
    for usage in (whole.usage, last.usage):
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == counts
    assert "".join(piece.choices[0].delta.content or "" for piece in answers) == expected.text
    assert [piece.choices[0].finish_reason for piece in answers] == [*[None] * (len(answers) - 1), "length"]
    assert answers[0].choices[0].delta.role == "assistant"
    assert {piece.id for piece in pieces} == {pieces[0].id}
    options: Any = {"include_usage": True, "continuous_usage_stats": True}  # vLLM's
    counted = [
        piece.usage and piece.usage.completion_tokens
        for piece in client.chat.completions.create(model=model, **chat("Hello"), stream=True, stream_options=options)
    ]
    assert (counted[0], counted[-1]) == (0, 12)  # the first one has the role alone
    assert None not in counted
    assert counted == sorted(counted)
    assert whole.model == pieces[0].model == model


def test_roles_and_parts(service: Service, client: openai.OpenAI) -> None:
    """The developer is the system; parts are lines; an earlier answer is sent back as the client has it."""
    first = client.chat.completions.create(model="llm", **chat("Hello", max_tokens=3))
    answer = first.choices[0].message
    messages: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]},
        answer.model_dump(),
        {"role": "user", "content": "More"},
    ]
    found = client.chat.completions.create(model="llm", **chat("", messages=messages))
    plain = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello\nthere"},
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": "More"},
    ]
    with Client(service.grpc) as own:
        expected = Llm(own, "llm").generate(plain, max_tokens=12, temperature=0)
    assert found.choices[0].message.content == expected.text
    assert found.usage is not None
    assert found.usage.prompt_tokens == expected.num_input_tokens


def test_settings(service: Service, client: openai.OpenAI) -> None:
    """Each setting has the effect that it has in shoal's own client."""
    settings: dict[str, Any] = {
        "seed": 7, "temperature": 1.3, "top_p": 0.9, "frequency_penalty": 0.5, "presence_penalty": -0.5,
    }  # fmt: skip
    more: dict[str, Any] = {"top_k": 40, "repetition_penalty": 1.2, "min_tokens": 3}
    asked = {**chat("Hello", **settings), "max_tokens": None, "max_completion_tokens": 9}
    found = client.chat.completions.create(model="llm", **asked, extra_body=more)
    with Client(service.grpc) as own:
        llm = Llm(own, "llm")
        messages = [{"role": "user", "content": "Hello"}]
        expected = llm.generate(messages, max_tokens=9, **settings, **more).text
        assert found.choices[0].message.content == expected
        whole = llm.generate("A cat", max_tokens=12, temperature=0)
    stop = whole.text[4:7]
    cut = client.completions.create(model="llm", prompt="A cat", max_tokens=12, temperature=0, stop=[stop, "nowhere"])
    assert cut.choices[0].text == whole.text[: whole.text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_log_probabilities(service: Service, client: openai.OpenAI) -> None:
    """Those of shoal's own client, in the forms of both APIs, streamed and whole."""
    with Client(service.grpc) as own:
        expected = Llm(own, "llm").generate("A cat", max_tokens=5, temperature=0, top_logprobs=3).logprobs
    values = [[each["logprob"] for each in place.values()] for place in expected]
    found = client.completions.create(model="llm", prompt="A cat", max_tokens=5, temperature=0, logprobs=3)
    places = found.choices[0].logprobs
    assert places is not None
    assert places.token_logprobs == [place[0] for place in values]
    tops = [{_name(each): each["logprob"] for each in reversed([*place.values()])} for place in expected]
    assert places.top_logprobs == tops
    drawn = client.completions.create(model="llm", prompt="A cat", max_tokens=5, temperature=1, seed=3, logprobs=0)
    alone = drawn.choices[0].logprobs
    assert alone is not None
    found_alone = zip(alone.tokens or (), alone.token_logprobs or (), strict=True)
    assert alone.top_logprobs == [{token: value} for token, value in found_alone]  # OpenAI's has the chosen one, too
    asked: Any = chat("Hello", logprobs=True, top_logprobs=2, max_tokens=4)
    whole = client.chat.completions.create(model="llm", **asked).choices[0].logprobs
    pieces = [piece.choices[0].logprobs for piece in client.chat.completions.create(model="llm", **asked, stream=True)]
    assert whole is not None
    assert whole.content is not None
    assert [place for piece in pieces if piece for place in piece.content or []] == whole.content
    assert all(place.token == place.top_logprobs[0].token and len(place.top_logprobs) == 2 for place in whole.content)


@pytest.mark.parametrize("model", ["llm", "llamav2"])
def test_completions_of_several_texts(model: str, service: Service) -> None:
    """Each text in a request of its own, in the order of the texts, whole and in pieces."""
    prompts = TEXTS[:3]
    settings: dict[str, Any] = {} if model == "llamav2" else {"temperature": 0, "max_tokens": 6}
    with Client(service.grpc) as own:
        expected = [Llm(own, model).generate(prompt, **settings).text for prompt in prompts]
    # OpenAI's type of a piece has no null for the reason, which OpenAI's own API sends
    with connect(service, _strict_response_validation=False) as client:
        whole = client.completions.create(model=model, prompt=prompts, **settings)
        assert [choice.text for choice in whole.choices] == expected
        assert [choice.index for choice in whole.choices] == [0, 1, 2]
        joined = [""] * 3
        for piece in client.completions.create(model=model, prompt=prompts, **settings, stream=True):
            joined[piece.choices[0].index] += piece.choices[0].text
    assert joined == expected
    assert (whole.usage is None) == (model == "llamav2")  # which does not count


def test_many_callers(service: Service, scale: Any) -> None:
    """Streamed pieces, whole answers and shoal's own client give one text for each prompt, with 16 callers."""
    prompts = [f"{text} {number}" for number, text in enumerate(TEXTS * 2)] if not scale.is_full else [
        f"{TEXTS[number % 7]} {number}" for number in range(200)
    ]  # fmt: skip
    settings: dict[str, Any] = {"max_tokens": 8, "temperature": 0}

    def ask(prompt: str) -> tuple[str, str, str]:
        with connect(service) as client, Client(service.grpc) as own:
            whole = client.chat.completions.create(model="llm", **chat(prompt, **settings)).choices[0].message.content
            pieces = client.chat.completions.create(model="llm", **chat(prompt, **settings), stream=True)
            joined = "".join(piece.choices[0].delta.content or "" for piece in pieces)
            message = [{"role": "user", "content": prompt}]
            return whole or "", joined, Llm(own, "llm").generate(message, **settings).text

    with ThreadPoolExecutor(16) as pool:
        for answers in pool.map(ask, prompts):
            assert len({*answers}) == 1, answers


def test_asyncio(service: Service) -> None:
    """OpenAI's asynchronous client."""

    async def ask() -> list[str]:
        options: Any = {"max_retries": 0, "_strict_response_validation": True}
        async with openai.AsyncOpenAI(base_url=f"http://{service.http}/v1", api_key="none", **options) as client:
            whole = await client.chat.completions.create(model="llm", **chat("Hello"))
            stream = await client.chat.completions.create(model="llm", **chat("Hello"), stream=True)
            joined = "".join([piece.choices[0].delta.content or "" async for piece in stream])
            response = await client.responses.create(model="llm", input="Hello", temperature=0, max_output_tokens=12)
            return [whole.choices[0].message.content or "", joined, response.output_text]

    answers = asyncio.run(ask())
    assert len({*answers}) == 1, answers


# --- responses and messages -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", CHATS)
def test_responses(model: str, client: openai.OpenAI) -> None:
    """The text of a chat, with instructions, whole and in events, which are numbered."""
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    expected = client.chat.completions.create(model=model, **chat("", messages=messages))
    asked: Any = {"instructions": "Be brief.", "input": "Hello", "temperature": 0, "max_output_tokens": 12}
    whole = client.responses.create(model=model, **asked)
    assert whole.output_text == expected.choices[0].message.content
    assert whole.temperature == 0
    assert client.responses.create(model=model, input="Hello", max_output_tokens=2).temperature == 0
    assert (whole.status, whole.incomplete_details and whole.incomplete_details.reason) == (
        "incomplete", "max_output_tokens",
    )  # fmt: skip
    assert whole.usage is not None
    assert whole.usage.output_tokens == 12
    events = [*client.responses.create(model=model, **asked, stream=True)]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert [event.type for event in events if event.type != "response.output_text.delta"] == [
        f"response.{name}" for name in (
            "created", "in_progress", "output_item.added", "content_part.added", "output_text.done",
            "content_part.done", "output_item.done", "incomplete",
        )
    ]  # fmt: skip
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    again: Any = [{"role": "user", "content": "Hello"}, *[item.model_dump() for item in whole.output]]
    longer = client.responses.create(
        model=model, input=[*again, {"role": "user", "content": "More"}], max_output_tokens=2
    )
    assert longer.usage is not None
    assert longer.usage.input_tokens > whole.usage.input_tokens


@pytest.mark.parametrize("model", CHATS)
def test_anthropic(model: str, service: Service, client: openai.OpenAI) -> None:
    """Anthropic's client gets the text of the same chat, whole and streamed, and the number of its tokens."""
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    expected = client.chat.completions.create(model=model, **chat("", messages=messages))
    asked: Any = {"model": model, "system": "Be brief.", "messages": [{"role": "user", "content": "Hello"}]}
    settings: Any = {"max_tokens": 12, "temperature": 0}
    with anthropic.Anthropic(base_url=f"http://{service.http}", api_key="none", max_retries=0) as other:
        whole = other.messages.create(**asked, extra_body=settings, max_tokens=12)
        (block,) = whole.content
        assert block.type == "text"
        assert (block.text, whole.stop_reason) == (expected.choices[0].message.content, "max_tokens")
        assert expected.usage is not None
        assert whole.usage.input_tokens == expected.usage.prompt_tokens
        assert other.messages.count_tokens(**asked).input_tokens == expected.usage.prompt_tokens
        with other.messages.stream(**asked, extra_body=settings, max_tokens=12) as stream:
            assert "".join(stream.text_stream) == block.text
            assert stream.get_final_message().usage.output_tokens == 12
        with pytest.raises(anthropic.BadRequestError, match="temperature is"):
            other.messages.create(**asked, max_tokens=5, extra_body={"temperature": -1})
        with pytest.raises(anthropic.NotFoundError, match="nothing"):
            other.messages.create(**{**asked, "model": "nothing"}, max_tokens=5)


@pytest.mark.parametrize("model", CHATS)
def test_token_ids(model: str, service: Service, repository: Path, client: openai.OpenAI) -> None:
    """vLLM's form: the ids of the model's own tokenizer, as many as a chat counts, and the text again.

    ``llm_bls`` turns ids into text by itself, so there is no step to ask for that.
    """
    tokenizer = Tokenizer.from_file(str(repository.parent / "weights" / "tokenizer.json"))
    for text in TEXTS:
        asked = {"model": model, "prompt": text}
        status, found = post(service, "/tokenize", json.dumps(asked).encode())
        assert (status, found["tokens"]) == (200, tokenizer.encode(text).ids)
        assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 1024)
        _, again = post(service, "/detokenize", json.dumps({"model": "llm", "tokens": found["tokens"]}).encode())
        assert again == {"prompt": tokenizer.decode(found["tokens"], skip_special_tokens=False)}
    expected = client.chat.completions.create(model=model, **chat("Hello")).usage
    assert expected is not None
    _, found = post(service, "/tokenize", json.dumps({"model": model, **chat("Hello")}).encode())
    assert found["error"]["param"] == "max_tokens"
    asked = {"model": model, "messages": chat("Hello")["messages"]}
    _, found = post(service, "/tokenize", json.dumps(asked).encode())
    assert found["count"] == expected.prompt_tokens
    for path, body, place in (
        ("/tokenize", {"model": model, "prompt": ""}, None),
        ("/tokenize", {"model": "llamav2", "prompt": "a"}, "model"),
        ("/detokenize", {"model": "llm_bls", "tokens": [5]}, "model"),
        ("/detokenize", {"model": "embedder", "tokens": [5]}, "model"),
        ("/detokenize", {"model": "llm", "tokens": [5, 10**6]}, None),
    ):  # fmt: skip
        status, found = post(service, path, json.dumps(body).encode())
        assert (status, found["error"]["param"]) == (400, place), found
    status, found = post(service, "/detokenize", json.dumps({"model": "llm", "tokens": []}).encode())
    assert (status, found) == (200, {"prompt": ""})


# --- numbers --------------------------------------------------------------------------------------------------------


def test_embeddings(service: Service) -> None:
    """Bit for bit those of shoal's own client, in the order of the texts, of more texts than a request may have.

    Not with strict validation: OpenAI's client asks for base64, which its own type does not have.
    """
    client = connect(service, _strict_response_validation=False)
    with Client(service.grpc) as own:
        expected = own.infer("embedder", TEXT=TEXTS)["EMBEDDING"]
    for more in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        found = client.embeddings.create(model="embedder", input=TEXTS, **more).data  # type: ignore[arg-type]
        rows = [each.embedding for each in found]
        if more.get("encoding_format") == "base64":
            rows = [np.frombuffer(base64.b64decode(row), np.float32) for row in rows]  # type: ignore[misc,arg-type]
        assert [each.index for each in found] == [*range(len(TEXTS))]
        assert np.array_equal(np.array(rows, np.float32), expected)
    one = client.embeddings.create(model="embedder", input=TEXTS[0]).data
    assert np.array_equal(np.array(one[0].embedding, np.float32), expected[0])
    client.close()


def test_classes_and_scores(service: Service) -> None:
    """Labels of the greatest probability; a score has none. One answer on all ways."""
    with Client(service.grpc) as own:
        probabilities = own.infer("labeller", TEXT=TEXTS)["PROBS"]
        scores = own.infer("reader", TEXT=TEXTS)["SCORE"]
    _, found = post(service, "/v1/classify", json.dumps({"model": "labeller", "input": TEXTS}).encode())
    for index, row in enumerate(found["data"]):
        assert np.array_equal(np.array(row["probs"], np.float32), probabilities[index])
        expected = index, LABELS[int(probabilities[index].argmax())], 3
        assert (row["index"], row["label"], row["num_classes"]) == expected
    _, found = post(service, "/v1/classify", json.dumps({"model": "reader", "input": TEXTS[0]}).encode())
    assert [(row["label"], np.float32(row["probs"])) for row in found["data"]] == [(None, scores[0])]


def test_predictions(service: Service) -> None:
    """KServe's first protocol: texts, and values by input, mixed; each row gets all outputs."""
    weights = [None, 0.25, None, 1.0, 0.75, None, None]
    instances = [
        text if weight is None else {"TEXT": text, "WEIGHT": weight}
        for text, weight in zip(TEXTS, weights, strict=True)
    ]
    status, found = post(service, "/v1/models/reader:predict", json.dumps({"instances": instances}).encode())
    assert status == 200
    with Client(service.grpc) as own:
        for text, weight, row in zip(TEXTS, weights, found["predictions"], strict=True):
            answer = own.infer("reader", TEXT=[text], WEIGHT=None if weight is None else [weight])
            assert row["NAME"] == "r"
            assert np.float32(row["SCORE"]) == answer["SCORE"][0, 0]
            assert np.float32(row["OTHER"]) == answer["OTHER"][0, 0]
    _, rows = post(service, "/v1/models/embedder:predict", json.dumps({"inputs": TEXTS}).encode())
    assert rows == post(service, "/v1/models/embedder:predict", json.dumps({"instances": TEXTS}).encode())[1]
    assert rows == post(service, "/v1/models/embedder:predict", json.dumps({"inputs": {"TEXT": TEXTS}}).encode())[1]
    for bad, place in (("[5]", None), ('[{"NO": 1}]', None), ('[{"TEXT": 5}]', None), ("[]", "instances")):
        status, found = post(service, "/v1/models/reader:predict", f'{{"instances": {bad}}}'.encode())
        assert (status, found["error"]["param"]) == (400, place), found


def test_rankings(service: Service) -> None:
    """The greatest score first; pairs in their order."""
    documents = ["zz", "a cat", "cattle", "c"]
    with Client(service.grpc) as own:
        scores = own.infer("ranker", QUERY=["a cat"] * 4, DOCUMENT=documents)["RELEVANCE"][:, 0]
    asked: dict[str, Any] = {"model": "ranker", "query": "a cat", "documents": documents, "top_n": 3}
    _, found = post(service, "/v1/rerank", json.dumps(asked).encode())
    order = [int(index) for index in np.argsort(-scores)][:3]
    assert [each["index"] for each in found["results"]] == order
    assert [each["document"]["text"] for each in found["results"]] == [documents[index] for index in order]
    assert np.array_equal(np.array([each["relevance_score"] for each in found["results"]], np.float32), scores[order])
    asked = {"model": "ranker", "text_1": "a cat", "text_2": documents}
    _, found = post(service, "/v1/score", json.dumps(asked).encode())
    assert np.array_equal(np.array([each["score"] for each in found["data"]], np.float32), scores)
    status, found = post(service, "/v1/score", json.dumps({**asked, "text_1": ["a", "b", "c"]}).encode())
    assert (status, found["error"]["param"]) == (400, "text_1")


# --- bad input ------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {  # what is asked, and the code and the place of the refusal
    "role": ({"messages": [{"role": "robot", "content": "a"}]}, "invalid_value", "messages[0].role"),
    "no messages": ({"messages": []}, "invalid_value", "messages"),
    "no content": ({"messages": [{"role": "user", "content": ""}]}, "invalid_value", "messages[0].content"),
    "missing": ({"messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b"}}]}]},
        "unsupported_parameter", "messages[0].content[0].type",
    ),
    "tools": ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "unsupported_parameter", "tools[0].type"),
    "form": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
        "invalid_value", "response_format",
    ),
    "several": ({"n": 129}, "invalid_value", "n"),
    "store": ({"store": True}, "unsupported_parameter", "store"),
    "temperature": ({"temperature": -1}, "invalid_value", "temperature"),
    "top_p": ({"top_p": 0}, "invalid_value", "top_p"),
    "penalty": ({"frequency_penalty": 3}, "invalid_value", "frequency_penalty"),
    "no tokens": ({"max_tokens": 0}, "invalid_value", "max_tokens"),
    "many tokens": ({"max_tokens": 10**6}, "context_length_exceeded", "max_tokens"),
    "both": ({"max_tokens": 5, "max_completion_tokens": 6}, "invalid_value", "max_tokens"),
    "long": ({"messages": [{"role": "user", "content": "a " * 2000}]}, "context_length_exceeded", "messages"),
    "stops": ({"stop": ["a"] * 65}, "invalid_value", "stop"),
    "top_logprobs": ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
    "alone": ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
}  # fmt: skip


@pytest.mark.parametrize("is_streaming", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str, is_streaming: bool, client: openai.OpenAI) -> None:
    """The client's own exception, with the code and the place."""
    changed, code, place = REFUSED[name]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="llm", **{**chat("Hello"), **changed}, stream=is_streaming)
    assert (refused.value.code, refused.value.param) == (code, place), refused.value
    assert refused.value.type == "invalid_request_error"


def test_refusals_of_bodies(service: Service) -> None:
    """Requests that no client sends, and for what other models serve."""
    path, good = "/v1/chat/completions", json.dumps({"model": "llm", **chat("Hello")}).encode()
    assert post(service, path, good)[0] == 200
    found = {
        name: (status, reply["error"]["code"], reply["error"]["param"])
        for name, (status, reply) in {
            "json": post(service, path, good[:-1]),
            "nan": post(service, path, good.replace(b'"temperature": 0', b'"temperature": NaN')),
            "surrogate": post(service, path, good.replace(b"Hello", b"\\ud800")),
            "bytes": post(service, path, good.replace(b"Hello", b"\xff")),
            "nested": post(service, path, b'{"messages":' + b"[" * 10_000 + b"]" * 10_000 + b"}"),
            "list": post(service, path, b"[]"),
            "text": post(service, path, good, "text/plain"),
            "large": post(service, path, good.replace(b"Hello", b"x" * 2**22)),
            "typo": post(service, path, good.replace(b"temperature", b"temprature")),
            "no model": post(service, path, good.replace(b'"model": "llm", ', b"")),
            "other": post(service, "/v1/embeddings", b'{"model": "llm", "input": "a"}'),
            "ids": post(service, "/v1/embeddings", b'{"model": "embedder", "input": [[1, 2]]}'),
            "fails": post(service, "/v1/embeddings", b'{"model": "embedder", "input": "break"}'),
            "path": post(service, "/v1/images/generations", b"{}"),
            "no path": post(service, "/v1", b"{}"),
        }.items()
    }
    assert found == {
        "json": (400, "invalid_json", None), "nan": (400, "invalid_json", None),
        "surrogate": (400, "invalid_json", None), "bytes": (400, "invalid_json", None),
        "nested": (400, "invalid_json", None), "list": (400, "invalid_value", None),
        "text": (415, "unsupported_media_type", None), "large": (413, "request_too_large", None),
        "typo": (400, "unknown_parameter", "temprature"),
        "no model": (400, "missing_required_parameter", "model"), "other": (400, "invalid_value", "model"),
        "ids": (400, "invalid_value", "input[0]"), "fails": (400, "invalid_value", None),
        "path": (404, "unknown_url", None), "no path": (404, "unknown_url", None),
    }  # fmt: skip


def test_refusals_name_places_as_the_route_has_them(service: Service) -> None:
    """The field of the request, where the pipeline has another name for it; Anthropic's paths have its form."""
    empty = [{"role": "user", "content": "a"}, {"role": "user", "content": ""}]
    for path, body, place in (
        ("/v1/responses", {"input": empty}, "input[1].content"),
        ("/v1/responses", {"input": empty, "instructions": "a"}, "input[1].content"),
        ("/v1/responses", {"input": "a " * 2000}, "input"),
        ("/v1/responses", {"input": "a", "max_output_tokens": 10**6}, "max_output_tokens"),
        ("/v1/completions", {"prompt": "a " * 2000}, "prompt"),
        ("/v1/completions", {"prompt": "a", "logprobs": 21}, "logprobs"),
        ("/v1/completions", {"prompt": "a", "stop": ["a" * 4000, "b" * 4000]}, "stop"),
    ):  # fmt: skip
        status, found = post(service, path, json.dumps({"model": "llm", **body}).encode())
        assert (status, found["error"]["param"]) == (400, place), found
    status, found = post(service, "/v1/messages/batches", b"{}")
    assert (status, found["type"], found["error"]["type"]) == (404, "error", "not_found_error")
