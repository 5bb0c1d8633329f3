"""Clients of language models: beside each other in this process, stopped, and of ``llamav2``."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from shoal import AsyncClient, Client, Pipeline, load
from shoal.clients.llm.client import AsyncLlm, Llm
from shoal.clients.llm.dialects import Messages
from shoal.errors import InputError
from shoal.kit.generation.pieces import Piece
from tests.support.commands import Shoal
from tests.support.service import Service

PROMPTS = ["A cat", "The fish", "Ein Fisch", "A river", "Why?", "Once"]


@pytest.mark.parametrize("model", ["llm", "llm_bls"])
def test_asyncio_in_this_process(model: str, repository: Path) -> None:
    """Requests run beside each other; one that is left early ends, and the others go on."""

    async def ask(pipeline: Pipeline) -> list[str]:
        llm = AsyncLlm(pipeline)
        pieces = llm.stream("A cat", max_tokens=900)
        await anext(pieces)
        await pieces.aclose()
        with pytest.raises(InputError, match="request_id is given, and the pipeline runs in this process"):
            await llm.generate("A cat", request_id="7")
        return [one.text for one in await asyncio.gather(*(llm.generate(each, max_tokens=9) for each in PROMPTS))]

    with load(repository / model) as pipeline:
        assert asyncio.run(ask(pipeline)) == [Llm(pipeline).generate(prompt, max_tokens=9).text for prompt in PROMPTS]


@pytest.mark.parametrize("way", ["grpc", "http", "local"])
@pytest.mark.parametrize("model", ["llm", "llm_bls", "llamav2"])
def test_several_prompts(way: Any, model: str, service: Service, here: Callable[[str], Pipeline]) -> None:
    """More than are asked at once; the answers are those of single requests, in their order."""
    prompts: list[str | Messages] = [*PROMPTS, [{"role": "user", "content": "Hello"}]] * 3
    url = "" if way == "local" else getattr(service, way)

    async def ask() -> list[Piece]:
        if way == "local":
            return await AsyncLlm(here(model)).generate_all(prompts, max_tokens=4, temperature=0)
        async with AsyncClient(url, protocol=way) as client:
            return await AsyncLlm(client, model).generate_all(prompts, max_tokens=4, temperature=0)

    with nullcontext(here(model)) if way == "local" else Client(url, protocol=way) as source:
        llm = Llm(source, "" if way == "local" else model)
        single = [llm.generate(prompt, max_tokens=4, temperature=0) for prompt in prompts[:7]]
        assert llm.generate_all(prompts, max_tokens=4, temperature=0) == single * 3 == asyncio.run(ask())
        assert llm.generate_all([]) == []
        with pytest.raises(InputError, match=r"The prompt is a list of texts\. Ask generate_all\(prompts\)"):
            llm.generate(["A cat", "The fish"])  # type: ignore[arg-type]
        with pytest.raises(InputError, match="max_tokens is 0"):
            llm.generate_all(PROMPTS, max_tokens=0)


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_stop_request_ends_an_answer_of_llm_bls(is_stream: bool, service: Service) -> None:
    """At once, with a marked last answer that has the counts, and in a whole answer the text so far."""
    with Client(service.grpc) as client, ThreadPoolExecutor() as pool:
        llm = Llm(client, "llm_bls")
        ask = (lambda **more: list(llm.stream(**more))) if is_stream else (lambda **more: [llm.generate(**more)])
        found = pool.submit(ask, prompt="A cat", max_tokens=900, request_id="mine")
        time.sleep(0.3)
        start = time.monotonic()
        assert not list(client.stream("llm_bls", {"text_input": ["A"], "stop": [True]}, request_id="mine"))
        *pieces, last = found.result(60)
        assert time.monotonic() - start < 1
    assert last.finish_reason == "cancelled"
    assert 0 < last.num_output_tokens < 900
    assert bool(last.text) != is_stream
    assert all(piece.text and not piece.finish_reason for piece in pieces)


def test_llama_2_with_a_history_and_settings(service: Service) -> None:
    """Each row of a batch with its own settings; a seed gives the same text alone and beside others."""
    asked: dict[str, list[list[Any]]] = {
        "prompt": [[f"What is a river, {number}?"] for number in range(8)],
        "temperature": [[0.5 + number / 4] for number in range(8)],
        "top_p": [[0.99]] * 8,
        "top_k": [[0]] * 8,
        "max_tokens": [[4 + number] for number in range(8)],
        "seed": [[number // 2] for number in range(8)],
    }
    with Client(service.grpc) as client, ThreadPoolExecutor(8) as pool:

        def ask(row: int) -> Any:
            return client.infer("llamav2", {name: [values[row]] for name, values in asked.items()})[
                "generated_text"
            ].item()

        together = client.infer("llamav2", asked)["generated_text"][:, 0].tolist()
        assert together == [ask(row) for row in range(8)]
        assert set(pool.map(ask, [3] * 32)) == {together[3]}  # in batches of any size
        assert len(set(together)) == 8
        history = json.dumps([{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hello."}])
        remembered = client.infer("llamav2", prompt=[["Why?"]], history=[[history]])["generated_text"].item()
        assert remembered != client.infer("llamav2", prompt=[["Why?"]])["generated_text"].item()
        for more, words in (
            ({"history": [['[{"role": "user", "content": "Hello!"}]']]}, "Llama 2 cannot take"),
            ({"history": [["hello"]]}, "history is not JSON"),
            ({"max_tokens": [[2000]]}, r"max_tokens is 2000, and the prompt leaves \d+. Send from 1 to"),
            ({"top_p": [[2.0]]}, "top_p is 2.0. Send more than 0"),
        ):
            with pytest.raises(InputError, match=words):
                client.infer("llamav2", {"prompt": [["Why?"]], **more})


@pytest.mark.parametrize("way", ["grpc", "http", "local"])
def test_the_client_asks_llama_2(way: Any, service: Service, here: Callable[[str], Pipeline], shoal: Shoal) -> None:
    """One whole answer, with a chat's earlier messages as the history; settings that it lacks are refused."""
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
    chat += [{"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Why?"}]
    with Client(service.grpc) as client:
        right = client.infer("llamav2", prompt=[["Why?"]], history=[[json.dumps(chat[:-1])]], max_tokens=[[9]])
    with nullcontext(here("llamav2")) if way == "local" else Client(getattr(service, way), protocol=way) as source:
        llm = Llm(source, "" if way == "local" else "llamav2")
        assert llm.generate(chat, max_tokens=9) == Piece(right["generated_text"].item().decode(), "", 0, 0)
        assert [*llm.stream("Why?", max_tokens=9)] == [llm.generate("Why?", max_tokens=9)]
        with pytest.raises(InputError, match=r"The model has no setting stop_words. Leave it out, or ask llm."):
            llm.generate("Why?", stop_words=["a"])
        with pytest.raises(InputError, match="The last message's role is 'assistant'"):
            llm.generate(chat[:3])
        printed = shoal("generate", "Why?", "--model", "llamav2", "--max-tokens", 9, "--url", service.grpc)
        assert printed.strip() == llm.generate("Why?", max_tokens=9).text.strip()
