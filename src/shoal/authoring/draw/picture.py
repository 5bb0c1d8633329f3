"""Draw a pipeline's graph as SVG or PNG. Graphviz places boxes and arrows; the colours are GitHub's (Primer)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shoal.authoring.draw.boxes import (
    CALLS,
    END,
    LEGEND,
    NESTED,
    ON_GPU,
    ON_HOST,
    OPEN,
    Joined,
    join_edges,
    legible,
    list_boxes,
)
from shoal.authoring.repository.graph import Graph
from shoal.errors import needs

# Graphviz measures texts in _FONT. A browser shows the SVG in the first of _FONTS that it has; none is wider.
_FONT = "DejaVu Sans Mono"
_FONTS = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace"
_SIZES = {"heading": 15, "title": 13, "name": 12, "detail": 11, "alarm": 11}  # pixels
_BOLD = ("heading", "title", "alarm")
_LONGEST = 32  # characters; a longer name loses its middle

_PAGE, _INK, _FAINT, _LINE, _ALARM = "#ffffff", "#1f2328", "#59636e", "#818b98", "#cf222e"
_BOXES = {  # fill and outline
    ON_GPU: ("#dafbe1", "#1a7f37"),
    ON_HOST: ("#ddf4ff", "#0969da"),
    NESTED: ("#fbefff", "#8250df"),
    OPEN: ("#f6f8fa", _FAINT),
    END: (_PAGE, _FAINT),
}
_ON_DARK = {  # the colour that replaces each colour above on a dark page
    _PAGE: "#0d1117",
    _INK: "#f0f6fc",
    _FAINT: "#9198a1",
    _LINE: "#7d8590",
    _ALARM: "#ff7b72",
    "#dafbe1": "#12261e",
    "#1a7f37": "#3fb950",
    "#ddf4ff": "#0c1f3a",
    "#0969da": "#4493f8",
    "#fbefff": "#211830",
    "#8250df": "#ab7df8",
    "#f6f8fa": "#151b23",
}

_Words = tuple[str, str]  # a line of text, and its kind: a key of _SIZES


def svg(graph: Graph) -> str:
    """Draw the graph as SVG, from the request at the top to the answer at the bottom.

    The same graph gives the same bytes. The colours follow the viewer's choice of light or dark mode.

    Raises:
        SetupError: matplotlib or pygraphviz is not installed.
    """
    drawn = _render(graph, "svg").decode()
    width, height = re.findall(r'<svg width="(\d+)pt" height="(\d+)pt"', drawn)[0]
    body = re.sub(r"<!--.*?-->\n|<title>.*?</title>\n", "", drawn[drawn.index("<g ") :], flags=re.DOTALL)
    dark = "".join(
        f'    [{attribute}="{light}"] {{ {attribute}: {colour} }}\n'
        for light, colour in _ON_DARK.items()
        for attribute in ("fill", "stroke")
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="{width}"'
        f' height="{height}" viewBox="0 0 {width} {height}" role="img">\n'
        f"<title>{escape(legible(graph.config.name))}</title>\n<desc>{escape(_describe(graph))}</desc>\n"
        f"<style>\n  text {{ font-family: {_FONTS} }}\n"
        f"  @media (prefers-color-scheme: dark) {{\n{dark}  }}\n</style>\n{body}"
    )


def png(graph: Graph) -> bytes:
    """Draw the graph as PNG for a light page, twice the SVG's size in pixels. The same graph gives the same bytes.

    Raises:
        SetupError: matplotlib or pygraphviz is not installed.
    """
    return _render(graph, "png", dpi=144)


def _render(graph: Graph, form: str, dpi: int = 72) -> bytes:
    with needs("draw"):
        import matplotlib
        import pygraphviz
    spaces = {"dpi": dpi, "pad": 0.28, "nodesep": 0.22, "ranksep": 0.33, "outputorder": "edgesfirst"}
    look = {"bgcolor": _PAGE, "fontname": _FONT, "label": _heading(graph), "labelloc": "t", "labeljust": "l"}
    drawn = pygraphviz.AGraph(directed=True, strict=False, **spaces, **look)
    drawn.node_attr.update(shape="box", style="filled,rounded", penwidth=1.5, margin="0.16,0.06", fontname=_FONT)
    drawn.edge_attr.update(arrowsize=0.7)
    _add_boxes(drawn, graph)
    _add_arrows(drawn, graph)
    with _fonts_in(Path(matplotlib.get_data_path()) / "fonts" / "ttf"):
        image: bytes = drawn.draw(format=form, prog="dot")
    return image


@contextmanager
def _fonts_in(folder: Path) -> Iterator[None]:
    """Make Graphviz use the fonts in ``folder``: many servers have no fonts, and other fonts change the picture.

    Inside the context nothing is written to standard error: the bundled fontconfig prints warnings about entries that
    it does not know in the machine's own font configuration.
    """
    name = "FONTCONFIG_FILE"
    before = os.environ.get(name)
    with TemporaryDirectory(prefix="shoal-fonts-") as held, Path(os.devnull).open("wb") as nothing:
        file = Path(held) / "fonts.conf"
        folders = f"<dir>{escape(str(folder))}</dir><cachedir>{escape(held)}</cachedir>"
        file.write_text(f"<fontconfig>{folders}</fontconfig>", encoding="utf-8")
        os.environ[name] = str(file)
        stderr = os.dup(2)
        os.dup2(nothing.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            del os.environ[name]
            if before is not None:
                os.environ[name] = before


def _heading(graph: Graph) -> str:
    words = [(graph.config.name, "heading")]
    if any(arrow.is_repeated for arrow in join_edges(graph)):
        words.append((LEGEND, "detail"))
    return _table(words, "left")


def _add_boxes(drawn: Any, graph: Graph) -> None:
    """Add a node per box, numbered as in `list_boxes`, with the request at the top and the answer at the bottom."""
    for number, box in enumerate(list_boxes(graph)):
        words = [(box.title, "title"), *([(box.subtitle, "detail")] if box.subtitle else [])]
        fill, outline = _BOXES[box.kind]
        drawn.add_node(number, **_label(words), fillcolor=fill, color=outline)
    drawn.add_subgraph([0], rank="source")
    drawn.add_subgraph([len(graph.steps) + 1], rank="sink")


def _add_arrows(drawn: Any, graph: Graph) -> None:
    """Add the arrows. Each label is a node in the middle of its arrow: Graphviz's own labels lie beside it."""
    for number, arrow in enumerate(join_edges(graph)):
        label = f"label {number}"
        drawn.add_node(label, **_label(_arrow_words(arrow)), fillcolor=_PAGE, style="filled", penwidth=0, margin=0)
        colour = _ALARM if arrow.warning else _LINE
        look = {
            "color": f"{colour}:{colour}" if arrow.is_repeated else colour,  # two colours: two lines side by side
            "penwidth": 3 if arrow.warning else 1.5,
            "style": "solid" if arrow.edges else "dashed",
        }
        drawn.add_edge(arrow.source, label, headport="n", arrowhead="none", **look)
        drawn.add_edge(label, arrow.target, tailport="s", **look)


