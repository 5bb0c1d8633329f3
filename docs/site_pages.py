"""Writer of the pages that ``make docs`` builds the site of: ``python docs/site_pages.py build/docs``.

They have the layout of the repository, so that the links between them hold. Links to the list of public names in the
code lead to their reference.
"""

from __future__ import annotations

import html
import re
import shutil
import sys
from pathlib import Path

import pygraphviz
from api import make_page
from reference import make_pages

ROOT = Path(__file__).parents[1]
_MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_BOX = 'shape=box, style="rounded,filled", fillcolor="#ddf4ff", color="#0969da"'
_ARROW = re.compile(r'(\w+) -->(?:\|"(.*)"\|)? (\w+)')
_NODE = re.compile(r'(\w+)(?:\[(\w+)\]|\(\[(\w+)\]\)|\["(.*)"\])?')


def write(folder: Path) -> None:
    """Write the pages into ``folder``, which is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    records = folder / "benchmarks" / "results"
    shutil.copytree(ROOT / "benchmarks" / "results", records)
    links = [f"- [{path.name}]({path.name})\n" for path in sorted(records.iterdir())]
    (records / "index.md").write_text("# Records of measurements\n\n" + "".join(links), encoding="utf-8")
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder)
    changes = folder / "CHANGELOG.md"  # it has every word, and would come first
    changes.write_text("---\nsearch:\n  exclude: true\n---\n\n" + changes.read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "docs" / "reference").mkdir()
    for name, text in {**make_pages(), "python": make_page()}.items():
        (folder / "docs" / "reference" / f"{name}.md").write_text(text, encoding="utf-8")
    for page in folder.rglob("*.md"):
        text = page.read_text(encoding="utf-8").replace("src/shoal/__init__.py)", "docs/reference/python.md)")
        if charts := _MERMAID.findall(text):  # the theme would load Mermaid from elsewhere
            picture = page.with_suffix(".svg")
            text = _MERMAID.sub(f"![Flow chart]({picture.name})", text)
            picture.write_bytes(_draw(*charts))  # one per page
        page.write_text(text, encoding="utf-8")


def _draw(chart: str) -> bytes:
    """Draw a flow chart as SVG, by Graphviz; it may have the forms of Mermaid that the pages have."""
    lines = [f"digraph {{ node [{_BOX}]; edge [fontsize=11]"]
    for line in map(str.strip, chart.splitlines()[1:]):
        if line.startswith("subgraph "):
            name = line.removeprefix("subgraph ")
            lines.append(f'subgraph cluster_{name} {{ label="{name}"; color="#818b98"')
        elif line == "end":
            lines.append("}")
        elif found := _ARROW.fullmatch(line):
            lines.append(f'{found[1]} -> {found[3]} [label="{_unescape(found[2] or "")}"]')
        elif found := _NODE.fullmatch(line):
            lines.append(f'{found[1]} [label="{_unescape(found[found.lastindex or 1])}"]')
        elif not line.startswith(("classDef ", "class ")):
            raise ValueError(f"{line!r} cannot be drawn.")
    drawn: bytes = pygraphviz.AGraph("\n".join([*lines, "}"])).draw(format="svg", prog="dot")
    return drawn


def _unescape(label: str) -> str:
    """Return a label of Mermaid as one of Graphviz."""
    return html.unescape(re.sub(r"#(\d+);", r"&#\1;", label)).replace('"', r"\"").replace("<br/>", r"\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
