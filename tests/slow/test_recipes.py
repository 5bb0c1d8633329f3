"""Every block of the recipes, typed in order; a section whose libraries are not installed is skipped."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.lab.tiny_llm import make_tiny
from shoal.serving.server.launch import find_ports
from tests.support.once import ROOT
from tests.support.pages import BLOCK
from tests.support.published import publish
from tests.support.reader import Reader

PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
BEGINNING, *REST = re.split("^## ", PAGE, flags=re.MULTILINE)
SECTIONS = {title: BLOCK.findall(text) for title, _, text in (section.partition("\n") for section in REST)}


@pytest.fixture(scope="module")
def reader(tiny_bert: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """A folder with what the page names."""
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "build").mkdir()
    (folder / "build" / "repository").symlink_to(repository)
    (publish(tiny_bert, folder / "published") / "score").rename(folder / "my-reranker")
    make_tiny(folder / "my-llama")
    made = Reader(folder)
    made.environment["PATH"] = f"{Path(sys.executable).parent}:{made.environment['PATH']}"
    yield made
    made.stop()


@pytest.fixture(scope="module")
def served(reader: Reader) -> Reader:
    """The reader, who has typed the first block of the page."""
    for language, block in BLOCK.findall(BEGINNING):
        reader.type(language, block)
    return reader


def test_a_reranker(reader: Reader) -> None:
    _, by_curl, in_python = (reader.type(language, block) for language, block in SECTIONS["A reranker"])
    (best,) = json.loads(by_curl)["results"]
    assert in_python.startswith(f"[{best['document']['text']!r}, ")


@contextmanager
def running(reader: Reader, command: str) -> Iterator[None]:
    """Run the application until the end of the block, on a free port in the place of the page's."""
    reader.ports["8080"] = port = find_ports(0, 0, 0)[0]
    words = command.replace("8080", str(port)).split()
    log = reader.clone / "app.log"
    with log.open("w") as file:
        process = subprocess.Popen(words, cwd=reader.clone, env=reader.environment, stderr=file, stdout=file)
    try:
        while "Uvicorn running" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(30)


def ask_app(reader: Reader, text: str) -> tuple[int, str | None]:
    """Return the status of an answer that is an error, and its Retry-After."""
    url = f"http://127.0.0.1:{reader.ports['8080']}/score"
    request = urllib.request.Request(url, json.dumps({"text": text}).encode(), {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as caught, urllib.request.urlopen(request):
        pass
    with caught.value as answer:
        return answer.code, answer.headers["Retry-After"]


def test_an_application(served: Reader) -> None:
    for name in ("fastapi", "uvicorn"):
        pytest.importorskip(name, reason=f"{name} is not installed here")
    (_, app), (_, command), (language, curl) = SECTIONS["An application with FastAPI"]
    (served.clone / "app.py").write_text(app.replace("8001", str(served.ports["8001"])), encoding="utf-8")
    with running(served, command):
        score = json.loads(served.type(language, curl))["score"]
        assert isinstance(score, float)
        assert ask_app(served, "a" * 65537) == (422, None)
    (served.clone / "app.py").write_text(app.replace("8001", str(find_ports(0, 0, 0)[0])), encoding="utf-8")
    with running(served, command):
        assert ask_app(served, "The cat sat.") == (503, "1")


def test_pandas(served: Reader) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed here")
    scored, _, command, read = (served.type(language, block) for language, block in SECTIONS["pandas"])
    assert re.search(r"^1 +7 .*\n0 +8 ", scored, re.MULTILINE)  # in the rows of its own index
    assert "Some rows failed." in command
    assert re.search(r"^1 +8 +excerpt", read, re.MULTILINE)
    assert read.count("\n") == 3


def test_a_notebook(served: Reader) -> None:
    ((language, block),) = SECTIONS["A notebook"]
    assert served.type(language, block).startswith("ensemble_all(excerpt: STRING [1], ")


def test_many_rows(served: Reader) -> None:
    ((language, block),) = SECTIONS["Scoring a million rows"]
    served.type(language, block)
    assert (served.clone / "build" / "sample.csv").read_text(encoding="utf-8").count("\n") == 201


def test_an_agent(reader: Reader) -> None:
    _, asked = (reader.type(language, block) for language, block in SECTIONS["Agents"])
    assert re.fullmatch(r"is_warm=(True|False) is_dry=(True|False)\n", asked)


def test_no_section_is_left_out() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    assert [title for title in SECTIONS if f'SECTIONS["{title}"]' not in source] == []
