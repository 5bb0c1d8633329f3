"""Options of the commands that ask a running server, or measure one: each value is obeyed.

A line for each option, as in ``tests/unit/test_option_repositories.py``; ``{grpc}``, ``{http}`` and ``{metrics}`` are
the addresses of one service for all of them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from shoal.authoring.composition.compose import compose
from shoal.lab.tiny_llm import make_tiny
from tests.support.options import PRINTED, TEXT, Both, Elsewhere, Shoal, Table, check_both, check_steady, rows
from tests.support.planted import write
from tests.support.projects import write_model
from tests.support.service import SHOAL, Service

INFER = "infer hello --model text"
LLM = "generate hello --model llm --url {grpc}"
GENERATE = f"{LLM} --max-tokens 8 --seed 1 --temperature 2"
TALK = "hello.txt | chat {grpc} --model llm"
CHAT = f"{TALK} --max-tokens 8 --seed 1 --temperature 2"
TOKENS = "tokens 5,6,7 --url {grpc}"
KEY = Elsewhere("unit/test_option_keys.py::test_commands_read_a_key_from_a_file_or_the_environment")
TABLE: Table = {
    **{
        f"{command} --{option}": Elsewhere("unit/test_option_keys.py::test_commands_read_certificates")
        for command in ("copies", "status", "infer", "generate", "chat", "tokens", "bench")
        for option in ("ca-cert", "client-cert")
    },
    "copies --api-key-file": KEY,
    "status --api-key-file": KEY,
    "infer --api-key-file": KEY,
    "generate --api-key-file": KEY,
    "chat --api-key-file": KEY,
    "tokens --api-key-file": KEY,
    "bench --api-key-file": KEY,
    "copies --url": Both("copies repository/all", "--url {metrics}", "--url 127.0.0.1:1"),
    "copies --json": Both("copies repository/all --url {metrics}", "", "--json"),
    "status --json": Both("status {metrics}", "", "--json"),
    "infer --protocol": Both(f"{INFER} --url {{grpc}}", "--protocol grpc", "--protocol http"),
    "infer --timeout": Both(f"{INFER} --url {{grpc}}", "--timeout 30", "--timeout 0.000000001"),
    "infer --placement": Both("infer hello --model all --url {grpc}", "", "--placement client --repository changed"),
    "infer --fresh": Elsewhere("unit/test_bulk_resume.py::test_a_journal_of_something_else_is_not_gone_on_with"),
    "chat --system": Both(CHAT, "", "--system hey"),
    "chat --max-tokens": Both(f"{TALK} --seed 1 --json", "--max-tokens 1", "--max-tokens 2"),
    "chat --temperature": Both(f"{TALK} --seed 1 --max-tokens 8", "--temperature 0", "--temperature 2"),
    "chat --top-p": Both(CHAT, "--top-p 0.01", "--top-p 1"),
    "chat --seed": Both(f"{TALK} --max-tokens 8 --temperature 2", "--seed 1", "--seed 2"),
    "chat --stop": Both(CHAT, "--stop never", "--stop a --stop b --stop c --stop d --stop e"),
    "chat --set": Both(CHAT, "--set top_k=1", "--set top_k=500"),
    "chat --protocol": Both(f"{TALK} --max-tokens 2 --seed 1", "--protocol grpc", "--protocol http"),
    "chat --timeout": Both(f"{TALK} --max-tokens 2 --seed 1", "--timeout 30", "--timeout 0.000000001"),
    "chat --model": Both("hello.txt | chat {grpc} --max-tokens 2 --seed 1", "--model llm", "--model text"),
    "chat --local": Both("hello.txt | chat --model llm --seed 1 --max-tokens 2", "", "--local"),
    "chat --repository": Both(
        "hello.txt | chat --model llm --local --seed 1 --max-tokens 4", "--repository llm", "--repository other"
    ),
    "chat --json": Both(CHAT, "", "--json"),
    "generate --max-tokens": Both(f"{LLM} --seed 1 --json", "--max-tokens 1", "--max-tokens 2"),
    "generate --temperature": Both(f"{LLM} --seed 1 --max-tokens 8", "--temperature 0", "--temperature 2"),
    "generate --top-p": Both(GENERATE, "--top-p 0.01", "--top-p 1"),
    "generate --seed": Both(f"{LLM} --max-tokens 8 --temperature 2", "--seed 1", "--seed 2"),
    "generate --stop": Both(GENERATE, "--stop never", "--stop a --stop b --stop c --stop d --stop e"),
    "generate --set": Both(GENERATE, "--set top_k=1", "--set top_k=500"),
    "generate --url": Both("generate hello --model llm --max-tokens 2 --seed 1", "--url {grpc}", "--url 127.0.0.1:1"),
    "generate --protocol": Both(f"{LLM} --max-tokens 2 --seed 1", "--protocol grpc", "--protocol http"),
    "generate --timeout": Both(f"{LLM} --max-tokens 2 --seed 1", "--timeout 30", "--timeout 0.000000001"),
    "generate --model": Both("generate hello --max-tokens 2 --seed 1 --url {grpc}", "--model llm", "--model text"),
    "generate --local": Both("generate hello --model llm --seed 1 --max-tokens 2", "", "--local"),
    "generate --repository": Both(
        "generate hello --model llm --local --seed 1 --max-tokens 4", "--repository llm", "--repository other"
    ),
    "generate --json": Both(GENERATE, "", "--json"),
    "tokens --output-length": Both(TOKENS, "--output-length 1", "--output-length 2"),
    "tokens --tokenizer": Both(TOKENS, "", "--tokenizer weights"),
    "tokens --url": Both("tokens 5,6,7", "--url {grpc}", "--url 127.0.0.1:1"),
    "tokens --protocol": Both(TOKENS, "--protocol grpc", "--protocol http"),
    "tokens --model": Both(TOKENS, "--model llm-hf", "--model text"),
    "tokens --timeout": Both(TOKENS, "--timeout 30", "--timeout 0.000000001"),
    "tokens --json": Both(TOKENS, "", "--json"),
}


class Measured(NamedTuple):
    """Two command lines of ``shoal bench``, and what is looked at in the record and the seconds that it took."""

    base: str
    one: str
    two: str
    look: Callable[[dict[str, Any], float], Any]


def look_at_loads(record: dict[str, Any], _: float) -> Any:
    """Return which loads were measured, and with which rows."""
    loads = [{name: load[name] for name in load if isinstance(load[name], int | str)} for load in record["loads"]]
    return loads, record.get("inputs")


QUICK = "bench --model llm --url {grpc} --repeats 1 --input-tokens 4"
MODELS = f"{QUICK} --seconds 0.1 --concurrency 1 --output-tokens 2"
REPOSITORY = "bench small --seconds 0.1 --repeats 1"
ROWS = f"{REPOSITORY} --batches 1 --concurrency 1"
MEASURED: Table = {
    "bench --model": Both(f"{MODELS.replace('--model llm', '')} --json", "--model llm", "--model text"),
    "bench --url": Both(MODELS.replace("--url {grpc}", ""), "--url {grpc}", "--url 127.0.0.1:1", PRINTED),
    "bench --protocol": Both(MODELS, "--protocol grpc", "--protocol http"),
    "bench --json": Both(MODELS, "", "--json"),
    "bench --out": Both(MODELS, "", "--out here"),
    "bench --seconds": Measured(
        f"{QUICK} --concurrency 1 --output-tokens 2", "--seconds 0.1", "--seconds 5", lambda _, s: s > 5
    ),
    "bench --repeats": Measured(MODELS.replace("--repeats 1", ""), "--repeats 1", "--repeats 5", lambda _, s: s > 5),
    "bench --quick": Measured(
        "bench --model llm --url {grpc} --output-tokens 2 --concurrency 1 --repeats 1",
        "",
        "--quick",
        lambda _, s: s > 5,
    ),
    "bench --input-tokens": Measured(
        MODELS.replace("--input-tokens 4", ""), "--input-tokens 4", "--input-tokens 8", look_at_loads
    ),
    "bench --output-tokens": Measured(
        MODELS.replace("--output-tokens 2", ""), "--output-tokens 2", "--output-tokens 4", look_at_loads
    ),
    "bench --concurrency": Measured(
        MODELS.replace("--concurrency 1", ""), "--concurrency 1", "--concurrency 2", look_at_loads
    ),
    "bench --inputs": Measured(ROWS, "--inputs texts.csv", "--inputs more.csv", look_at_loads),
    "bench --text-column": Both(f"{ROWS} --inputs texts.csv", "--text-column TEXT", "--text-column nothing"),
    "bench --column": Both(f"{ROWS} --inputs texts.csv", "--column TEXT=other", "--column TEXT=nothing"),
    "bench --batches": Measured(f"{REPOSITORY} --concurrency 1", "--batches 1", "--batches 2", look_at_loads),
    "bench --placement": Measured(ROWS, "--placement server", "--placement server,client", look_at_loads),
    "bench --tokenizer": Both(MODELS, "", "--tokenizer nowhere", PRINTED),
    "bench --report": Both(ROWS, "", "--report", PRINTED),
}
TABLE = {
    **TABLE,
    **MEASURED,
    "generate --stream": Elsewhere("slow/test_option_served.py::test_a_stream_comes_in_pieces"),
}

ENSEMBLE = """
platform: "ensemble" max_batch_size: 8
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] } ]
ensemble_scheduling { step [ { model_name: "text" model_version: -1
  input_map { key: "TEXT" value: "TEXT" } output_map { key: "OUT" value: "OUT" } } ] }
