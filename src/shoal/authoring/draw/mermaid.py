"""Draw a pipeline's graph as Mermaid text, which GitHub and most editors render."""

from __future__ import annotations

import re

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

# Fill and text are both set, so that they are legible on a light page and on a dark one.
_CLASSES = {
    ON_GPU: "fill:#dafbe1,stroke:#1a7f37,color:#1f2328",
    ON_HOST: "fill:#ddf4ff,stroke:#0969da,color:#1f2328",
    NESTED: "fill:#fbefff,stroke:#8250df,color:#1f2328",
    OPEN: "fill:#f6f8fa,stroke:#59636e,color:#1f2328",
}
_WARNING = "stroke:#cf222e,stroke-width:3px,color:#cf222e"
# Inside quotes, these characters may end a label, begin an entity, or be read as Markdown.
_UNSAFE = re.compile(r"^[\W_]|^\d+[.)]|[^\w ,·()/\[\]+.-]|_$")


def draw(graph: Graph) -> str:
    """Return the graph as Mermaid text."""
    boxes = list_boxes(graph)
    names = ["request", *(f"s{index}" for index in range(len(graph.steps))), "answer"]
    names += [f"c{index}" for index in range(len(boxes) - len(names))]
    lines = ["flowchart TB"]
    for name, box in zip(names, boxes, strict=True):
        is_end = box.kind == END
        lines.append(f"  {name}([{name}])" if is_end else f'  {name}["{escape(box.title)}<br/>{escape(box.subtitle)}"]')
    arrows = join_edges(graph)
    lines += [f'  {names[arrow.source]} {_line(arrow)}|"{_label(arrow)}"| {names[arrow.target]}' for arrow in arrows]
    if any(arrow.is_repeated for arrow in arrows):
        lines += [f'  legend["{escape(LEGEND.replace("double", "thick"))}"]', "  style legend fill:none,stroke:none"]
    for kind, style in _CLASSES.items():
        members = [name for name, box in zip(names, boxes, strict=True) if box.kind == kind != END]
        lines += [f"  classDef {kind} {style}", f"  class {','.join(members)} {kind}"] if members else []
    lines += [f"  linkStyle {index} {_WARNING}" for index, arrow in enumerate(arrows) if arrow.warning]
    return "\n".join(lines) + "\n"


def _line(arrow: Joined) -> str:
    return "==>" if arrow.is_repeated else "-->" if arrow.edges else "-.->"


def _label(arrow: Joined) -> str:
    words = [arrow.warning] if arrow.warning else [] if arrow.edges else [CALLS]
    words += [word for line in arrow.lines for word in line]
    return "<br/>".join(map(escape, words))


def escape(text: str) -> str:
    """Escape ``text`` for a quoted label: special characters become numeric entities."""
    return _UNSAFE.sub(lambda found: "".join(f"#{ord(character)};" for character in found[0]), legible(text))
