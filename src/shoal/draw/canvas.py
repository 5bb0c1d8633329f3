"""Shapes in pixels, written as SVG or as PNG: the same shapes, in the same colours."""

from __future__ import annotations

import io
import unicodedata
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.sax.saxutils import escape

from shoal.draw.layout import ARROW, Point, Rect
from shoal.errors import needs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FONTS = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace"
_ADVANCE = 0.62  # width of a character in the widest of them, in ems
_DOUBLE, _DASHES = 4.5, (5, 4)  # width of a double line, with its core; lengths of dashes and gaps, in pixels
_DOTS_PER_INCH = 64  # of the PNG's figure: a power of two, so that whole pixels stay whole


class Type(NamedTuple):
    """A text style: font size and line height in pixels."""

    size: int
    line: int
    is_bold: bool = False


class Look(NamedTuple):
    """Fill colour of a shape or text, stroke colour, and stroke width in pixels."""

    fill: str
    stroke: str = "none"
    width: float = 0


@dataclass(frozen=True)
class Theme:
    """Colours of each kind of shape on a light page and on a dark one, and the style of each kind of text."""

    light: Mapping[str, Look]
    dark: Mapping[str, Look]
    types: Mapping[str, Type]


class Block(NamedTuple):
    """A rectangle with round corners."""

    rect: Rect
    radius: int
    look: str


class Line(NamedTuple):
    """An arrow that goes down through the points: straight to a point below, or in an S-curve to one beside it."""

    points: tuple[Point, ...]
    look: str
    is_double: bool = False
    is_dashed: bool = False


class Words(NamedTuple):
    """One line of text centred at ``x``, or starting there, with its baseline at ``y``; ``full`` is the whole text
    where it was shortened.
    """

    x: int
    y: int
    text: str
    look: str
    is_centred: bool = True
    full: str = ""


@dataclass(frozen=True)
class Scene:
    """A picture: shapes from back to front, on a page of pixels; ``title`` and ``story`` are for screen readers."""

    width: int
    height: int
    shapes: tuple[Block | Line | Words, ...]
    title: str
    story: str
    theme: Theme


def measure(text: str, size: int) -> int:
    """Return an upper bound of a text's width in pixels, in a monospaced font; East Asian characters count as two."""
    places = sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text if not unicodedata.combining(c))
    return round(places * size * _ADVANCE + 0.5)


def to_svg(scene: Scene) -> str:
    """Write the scene as SVG, which follows the reader's choice of a light or a dark page."""
    dark = "".join(f"    {rule}\n" for rule in _rules(scene.theme.dark))
    light = "".join(f"  {rule}\n" for rule in _rules(scene.theme.light))
    types = "".join(f"  {rule}\n" for rule in _type_rules(scene.theme.types))
    body = "\n".join(_element(shape) for shape in scene.shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{scene.width}" height="{scene.height}"'
        f' viewBox="0 0 {scene.width} {scene.height}" role="img">\n'
        f"<title>{escape(scene.title)}</title>\n<desc>{escape(scene.story)}</desc>\n"
        f"<style>\n  text {{ font-family: {_FONTS} }}\n{types}{light}"
        f"  @media (prefers-color-scheme: dark) {{\n{dark}  }}\n</style>\n{body}\n</svg>\n"
    )


def _rules(looks: Mapping[str, Look]) -> Iterator[str]:
    for name, look in looks.items():
        outline = f"; stroke: {look.stroke}; stroke-width: {look.width:g}" if look.width else ""
        yield f".{name} {{ fill: {look.fill}{outline} }}"


def _type_rules(types: Mapping[str, Type]) -> Iterator[str]:
    for name, form in types.items():
        yield f".{name} {{ font-size: {form.size}px{'; font-weight: bold' if form.is_bold else ''} }}"


def _element(shape: Block | Line | Words) -> str:
    if isinstance(shape, Block):
        x, y, width, height = shape.rect
        return f'<rect class="{shape.look}" x="{x}" y="{y}" width="{width}" height="{height}" rx="{shape.radius}"/>'
    if isinstance(shape, Line):
        tip = " ".join(f"{x},{y}" for x, y in _tip(shape))
        path = _path(shape)
        more = f' stroke-dasharray="{_DASHES[0]} {_DASHES[1]}"' if shape.is_dashed else ""
        core = f'<path class="core" d="{path}"/>\n' if shape.is_double else ""
        more += f' style="stroke-width: {_DOUBLE}"' if shape.is_double else ""
        return (
            f'<path class="{shape.look}" d="{path}"{more}/>\n{core}<polygon class="{shape.look}-tip" points="{tip}"/>'
        )
    anchor = ' text-anchor="middle"' if shape.is_centred else ""
    full = f"<title>{escape(shape.full)}</title>" if shape.full else ""
    return f'<text class="{shape.look}" x="{shape.x}" y="{shape.y}"{anchor}>{full}{escape(shape.text)}</text>'


