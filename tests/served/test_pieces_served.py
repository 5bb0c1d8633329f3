"""One pipeline of all pieces, on the real server and in this process: by shoal's names, and as copies under others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.errors import InputError
from shoal.repository.check import check
from shoal.repository.compose import compose
from shoal.repository.pbtxt import write_config
from shoal.serving.client import Client
from shoal.serving.local import LocalPipeline
from shoal.serving.pipeline import Pipeline
from shoal.serving.server import serve
from tests.support.pieces import PIECES, leaf, vocabulary

pytestmark = pytest.mark.server
INPUTS: dict[str, Any] = {
    "TEXT": ["The cat sat.", "No dog, no CAT!", ""],
    "A": np.array([[3, 1, -np.inf], [0, 0, 0], [5, 1, 2]], np.float32),
    "B": np.array([[0, 1, -np.inf], [3, 2, 1], [9, 0, 0]], np.float32),
}


def copy(piece: str, name: str, root: Path, *, names: dict[str, str], **parameters: str) -> Path:
    """A piece under another name, with other ``names`` of tensors and parameters; its version folder."""
    source = leaf(piece).folder
    folder, message = root / source.parent.name / name, type(leaf(piece).message)()
    message.CopyFrom(leaf(piece).message)
    message.name = name
    for tensor in (*message.input, *message.output):
        tensor.name = names.get(tensor.name, tensor.name)
    for key, value in parameters.items():
        message.parameters[key].string_value = value
    shutil.copytree(source / "1", folder / "1", ignore=shutil.ignore_patterns("__pycache__"))
    write_config(message, folder / "config.pbtxt", comment=f"A copy of {piece}.")
    return folder / "1"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    (root / "given").mkdir()
    shutil.copyfile(vocabulary(), root / "given" / "vocab.txt")
    scales = {"mean": [0, 1, 0.5, 1], "std": [1, 2, 1, 1]}
    (root / "given" / "zscore.json").write_text(json.dumps(scales), encoding="utf-8")
    counts = copy("word_counts", "my_counts", root, names={"TEXT": "WORDS", "COUNTS": "FEATURES"}, value="share")
    (counts / "words.txt").write_text("the\ncat\nno\n.\n", encoding="utf-8")
    copy("label", "my_label", root, names={"SCORES": "VOTES"}, labels='["low", "mid", "high"]', least="0.75")
    define(root).write(root / "ensembles" / "chain")
    return compose("chain", root / "repository", artifacts=root / "given", leaves=[root])


def define(root: Path) -> Pipeline:
    chain = Pipeline("chain", leaves=[root])
    text, a, b = chain.input("TEXT", "STRING", [1]), chain.input("A", "FP32", [3]), chain.input("B", "FP32", [3])
    checked = chain.step("checked_text", TEXT=text)["CHECKED"]
    tokens = chain.step("tokenizer", TEXT=checked)
    features = chain.step("my_counts", WORDS=checked)["FEATURES"]
    unit = chain.step("l2_normalise", EMBEDDING=chain.step("zscore", X=features)["Z"])
    first, second = (chain.step("softmax", LOGITS=logits)["PROBABILITIES"] for logits in (a, b))
    votes = chain.step("blend", FIRST=first, SECOND=second)["BLEND"]
    mine, plain = chain.step("my_label", VOTES=votes), chain.step("label", SCORES=votes)
    best = chain.step("top_k", SCORES=votes)
    outputs = {
        "IDS": tokens["input_ids"],
        "MASK": tokens["attention_mask"],
        "UNIT": unit["UNIT"],
        "MINE": mine["LABEL"],
        "LABEL": plain["LABEL"],
        "SCORE": plain["SCORE"],
        "LABELS": best["LABELS"],
        "TOP_SCORES": best["TOP_SCORES"],
        "ABOVE": chain.step("threshold", SCORE=votes)["ABOVE"],
    }
    for name, tensor in outputs.items():
        chain.output(name, tensor)
    return chain


@pytest.fixture(scope="module")
def client(repository: Path) -> Iterator[Client]:
    with serve(repository) as server, Client(server.grpc_url) as connected:
        yield connected


@pytest.fixture(scope="module")
def here(repository: Path) -> Iterator[LocalPipeline]:
    loaded = LocalPipeline.load(repository / "chain")
    yield loaded
    loaded.close()


def test_the_server_gives_what_this_process_gives(client: Client, here: LocalPipeline) -> None:
    expected, served = here(**INPUTS), client.infer("chain", INPUTS)
    assert expected.keys() == set(served)
    for name, array in expected.items():
        assert served[name].dtype == array.dtype
        assert np.array_equal(served[name], array), name


def test_it_is_the_right_answer(here: LocalPipeline) -> None:
    answer = here(**INPUTS)
    logits = np.stack([INPUTS["A"], INPUTS["B"]]).astype(np.float64)
    powers = np.exp(logits)
    votes = (powers / powers.sum(axis=2, keepdims=True)).mean(axis=0)
    np.testing.assert_allclose(answer["SCORE"][:, 0], votes.max(axis=1), rtol=1e-6)
    np.testing.assert_allclose(answer["TOP_SCORES"], -np.sort(-votes), rtol=1e-6, atol=1e-12)
    assert answer["ABOVE"].tolist() == (votes >= 0.5).tolist()
    assert answer["LABEL"].tolist() == [[str(column).encode()] for column in votes.argmax(axis=1)]
    assert answer["MINE"].tolist() == [[b"" if row.max() < 0.75 else b"low"] for row in votes]
    shares = np.array([[1 / 3, 1 / 3, 0, 1 / 3], [0, 1 / 4, 1 / 2, 0], [0, 0, 0, 0]])  # of: the, cat, no, a full stop
    z = (shares - [0, 1, 0.5, 1]) / [1, 2, 1, 1]
    np.testing.assert_allclose(answer["UNIT"], z / np.linalg.norm(z, axis=1, keepdims=True), rtol=1e-6, atol=1e-7)


def test_a_bad_score_gets_the_same_words(client: Client, repository: Path) -> None:
    """Asked of the piece alone: side by side with others in an ensemble Triton 24.10 may not outlive it."""
    bad = {"LOGITS": np.full((3, 3), np.nan, np.float32)}
    here = LocalPipeline.load(repository / "softmax")
    with pytest.raises(InputError) as local:
        here(**bad)
    here.close()
    with pytest.raises(InputError) as served:
        client.infer("softmax", bad)
    assert str(local.value) == str(served.value)
    assert str(local.value).startswith("LOGITS[0] holds NaN or infinity; it must be finite.")


def test_nothing_is_found_in_it(repository: Path) -> None:
    assert [finding.rule.id for finding in check(repository)] == ["several-first-steps"]  # as it is defined above
    assert check(repository, target="26.05") == []
    config = json.loads((repository / "manifest.json").read_text(encoding="utf-8"))
    assert config["not_warmed_up"] == {}


def test_every_piece_takes_part(repository: Path) -> None:
    names = {path.parent.name.replace("my_counts", "word_counts") for path in repository.glob("*/config.pbtxt")}
    assert names == {*PIECES, "my_label", "chain"}
