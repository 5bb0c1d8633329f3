"""Answers that follow a grammar: JSON schemas, patterns, choices and Lark, on engines that choose tokens themselves."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import pytest
from tokenizers import Tokenizer

from shoal.authoring.project.importing.add_model import add_model
from shoal.errors import InputError, ShoalError
from shoal.lab.tiny_llm import make_tiny
from tests.support.llm import ENGINE, open_engine, token_inputs, tokens_of
from tests.support.once import ROOT

IDS = [4, 8, 15, 16]
DRAWN: dict[str, Any] = {"temperature": 1.0, "runtime_top_p": 1.0}
WAYS = ("continuous", "static", "single", "onnx")
NAME = {"type": "string", "maxLength": 6}
SCHEMAS: list[Any] = [
    {"type": "string", "maxLength": 9},
    {"type": "string", "pattern": "^[a-c]{2,5}$"},
    {"type": "string", "format": "date"},
    {"type": "integer"},
    {"type": "integer", "minimum": -5, "maximum": 120},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    {"type": "boolean"},
    {"type": "null"},
    {"enum": ["a", 1, None, {"b": [2]}, "é"]},
    {"const": {"x": "y"}},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "integer", "maximum": 9, "minimum": 0}, NAME], "items": False},
    {"type": "object", "properties": {"name": NAME}, "required": ["name"], "additionalProperties": False},
    {
        "type": "object",
        "properties": {"name": NAME, "age": {"type": "integer", "minimum": 0, "maximum": 150}, "tags": {"enum": [1]}},
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "string", "maxLength": 3}]},
    {"$defs": {"n": NAME}, "type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1, "maxItems": 2},
    {  # a list of lists
        "type": "object",
        "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
        "required": ["next"],
        "additionalProperties": False,
    },
]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=WAYS)
def engine(request: pytest.FixtureRequest, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The engine in each of its ways, with eight slots."""
    if request.param == "onnx":
        project = tmp_path_factory.mktemp("project")
        add_model(weights, "exported", task="generate", project=project)
        folder, place, more = project / "models" / "exported" / "1", ROOT / "models" / "llm-onnx", {}
    else:
        folder, place, more = weights, ENGINE, {"batching": request.param}
    with open_engine(folder, place, slots="8", **more) as component:
        yield component


@pytest.fixture(scope="module")
def tokenizer(weights: Path) -> Tokenizer:
    return Tokenizer.from_file(str(weights / "tokenizer.json"))


def ask(engine: Any, guide: Any, new: int = 200, **more: Any) -> tuple[list[int], str]:
    """The tokens of an answer, and why it ended."""
    answers = [*engine.stream(token_inputs(IDS, new, guide=json.dumps(guide), **more))]
    return tokens_of(answers), answers[-1]["finish_reason"].item().decode()


def test_answers_are_of_their_schema(engine: Any, tokenizer: Tokenizer) -> None:
    """All at once, with rows that follow nothing beside them, which are what they are alone."""
    alone = [tokens_of(engine.stream(token_inputs([*IDS, place], 30))) for place in range(4)]

    def run(number: int) -> None:
        schema, settings = SCHEMAS[number // 2], {**DRAWN, "seed": number} if number % 2 else {}
        tokens, reason = ask(engine, {"json": schema}, **settings)
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        if reason == "stop":
            jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)
        assert reason == "stop" or len(tokens) == 200, (schema, text)

    with ThreadPoolExecutor(8) as pool:
        free = [engine.stream(token_inputs([*IDS, place], 30)) for place in range(4)]
        list(pool.map(run, range(2 * len(SCHEMAS))))
    assert [tokens_of(stream) for stream in free] == alone


@pytest.mark.parametrize(
    ("guide", "pattern"),
    [
        ({"regex": "[ab]{3}|x"}, "[ab]{3}|x"),
        ({"choice": ["yes", "no", "über uns", 'a "quoted" \n one']}, 'yes|no|über uns|a "quoted" \n one'),
        ({"grammar": 'start: "(" start ")" | "x"'}, r"\(*x\)*"),
        ({"json": '{"type": "boolean"}'}, "true|false"),
    ],
)
def test_other_forms(guide: Any, pattern: str, engine: Any, tokenizer: Tokenizer) -> None:
    for settings in ({}, {**DRAWN, "seed": 3}):
        tokens, reason = ask(engine, guide, **settings)
        assert re.fullmatch(pattern, tokenizer.decode(tokens, skip_special_tokens=False)) or reason == "length"


