"""Layered graph drawing: the order of boxes and lines within each layer, and their positions.

The method of Sugiyama, Tagawa and Toda, "Methods for visual understanding of hierarchical system structures" (1981):
an edge gets an item in each layer that it crosses, so that it does not run through a box. Barycentres give the order in
a layer, least squares with minimum distances the positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from math import floor, inf
from typing import NamedTuple

_SWEEPS = 12  # down and up; the best order found is kept
_SETTLING = 40  # rounds after which positions no longer move by a pixel


class Link(NamedTuple):
    """Segment of an edge between items of adjacent layers; segments of higher weight are drawn straighter."""

    upper: int
    lower: int
    weight: float = 1.0


class Neighbours:
    """Items above and below each item, with the weights of their links."""

    def __init__(self, num_items: int, links: Sequence[Link]) -> None:
        self.above: list[list[tuple[int, float]]] = [[] for _ in range(num_items)]
        self.below: list[list[tuple[int, float]]] = [[] for _ in range(num_items)]
        for upper, lower, weight in links:
            self.above[lower].append((upper, weight))
            self.below[upper].append((lower, weight))


def order(layers: Sequence[Sequence[int]], links: Sequence[Link]) -> list[list[int]]:
    """Order the items of each layer from left to right, such that few lines cross; ties keep their order."""
    # The crossing heuristic: sweep down and up, sort each layer by the mean place of its items' neighbours in the layer
    # before, then swap adjacent items while that helps. A sweep may make things worse, so the best order is kept.
    neighbours = Neighbours(sum(map(len, layers)), links)
    current = [list(layer) for layer in layers]
    best, fewest = [list(layer) for layer in current], _count_crossings(current, neighbours)
    for _ in range(_SWEEPS):
        for side, sequence in ((neighbours.above, current), (neighbours.below, current[::-1])):
            place = _places(current)
            for layer in sequence:
                layer.sort(key=lambda item: _barycentre(side[item], place, place[item]))
                place |= {item: index for index, item in enumerate(layer)}
            _swap(current, neighbours)
            if (crossings := _count_crossings(current, neighbours)) < fewest:
                best, fewest = [list(layer) for layer in current], crossings
    return best


def _count_crossings(layers: Sequence[Sequence[int]], neighbours: Neighbours) -> int:
    """Count the pairs of lines that cross."""
    place = _places(layers)
    return sum(_crossed(neighbours.below, *pair, place) for layer in layers for pair in combinations(layer, 2))


def _places(layers: Sequence[Sequence[int]]) -> dict[int, int]:
    return {item: index for layer in layers for index, item in enumerate(layer)}


def _barycentre(linked: Sequence[tuple[int, float]], place: dict[int, int], own: int) -> float:
    return sum(place[item] for item, _ in linked) / len(linked) if linked else own


def _swap(layers: list[list[int]], neighbours: Neighbours) -> None:
    """Exchange adjacent items as long as that reduces crossings."""
    place = _places(layers)
    for _ in range(_SWEEPS):
        has_changed = False
        for layer in layers:
            for left in range(len(layer) - 1):
                first, second = layer[left : left + 2]
                sides = (neighbours.above, neighbours.below)
                now = sum(_crossed(side, first, second, place) for side in sides)
                if now > sum(_crossed(side, second, first, place) for side in sides):
                    layer[left : left + 2] = second, first
                    place[first], place[second] = place[second], place[first]
                    has_changed = True
        if not has_changed:
            return


def _crossed(side: Sequence[Sequence[tuple[int, float]]], left: int, right: int, place: dict[int, int]) -> int:
    """Count the crossings on one side between the lines of two items, if they were in this order."""
    return sum(place[a] > place[b] for a, _ in side[left] for b, _ in side[right])


def spread(
    layers: Sequence[Sequence[int]], links: Sequence[Link], widths: Sequence[int], gaps: Sequence[int]
) -> list[int]:
    """Return the position of each item's middle, as near to its neighbours' as order and distances allow.

    ``widths`` and ``gaps`` are pixels by item. The space between two items is at least the larger of their gaps.
    """
    # Relaxation: sweeping up and down, each layer is moved towards the weighted means of its neighbours' positions;
    # `keep_apart` solves that exactly for one layer. The last pass rounds to pixels and keeps the distances.
    neighbours = Neighbours(len(widths), links)
    distances = [[distance(a, b, widths, gaps) for a, b in pairwise(layer)] for layer in layers]
    middles = [0.0] * len(widths)
    for layer, steps in zip(layers, distances, strict=True):
        _assign(middles, layer, keep_apart([0.0] * len(layer), [1.0] * len(layer), steps))
    for turn in range(_SETTLING):
        for number in range(len(layers)) if turn % 2 else reversed(range(len(layers))):
            layer = layers[number]
            linked = [neighbours.above[item] + neighbours.below[item] for item in layer]
            wanted = [
                sum(middles[other] * weight for other, weight in pulls) / sum(weight for _, weight in pulls)
                if pulls
                else middles[item]
                for item, pulls in zip(layer, linked, strict=True)
            ]
            weights = [sum(weight for _, weight in pulls) or 0.1 for pulls in linked]
            _assign(middles, layer, keep_apart(wanted, weights, distances[number]))
    rounded = [0] * len(widths)
    for layer, steps in zip(layers, distances, strict=True):
        apart = keep_apart([middles[item] for item in layer], [1.0] * len(layer), steps)
        for item, middle in zip(layer, apart, strict=True):
            rounded[item] = floor(middle + 0.5)
    return rounded


def straighten(
    chains: Sequence[Sequence[int]],
    middles: Sequence[int],
    layers: Sequence[Sequence[int]],
    widths: Sequence[int],
    gaps: Sequence[int],
) -> list[int]:
    """Move the middles so that each of the ``chains`` runs straight as far down as its neighbours leave it room."""
    # Greedy interval intersection: a run is extended while the rooms of its items have a common x, and then placed at
    # the nearest such x to its mean.
    straight = list(middles)
    beside = {item: (layer, index) for layer in layers for index, item in enumerate(layer)}

    def room(item: int) -> tuple[float, float]:
        layer, index = beside[item]
        left, right = layer[index - 1 : index], layer[index + 1 : index + 2]
        return (
            max((straight[o] + distance(o, item, widths, gaps) for o in left), default=-inf),
            min((straight[o] - distance(item, o, widths, gaps) for o in right), default=inf),
        )

    for chain in chains:
        start = 0
        while start < len(chain):
            (low, high), end = room(chain[start]), start + 1
            while end < len(chain):
                least, most = room(chain[end])
                if max(low, least) > min(high, most):
                    break
                low, high, end = max(low, least), min(high, most), end + 1
            run = chain[start:end]
            place = min(max(sum(straight[item] for item in run) / len(run), low), high)
            for item in run:
                straight[item] = floor(place + 0.5)
            start = end
    return straight


def distance(left: int, right: int, widths: Sequence[int], gaps: Sequence[int]) -> int:
    """Return the minimum pixels from the middle of an item to that of the next one in its layer."""
    return (widths[left] + widths[right] + 1) // 2 + max(gaps[left], gaps[right])


def _assign(middles: list[float], layer: Sequence[int], values: Sequence[float]) -> None:
    for item, value in zip(layer, values, strict=True):
        middles[item] = value


def keep_apart(wanted: Sequence[float], weights: Sequence[float], distances: Sequence[int]) -> list[float]:
    """Return the places nearest to ``wanted``, in weighted least squares, with ``distances`` between neighbours.

    After subtracting the distances before each place, "far enough apart" means "not decreasing": isotonic regression,
    solved by pooling adjacent violators (Ayer and others, 1955).
    """
    before = [0]
    for distance in distances:
        before.append(before[-1] + distance)
    blocks: list[tuple[float, float, int]] = []  # middle, weight, number of places
    for place, weight, room in zip(wanted, weights, before, strict=False):
        value, size = place - room, 1
        while blocks and blocks[-1][0] >= value:
            other, heavy, number = blocks.pop()
            value = (value * weight + other * heavy) / (weight + heavy)
            weight, size = weight + heavy, size + number
        blocks.append((value, weight, size))
    flat = [value for value, _, size in blocks for _ in range(size)]
    return [value + room for value, room in zip(flat, before, strict=False)]
