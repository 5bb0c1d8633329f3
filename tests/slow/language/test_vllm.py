"""vLLM in its own environment, in the slot of the engine: on the real Triton, against ``generate``."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig

from shoal.authoring.composition.compose import compose
from shoal.clients.client.client import Client
from shoal.errors import ArtifactError, InputError, ServerError, ShoalError
from shoal.kit.generation.contract import pack_words
from shoal.lab.tiny_llm import make_tiny
from shoal.serving.server.launch import Server, serve
from shoal.system.processes import Process, find_descendants, find_process
from tests.conftest import Scale, verified
from tests.support.environments import RUNNING
from tests.support.generate import PENALTIES, check_equal, expect, expect_penalized, prompts, wait_for
from tests.support.llm import find_trained, token_inputs, tokens_of
from tests.support.service import Service
from tests.support.vllm import ARGUMENTS, CONTEXT, ENGINE, lengthen, make_repository

LONG = 16000  # 1,000 tokens took less than a second on a fast machine


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return load_oracle(folder)


@pytest.fixture(scope="module")
def client(vllm: Service) -> Iterator[Client]:
    with Client(vllm.grpc) as client:
        yield client


def load_oracle(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.generation_config = GenerationConfig()
    return model


def own_processes(triton: int) -> list[Process]:
    """The engine's stub, vLLM's processes, and what they started."""
    for child in find_descendants(triton):
        below = find_descendants(child.pid)
        if child.parent == triton and any("EngineCore" in " ".join(each.arguments()) for each in below):
            return [child, *below]
    raise AssertionError("vLLM does not run")


def alive(processes: list[Process]) -> list[list[str]]:
    found = [find_process(process.pid) for process in processes]
    return [process.arguments() for process in found if process is not None and not process.is_ended]


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """The results of calls that are made at the same time."""
    results: list[Any] = [None] * len(calls)

    def run(place: int) -> None:
        try:
            results[place] = calls[place]()
        except ShoalError as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_tokens_are_those_of_generate(client: Client, oracle: Any) -> None:
    """More requests than slots, of mixed lengths, at the same time."""
    asked = list(zip(prompts(12), [8, 16, 32, 96] * 3, strict=True))

    def ask(ids: list[int], new: int) -> list[int]:
        return tokens_of(client.stream(ENGINE, token_inputs(ids, new)))

    found = in_threads([partial(ask, ids, new) for ids, new in asked])
    for (ids, new), tokens in zip(asked, found, strict=True):
        check_equal(tokens, expect(oracle, ids, new))


def test_settings(client: Client, oracle: Any) -> None:
    ids = prompts(1, 7)[0]
    plain = expect(oracle, ids, 24)[0]

    def ask(**more: Any) -> list[int]:
        return tokens_of(client.stream(ENGINE, token_inputs(ids, 24, **more)))

    bad, end = [[plain[2]], plain[5:7]], plain[0]
    settings = {"repetition_penalty": 1.3, "min_new_tokens": 6, "bad_words_ids": bad, "eos_token_id": end}
    tokens, gaps = expect(oracle, ids, 24, **settings)
    assert tokens != plain
    found = ask(repetition_penalty=1.3, min_tokens=6, bad_words_list=pack_words(bad), end_id=end)
    check_equal(found, ([token for token in tokens if token != end], gaps))
    for frequency, presence in PENALTIES:
        found = ask(frequency_penalty=frequency, presence_penalty=presence)
        check_equal(found, expect_penalized(oracle, ids, 24, frequency, presence))
    sampled = {"temperature": 1.2, "runtime_top_k": 80, "runtime_top_p": 0.95}
    assert ask(seed=2**64 - 1, **sampled) == ask(seed=2**64 - 1, **sampled)
    assert ask(**sampled) != ask(**sampled)
    place = next(i for i in range(3, 24) if plain.index(plain[i]) == i)
    assert ask(stop_words_list=pack_words([plain[place : place + 2]])) == plain[: place + 2]
    (whole,) = client.stream(ENGINE, token_inputs(ids, 24, streaming=False, carry=b"{}"))
    assert (tokens_of([whole]), whole["finish_reason"].item(), whole["carry"].item()) == (plain, b"length", b"{}")


GUIDES = {
    '{"json": {"type": "array", "items": {"enum": [1, "b"]}, "maxItems": 3}}': r'\[((1|"b")(,(1|"b")){0,2})?\]',
    '{"regex": "[ab]{3,6}"}': "[ab]{3,6}",
    '{"choice": ["x y", "zz"]}': "x y|zz",
    '{"grammar": "start: \\"<\\" X \\">\\"\\nX: /[0-9]{2,4}/", "optional": true}': "<[0-9]{2,4}>",
}


def test_answers_follow_guides(client: Client, oracle: Any, folder: Path) -> None:
    """Greedy and drawn, without an end token too, beside requests without a guide."""
    tokenizer, ids = Tokenizer.from_file(str(folder / "tokenizer.json")), prompts(1, 7)[0]
    drawn = {"temperature": 1.0, "runtime_top_p": 1.0, "seed": 1}

    def ask(**more: Any) -> list[int]:
        return tokens_of(client.stream(ENGINE, token_inputs(ids, 60, **more)))

    asked = [(guide, more) for guide in GUIDES for more in ({}, drawn, {"end_id": -1, "min_tokens": 50})]
    *found, free = in_threads([*(partial(ask, guide=guide, **more) for guide, more in asked), ask])
    for (guide, _), tokens in zip(asked, found, strict=True):
        assert re.fullmatch(GUIDES[guide], tokenizer.decode(tokens))
    check_equal(free, expect(oracle, ids, 60))
    # Some releases of llguidance find no number here: never an answer that is cut, and says "stop".
    within = {"type": "integer", "minimum": -100, "maximum": -1, "multipleOf": 5}
    schema = {"type": "object", "properties": {"x": within}, "required": ["x"], "additionalProperties": False}
    guide = json.dumps({"json": schema})
    try:
        text = tokenizer.decode(ask(guide=guide))
    except InputError:
        with pytest.raises(InputError, match="guide cannot be followed here"):
            ask(guide=guide)
    else:
        assert json.loads(text)["x"] in range(-100, 0, 5)
    with pytest.raises(InputError, match=r"guide\.json is refused: Unimplemented keys"):
        ask(guide='{"json": {"not": {}}}')


def test_bad_requests_leave_neighbours_unharmed(client: Client, oracle: Any) -> None:
    ids = prompts(1, 2)[0]
    neighbour = client.stream(ENGINE, token_inputs(ids, 60))
    first = next(neighbour)
    for inputs, words in (
        (token_inputs([5, 484], 4), "vocabulary has 484 tokens"),
        (token_inputs([5], 4, input_lengths=0), "has no tokens"),
        (token_inputs([5], CONTEXT), "16385 together, and the context has 16384"),
        (token_inputs([5], 4, temperature=float("nan")), "temperature is nan"),
    ):
        with pytest.raises(InputError, match=words):
            list(client.stream(ENGINE, inputs))
    check_equal(tokens_of([first, *neighbour]), expect(oracle, ids, 60))


def test_leaving_frees_the_slot(client: Client, scale: Scale) -> None:
    """All slots are taken by requests that would take seconds; one more waits until they leave."""
    long = [client.stream(ENGINE, token_inputs([5], LONG), request_id=f"long {place}") for place in range(4)]
    for stream in long:
        next(stream)
    start = time.monotonic()
    for place in range(4):
        list(client.stream(ENGINE, token_inputs([5], 1, stop=True), request_id=f"long {place}"))
    assert len(tokens_of(client.stream(ENGINE, token_inputs([5, 6], 4)))) == 4
    assert time.monotonic() - start < scale(15, 1)
    for stream in long:
        assert len(tokens_of(stream)) < LONG


def test_a_service_that_is_stopped_leaves_no_process(vllm: Service, client: Client, scale: Scale) -> None:
    """The last test with this service; Triton waits for the answer under way, up to its own time-out."""
    stream = client.stream(ENGINE, token_inputs([5], 1000))
    next(stream)
    found = own_processes(vllm.servers()[0].pid)
    start = time.monotonic()
    vllm.stop()
    assert time.monotonic() - start < scale(60, 15)
    wait_for(lambda: not alive(found), scale(20, 2))


# --- a server of its own, with speculative decoding ---------------------------------------------------------------


@pytest.fixture(scope="module")
def trained() -> Path:
    return find_trained()


@pytest.fixture(scope="module")
def own_oracle(trained: Path) -> Any:
    return load_oracle(trained)


@pytest.fixture(scope="module")
def started(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, float]]:
    """The server, and the seconds that it took to start."""
    place = tmp_path_factory.mktemp("own")
    guess = '"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}'
    repository = make_repository(lengthen(trained, place), place, ARGUMENTS[:-1] + f", {guess}}}")
    start = time.monotonic()
    with serve(repository) as server:
        yield server, time.monotonic() - start


def test_speculative_decoding_changes_no_token(started: tuple[Server, float], own_oracle: Any) -> None:
    server, _ = started
    with Client(server.grpc_url) as client:
        for ids in prompts(4, 5):
            answers = list(client.stream(ENGINE, token_inputs(ids, 48)))
            check_equal(tokens_of(answers), expect(own_oracle, ids, 48))

    def count(what: str) -> float:
        with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=10) as page:
            found = re.findall(rf"^shoal_{what}_tokens_total{{.*}} (\S+)$", page.read().decode(), re.MULTILINE)
        return sum(map(float, found))

    wait_for(lambda: count("accepted") > 0, 10)  # published once a second
    assert count("accepted") <= count("drafted") <= 3 * 4 * 48


def test_vllms_own_metrics(started: tuple[Server, float]) -> None:
    """By vLLM's names: what runs and waits, and the tokens of prompts and answers."""
    server, _ = started

    def read() -> dict[str, float]:
        with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=10) as page:
            found = re.findall(r'^vllm:(\w+){.*model="llm-vllm".*} (\S+)$', page.read().decode(), re.MULTILINE)
        return {name: float(value) for name, value in found}

    wait_for(lambda: read().get("num_requests_running") == 0, 10)
    time.sleep(2)  # what other tests asked is published once a second
    before, asked = read(), prompts(4, 5)
    with Client(server.grpc_url) as client:
        streams = [client.stream(ENGINE, token_inputs(ids, LONG)) for ids in asked[:3]]
        for stream in streams[:2]:
            next(stream)
        third = threading.Thread(target=partial(next, streams[2]))
        third.start()  # beyond the two slots
        wait_for(lambda: (read()["num_requests_running"], read()["num_requests_waiting"]) == (2, 1), 10)
        assert 0 < read()["kv_cache_usage_perc"] < 1
        for stream in streams[:2]:
            stream.close()
        third.join(60)
        streams[2].close()
        wait_for(lambda: read()["num_requests_running"] == 0, 10)
        started_tokens = read()["generation_tokens_total"]
        assert len(tokens_of(client.stream(ENGINE, token_inputs(asked[3], 48)))) == 48
        wait_for(lambda: read()["generation_tokens_total"] == started_tokens + 48, 10)
    after = read()
    for name in ("prompt_tokens_total", "prefix_cache_queries_total"):
        assert after[name] - before.get(name, 0) == sum(map(len, asked))
    assert after["num_requests_waiting"] == 0


