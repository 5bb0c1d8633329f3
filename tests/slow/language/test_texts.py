"""Several texts in a request to the pipelines of a language model, and files of prompts: equal to single requests."""

from __future__ import annotations

import csv
import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

import shoal
from shoal import Client
from shoal.authoring.repository.config import read_config
from shoal.clients.local import Pipeline
from shoal.errors import ShoalError
from tests.conftest import verified
from tests.support.commands import Shoal
from tests.support.service import Service

MODELS = ["llm", "llm_bls", "llm_onnx"]
WAYS = ["grpc", "http", "local"]
Here: TypeAlias = Callable[[str], Pipeline]
ROWS = [1, 2, 16]
WORDS = ["The", "cat", "sat", "on", "the", "mat", "and", "watched", "rain", "from", "hills", "reach", "the", "sea"]
TEXTS = [" ".join(WORDS[at % 7 : at % 7 + 1 + at % 5]) for at in range(64)]
NEW = [3 + at % 9 for at in range(64)]  # tokens of each answer


def ask(way: str, service: Service, here: Here, model: str, inputs: dict[str, Any]) -> list[Any]:
    if way == "local":
        return list(here(model).stream(**inputs))
    with Client(getattr(service, way), protocol=way, retries=0, timeout=120) as client:
        return list(client.stream(model, inputs))


def gather(answers: list[Any], number: int) -> list[tuple[str, str, int, int]]:
    """The text, reason and counts of each row, from answers that name their rows."""
    rows: list[tuple[str, str, int, int]] = [("", "", 0, 0)] * number
    for answer in answers:
        names = ("text_output", "finish_reason", "num_input_tokens", "num_output_tokens")
        for at, row in enumerate(answer["batch_index"].ravel().tolist()):
            values: list[Any] = [answer[name][at, 0] for name in names]
            text, reason = (value.decode() if isinstance(value, bytes) else value for value in values[:2])
            before = rows[row]
            rows[row] = before[0] + text, before[1] or reason, int(values[2]), max(before[3], int(values[3]))
    return rows


@pytest.fixture(scope="module")
def singles(service: Service) -> list[tuple[str, str, int, int]]:
    """Each text asked alone, with settings of its own."""
    with Client(service.grpc) as client:
        answers = [list(client.stream("llm", settings([at]) | {"stream": [False]})) for at in range(64)]
    assert all(len(each) == 1 for each in answers)
    return [gather(each, 1)[0] for each in answers]


