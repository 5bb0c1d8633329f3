"""Layout of a drawing's boxes, labels and lines in pixels, from top to bottom; independent of their meaning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import floor
from typing import NamedTuple

from shoal.draw.sugiyama import Link, keep_apart, order, spread, straighten

_BOX_GAP, _LABEL_GAP, _LINE_GAP = 20, 14, 12  # to a neighbour in the same layer
_ROW_GAP, _MAX_ROW_GAP = 18, 54  # between layers: more where lines go far aside
PORT_GAP, INSET = 14, 14  # between two lines at one box, and between them and its corners
_STRAIGHT, _BENT = 8.0, 1.0  # weights: a long line should be straight where it has neither box nor label
ARROW = 8  # the arrowhead, which is vertical


class Size(NamedTuple):
    """Size of a box or a label."""

    width: int
    height: int


class Rect(NamedTuple):
    """A box or a label in the drawing."""

    x: int
    y: int
    width: int
    height: int

    @property
    def right(self) -> int:
        """X of the right border."""
        return self.x + self.width

    @property
    def bottom(self) -> int:
        """Y of the lower border."""
        return self.y + self.height


class Arrow(NamedTuple):
    """An arrow from box ``source`` down to box ``target``, with a label between them."""

    source: int
    target: int
    label: Size


Point = tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """A finished layout; ``routes`` are the points of each arrow, from the border of one box to that of the next."""

    width: int
    height: int
    boxes: tuple[Rect, ...]
    labels: tuple[Rect, ...]
    routes: tuple[tuple[Point, ...], ...]


def arrange(boxes: Sequence[Size], levels: Sequence[int], arrows: Sequence[Arrow]) -> Layout:
    """Lay out ``boxes`` in rows by level, 0 first, with each arrow's label between its ends.

    No two boxes or labels overlap, and no line runs through one but its own label. Every arrow must lead to a higher
    level.
    """
    items = _Items.of(boxes, levels, arrows)
    links = list(items.links())
    layers = order(items.layers(), links)
    widths, gaps = [size.width for size in items.sizes], items.gaps()
    middles = spread(layers, links, widths, gaps)
    middles = straighten([chain[1:-1] for chain in items.chains], middles, layers, widths, gaps)
    left = min(middle - size.width // 2 for middle, size in zip(middles, items.sizes, strict=True))
    middles = [middle - left for middle in middles]
    rows = _rows(layers, items.sizes, [(middles[link.upper], middles[link.lower], link.lower) for link in links])
    places = {item: row for layer, row in zip(layers, rows, strict=True) for item in layer}
    rects = [
        Rect(middle - size.width // 2, places[item].y + (places[item].height - size.height) // 2, *size)
        for item, (middle, size) in enumerate(zip(middles, items.sizes, strict=True))
    ]
    return Layout(
        width=max(rect.right for rect in rects),
        height=rows[-1].y + rows[-1].height,
        boxes=tuple(rects[: len(boxes)]),
        labels=tuple(rects[label] for label in items.labels),
        routes=tuple(_routes(items, middles, rects, places)),
    )


@dataclass
class _Items:
    """Boxes, then one item per arrow and layer between its boxes: its label in one layer, an empty item in the others.

    Boxes are in the even layers. The empty items reserve room for the line, as in Sugiyama's method.
    """

    sizes: list[Size]
    layer: list[int]
    num_boxes: int
    chains: list[list[int]] = field(default_factory=list)  # an arrow's items, from box to box
    labels: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, boxes: Sequence[Size], levels: Sequence[int], arrows: Sequence[Arrow]) -> _Items:
        items = cls(list(boxes), [2 * level for level in levels], len(boxes))
        widths = [0] * (2 * max(levels) + 1)
        chosen = {}
        # Labels with a choice of layers are placed last, each in the layer with the least total width so far.
        for number in sorted(range(len(arrows)), key=lambda n: levels[arrows[n].target] - levels[arrows[n].source]):
            source, target, label = arrows[number]
            layer = min(range(2 * levels[target] - 1, 2 * levels[source], -2), key=lambda n: widths[n])
            widths[layer] += label.width + _LABEL_GAP
            chosen[number] = layer
        for number, (source, target, label) in enumerate(arrows):
            chain = [source]
            for layer in range(2 * levels[source] + 1, 2 * levels[target]):
                if layer == chosen[number]:
                    items.labels.append(len(items.sizes))
                chain.append(len(items.sizes))
                items.sizes.append(label if layer == chosen[number] else Size(0, 0))
                items.layer.append(layer)
            items.chains.append([*chain, target])
        return items

    def links(self) -> Iterator[Link]:
        """Yield the pieces of all lines; those that touch neither box nor label weigh most."""
        for chain in self.chains:
            for upper, lower in pairwise(chain):
                is_free = not self.sizes[upper].width and not self.sizes[lower].width
                yield Link(upper, lower, _STRAIGHT if is_free else _BENT)

    def layers(self) -> list[list[int]]:
        return [[i for i, own in enumerate(self.layer) if own == n] for n in range(max(self.layer) + 1)]

    def gaps(self) -> list[int]:
        return [
            _BOX_GAP if item < self.num_boxes else _LABEL_GAP if size.width else _LINE_GAP
            for item, size in enumerate(self.sizes)
        ]


class _Row(NamedTuple):
    y: int
    height: int


def _rows(layers: Sequence[Sequence[int]], sizes: Sequence[Size], pieces: Sequence[tuple[int, int, int]]) -> list[_Row]:
    """Return each layer's y and height; ``pieces`` are a line piece's upper x, lower x and lower item."""
    rows: list[_Row] = []
    y = 0
    for number, layer in enumerate(layers):
        aside = max((abs(x - then) for x, then, below in pieces if below in layer), default=0)
        if number:
            y += min(_ROW_GAP + aside // 8, _MAX_ROW_GAP) + (0 if number % 2 else ARROW)
        rows.append(_Row(y, max(sizes[item].height for item in layer) if layer else 0))
        y += rows[-1].height
    return rows


def _routes(
    items: _Items, middles: Sequence[int], rects: Sequence[Rect], rows: dict[int, _Row]
) -> Iterator[tuple[Point, ...]]:
    starts = _ports(items, middles, rects, end=0)
    ends = _ports(items, middles, rects, end=-1)
    for number, chain in enumerate(items.chains):
        source, *between, target = chain
        x = starts[number]
        points = [(x, rects[source].bottom), (x, rows[source].y + rows[source].height)]
        for item in between:
            points += [(middles[item], rows[item].y), (middles[item], rows[item].y + rows[item].height)]
        x = ends[number]
        points += [(x, rows[target].y - ARROW), (x, rects[target].y)]
        yield _without_idle(points)


def _without_idle(points: Sequence[Point]) -> tuple[Point, ...]:
    """Drop the points in the middle of a straight piece."""
    kept = [points[0]]
    for point, then in pairwise(points[1:]):
        if not kept[-1][0] == point[0] == then[0]:
            kept.append(point)
    return (*kept, points[-1])


def _ports(items: _Items, middles: Sequence[int], rects: Sequence[Rect], end: int) -> list[int]:
    """Return the x at which each arrow leaves its box (``end`` 0) or enters it (-1), as near as possible to the next
    item of its chain; the ports of a box keep their distance.
    """
    ports = [0] * len(items.chains)
    for box in range(items.num_boxes):
        rect, inner = rects[box], 1 if end == 0 else -2
        own = [number for number, chain in enumerate(items.chains) if chain[end] == box]
        own.sort(key=lambda number: (middles[items.chains[number][inner]], number))
        gap = min(PORT_GAP, (rect.width - 2 * INSET) // max(1, len(own) - 1))
        low, high = rect.x + INSET, rect.right - INSET
        wanted = [min(max(middles[items.chains[number][inner]], low), high) for number in own]
        places = keep_apart(wanted, [1.0] * len(own), [gap] * (len(own) - 1))
        for index, (number, place) in enumerate(zip(own, places, strict=True)):
            ports[number] = floor(min(max(place, low + gap * index), high - gap * (len(own) - 1 - index)) + 0.5)
    return ports