@pytest.fixture
def impatient(started: tuple[Server, float]) -> Iterator[Client]:
    with Client(started[0].grpc_url, retries=0) as client:
        yield client


def test_the_core_dies_and_is_replaced(
    started: tuple[Server, float], impatient: Client, own_oracle: Any, scale: Scale
) -> None:
    server, start_seconds = started
    ids = prompts(1, 2)[0]
    core = next(each for each in own_processes(server.pid) if "EngineCore" in " ".join(each.arguments()))
    streams = [impatient.stream(ENGINE, token_inputs([5, place], LONG)) for place in range(4, 7)]
    for stream in streams[:2]:
        next(stream)
    os.kill(core.pid, signal.SIGKILL)
    start = time.monotonic()
    errors = in_threads([partial(list, stream) for stream in streams])
    assert time.monotonic() - start < scale(20, 1)
    for error in errors[:2]:
        assert str(error)[:100] == "Model llm-vllm failed on this request (EngineDeadError). See the server's log."
    assert isinstance(errors[2], ServerError)  # it was asked after the death: its client may ask again
    assert "is unavailable: its process died" in str(errors[2])

    refusals: list[str] = []

    def answers() -> bool:
        try:
            check_equal(tokens_of(impatient.stream(ENGINE, token_inputs(ids, 12))), expect(own_oracle, ids, 12))
        except ServerError as error:
            refusals.append(str(error))
            time.sleep(0.5)
            return False
        return True

    try:
        seconds = wait_for(answers, 300)
    except AssertionError:
        pytest.fail(f"{refusals[-1]}\n{server.log.read_text(encoding='utf-8', errors='replace')[-4000:]}")
    assert seconds < (max(40, start_seconds) if scale.is_full else 300)  # it started in 28 s where nothing else ran
    assert refusals
    assert all("is unavailable: its process died" in error for error in refusals)


