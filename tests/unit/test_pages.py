"""Pages: their links, their picture, and that each block is run by some test."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.authoring.draw.mermaid import draw
from shoal.authoring.repository.find_graph import find_model_folders
from shoal.authoring.repository.graph import Graph
from shoal.serving.gateway.v1 import errors, schema
from tests.support import house
from tests.support.once import ROOT
from tests.support.pages import BLOCK, README

OTHER_PAGES = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "records").glob("*.md")])


def test_the_picture_is_the_ensemble() -> None:
    leaves = find_model_folders()
    (picture,) = [block for language, block in README if language == "mermaid"]
    assert picture == draw(Graph.build(leaves["ensemble_all"], leaves))


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_picture_of_the_house_is_its_imports() -> None:
    """``python -m tests.support.house`` prints it."""
    (picture,) = [block for language, block in BLOCK.findall(ARCHITECTURE) if language == "mermaid"]
    assert picture == house.draw()


def test_the_house_has_the_files_that_its_page_names() -> None:
    named = re.findall(rf"`((?:{'|'.join(house.FLOORS)})/[\w/.]*)`", ARCHITECTURE)
    assert len(named) > 60
    assert [path for path in named if not (house.PACKAGE / path).exists()] == []


def test_a_picture_of_a_terminal_can_be_read() -> None:
    """As test_readme.py does, which compares the one in the README with what the commands print."""
    program = runpy.run_path(str(ROOT / "docs" / "first_minute.py"))
    text = '$ shoal check "a<b" && ls\nmodel/config.pbtxt:7: error: 1 > 0\n    Write 0.\n│ é │\n'
    assert program["read"](program["draw"](text)) == text


@pytest.mark.usefixtures("may_start_processes")
def test_commands_of_contributors_are_known() -> None:
    """Each target of ``make`` exists, and each line for pytest finds its tests."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    commands = re.findall(r"`((?:make|\.venv/bin/pytest|python -m) [^`]+)`", text)
    assert len(commands) > 6
    for command in commands:
        words = command.replace(".venv/bin/pytest", f"{sys.executable} -m pytest --collect-only -q").split()
        words = [*words, "--dry-run"] if words[0] == "make" else words
        subprocess.run(words, cwd=ROOT, check=True, capture_output=True)


def test_blocks_of_other_pages_are_run_by_tests() -> None:
    for page in OTHER_PAGES:
        # Tests of their own plant the examples of the rules; test_tutorial.py runs the tutorial and five more.
        others = {
            "add-model",
            "architecture",
            "environments",
            "index",
            "inference",
            "language-models",
            "moving",
            "nvidia",
            "openai",
        }
        others |= {"placement", "recipes", "rules", "streaming", "training", "tutorial"}
        if page.stem not in others:
            assert not BLOCK.findall(page.read_text(encoding="utf-8")), page


def headings(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_links_and_folders_exist() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *OTHER_PAGES]:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\((?!http)([^)]+)\)", text) + re.findall(
            r"`((?:src|docs|benchmarks)/[\w/.-]+)`", text
        ):
            name, _, anchor = target.partition("#")
            found = [path for path in (page.parent / name, ROOT / name) if path.exists()] if name else [page]
            assert found, (page, target)
            assert not anchor or anchor in headings(found[0]), (page, target)


def test_the_fields_of_openais_api_that_are_refused_or_do_nothing() -> None:
    page = (ROOT / "docs" / "openai-reference.md").read_text(encoding="utf-8")
    rewrite = runpy.run_path(str(ROOT / "docs" / "openai_fields.py"))["rewrite"]
    assert rewrite(page) == page, "Type: python docs/openai_fields.py"
    names = {*schema.IDLE, *schema._UNSUPPORTED} - {"type"}  # of a part
    assert {name for name in names if "." not in name and f"`{name}`" not in page} == set()
    codes = {*errors._CODES.split(), "model_not_found", "context_length_exceeded", "invalid_json", "unknown_url"}
    assert {code for code in codes if f"`{code}`" not in page} == {"not_found"}  # each route has a code of its own
