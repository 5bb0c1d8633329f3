"""Copies that a pipeline's components make between host and device, and the check that they stay within a budget."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shoal.clients.client.operators import read_page
from shoal.errors import ShoalError
from shoal.kit.component.ledger import (
    ACROSS,
    BATCHES,
    BYTES,
    CONTROL,
    COPIES,
    EXACT,
    EXACT_ROWS,
    SECONDS,
    SETUP,
    UP,
    CopyEdge,
    CopyTotals,
    Ledger,
)

if TYPE_CHECKING:
    from shoal.authoring.repository.graph import Graph

CONTROL_BYTES = 1024  # per batch, for scalars that decide sizes on the host


class Copy(NamedTuple):
    """Total of the copies between host and device that one model made of one tensor in one direction.

    ``edge`` holds the tensor's name and the direction. Instead of a tensor it may name another cause of copies:
    ``(setup)``, ``(control)`` or ``(exact rows)``.
    """

    model: str
    edge: CopyEdge
    traffic: CopyTotals


@dataclass(frozen=True)
class Copies:
    """Copies between host and device that the models of a pipeline have made so far, by model, tensor and direction.

    The difference of two readings gives the copies made in between. ``events`` counts, by model, the batches, the rows,
    and the rows that were tokenized on the host because the device's tokenizer would give other tokens. Read the copies
    while no request is running: in the middle of a batch, only some of its copies have been counted.
    """

    traffic: Mapping[tuple[str, CopyEdge], CopyTotals]
    events: Mapping[str, Mapping[str, int]]
    has_setup: bool = True  # whether copies made at start-up are included

    @classmethod
    def read(cls, ledgers: Iterable[tuple[str, Ledger]]) -> Copies:
        """Read the copies of models in this process from the models' ledgers, which count them, by the models' names.

        Versions of one model add up, as the instances of a model on a server do.
        """
        traffic: dict[tuple[str, CopyEdge], CopyTotals] = defaultdict(CopyTotals)
        events: dict[str, Counter[str]] = defaultdict(Counter)
        for model, ledger in ledgers:
            events[model].update(ledger.events)
            for edge, moved in ledger.traffic.items():
                traffic[model, edge] += moved
        return cls(dict(traffic), {model: dict(counts) for model, counts in events.items()})

    @classmethod
    def parse(cls, metrics: str) -> Copies:
        """Parse the copies of a server's models from the text of its metrics endpoint, which is up to a second old."""
        from prometheus_client.parser import text_string_to_metric_families

        parts: dict[tuple[str, CopyEdge], Counter[str]] = defaultdict(Counter)
        events: dict[str, Counter[str]] = defaultdict(Counter)
        for family in text_string_to_metric_families(metrics):
            for name, labels, value, *_ in family.samples:
                # metrics of a component have an instance or an edge; those of the service have neither
                if not name.startswith("shoal_") or labels.keys().isdisjoint(("instance", "edge")):
                    continue
                if "edge" in labels:  # instances of one model add up
                    parts[labels["model"], CopyEdge(labels["edge"], labels["direction"])][name] += value  # type: ignore[assignment]
                else:
                    events[labels["model"]][name.removeprefix("shoal_").removesuffix("_total")] += int(value)
        traffic = {
            key: CopyTotals(int(part[COPIES]), int(part[BYTES]), float(part[SECONDS])) for key, part in parts.items()
        }
        return cls(traffic, {model: dict(counts) for model, counts in events.items()})

    def __sub__(self, before: Copies) -> Copies:
        traffic = {key: t - before.traffic.get(key, CopyTotals()) for key, t in self.traffic.items()}
        events = {
            model: {event: number - before.events.get(model, {}).get(event, 0) for event, number in counts.items()}
            for model, counts in self.events.items()
        }
        return Copies({key: t for key, t in traffic.items() if t.copies}, events, has_setup=False)

    def __iter__(self) -> Iterator[Copy]:
        """Iterate over the totals, sorted by model, tensor and direction."""
        return (Copy(model, edge, self.traffic[model, edge]) for model, edge in sorted(self.traffic))

    def beyond(self, graph: Graph) -> list[str]:
        """Describe the copies beyond the budget of a pipeline on one GPU, one text per model and tensor.

        From host to device, the budget allows the request's tensors, and the token ids of rows that were tokenized on
        the host. From device to host, it allows the answer. It also allows the copies that models make when they start,
        and at most 1 KiB per batch of control scalars, which are values that decide sizes on the host. A copy between
        steps is allowed only if one step is placed on the host and the other on a GPU, and if it does not go back.
        """
        return [
            f"{copy.model}: {copy.edge.name} went {copy.edge.direction} {copy.traffic.copies} times,"
            f" {copy.traffic.num_bytes} bytes in all"
            for copy in self
            if copy.model in graph.members and not self._is_within(copy, graph)
        ]

    def _is_within(self, copy: Copy, graph: Graph) -> bool:
        (name, direction), traffic = copy.edge, copy.traffic
        events = self.events.get(copy.model, {})
        batches = events.get(BATCHES, 0)
        if name == SETUP:
            return self.has_setup
        if direction == ACROSS:
            return False
        if name == CONTROL:
            return traffic.num_bytes <= CONTROL_BYTES * batches
        if name == EXACT:
            return direction == UP and traffic.copies <= 2 * batches and events.get(EXACT_ROWS, 0) > 0
        allowed = _ends(graph, direction) | _moves(graph, direction)
        return traffic.copies <= batches and (copy.model, name) in allowed

    def check(self, graph: Graph) -> None:
        """Check that the copies stay within the budget that ``beyond`` describes.

        Raises:
            ShoalError: copies exceed the budget; the message names their models and tensors.
        """
        beyond = self.beyond(graph)
        if beyond:
            raise ShoalError(
                f"Copied beyond the budget: {'; '.join(beyond)}.",
                "Keep arrays on context.device, and read values with device.fetch(array, CONTROL) alone.",
            )


def read_metrics(url: str, api_key: str = "", ca_cert: str = "", client_cert: str = "") -> Copies:
    """Read the copies that the models of a running server have made, from its metrics endpoint.

    The options are those of ``shoal.Client``, for HTTP.

    Raises:
        InputError: the value of an option is invalid.
        ServerError: no server answers at ``url``, or it refuses the key.
    """
    return Copies.parse(read_page(url, "/metrics", api_key, ca_cert, client_cert))


def _moves(graph: Graph, direction: str) -> set[tuple[str, str]]:
    """Return the (model, tensor) pairs of what steps read from steps that their configurations place elsewhere."""
    from shoal.authoring.repository.graph import TO_GPU, TO_HOST

    crossing = TO_GPU if direction == UP else TO_HOST
    edges = [edge for edge in graph.edges() if edge.crossing == crossing and edge.source is not None]
    steps = [(graph.steps[edge.target], edge.name) for edge in edges if edge.target is not None]
    return {(step.model, name) for step, tensor in steps for name, given in step.inputs.items() if given == tensor}


def _ends(graph: Graph, direction: str) -> set[tuple[str, str]]:
    """Return the (model, tensor) pairs of the request's inputs (for ``up``) or the answer's outputs (for ``down``)."""
    if direction == UP:
        read = ((step.model, name, tensor) for step in graph.steps for name, tensor in step.inputs.items())
        return {(model, name) for model, name, tensor in read if graph.producer(tensor) is None}
    answers = {tensor.name for tensor in graph.config.spec.outputs}
    written = ((step.model, name, tensor) for step in graph.steps for name, tensor in step.outputs.items())
    return {(model, name) for model, name, tensor in written if tensor in answers}
