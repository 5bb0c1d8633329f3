"""Draw a graph as SVG or PNG: the shapes and texts of the picture, and its theme."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shoal.draw.boxes import (
    CALLS,
    END,
    LEGEND,
    NESTED,
    ON_GPU,
    ON_HOST,
    OPEN,
    Box,
    Joined,
    join_edges,
    legible,
    list_boxes,
    list_levels,
)
from shoal.draw.canvas import Block, Line, Look, Scene, Theme, Type, Words, measure, to_png, to_svg
from shoal.draw.layout import INSET, PORT_GAP, Arrow, Rect, Size, arrange
from shoal.repository.graph import Graph

_MARGIN, _HEADING = 20, 36
_PADDING, _MIN_BOX = 12, 96  # of a box: beside its words, and its width
_LONGEST = 32  # characters; a longer name loses its middle
_BASELINE = 0.76  # of a line's height, from its top

_TYPES = {
    "heading": Type(15, 20, is_bold=True),
    "title": Type(13, 18, is_bold=True),
    "name": Type(12, 18),
    "detail": Type(11, 15),
    "alarm": Type(11, 17, is_bold=True),
}


def _looks(page: str, ink: str, faint: str, line: str, alarm: str, boxes: Sequence[tuple[str, str]]) -> dict[str, Look]:
    kinds = zip((ON_GPU, ON_HOST, NESTED, OPEN, END), boxes, strict=True)
    return {
        "page": Look(page),
        **dict.fromkeys(("heading", "title", "name"), Look(ink)),
        "detail": Look(faint),
        "alarm": Look(alarm),
        **{kind: Look(fill, stroke, 1.5) for kind, (fill, stroke) in kinds},
        "line": Look("none", line, 1.5),
        "line-tip": Look(line),
        "warning": Look("none", alarm, 3),
        "warning-tip": Look(alarm),
        "core": Look("none", page, 1.5),
    }


# The colours of GitHub's own pages (Primer).
_THEME = Theme(
    light=_looks(
        *("#ffffff", "#1f2328", "#59636e", "#818b98", "#cf222e"),
        [
            ("#dafbe1", "#1a7f37"),
            ("#ddf4ff", "#0969da"),
            ("#fbefff", "#8250df"),
            ("#f6f8fa", "#59636e"),
            ("#ffffff", "#59636e"),
        ],
    ),
    dark=_looks(
        *("#0d1117", "#f0f6fc", "#9198a1", "#7d8590", "#ff7b72"),
        [
            ("#12261e", "#3fb950"),
            ("#0c1f3a", "#4493f8"),
            ("#211830", "#ab7df8"),
            ("#151b23", "#9198a1"),
            ("#0d1117", "#9198a1"),
        ],
    ),
    types=_TYPES,
)


def svg(graph: Graph) -> str:
    """Draw the graph as SVG, from the request at the top to the answer at the bottom; the same bytes each time.

    Raises:
        ArtifactError: steps wait for one another in a circle, or for a tensor that no step writes.
    """
    return to_svg(compose_scene(graph))


def png(graph: Graph, scale: int = 2) -> bytes:
    """Draw the graph as PNG, ``scale`` times the SVG's size in pixels, for a light page.

    Raises:
        ArtifactError: as in `svg`.
        SetupError: matplotlib is not installed.
    """
    return to_png(compose_scene(graph), scale)


class _Text(NamedTuple):
    """A line of a box or a label, and its kind."""

    text: str
    look: str

    @property
    def shown(self) -> str:
        """The text; the middle of a long one is left out."""
        text = legible(self.text)
        half = _LONGEST // 2
        return text if len(text) <= _LONGEST else f"{text[: half - 1]}…{text[-half:]}"


def compose_scene(graph: Graph) -> Scene:
    """Compose the shapes of the picture of ``graph``."""
    boxes, arrows = list_boxes(graph), join_edges(graph)
    levels = list_levels(graph, arrows)
    arrows = [arrow for arrow in arrows if levels[arrow.source] < levels[arrow.target]]  # calls in a circle have others
    box_texts = [_box_texts(box) for box in boxes]
    label_texts = [_label_texts(arrow) for arrow in arrows]
    layout = arrange(
        [_size(texts, _PADDING, _room(index, arrows)) for index, texts in enumerate(box_texts)],
        levels,
        [Arrow(arrow.source, arrow.target, _size(texts, 4)) for arrow, texts in zip(arrows, label_texts, strict=True)],
    )
    heading = [_Text(graph.config.name, "heading")]
    if any(arrow.is_repeated for arrow in arrows):
        heading.append(_Text(LEGEND, "detail"))
    width = max(layout.width, *(measure(text.shown, _TYPES[text.look].size) for text in heading)) + 2 * _MARGIN
    left, top = (width - layout.width) // 2, _MARGIN + _HEADING + sum(_TYPES[text.look].line for text in heading[1:])
    height = top + layout.height + _MARGIN
    shapes: list[Block | Line | Words] = [Block(Rect(0, 0, width, height), 0, "page")]
    shapes += _write(heading, Rect(_MARGIN, _MARGIN - 4, 0, 0), is_centred=False)
    for arrow, route in sorted(zip(arrows, layout.routes, strict=True), key=lambda pair: bool(pair[0].warning)):
        points, look = tuple((x + left, y + top) for x, y in route), "warning" if arrow.warning else "line"
        shapes.append(Line(points, look, is_double=arrow.is_repeated, is_dashed=not arrow.edges))
    for rect, texts in zip(layout.labels, label_texts, strict=True):
        moved = rect._replace(x=rect.x + left, y=rect.y + top)
        shapes += [Block(moved, 4, "page"), *_write(texts, moved)]
    for box, rect, texts in zip(boxes, layout.boxes, box_texts, strict=True):
        moved = rect._replace(x=rect.x + left, y=rect.y + top)
        shapes += [Block(moved, 12 if box.kind == END else 6, box.kind), *_write(texts, moved)]
    return Scene(width, height, tuple(shapes), legible(graph.config.name), _tell(boxes, arrows), _THEME)


def _box_texts(box: Box) -> list[_Text]:
    return [_Text(box.title, "title"), *([_Text(box.subtitle, "detail")] if box.subtitle else [])]


def _label_texts(arrow: Joined) -> list[_Text]:
    texts = [_Text(arrow.warning, "alarm")] if arrow.warning else []
    for name, kind in arrow.lines:
        texts += [_Text(name, "name"), _Text(kind, "detail")]
    return texts or [_Text(CALLS, "detail")]


def _room(box: int, arrows: Sequence[Joined]) -> int:
    """Return the width that a box needs for the lines that enter or leave it."""
    lines = max(sum(a.source == box for a in arrows), sum(a.target == box for a in arrows))
    return max(_MIN_BOX, 2 * INSET + (lines - 1) * PORT_GAP)


def _size(texts: Sequence[_Text], padding: int, least: int = 0) -> Size:
    width = max(measure(text.shown, _TYPES[text.look].size) for text in texts) + 2 * padding
    return Size(max(least, width), sum(_TYPES[text.look].line for text in texts) + 2 * min(padding, 8))


def _write(texts: Sequence[_Text], rect: Rect, *, is_centred: bool = True) -> Iterator[Words]:
    y = rect.y + (rect.height - sum(_TYPES[text.look].line for text in texts)) // 2 if rect.height else rect.y
    for text in texts:
        form = _TYPES[text.look]
        full = "" if text.shown == legible(text.text) else legible(text.text)
        yield Words(rect.x + rect.width // 2, y + round(form.line * _BASELINE), text.shown, text.look, is_centred, full)
        y += form.line


def _tell(boxes: Sequence[Box], arrows: Sequence[Joined]) -> str:
    """Describe the picture in words."""
    steps = [f"{box.title} ({box.subtitle})" for box in boxes if box.kind != END]
    ways = [
        f"{boxes[arrow.source].title} to {boxes[arrow.target].title}:"
        f" {', '.join(' '.join(line) for line in arrow.lines) or CALLS}"
        + (f" ({arrow.warning})" if arrow.warning else "")
        for arrow in arrows
    ]
    legend = f" {LEGEND}." if any(arrow.is_repeated for arrow in arrows) else ""
    return legible(f"Steps: {', '.join(steps)}. Tensors: {'; '.join(ways)}.{legend}")
