"""Every block of every page, run as a reader would: in order, in a clone, with the environment that make made."""

from __future__ import annotations

import csv
import itertools
import json
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from shoal.readability.corpus import read_passages
from tests.support.environments import WHEELS
from tests.support.once import ROOT
from tests.support.pages import BLOCK, README
from tests.support.reader import Reader

ENVIRONMENTS = BLOCK.findall((ROOT / "docs" / "environments.md").read_text(encoding="utf-8"))
TRAINING = BLOCK.findall((ROOT / "docs" / "training.md").read_text(encoding="utf-8"))
INFERENCE = BLOCK.findall((ROOT / "docs" / "inference.md").read_text(encoding="utf-8"))
PLACEMENT = BLOCK.findall((ROOT / "docs" / "placement.md").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """A clone with what git knows, and this environment for its .venv."""
    if not (ROOT / ".venv" / ".installed").exists():
        pytest.skip("make has not installed .venv here")
    clone = tmp_path_factory.mktemp("clone") / "shoal"
    listing = ["git", "ls-files", "-co", "--exclude-standard"]
    for name in subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, clone / name)
    (clone / ".venv").symlink_to(ROOT / ".venv")
    made = Reader(clone)
    yield made
    made.stop()


def test_every_block_of_the_readme_works(reader: Reader) -> None:
    printed = {}
    for language, block in README:
        if language in ("bash", "python"):
            printed[block] = reader.type(language, block)
    (quickstart,) = [text for block, text in printed.items() if block.startswith("make quickstart")]
    (curl,) = [text for block, text in printed.items() if block.startswith("curl")]
    assert {output["name"] for output in json.loads(curl)["outputs"]} == {"SCORE", "BERT_SCORE", "FOREST_SCORE"}
    (by_openai,) = [text for block, text in printed.items() if "import openai" in block]
    assert "ensemble_all ['/v1/classify', '/v1/models/ensemble_all:predict']" in by_openai
    (easy, hard) = (float(score) for score in re.findall(r"\. (-?\d+\.\d+)$", by_openai, re.MULTILINE))
    assert easy > hard
    (container,) = [text for block, text in printed.items() if "for-container --print" in block]
    assert "tritonserver:26.06-py3" in container
    check_picture(reader, quickstart)


def check_picture(reader: Reader, quickstart: str) -> None:
    """Type the commands of docs/first-minute.svg, and compare what they print with it; the first has been typed."""
    read = runpy.run_path(str(ROOT / "docs" / "first_minute.py"))["read"]
    shown = read((ROOT / "docs" / "first-minute.svg").read_text(encoding="utf-8"))
    config = reader.clone / "build" / "repository" / "cuml" / "config.pbtxt"
    before = config.read_bytes()
    reader.type("bash", "shoal serve build/repository")
    printed = ""
    for command in re.findall(r"^\$ (.+)$", shown, re.MULTILINE):
        text = quickstart if command == "make quickstart" else reader.type("bash", f"{command} || test $? -eq 1")
        printed += f"$ {command}\n{text}".replace(str(reader.clone), "/home/you/shoal")
    config.write_bytes(before)
    (ROOT / "build").mkdir(exist_ok=True)
    (ROOT / "build" / "first-minute.txt").write_text(printed, encoding="utf-8")
    says = "python docs/first_minute.py < build/first-minute.txt > docs/first-minute.svg"
    assert re.sub(r"\s", "", "".join(_shape(printed))) == re.sub(r"\s", "", "".join(_shape(shown))), f"Type: {says}"


def test_every_block_of_the_inference_page_works(reader: Reader) -> None:
    """With what the README has left: build/repository."""
    reader.type("bash", "shoal serve build/repository")
    printed = [reader.type(language, block) for language, block in INFERENCE if language != "yaml"]
    (job,) = [yaml.safe_load(block) for language, block in INFERENCE if language == "yaml"]
    assert "--worker $JOB_COMPLETION_INDEX/8" in job["spec"]["template"]["spec"]["containers"][0]["command"][2]
    assert "text,id,score,bert_score,forest_score,error" in printed[2]
    (curl,) = [text for text in printed if text.startswith('{"model_name"')]
    assert [output["name"] for output in json.loads(curl)["outputs"]] == ["SCORE"]


def test_every_block_of_the_placement_page_works(reader: Reader) -> None:
    """With what the README has left: build/artifacts and build/repository."""
    printed = [reader.type(language, block) for language, block in PLACEMENT]
    (plan,) = [text for text in printed if "CUDA pool" in text]
    assert "--cuda-memory-pool-byte-size=1:" in plan
    assert "Nothing was copied between host and device." in printed[-1]


def test_every_block_of_the_environments_page_works(reader: Reader) -> None:
    """With build/artifacts, and pip's index in a folder."""
    if not any(WHEELS.glob("*.whl")):
        pytest.skip(f"{WHEELS} holds no wheels: `make test` downloads them")
    reader.environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(WHEELS)}
    printed = [reader.type(language, block) for language, block in ENVIRONMENTS]
    assert "The cat sat on the mat." in printed[1]
    assert "fits embedded: Python 3." in printed[3]


def test_every_block_of_the_training_page_works(reader: Reader, tmp_path: Path) -> None:
    """With shoal's passages in the place of the corpus, two folds of five and a tenth of an epoch."""
    corpus = read_passages()
    with (tmp_path / "train.csv").open("w", newline="", encoding="utf-8") as file:
        rows = itertools.islice(zip(corpus.texts, corpus.targets, strict=True), 60)
        csv.writer(file).writerows([("excerpt", "target"), *rows])
    reader.environment |= {"SHOAL_DATA_DIR": str(tmp_path)}
    (reader.clone / "build").mkdir(exist_ok=True)
    printed = []
    for language, block in TRAINING:
        block = block.replace("--preset full", "--preset full --folds 2").replace(
            "shoal train", "shoal train --epochs 0.1"
        )
        printed.append(reader.type(language, block))
    full, _, quick, evaluated = printed
    for text in (full, quick):
        assert "RMSE on unseen texts: encoder" in text
        assert "report.html" in text
    assert "2-fold cross-validation" in full
    assert "20 texts of my.csv" in evaluated


def _shape(text: str) -> list[str]:
    """The output without its numbers, texts, paths and rules: what a reader recognises it by."""
    lines = [re.sub(r"[━┃│┏┓┳┡┩╇└┘┴─\s]+", " ", line).strip() for line in text.splitlines()]
    lines = [re.sub(r": .*/(build)", r": \1", line) for line in lines]
    return [
        re.sub(r"-?\d+\.\d+", "#", "TEXT # # #" if re.search(r"\d \S+ \S+$", line) else line) for line in lines if line
    ]
