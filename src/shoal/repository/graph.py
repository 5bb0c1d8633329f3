"""An ensemble as a graph: steps, the tensors between them, and its picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.component.spec import ModelSpec, TensorSpec
from shoal.errors import ArtifactError
from shoal.repository.pbtxt import ModelConfig, Step, read_config


@dataclass(frozen=True)
class Edge:
    """A tensor on its way: ``source`` and ``target`` are step indices, None is the request or the answer.

    ``name`` is the tensor's name in the ensemble, ``tensor`` its declaration where it is read.
    """

    name: str
    tensor: TensorSpec
    source: int | None
    target: int | None


@dataclass(frozen=True)
class Graph:
    """A model and all it calls. A model that is no ensemble is a graph of one step."""

    config: ModelConfig
    steps: tuple[Step, ...]
    members: Mapping[str, ModelConfig]

    @classmethod
    def load(cls, folder: Path) -> Graph:
        """Read the ensemble (or single model) in ``folder`` and its members from the folders beside it.

        Raises:
            ArtifactError: a member is missing, or a step maps a tensor that its model does not have.
        """
        config = read_config(folder)
        names = {step.model for step in config.steps}
        return cls.build(config, {name: read_config(folder.parent / name) for name in sorted(names)})

    @classmethod
    def build(cls, config: ModelConfig, members: Mapping[str, ModelConfig]) -> Graph:
        """The graph of ``config`` over its members, by name."""
        if not config.is_ensemble:
            maps = ({t.name: t.name for t in tensors} for tensors in (config.spec.inputs, config.spec.outputs))
            return cls(config, (Step(config.name, 1, *maps),), {config.name: config})
        for step in config.steps:
            _check_names(config.name, step, members[step.model].spec)
        return cls(config, config.steps, members)

    def producer(self, tensor: str) -> int | None:
        """The step that writes an ensemble tensor; None where the request brings it."""
        for index, step in enumerate(self.steps):
            if tensor in step.outputs.values():
                return index
        return None

    def edges(self) -> list[Edge]:
        """Every tensor from who writes it to who reads it, in the order of the steps."""
        edges = []
        for index, step in enumerate(self.steps):
            specs = {t.name: t for t in self.members[step.model].spec.inputs}
            edges += [Edge(tensor, specs[name], self.producer(tensor), index) for name, tensor in step.inputs.items()]
        return edges + [Edge(t.name, t, self.producer(t.name), None) for t in self.config.spec.outputs]

    def mermaid(self) -> str:
        """The graph as Mermaid text, which GitHub and most editors draw."""
        lines = ["flowchart LR", "  request([request])"]
        lines += [f'  s{i}["{step.model}<br/>{_kind(self.members[step.model])}"]' for i, step in enumerate(self.steps)]
        lines.append("  answer([answer])")
        for edge in self.edges():
            source = "request" if edge.source is None else f"s{edge.source}"
            target = "answer" if edge.target is None else f"s{edge.target}"
            lines.append(f'  {source} -->|"{edge.name}<br/>{_shape(edge.tensor)}"| {target}')
        return "\n".join(lines) + "\n"


def _kind(config: ModelConfig) -> str:
    return config.backend or config.platform


def _shape(tensor: TensorSpec) -> str:
    return f"{tensor.dtype.removeprefix('TYPE_')} {list(tensor.dims)}"


def _check_names(ensemble: str, step: Step, spec: ModelSpec) -> None:
    """Core's own rule, in core's words."""
    inputs, outputs = ({t.name for t in tensors} for tensors in (spec.inputs, spec.outputs))
    for name, tensor in step.inputs.items():
        if name not in inputs:
            what = f"is mapping to non-existing input {name}"
            raise ArtifactError(*_core_error(ensemble, tensor, what, step.model, inputs))
    for name, tensor in step.outputs.items():
        if name not in outputs:
            what = f"is mapped from non-existing output {name}"
            raise ArtifactError(*_core_error(ensemble, tensor, what, step.model, outputs))


def _core_error(ensemble: str, tensor: str, what: str, model: str, known: set[str]) -> tuple[str, str]:
    return (
        f"in ensemble {ensemble}, ensemble tensor {tensor} {what} in model {model}.",
        f"Model {model} has: {', '.join(sorted(known))}.",
    )