def _arrow_words(arrow: Joined) -> list[_Words]:
    words = [(arrow.warning, "alarm")] if arrow.warning else []
    for name, kind in arrow.lines:
        words += [(name, "name"), (kind, "detail")]
    return words or [(CALLS, "detail")]


def _label(words: Sequence[_Words]) -> dict[str, str]:
    """Return the attributes of a node with these lines of text; a tooltip has the full text of shortened lines."""
    full = [legible(text) for text, _ in words if _shorten(text) != legible(text)]
    return {"label": _table(words), **({"tooltip": ", ".join(full)} if full else {})}


def _table(words: Sequence[_Words], align: str = "center") -> str:
    """Write lines of text as one of Graphviz's HTML-like tables."""
    rows = []
    for text, kind in words:
        shown = escape(_shorten(text))
        shown = f"<B>{shown}</B>" if kind in _BOLD else shown
        colour = {"detail": _FAINT, "alarm": _ALARM}.get(kind, _INK)
        font = f'<FONT POINT-SIZE="{_SIZES[kind]}" COLOR="{colour}">{shown}</FONT>'
        rows.append(f'<TR><TD ALIGN="{align}">{font}</TD></TR>')
    return f'<<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="0" CELLPADDING="1">{"".join(rows)}</TABLE>>'


def _shorten(text: str) -> str:
    """Leave out the middle of a text of more than 32 characters."""
    text, half = legible(text), _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[: half - 1]}…{text[-half:]}"


def _describe(graph: Graph) -> str:
    """Describe the picture in words, for screen readers."""
    boxes, arrows = list_boxes(graph), join_edges(graph)
    steps = [f"{box.title} ({box.subtitle})" for box in boxes if box.kind != END]
    ways = [
        f"{boxes[arrow.source].title} to {boxes[arrow.target].title}:"
        f" {', '.join(' '.join(line) for line in arrow.lines) or CALLS}"
        + (f" ({arrow.warning})" if arrow.warning else "")
        for arrow in arrows
    ]
    legend = f" {LEGEND}." if any(arrow.is_repeated for arrow in arrows) else ""
    return legible(f"Steps: {', '.join(steps)}. Tensors: {'; '.join(ways)}.{legend}")