"""
PUBLIC = 'parameters { key: "public" value { string_value: "true" } } instance_group [ { kind: KIND_CPU } ]'


def write_texts(repository: Path, way: str) -> None:
    write_model(repository, "text", [["TEXT", "STRING", [1]]], [["OUT", "STRING", [1]]])
    config = repository / "text" / "config.pbtxt"
    config.write_text(config.read_text() + PUBLIC)
    (repository / "text" / "1" / "model.py").write_text(TEXT.replace("WAY", way))
    write(repository / "all" / "config.pbtxt", ENSEMBLE)
    write(repository / "all" / "1" / ".gitkeep", "")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    for name, seed in (("llm", 0), ("other", 1)):
        weights = make_tiny(root / f"weights-{seed}", hidden=16, layers=1, seed=seed)
        compose("llm", root / name, weights=weights)
    (root / "weights").symlink_to(root / "weights-0")
    for name, way in (("small", "upper"), ("changed", "title")):
        write_texts(root / name, way)
    shutil.copytree(root / "llm", root / "repository", ignore=shutil.ignore_patterns("manifest.json"))
    write_texts(root / "repository", "upper")
    (root / "build").mkdir()
    (root / "build" / "repository").symlink_to(root / "llm")
    (root / "texts.csv").write_text("TEXT,other\none,two\n")
    (root / "more.csv").write_text("TEXT\none\ntwo\n")
    (root / "hello.txt").write_text("hello\n")
    return root


@pytest.fixture(scope="module")
def service(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(world / "repository", tmp_path_factory.mktemp("log") / "log") as running:
        yield running


@pytest.fixture(scope="module")
def shoal(world: Path, service: Service, tmp_path_factory: pytest.TempPathFactory) -> Shoal:
    at = {"grpc": service.grpc, "http": service.http, "metrics": service.metrics}
    return Shoal(world, tmp_path_factory.mktemp("runs"), **at)


@pytest.mark.parametrize("entry", rows(TABLE))
def test_two_values_give_two_results(entry: Both, shoal: Shoal) -> None:
    check_both(shoal, entry)


def test_one_value_gives_one_result(shoal: Shoal) -> None:
    check_steady(shoal, {name: entry for name, entry in TABLE.items() if name not in MEASURED and "copies" not in name})


@pytest.mark.parametrize("entry", [pytest.param(e, id=n) for n, e in TABLE.items() if isinstance(e, Measured)])
def test_two_values_give_two_measurements(entry: Measured, shoal: Shoal) -> None:
    found = []
    for value in (entry.one, entry.two):
        start = time.monotonic()
        printed = shoal.run(f"{entry.base} {value} --json")[PRINTED]
        assert printed.startswith("0 "), printed
        found.append(entry.look(json.loads(printed[printed.index("{") :]), time.monotonic() - start))
    assert found[0] != found[1]


def test_a_stream_comes_in_pieces(service: Service) -> None:
    """With ``--stream`` the text begins long before its end; without, it comes at once."""
    shares = []
    for option in ([], ["--stream"]):
        command = [*SHOAL, "generate", "hello", "--model", "llm", "--url", service.grpc, "--max-tokens", "400", *option]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as process:
            assert process.stdout is not None
            process.stdout.read(1)
            first = time.monotonic()
            process.stdout.read()
            shares.append(time.monotonic() - first)
    assert shares[1] > 2 * shares[0]
