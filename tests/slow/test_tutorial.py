"""Every block of the tutorial, typed in order into an empty folder, with shoal as its wheel installs it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.once import ROOT
from tests.support.pages import BLOCK
from tests.support.published import LABELS, publish
from tests.support.reader import Reader

TUTORIAL, STREAMING, LANGUAGE_MODELS, ADD_MODEL, NVIDIA, OPENAI = (
    BLOCK.findall((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8"))
    for name in ("tutorial", "streaming", "language-models", "add-model", "nvidia", "openai")
)
COMMANDS = Path(sys.executable).parent
LLM = "shoal quickstart --llm\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel's files as pip installs them into site-packages; other packages come from this environment."""
    pytest.importorskip("hatchling", reason="the build backend is not installed here")
    folder = tmp_path_factory.mktemp("wheel")
    build: list[str | Path] = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (made,) = folder.glob("*.whl")
    with zipfile.ZipFile(made) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.fixture
def newcomer(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    reader = Reader(tmp_path_factory.mktemp("empty"))
    reader.environment |= {"PATH": f"{COMMANDS}:{reader.environment['PATH']}", "PYTHONPATH": str(wheel)}
    yield reader
    reader.stop()


@pytest.fixture
def with_model(newcomer: Reader, wheel: Path) -> Reader:
    """A newcomer with what the first line of the pages about language models makes: it is typed once."""
    folder = wheel.parent / "model"
    if not folder.is_dir():
        newcomer.type("bash", LLM)
        newcomer.clone.joinpath("build").rename(folder)
    shutil.copytree(folder, newcomer.clone / "build")
    return newcomer


def test_every_block_of_the_tutorial_works(newcomer: Reader, wheel: Path) -> None:
    where = newcomer.type("python", "import shoal; print(shoal.__file__)")
    assert Path(where.strip()).is_relative_to(wheel)
    # A tenth of an epoch gives scores of no worth, which are equal in both places all the same.
    printed = [
        newcomer.type(lang, block.replace("shoal train", "shoal train --epochs 0.1")) for lang, block in TUTORIAL
    ]
    trained_and_scored, _, served = printed[:3]
    assert len(numbers(served)) == 6
    assert numbers(trained_and_scored)[-6:] == pytest.approx(numbers(served), abs=0.002)
    (tested,) = [text for text in printed if " passed" in text]
    assert "2 passed" in tested
    (graded,) = [text for text in printed if "LEVEL" in text.upper() and "picture: " in text]
    assert re.search("easy|hard", graded)
    (container,) = [text for text in printed if "tritonserver:26.06-py3" in text]
    assert "build/for-container" in container
    (topics,) = [text for text, (_, block) in zip(printed, TUTORIAL, strict=True) if "--model triage" in block]
    assert topics.count("billing") >= 1
    assert topics.count("technical") >= 1


def numbers(text: str) -> list[float]:
    """Those with three digits behind the point, as tables of scores have them."""
    return [float(number) for number in re.findall(r"-?\d+\.\d{3}\b", text)]


def test_every_block_of_the_streaming_page_works(newcomer: Reader) -> None:
    made, _, asked, in_python, others = (newcomer.type(language, block) for language, block in STREAMING)
    assert made.endswith("A\ncat\nsat.\n") or "Acatsat." in made
    assert asked.count("data: ") == 3
    assert "[b'A', b'cat', b'sat.']" in in_python
    assert "CAT" in others


def test_every_block_about_classifiers_works(newcomer: Reader, tiny_bert: Path) -> None:
    shutil.copytree(publish(tiny_bert, newcomer.clone / "published") / "triage", newcomer.clone / "my-classifier")
    *_, compared = (newcomer.type(language, block) for language, block in ADD_MODEL)
    assert "(2, 3) True" in compared


def test_every_block_of_the_language_models_page_works(newcomer: Reader) -> None:
    cats = "A cat sat on the warm stone wall and watched the birds in the old apple tree."
    hello = "Hello! I am a very small language model."
    quickstart, _, _, asked, in_python, served, guided, rows, probable, whole, together, on_onnx, static = (
        newcomer.type(language, block) for language, block in LANGUAGE_MODELS
    )
    assert guided.split()[-1] in ("red", "green")
    assert "Fish swim in the sea in large shoals" in quickstart
    assert cats in asked
    assert '"text": "A cat sat on the warm stone "' in asked
    assert hello in asked
    assert "generated_text" in asked
    assert re.search(r"^\d+(,\d+){4}\n", asked, re.MULTILINE)
    assert "\nA cat" in asked  # of the second `shoal tokens`, which prints the prompt too
    assert in_python.count(cats.partition("wall")[0]) == 3
    assert "Piece(text=" in in_python
    assert json.loads(served.partition("data: ")[0])["finish_reason"] in ("stop", "length")
    assert "".join(json.loads(line)["text_output"] for line in re.findall("data: (.*)$", served, re.MULTILINE)) == cats
    assert '"batch_index":[0,1]' in rows
    assert rows.startswith("text,text_output,")
    assert "'rank': 1" in probable
    assert "build/gpt3" in whole
    assert hello in together
    assert hello in on_onnx
    assert hello in static


def test_every_block_of_the_openai_page_works(with_model: Reader, tiny_bert: Path) -> None:
    shutil.copytree(publish(tiny_bert, with_model.clone / "published") / "triage", with_model.clone / "my-classifier")
    shutil.copytree(tiny_bert, with_model.clone / "my-encoder")
    cats = "A cat sat on the warm stone wall and watched the birds in the old apple tree."
    _, _, by_openai, by_anthropic, by_curl, by_tools = (
        with_model.type(language, block.removeprefix(LLM)) for language, block in OPENAI
    )
    assert by_openai.startswith("['gpt-4o', 'llm', ")
    assert by_openai.count(cats) == 3
    assert by_openai.endswith("\n16\n")
    assert by_anthropic.startswith(f"{cats}\n")
    assert by_tools.startswith("get_weather {'city': '")
    classified, predicted = (json.loads(line) for line in by_curl.replace("}{", "}\n{").splitlines())
    rows = [row["OUTPUT__0"] for row in predicted["predictions"]]
    assert [row["probs"] for row in classified["data"]] == rows
    assert [len(row) for row in rows] == [3, 3]
    assert {row["label"] for row in classified["data"]} <= {*LABELS.values()}


def test_every_block_about_nvidias_models_works(with_model: Reader) -> None:
    """The client and both lines for curl print the same text."""
    _, asked = (with_model.type(language, block.removeprefix(LLM)) for language, block in NVIDIA)
    text, *answers = asked.strip("\n").replace("}{", "}\n{").split("\n")
    assert [json.loads(answer)["text_output"] for answer in answers] == [text] * 2
    assert text