def _tip(line: Line) -> tuple[Point, Point, Point]:
    x, y = line.points[-1]
    return (x - ARROW // 2, y - ARROW), (x + ARROW // 2, y - ARROW), (x, y)


def _path(line: Line) -> str:
    pieces = [f"M{line.points[0][0]} {line.points[0][1]}"]
    for (x, y), (then, below) in _pieces(line):
        middle = (y + below) / 2
        pieces.append(f"V{below}" if x == then else f"C{x} {middle:g} {then} {middle:g} {then} {below}")
    return " ".join(pieces)


def _pieces(line: Line) -> Iterator[tuple[Point, Point]]:
    """Yield the pieces of a line, the last of which ends within its arrowhead."""
    *before, (x, y) = line.points
    yield from pairwise([*before, (x, y - ARROW + 1)])


def to_png(scene: Scene, scale: int) -> bytes:
    """Write the scene as PNG, ``scale`` times its size, for a light page; the same bytes each time.

    It uses matplotlib, which brings its own font: a server often has none.

    Raises:
        SetupError: matplotlib is not installed.
    """
    with needs("draw"):
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    buffer = io.BytesIO()
    style = {"font.family": ["DejaVu Sans Mono"], "text.parse_math": False, "path.simplify": False}
    with rc_context(style), warnings.catch_warnings():  # type: ignore[arg-type]
        warnings.filterwarnings("ignore", "Glyph .* missing")  # of a script that the font lacks: a box is drawn
        size = (scene.width / _DOTS_PER_INCH, scene.height / _DOTS_PER_INCH)
        figure = Figure(figsize=size, dpi=_DOTS_PER_INCH * scale)
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, scene.width), ylim=(scene.height, 0))
        axes.set_axis_off()
        for depth, shape in enumerate(scene.shapes):
            _paint(axes, shape, scene.theme, depth)
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _paint(axes: Axes, shape: Block | Line | Words, theme: Theme, depth: int) -> None:
    from matplotlib.patches import FancyBboxPatch, PathPatch, Polygon
    from matplotlib.path import Path

    look = theme.light[shape.look]
    options: dict[str, Any] = {"facecolor": look.fill, "edgecolor": look.stroke, "linewidth": _points(look.width)}
    if isinstance(shape, Block):
        x, y, width, height = shape.rect
        corners = f"round,pad=0,rounding_size={shape.radius}" if shape.radius else "square,pad=0"
        axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=corners, zorder=depth, **options))
    elif isinstance(shape, Line):
        vertices: list[tuple[float, float]] = [shape.points[0]]
        for (x, y), (then, below) in _pieces(shape):
            vertices += [(x, (y + below) / 2), (then, (y + below) / 2), (then, below)]
        path = Path(vertices, [Path.MOVETO] + [Path.CURVE4] * (len(vertices) - 1))
        if shape.is_dashed:
            options["linestyle"] = (0, tuple(length / look.width for length in _DASHES))  # in widths of the line
        if shape.is_double:
            options["linewidth"] = _points(_DOUBLE)
        axes.add_patch(PathPatch(path, zorder=depth, **options))
        if shape.is_double:
            core = theme.light["core"]
            options = {"facecolor": "none", "edgecolor": core.stroke, "linewidth": _points(core.width)}
            axes.add_patch(PathPatch(path, zorder=depth, **options))
        tip = theme.light[f"{shape.look}-tip"]
        axes.add_patch(Polygon(_tip(shape), facecolor=tip.fill, edgecolor="none", zorder=depth))
    else:
        form = theme.types[shape.look]
        axes.text(
            *(shape.x, shape.y, shape.text),
            ha="center" if shape.is_centred else "left",
            va="baseline",
            color=look.fill,
            fontsize=_points(form.size),
            fontweight="bold" if form.is_bold else "normal",
            zorder=depth,
        )


def _points(pixels: float) -> float:
    """Convert pixels of the scene to typographic points, matplotlib's unit."""
    return pixels * 72 / _DOTS_PER_INCH
