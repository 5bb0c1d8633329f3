"""``llm_bls`` with its engine in its own process: the answers of the form with an engine apart, and its limits."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from shoal import Client, InputError, Llm
from shoal.authoring.composition.compose import compose
from shoal.kit.generation.pieces import join_pieces
from tests.conftest import Scale, verified
from tests.support.generate import TIE, expect
from tests.support.service import Service, wait_until
from tests.support.vllm import lengthen, make_repository

MODEL, JSON = "llm_bls", {"Content-Type": "application/json"}
PROMPTS = [" ".join(["The", "cat", "sat", "on", "the", "mat", "and", "rain"][: 1 + at % 8]) for at in range(24)]
SETTINGS: list[dict[str, Any]] = [
    {}, {"temperature": 0.8, "seed": 5}, {"stop_words": ["a", "th"]}, {"top_logprobs": 2, "return_logprobs": True},
]  # fmt: skip


@pytest.fixture(scope="module")
def together(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    home = tmp_path_factory.mktemp("together")
    repository = compose(MODEL, home / "repository", weights=folder, is_together=True)
    with Service(repository, home / "log") as running:
        yield running


@pytest.fixture(scope="module")
def on_openvino(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    repository = tmp_path_factory.mktemp("openvino") / "repository"
    compose(MODEL, repository, weights=folder, engine="openvino", is_together=True)
    with Service(repository, repository.parent / "log") as running:
        yield running


@pytest.fixture(scope="module", params=["together", "on_openvino"])
def hosted(request: pytest.FixtureRequest) -> Service:
    """A service whose pipeline hosts its engine: llm-hf, or llm-openvino."""
    return cast("Service", request.getfixturevalue(request.param))


Forms = tuple[Service, tuple[Service, str]]  # the engine hosted, and a service and its model with an engine apart


@pytest.fixture(scope="module", params=["llm-hf", "llm-onnx", "llm-openvino", *verified("llm-vllm")])
def forms(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forms]:
    """Both forms on one engine."""
    ask_for, home = request.getfixturevalue, tmp_path_factory.mktemp(request.param)
    if request.param == "llm-hf":
        yield ask_for("together"), (ask_for("service"), MODEL)
        return
    if request.param == "llm-openvino":
        repository = compose("llm", home / "repository", weights=folder, engine="openvino")
        with Service(repository, home / "log") as apart:
            yield ask_for("on_openvino"), (apart, "llm")
        return
    if request.param == "llm-onnx":
        apart, model, project = ask_for("service"), "llm_onnx", ask_for("repository").parent
        how: dict[str, Any] = {"projects": [project], "weights": folder, "swap": {"llm-hf": "tiny-onnx"}}
        repository = compose(MODEL, home / "repository", is_together=True, **how)
    else:
        apart, model = ask_for("vllm"), MODEL
        repository = make_repository(lengthen(folder, home), home, slots=4, models=[MODEL], is_together=True)
    with Service(repository, home / "log") as running:
        yield running, (apart, model)


def ask(client: Client, number: int, model: str, settings: list[dict[str, Any]]) -> tuple[Any, ...]:
    """The answer, without the log probabilities' last digits, which depend on what is computed beside it."""
    chosen = settings[number % len(settings)]
    pieces = Llm(client, model).stream(PROMPTS[number % len(PROMPTS)], max_tokens=count(number), **chosen)
    *whole, total, places = join_pieces(list(pieces))
    ranks = [[(token, entry["rank"]) for token, entry in place.items()] for place in places]
    return (*whole, total and round(total, 3), ranks)


def count(number: int) -> int:
    return 4 + number % 9


@pytest.fixture(scope="module")
def generated(folder: Path) -> Callable[[int], str]:
    """The text that ``generate`` has for a greedy request, as far as no two tokens are equally good."""
    oracle, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    oracle.generation_config = GenerationConfig()

    def generate(number: int) -> str:
        new, gaps = expect(oracle, tokenizer(PROMPTS[number % len(PROMPTS)])["input_ids"], count(number))
        sure = next((at for at, gap in enumerate(gaps) if gap <= TIE), len(new))
        return str(tokenizer.decode(new[:sure], skip_special_tokens=True))

    return generate