def test_the_end_of_a_guide_is_the_end(engine: Any, tokenizer: Tokenizer) -> None:
    """Whatever min_tokens and an end token say; stop words end the answer earlier."""
    tokens, reason = ask(engine, {"choice": ["yes"]}, min_tokens=50, end_id=1)
    assert (tokenizer.decode(tokens), reason) == ("yes", "stop")
    (quote,) = tokenizer.encode('"', add_special_tokens=False).ids
    tokens, reason = ask(engine, {"json": {"enum": ["ab"]}}, end_id=quote)
    assert (tokenizer.decode(tokens), reason) == ('"ab"', "stop")
    word = tokenizer.encode("x", add_special_tokens=False).ids
    stops = np.array([word, [len(word)]])
    tokens, reason = ask(engine, {"regex": "a{3}x{9}"}, stop_words_list=stops)
    assert tokenizer.decode(tokens).startswith("aaax")
    assert len(tokenizer.decode(tokens)) < 12
    assert reason == "stop"


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        ({"json": {"not": {}}}, r"guide.json is refused: Unimplemented keys: \[\"not\"\]"),
        ({"json": {"$ref": "https://example.com/a"}}, "guide.json is refused: .* does not fetch resources"),
        ({"json": {"$ref": "#"}}, "guide.json is refused: no text fits it"),
        ({"json": False}, "guide.json is refused: Unsatisfiable schema"),
        ({"regex": "(a"}, "guide.regex is refused: .*unclosed group"),
        ({"grammar": "start: nothing"}, "guide.grammar is refused"),
        ({"json": 5}, "guide.json is 5, expected a JSON schema"),
        ({"choice": []}, "guide.choice is .*expected a list of 1 to 1024 texts"),
        ({"lark": "a"}, "expected an object with one of json, json_object, regex, choice, grammar"),
        ({"json": {}, "regex": "a"}, "expected an object with one of"),
        ([], "expected an object with one of"),
        ({"json": {"enum": ["x" * 9] * 60_000}}, "guide has [0-9]+ bytes; at most 524288 are read"),
    ],
)
def test_guides_that_are_refused(guide: Any, message: str, weights: Path) -> None:
    with open_engine(weights) as engine, pytest.raises(InputError, match=message):
        ask(engine, guide)


def test_a_guide_that_is_optional_is_left_out_where_it_is_refused(engine: Any) -> None:
    free = tokens_of(engine.stream(token_inputs(IDS, 12)))
    assert ask(engine, {"json": {"not": {}}, "optional": True}, 12)[0] == free
    assert ask(engine, {"regex": "[0-9]{3}", "optional": True}, 12)[0] != free


def test_a_guide_without_end_costs_its_request_alone(weights: Path) -> None:
    """Patterns that a text must have together: others are answered meanwhile, and after two seconds it is refused."""
    hostile = {"json": {"allOf": [{"type": "string", "pattern": f".*{number}.*"} for number in range(30)]}}
    with open_engine(weights) as engine, ThreadPoolExecutor(1) as pool:
        found = pool.submit(ask, engine, hostile)
        others, begun = 0, time.monotonic()
        while not found.done():
            assert len(tokens_of(engine.stream(token_inputs(IDS, 3)))) == 3
            others += 1
            assert time.monotonic() - begun < 30
        with pytest.raises(InputError, match=r"guide\.json is refused: it takes more than 2 s to read"):
            found.result()
        assert others > 5


def test_a_fault_of_the_engine_tells_no_path(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise OSError("no /srv/secret/tokenizer.json")

    with open_engine(weights) as engine:
        monkeypatch.setattr(engine.guides, "_read", fail)
        with pytest.raises(ShoalError) as error:
            ask(engine, {"regex": "a"})
        assert "secret" not in str(error.value)
        monkeypatch.undo()
        assert ask(engine, {"regex": "a"})[1] == "stop"
