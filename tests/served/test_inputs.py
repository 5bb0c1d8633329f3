"""Answer to each kind of input, over gRPC, over HTTP, in this process, and as a row of a file."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from shoal.cli import app
from shoal.clients.client.client import Client
from shoal.clients.local import Pipeline
from shoal.errors import InputError, ShoalError
from shoal.readability.preprocess_config import Bundle
from shoal.serving.server.launch import Server, find_ports

ENSEMBLE = "ensemble_all"
OUTPUTS = ("SCORE", "BERT_SCORE", "FOREST_SCORE")
LIMIT = 65_536

SCORED = {
    "empty": "",
    "blank": " \t\n\u3000",
    "one word": "Cat",
    "punctuation alone": "...?!",
    "emoji": "🐟🐠 👩‍👩‍👧‍👦",
    "CJK": "漢字仮名交じり文。",
    "right to left": "שלום עולם \u202eabc",
    "NUL": "a\0b\0",
    "marks without end": "e" + "\u0301" * 30_000,
    "64 KiB": "The cat sat on the mat, again. " * (LIMIT // 31) + "." * (LIMIT % 31),
    "64 KiB without a blank": "x" * LIMIT,
    "a text in UTF-8 already": "naïve café".encode(),
}

MUST_LIE = "it must lie between 0 and 1. Leave it out for the default."
TOO_LONG = "Split the text, or raise the max_text_bytes parameter in the model's config.pbtxt."
SURROGATE = "Such a string has no UTF-8 form; decode its source with errors='replace'."
REFUSED: dict[str, tuple[Any, Any, str]] = {  # a text, a weight, and what is said of them
    "a byte too long": ("x" * (LIMIT + 1), None, f"excerpt[0] has 65537 bytes; at most 65536 are allowed. {TOO_LONG}"),
    "too long in UTF-8": ("é" * 40_000, None, f"excerpt[0] has 80000 bytes; at most 65536 are allowed. {TOO_LONG}"),
    "no UTF-8": (
        b"caf\xe9!", None, "excerpt[0] is not valid UTF-8: byte 0xe9 at position 3. Encode the text as UTF-8.",
    ),
    "a surrogate in bytes": (
        b"\xed\xa0\x80", None, "excerpt[0] is not valid UTF-8: byte 0xed at position 0. Encode the text as UTF-8.",
    ),
    "a lone surrogate": ("a\ud800", None, f"excerpt[0] holds the lone surrogate U+D800 at position 1. {SURROGATE}"),
    "a number": (7, None, "excerpt[0] is 7; it must be a string. Give str or UTF-8 bytes."),
    "nothing": (None, None, "excerpt[0] is None; it must be a string. Give str or UTF-8 bytes."),
    "weight NaN": ("a", float("nan"), f"BERT_WEIGHT[0] is nan; {MUST_LIE}"),
    "weight infinite": ("a", float("inf"), f"BERT_WEIGHT[0] is inf; {MUST_LIE}"),
    "weight below": ("a", -0.25, f"BERT_WEIGHT[0] is -0.25; {MUST_LIE}"),
    "weight above": ("a", 1.5, f"BERT_WEIGHT[0] is 1.5; {MUST_LIE}"),
    "weight a word": (
        "a", "half",
        "BERT_WEIGHT cannot be read as TYPE_FP32:"
        " 'half' is not a number.",
    ),
}  # fmt: skip


@pytest.fixture(params=["grpc", "http", "in process"])
def ask(request: pytest.FixtureRequest, server: Server, pipeline: Pipeline) -> Any:
    """One request, by one of the ways."""
    if request.param == "in process":
        yield lambda **inputs: pipeline(**inputs)
        return
    url = server.grpc_url if request.param == "grpc" else server.http_url
    with Client(url, protocol=request.param) as client:
        yield lambda **inputs: client.infer(ENSEMBLE, inputs)


@pytest.mark.parametrize("name", SCORED)
def test_scored(ask: Callable[..., Any], pipeline: Pipeline, name: str) -> None:
    got, expected = ask(excerpt=[SCORED[name]]), pipeline(excerpt=[SCORED[name]])
    for output in OUTPUTS:
        assert np.isfinite(got[output]).all()
        assert np.array_equal(got[output], expected[output])


def test_texts_without_a_word_have_no_features(pipeline: Pipeline, bundle: Bundle) -> None:
    """All of them get the same z-scores."""
    preprocess = pipeline._models["preprocess", 1].call
    texts = [SCORED[name] for name in ("empty", "blank", "punctuation alone")]
    features = preprocess({"INPUT0": _tensor(texts)})["TREE_FEATS"]
    assert np.array_equal(features[0], features[1])
    assert np.array_equal(features[0], features[2])
    np.testing.assert_allclose(features[0] * _scale(bundle) + np.array(bundle.mean), 0, atol=1e-5)


def _scale(bundle: Bundle) -> Any:
    return np.where(np.array(bundle.std) == 0, 1, bundle.std)


def test_long_texts_are_cut_for_the_encoder_and_counted_whole(pipeline: Pipeline, bundle: Bundle) -> None:
    read = pipeline._models["preprocess", 1].call({"INPUT0": _tensor([SCORED["64 KiB"]])})
    assert read["BERT_IDS"].shape == (1, 256)
    num_words = read["TREE_FEATS"][0, 0] * _scale(bundle)[0] + bundle.mean[0]
    assert num_words == pytest.approx(7 * (LIMIT // 31), rel=1e-5)


def _tensor(texts: list[Any]) -> Any:
    array = np.empty((len(texts), 1), np.object_)
    array[:, 0] = [text if isinstance(text, bytes) else text.encode() for text in texts]
    return array


@pytest.mark.parametrize("name", REFUSED)
def test_refused(ask: Callable[..., Any], name: str) -> None:
    text, weight, message = REFUSED[name]
    with pytest.raises(InputError) as refused:
        ask(excerpt=[text], BERT_WEIGHT=None if weight is None else [weight])
    assert str(refused.value) == message
    ask(excerpt=["a"])  # nothing of it stays


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"BERT_WEIGHT": [0.5]}, "The input excerpt is missing. Give excerpt=[...]."),
        ({}, "The input excerpt is missing. Give excerpt=[...]."),
        ({"excerpt": ["a"], "text": ["b"]}, "There is no input text. Inputs: excerpt, BERT_WEIGHT."),
        (
            {"excerpt": ["a", "b"], "BERT_WEIGHT": [0.5]},
            "The inputs have different numbers of rows: excerpt 2, BERT_WEIGHT 1. Give one value of each per row.",
        ),
        (
            {"excerpt": ["a"], "BERT_WEIGHT": np.array([1])},
            'Input BERT_WEIGHT has dtype int64, expected float32 (TYPE_FP32). Convert it: array.astype("float32")',
        ),
        ({"excerpt": [["a", "b"]]}, "Input excerpt has shape [1, 2], expected [rows, 1]."),
        ({"excerpt": []}, "The request has no rows. Give at least one."),
    ],
)
def test_requests_that_are_none(ask: Callable[..., Any], inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refused:
        ask(**inputs)
    assert str(refused.value) == message


# --- in a file ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["grpc", "http", "local", "client"])
def test_inputs_as_rows_of_a_file(
    way: str, tmp_path: Path, repository: Path, server: Server, pipeline: Pipeline
) -> None:
    """All of the above in one file each: a bad row gets its message, the others get their scores."""
    options = (
        ["--local", "--repository", repository] if way == "local" else ["--url", _url(server, way), "--model", ENSEMBLE]
    )
    options += ["--protocol", "http"] if way == "http" else []
    options += ["--placement", "client", "--repository", repository] if way == "client" else []
    rows = [(text, None, "") for text in SCORED.values()] + list(REFUSED.values())
    for kind in (".jsonl", ".csv"):  # the one holds any string, the other any bytes
        chosen = [row for row in rows if isinstance(row[0], bytes) == (kind == ".csv")]
        source, out = tmp_path / f"in{kind}", tmp_path / f"out{kind}"
        (_write_jsonl if kind == ".jsonl" else _write_csv)(source, chosen)
        arguments = ["infer", "-i", source, "-o", out, "--column", "BERT_WEIGHT=weight", *options]
        run = CliRunner().invoke(app, [str(a) for a in arguments])
        num_bad = sum(bool(message) for _, _, message in chosen)
        assert (run.exit_code, run.exception and str(run.exception)) == (1, "1"), run.output
        assert f"{num_bad} of {len(chosen)} rows have an error." in run.stderr
        for answer, (text, _, message) in zip(_read(out), chosen, strict=True):
            assert (answer.get("error") or "") == message
            if not message:
                expected = pipeline(excerpt=[text])
                for name in OUTPUTS:  # in a batch with others: within the design's tolerance
                    assert float(answer[name.lower()]) == pytest.approx(float(expected[name][0, 0]), abs=1e-5)


def _url(server: Server, way: str) -> str:
    return server.http_url if way == "http" else server.grpc_url


def _write_jsonl(path: Path, rows: list[tuple[Any, Any, str]]) -> None:
    path.write_text("".join(json.dumps({"text": t, "weight": w}) + "\n" for t, w, _ in rows), encoding="utf-8")


def _write_csv(path: Path, rows: list[tuple[Any, Any, str]]) -> None:
    path.write_bytes(b"text,weight\n" + b"".join(b'"%s",\n' % text for text, _, _ in rows))


def _read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_bytes().splitlines()]
    with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        return list(csv.DictReader(file))


def test_a_column_of_weights_and_one_weight_for_all(tmp_path: Path, server: Server, pipeline: Pipeline) -> None:
    """An empty cell of the weight column gets the default."""
    source, out = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text("text,w\nA cat.,0\nA cat.,1\nA cat.,\nA cat.,0.25\n", encoding="utf-8")
    options = ["--column", "BERT_WEIGHT=w", "--url", server.grpc_url, "--model", ENSEMBLE]
    run = CliRunner().invoke(app, ["infer", "-i", str(source), "-o", str(out), *options])
    assert run.exit_code == 0, run.output
    expected = [pipeline(excerpt=["A cat."], BERT_WEIGHT=w)["SCORE"][0, 0] for w in ([0], [1], None, [0.25])]
    np.testing.assert_allclose([float(row["score"]) for row in _read(out)], expected, atol=1e-5)


# --- servers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_file_and_no_server(protocol: str, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("A cat.\n", encoding="utf-8")
    url = f"127.0.0.1:{find_ports(0, 0, 0)[0]}"
    options = ["--url", url, "--protocol", protocol]
    run = CliRunner().invoke(app, ["infer", "-i", str(tmp_path / "in.txt"), "-o", str(tmp_path / "out.csv"), *options])
    assert isinstance(run.exception, ShoalError)
    said = f"No Triton answers at {url} (connection refused). Start one: shoal serve REPOSITORY; "
    said += "or give the address of one: --url HOST:PORT"
    assert str(run.exception) == said
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]
