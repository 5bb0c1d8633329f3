"""Boxes, arrows and labels of a pipeline's graph, for all pictures of it, text or image."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.authoring.repository.config import ModelConfig
from shoal.authoring.repository.graph import ROUND_TRIP, TO_OTHER_GPU, Edge, Graph, is_on_gpu, is_on_host, name_device

ON_GPU, ON_HOST, NESTED, OPEN, END = "gpu", "cpu", "ensemble", "open", "end"
CALLS = "calls"  # label of an arrow to a model that code calls
LEGEND = "double, *: many per request"


@dataclass(frozen=True)
class Box:
    """A step, a model that another model's code calls, the request, or the answer.

    ``kind`` is one of ``ON_GPU``, ``ON_HOST``, ``NESTED`` (an ensemble), ``OPEN`` (unknown device) and ``END``.
    """

    title: str
    subtitle: str
    kind: str


@dataclass(frozen=True)
class Joined:
    """One arrow for all tensors (``edges``) from one box to another; ``source`` and ``target`` are numbers of boxes.

    An arrow without tensors is a call: the code of one model sends requests to the other.
    """

    source: int
    target: int
    edges: tuple[Edge, ...]

    @property
    def warning(self) -> str:
        """Costly copy that a tensor needs: ``host round trip``, else ``to another GPU``; empty if none does."""
        crossings = {edge.crossing for edge in self.edges}
        return next((costly for costly in (ROUND_TRIP, TO_OTHER_GPU) if costly in crossings), "")

    @property
    def is_repeated(self) -> bool:
        """Whether one of the tensors is sent many times per request."""
        return any(edge.is_repeated for edge in self.edges)

    @property
    def lines(self) -> list[tuple[str, str]]:
        """Name and type of each tensor; ``*`` marks a tensor that is sent many times per request."""
        return [(f"{edge.name} *" if edge.is_repeated else edge.name, edge.tensor.kind) for edge in self.edges]


def list_boxes(graph: Graph) -> list[Box]:
    """List the request, the steps and the answer, then the models that other models' code calls."""
    steps = [_box(step.model, graph.members[step.model]) for step in graph.steps]
    hosts = {name: f"in {caller}" for caller, name in graph.calls() if name in graph.members[caller].hosts}
    called = [_box(name, graph.members.get(name), hosts.get(name, "")) for name in _called(graph)]
    return [Box("request", "", END), *steps, Box("answer", "", END), *called]


def _box(name: str, config: ModelConfig | None, place: str = "") -> Box:
    if config is None:
        return Box(name, "not found", OPEN)
    words = dict.fromkeys([config.backend or config.platform, name_device(config), place])
    return Box(name, " · ".join(word for word in words if word), _kind(config))


def _called(graph: Graph) -> list[str]:
    return list(dict.fromkeys(called for _, called in graph.calls()))


def join_edges(graph: Graph) -> list[Joined]:
    """Make one arrow for all tensors from one box to another, and one per call; `list_boxes` numbers the boxes."""
    joined: dict[tuple[int, int], list[Edge]] = {}
    for edge in graph.edges():
        source = 0 if edge.source is None else edge.source + 1
        target = len(graph.steps) + 1 if edge.target is None else edge.target + 1
        edges = joined.setdefault((source, target), [])
        if edge.name not in [other.name for other in edges]:
            edges.append(edge)
    tensors = [Joined(source, target, tuple(edges)) for (source, target), edges in joined.items()]
    return [*tensors, *_join_calls(graph)]


def _join_calls(graph: Graph) -> list[Joined]:
    """Make an arrow for each pair of calling and called model, from every step of the calling model.

    If the calling model is not a step, the arrow begins at the model's own box.
    """
    first = len(graph.steps) + 2
    called = {name: first + number for number, name in enumerate(_called(graph))}
    steps = [step.model for step in graph.steps]
    return [
        Joined(source, called[name], ())
        for caller, name in graph.calls()
        for source in ([i for i, model in enumerate(steps, 1) if model == caller] or [called[caller]])
        if source != called[name]
    ]


def _kind(config: ModelConfig) -> str:
    if config.is_ensemble:
        return NESTED
    return ON_GPU if is_on_gpu(config) else ON_HOST if is_on_host(config) else OPEN


def legible(text: str) -> str:
    """Replace each character that is not printable by U+FFFD, since XML cannot contain some of these characters."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)
