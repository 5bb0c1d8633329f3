"""The site of the documentation: ``make docs`` in a minute, without a broken link, and with nothing from elsewhere."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.once import ROOT

pytest.importorskip("zensical", reason="zensical, which builds the site, is not installed here")

ZENSICAL = Path(sys.executable).with_name("zensical")
# The theme's script loads from elsewhere what draws these.
LOADED_LATER = {"mermaid", "glightbox", "pyodide"}


class Page(HTMLParser):
    """Links, anchors, resources and headings of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links, self.anchors, self.resources = list[str](), {""}, list[str]()
        self.language, self.levels = "", list[int]()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        assert not LOADED_LATER & {*(found.get("class") or "").split()}
        assert tag != "img" or found.get("alt")
        self.anchors.add(found.get("id") or "")
        self.language = (found.get("lang") if tag == "html" else None) or self.language
        if re.fullmatch("h[1-6]", tag):
            self.levels.append(int(tag[1]))
        address = found.get("src") or found.get("href")
        if address and tag == "a":
            self.links.append(address)
        elif address:
            self.resources.append(address)
        self.resources += re.findall(r"url\(([^)]+)\)", found.get("style") or "")


def find_broken(site: Path, pages: dict[Path, Page]) -> list[tuple[str, str]]:
    """Return links to files of the site that do not exist, or have no such anchor, with the pages that have them."""
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            has_anchor = target not in pages or unquote(parts.fragment) in pages[target].anchors
            if not (parts.netloc or (target.is_relative_to(site) and target.is_file() and has_anchor)):
                broken.append((str(path.relative_to(site)), link))
    return broken


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as ``make docs`` does; without a network, if a process may leave it here."""
    folder = tmp_path_factory.mktemp("site").resolve()
    shutil.copy(ROOT / "zensical.toml", folder)
    alone = ["unshare", "--map-root-user", "--net"]
    alone = [] if subprocess.run([*alone, "true"], check=False).returncode else alone
    began = time.monotonic()
    subprocess.run([*alone, sys.executable, ROOT / "docs" / "site_pages.py", "build/docs"], cwd=folder, check=True)
    subprocess.run([*alone, ZENSICAL, "build", "--strict"], cwd=folder, check=True)
    assert time.monotonic() - began < 60
    return folder / "build" / "site"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}  # whose links are absolute


def test_each_page_is_in_the_navigation(site: Path, pages: dict[Path, Page]) -> None:
    """Records are in a list of their own."""
    lists = (site / "index.html", site / "benchmarks" / "results" / "index.html")
    linked = {(page.parent / link.partition("#")[0]).resolve() for page in lists for link in pages[page].links}
    assert len(pages) > 50
    assert {path for path in pages if path not in linked} == set(), "Add them to nav in zensical.toml."


def test_no_link_is_broken(site: Path, pages: dict[Path, Page]) -> None:
    assert sum("#" in link for page in pages.values() for link in page.links) > 1000
    assert find_broken(site, pages) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    links = ["b.html", "a.html#there", "https://example.com/no", "#no", "c.html", "a.html#no", "../a.html", "folder"]
    (tmp_path / "folder").mkdir()
    (tmp_path / "b.html").touch()
    page = tmp_path / "a.html"
    page.write_text("<p id=there>" + "".join(f"<a href={link}>x</a>" for link in links), encoding="utf-8")
    assert find_broken(tmp_path, {page: Page(page)}) == [("a.html", link) for link in links[3:]]


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        for resource in page.resources:
            parts = urlsplit(resource)
            assert not parts.netloc
            assert parts.scheme == "data" or (path.parent / parts.path).exists(), (path, resource)
    for style in site.rglob("*.css"):
        text = style.read_text(encoding="utf-8")
        assert not re.findall(r"@import|url\(\s*[\"']?(?:https?:)?//", text), style


def test_headings_are_in_order_and_the_language_is_named(pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        assert page.language == "en", path
        assert (page.levels[0], page.levels.count(1)) == (1, 1), path
        assert [pair for pair in pairwise(page.levels) if pair[1] > pair[0] + 1] == [], path


def test_there_are_a_search_and_two_palettes(site: Path) -> None:
    for name in ("search.json", "search.js"):  # the second one is for pages that are read from files
        assert "shoal compose" in (site / name).read_text(encoding="utf-8")
    text = (site / "index.html").read_text(encoding="utf-8")
    assert all(f'data-md-color-scheme="{name}"' in text for name in ("default", "slate"))


# Words that users search, by the page that answers them.
SEARCHED = {
    "add-model": "embeddings, rerank",
    "components": "tokenizer",
    "inference": "csv",
    "install": "upgrade, windows",
    "keys": "api key, nginx",
    "language-models": "lora, quantize, stop word",
    "openai": "openai",
    "placement": "batch, gpu, memory",
    "reference/metrics": "metrics",
    "serve-a-model": "gguf",
    "serving": "health, kubernetes, log, port in use, timeout",
    "streaming": "stream",
    "targets": "docker",
}


@pytest.mark.parametrize(
    ("name", "words"), [(name, words) for name in SEARCHED for words in SEARCHED[name].split(", ")]
)
def test_a_word_leads_to_its_page(site: Path, name: str, words: str) -> None:
    """A title of the page has the word, if any title has it: the search shows titles first."""
    items = json.loads((site / "search.json").read_text(encoding="utf-8"))["items"]
    for fields in (("title", "path"), ("text",)):
        found = {
            item["location"].partition("#")[0]
            for item in items
            if all(word in str([item[field] for field in fields]).lower() for word in words.split())
        }
        if found:
            break
    assert f"docs/{name}.html" in found