def test_a_stub_that_is_killed_leaves_no_process(started: tuple[Server, float], scale: Scale) -> None:
    """The last test with this server."""
    found = own_processes(started[0].pid)
    assert len(found) >= 4  # the stub, its helper, vLLM's core and its worker
    os.kill(found[0].pid, signal.SIGKILL)
    wait_for(lambda: not alive(found), scale(20, 2))


# --- what is refused ----------------------------------------------------------------------------------------------


def write_venv(folder: Path, *, python: str = RUNNING, numpy: str = "1.26.4", package: str = "vllm") -> Path:
    """A virtual environment, as far as names go."""
    packages = folder / "lib" / f"python{python}" / "site-packages"
    record = packages / f"numpy-{numpy}.dist-info" / "METADATA"
    for path, text in (
        (folder / "pyvenv.cfg", f"home = /usr/bin\nversion = {python}.1\n"),
        (folder / "bin" / "activate", ""),
        (folder / "bin" / "python3", ""),
        (record, f"Metadata-Version: 2.1\nName: numpy\nVersion: {numpy}\n"),
        *((packages / name / "__init__.py", "") for name in ("numpy", "array_api_compat", package)),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        ({"package": "vlm"}, "No module named 'vllm': venv does not contain it"),
        ({"numpy": "2.4.1"}, "It has NumPy 2.4.1, and the stub of embedded silently corrupts tensors"),
        ({"python": "3.14"}, "It is for Python 3.14, and the stub of embedded is for Python"),
    ],
)
def test_environments_that_do_not_fit(contents: dict[str, str], words: str, folder: Path, tmp_path: Path) -> None:
    def make(**contents: str) -> Path:
        venv = write_venv(tmp_path / "venv", **contents)
        swap, environments = {"llm-hf": ENGINE}, {ENGINE: venv}
        return compose("llm", tmp_path / "repository", weights=folder, swap=swap, environments=environments)

    with pytest.raises(ArtifactError) as error:
        make(**contents)
    assert words in str(error.value)
    shutil.rmtree(tmp_path / "venv")
    assert make().is_dir()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ('{"max_num_sequences": 4}', "has no argument 'max_num_sequences'.*Did you mean max_num_seqs"),
        *verified(('{"dtype": "auto"}', "dtype")),
    ],
)
def test_arguments_that_vllm_does_not_take(arguments: str, words: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=words):
        make_repository(folder, tmp_path, arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kv_cache_memory_bytes": 10**13}, r"Available memory .* GiB\) .* less than requested memory for kv \(9313"),
        *verified(
            (
                {"speculative_config": {"method": "draft_model", "model": "DRAFT", "num_speculative_tokens": 3}},
                r"draft model should have the same vocabulary size\. .* vocab_size=484\. Draft model vocab_size=500",
            )
        ),
    ],
)
def test_why_vllm_does_not_start(arguments: dict[str, Any], words: str, folder: Path, tmp_path: Path) -> None:
    """Memory that is not there, and a draft model with another vocabulary."""
    draft = make_tiny(tmp_path / "draft", hidden=64, layers=1)
    path = draft / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"vocab_size": 500}), encoding="utf-8")
    given = json.dumps(json.loads(ARGUMENTS) | arguments).replace("DRAFT", str(draft))
    with pytest.raises(ServerError, match=f"vLLM does not start: .*{words}"):
        serve(make_repository(folder, tmp_path, given)).stop()