def test_a_hosted_engine_has_metrics_by_its_name(together: Service) -> None:
    def count_rows() -> float:
        page = together.get("/metrics")[1]
        return sum(
            map(float, re.findall(r'^shoal_rows_total{instance="llm_bls_.*model="llm-hf"} (\S+)$', page, re.MULTILINE))
        )

    before = count_rows()
    with Client(together.grpc) as client:
        for _ in range(3):
            Llm(client, MODEL).generate("The cat", max_tokens=2)
    assert wait_until(lambda: count_rows() == before + 3)


@pytest.mark.parametrize("at_once", [1, 16])
def test_answers_are_those_of_an_engine_apart(
    at_once: int, forms: Forms, generated: Callable[[int], str], scale: Scale, request: pytest.FixtureRequest
) -> None:
    full = 48 if "llm-vllm" in request.node.name else 200
    settings = SETTINGS
    if "llm-openvino" in request.node.name:  # which has no top_logprobs
        settings = [*SETTINGS[:-1], {"return_logprobs": True}]

    def ask_all(at: Service, model: str) -> list[Any]:
        with Client(at.grpc, retries=0, timeout=120) as client, ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda number: ask(client, number, model, settings), range(scale(24, full=full))))

    together, apart = forms
    answers = ask_all(together, MODEL)
    assert answers == ask_all(*apart)
    for number in range(0, len(answers), len(SETTINGS)):
        text = generated(number)
        assert text != ""
        assert answers[number][0].startswith(text)


def test_openais_client(together: Service, service: Service) -> None:
    def ask_v1(at: Service) -> tuple[str, Any, list[str]]:
        client = OpenAI(base_url=f"http://{at.http}/v1", api_key="none", max_retries=0)
        chat: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 9}
        whole = client.chat.completions.create(**chat)
        pieces = client.chat.completions.create(**chat, stream=True)
        texts = [choice.delta.content or "" for piece in pieces for choice in piece.choices]
        return whole.choices[0].message.content or "", whole.usage, texts

    found, expected = ask_v1(together), ask_v1(service)
    assert found == expected
    assert "".join(found[2]) == found[0] != ""


def test_the_service_still_counts_tokens(together: Service, service: Service) -> None:
    """The step that makes token ids is a model of its own."""

    def tokenize(at: Service) -> Any:
        body = json.dumps({"model": MODEL, "prompt": "The cat sat."}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"http://{at.http}/tokenize", body, JSON)) as reply:
            return json.loads(reply.read())

    assert tokenize(together) == tokenize(service)


def test_a_client_that_leaves_ends_the_engines_work(hosted: Service) -> None:
    """All of the engine's places are taken by streams that are left; the next request is answered at once."""
    with Client(hosted.grpc, retries=0, timeout=60) as client:
        llm = Llm(client, MODEL)
        for _ in range(40):
            with closing(llm.stream("The cat", max_tokens=200)) as pieces:
                next(pieces)
        begin = time.monotonic()
        assert llm.generate("The cat", max_tokens=2).text
        assert time.monotonic() - begin < 10


def test_errors_reach_their_client_alone(hosted: Service) -> None:
    with Client(hosted.grpc, retries=0, timeout=60) as client:
        llm = Llm(client, MODEL)
        texts: list[str] = []
        beside = threading.Thread(target=lambda: texts.append(llm.generate("The cat", max_tokens=40).text))
        beside.start()
        with pytest.raises(InputError, match="context"):
            llm.generate("The cat", max_tokens=10**6)
        beside.join()
        assert texts[0]


def test_a_killed_process_is_replaced(hosted: Service) -> None:
    with Client(hosted.grpc, retries=0, timeout=60) as client:
        expected = Llm(client, MODEL).generate("The cat", max_tokens=5)
        for stub in hosted.stubs():
            os.kill(stub.pid, signal.SIGKILL)

        def is_back() -> bool:
            try:
                return Llm(client, MODEL).generate("The cat", max_tokens=5) == expected
            except Exception:
                return False

        wait_until(is_back)
