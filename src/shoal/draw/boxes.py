"""Content shared by all pictures of a graph, text or image: boxes and arrows, with their labels."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.repository.config import ModelConfig
from shoal.repository.devices import ROUND_TRIP, TO_OTHER_GPU, is_on_gpu, is_on_host
from shoal.repository.graph import Edge, Graph

ON_GPU, ON_HOST, NESTED, OPEN, END = "gpu", "cpu", "ensemble", "open", "end"


@dataclass(frozen=True)
class Box:
    """A step, or the request (first) and the answer (last); ``kind`` is one of the constants above."""

    title: str
    subtitle: str
    kind: str


@dataclass(frozen=True)
class Joined:
    """All tensors that go from one box to another, as one arrow; ``warning`` names a costly copy among them."""

    source: int
    target: int
    edges: tuple[Edge, ...]

    @property
    def warning(self) -> str:
        """Host round trip of one of the tensors, or its copy to another GPU; else empty."""
        crossings = {edge.crossing for edge in self.edges}
        return next((costly for costly in (ROUND_TRIP, TO_OTHER_GPU) if costly in crossings), "")


def list_boxes(graph: Graph) -> list[Box]:
    """List the request, the steps and the answer."""
    steps = []
    for index, step in enumerate(graph.steps):
        config = graph.members[step.model]
        words = dict.fromkeys([config.backend or config.platform, graph.device(index)])
        steps.append(Box(step.model, " · ".join(word for word in words if word), _kind(config)))
    return [Box("request", "", END), *steps, Box("answer", "", END)]


def join_edges(graph: Graph) -> list[Joined]:
    """Make one arrow of all tensors between the same two boxes, numbered as in `list_boxes`."""
    joined: dict[tuple[int, int], list[Edge]] = {}
    for edge in graph.edges():
        source = 0 if edge.source is None else edge.source + 1
        target = len(graph.steps) + 1 if edge.target is None else edge.target + 1
        edges = joined.setdefault((source, target), [])
        if edge.name not in [other.name for other in edges]:
            edges.append(edge)
    return [Joined(source, target, tuple(edges)) for (source, target), edges in joined.items()]


def _kind(config: ModelConfig) -> str:
    if config.is_ensemble:
        return NESTED
    return ON_GPU if is_on_gpu(config) else ON_HOST if is_on_host(config) else OPEN


def legible(text: str) -> str:
    """Replace each character that is not printable, or that XML cannot hold."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)