def settings(numbers: list[int]) -> dict[str, Any]:
    return {
        "text_input": [TEXTS[at] for at in numbers],
        "max_tokens": [NEW[at] for at in numbers],
        "temperature": [0.8 * (at % 3 == 1) for at in numbers],
        "seed": list(numbers),
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("is_streaming", [True, False])
def test_each_row_is_the_single_request(
    way: str, model: str, is_streaming: bool, service: Service, here: Here, singles: list[tuple[str, str, int, int]]
) -> None:
    for number in (*ROWS, *([64] if way == "grpc" else [])):
        inputs = settings([*range(number)]) | {"stream": [is_streaming] * number}
        answers = ask(way, service, here, model, inputs)
        assert gather(answers, number) == singles[:number]
        if is_streaming:
            assert {answer["batch_index"].shape for answer in answers} == {(1, 1)}
            assert len(answers) >= number
        else:
            (answer,) = answers
            assert answer["batch_index"].ravel().tolist() == [*range(number)]
            assert answer["batch_index"].dtype == np.int32


@pytest.mark.parametrize("way", ["grpc", "http"])
@pytest.mark.parametrize("model", ["llm", "llm_bls"])
def test_stop_words_of_each_row(way: str, model: str, service: Service, here: Here) -> None:
    """A row ends at its own stop word, and the others go on. Over HTTP lists of lists have no shape."""
    texts = TEXTS[:3]
    inputs = {"text_input": texts, "max_tokens": [24] * 3, "stream": [False] * 3}
    plain = gather(ask("grpc", service, here, model, inputs), 3)
    stops = [[text[len(text) // 2 :][:2]] for text, *_ in plain]
    for is_streaming in (True, False):
        more = {"stop_words": stops, "stream": [is_streaming] * 3}
        if way == "http":
            with pytest.raises(shoal.InputError, match=r"stop_words has shape .* Use gRPC"):
                ask(way, service, here, model, inputs | more)
            continue
        found = gather(ask(way, service, here, model, inputs | more), 3)
        for row, (text, *_) in enumerate(plain):
            cut = {"stop_words": [stops[row]], "text_input": [texts[row]], "max_tokens": [24], "stream": [False]}
            (alone,) = gather(ask("grpc", service, here, model, cut), 1)
            assert found[row] == alone
            assert text.startswith(alone[0])
            assert alone[1] == "stop"


BAD = [
    ({"max_tokens": [4, 0]}, "Row 1: max_tokens is 0. Set it to 1 or more"),
    ({"text_input": ["a", ""]}, "Row 1: The prompt is empty"),
    ({"text_input": ["a", "b"] * 512}, "1024 rows|batch size|at most 64"),
    ({"stream": [True, False]}, "stream(ing)? is true for some rows and false for others. Send the same for all rows"),
    ({"text_input": np.zeros((0, 1), np.object_)}, "The request has no rows"),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ["llm", "llm_bls"])
@pytest.mark.parametrize(("more", "words"), BAD)
def test_bad_rows(way: str, model: str, more: dict[str, Any], words: str, service: Service, here: Here) -> None:
    with pytest.raises(shoal.ShoalError, match=words):
        ask(way, service, here, model, {"text_input": ["a", "b"]} | more)


def generate(service: Service, path: str, body: dict[str, Any]) -> str:
    request = urllib.request.Request(f"http://{service.http}/v2/models/{path}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read().decode()}"


@pytest.mark.parametrize("model", ["llm", "llm_bls"])
def test_lists_over_generate(model: str, service: Service) -> None:
    body = {"text_input": TEXTS[:2], "max_tokens": [4, 4], "stream": [False, False]}
    whole = json.loads(generate(service, f"{model}/generate", body))
    assert whole["batch_index"] == [0, 1]
    events = generate(service, f"{model}/generate_stream", body | {"stream": [True, True]}).split("\n\n")
    texts = ["", ""]
    for event in filter(None, events):
        piece = json.loads(event.removeprefix("data: "))
        texts[piece["batch_index"]] += piece["text_output"]
    assert texts == whole["text_output"]
    bad: list[dict[str, Any]] = [{"text_input": ["a"] * rows, "stream": [False] * rows} for rows in (0, 65)]
    for refused in (*bad, {"text_input": TEXTS[:2], "stream": False}):
        answer = generate(service, f"{model}/generate", refused)
        assert answer[:3] == "400"
        assert re.search("(0|65) rows; .* takes 1 to 64|batch.size", answer), answer


@pytest.mark.parametrize("model", ["llm", "llm_bls", "llm_onnx", "llamav2", "llm-hf"])
def test_no_member_of_generate_is_taken_in_silence(model: str, service: Service, repository: Path) -> None:
    """Members that the model has no input for, many of them one letter away from one, are refused by name."""
    random = np.random.default_rng(0)
    known = [entry.name for entry in read_config(repository / model).spec.inputs]
    others: dict[str, dict[str, Any]] = {
        "llamav2": {"prompt": "the"},
        "llm-hf": {"input_ids": [5], "input_lengths": 1, "request_output_len": 1},
    }
    given = others.get(model, {"text_input": "the", "max_tokens": 1, "stream": False})
    assert generate(service, f"{model}/generate", given).startswith("{")
    names = {"top_n", "logprobs", "stopWords", "n_predict", "max_new_tokens_", "é", "a b", "__class__", "0"}
    while len(names) < 60:
        letters = [*str(random.choice(known))] if random.random() < 0.7 else []
        for _ in range(random.integers(1, 3) if letters else 7):
            letters.insert(int(random.integers(len(letters) + 1)), chr(random.integers(ord("a"), ord("z") + 1)))
        names.add("".join(letters))
    for name in sorted(names - {*known}):
        for value in (1, "a", None):
            answer = generate(service, f"{model}/generate", given | {name: value})
            assert answer.startswith("400 "), (name, value, answer)
            assert name in json.loads(answer[4:])["error"], (name, value, answer)


@pytest.mark.parametrize("way", ["grpc", "http"])
def test_llamav2(way: str, service: Service) -> None:
    with Client(getattr(service, way), protocol=way, timeout=120) as client:
        alone = [client.infer("llamav2", prompt=[[text]])["generated_text"].item() for text in TEXTS[:16]]
        for number in ROWS:  # 16 are two requests: the model takes 8
            together = client.infer("llamav2", prompt=[[text] for text in TEXTS[:number]])["generated_text"]
            assert together[:, 0].tolist() == alone[:number]


# --- files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "model"),
    [
        ("grpc", "llm"), ("http", "llm_bls"), ("local", "llm_bls"),
        *verified(("grpc", "llm_bls"), ("http", "llm"), ("local", "llm")),
    ],
)  # fmt: skip
def test_a_file_of_prompts(
    way: str, model: str, shoal: Shoal, service: Service, repository: Path, tmp_path: Path, singles: list[Any]
) -> None:
    """The same bytes in requests of 16 rows and of one; a bad row has an error, and the others their answers."""
    if way == "local":
        place = ["--local", "--repository", repository]
    else:
        place = ["--url", getattr(service, way), "--protocol", way]
    asked = ["infer", "--model", model, *place]
    lines = tmp_path / "prompts.txt"
    lines.write_text("\n".join(TEXTS[:20]), encoding="utf-8")
    more = ["--set", "max_tokens=6", "--set", "temperature=0", "--set", "seed=1", "--input", lines]
    outputs = []
    for size in (1, 16):
        out = tmp_path / f"{size}.csv"
        shoal(*asked, *more, "--batch-size", size, "--output", out)
        outputs.append(out.read_bytes())
    assert outputs[0] == outputs[1]
    with (tmp_path / "16.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["text"] for row in rows] == TEXTS[:20]
    assert not {"batch_index", "logprobs", "cumulative_logprob"} & rows[0].keys()
    table = tmp_path / "rows.jsonl"
    given = [{"text_input": TEXTS[at], "max_tokens": NEW[at], "temperature": 0, "seed": at} for at in (0, 3, 6)]
    given.insert(1, {**given[0], "max_tokens": 0})
    table.write_text("".join(json.dumps(row) + "\n" for row in given), encoding="utf-8")
    out = tmp_path / "rows.out.jsonl"
    with pytest.raises(AssertionError, match="1 of 4 rows have an error"):
        shoal(*asked, "--input", table, "--output", out)
    found = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert found[1]["error"] == "max_tokens is 0. Set it to 1 or more, or leave it out."
    assert [found[at]["text_output"] for at in (0, 2, 3)] == [singles[at][0] for at in (0, 3, 6)]
    with pytest.raises(ShoalError, match="Leave stream out, or set it to false"):
        shoal(*asked, "--input", lines, "--set", "stream=true")
