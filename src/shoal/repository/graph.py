"""An ensemble as a graph: steps, the tensors between them, and the device of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from shoal.component.spec import ModelSpec, TensorSpec
from shoal.errors import ArtifactError
from shoal.repository.config import CONFIG, ModelConfig, Step, read_config
from shoal.repository.devices import ROUND_TRIP, TO_HOST, find_crossing, is_on_gpu, name_device


@dataclass(frozen=True)
class Edge:
    """A tensor between two steps: ``source`` and ``target`` are step indices, None is the request or the answer.

    ``name`` is the tensor's name in the ensemble, ``tensor`` its declaration where it is read. ``crossing`` is its copy
    between devices, or empty: ``to GPU``, ``to host``, ``to another GPU``, or ``host round trip``, a copy to the host
    of data that a later step needs on a GPU. ``is_repeated``: it comes any number of times per request.
    """

    name: str
    tensor: TensorSpec
    source: int | None
    target: int | None
    crossing: str = ""
    is_repeated: bool = False


@dataclass(frozen=True)
class Graph:
    """A model and all that it calls. A model that is not an ensemble is a graph of one step.

    ``members`` are the models of the steps, and those that their code calls (`ModelConfig.calls`), if they are there.
    """

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
        steps = {step.model for step in config.steps}

        def find(name: str) -> ModelConfig | None:
            member = folder.parent / name
            return read_config(member) if name in steps or (member / CONFIG).is_file() else None

        return cls.build(config, find_members(config, find))

    @classmethod
    def build(cls, config: ModelConfig, members: Mapping[str, ModelConfig]) -> Graph:
        """Build the graph of ``config`` over its members, by name.

        Raises:
            ArtifactError: a member is missing, or a step maps a tensor that its model does not have.
        """
        if not config.is_ensemble:
            maps = ({t.name: t.name for t in tensors} for tensors in (config.spec.inputs, config.spec.outputs))
            called = find_members(config, members.get)
            return cls(config, (Step(config.name, 1, *maps),), {config.name: config, **called})
        for step in config.steps:
            if step.model not in members:  # the rule and the error text of Triton's core
                raise ArtifactError(
                    f"ensemble {config.name} contains models that are not available or ambiguous: {step.model}.",
                    f"Known: {', '.join(sorted(members))}.",
                )
            _check_names(config.name, step, members[step.model].spec)
        return cls(config, config.steps, _mark_decoupled(members, members.get))

    def producer(self, tensor: str) -> int | None:
        """Return the step that writes an ensemble tensor; None where it is an input of the request."""
        for index, step in enumerate(self.steps):
            if tensor in step.outputs.values():
                return index
        return None

    def edges(self) -> list[Edge]:
        """Return an edge from writer to reader for every tensor, in the order of the steps."""
        edges, writers = [], {t: i for i, s in reversed([*enumerate(self.steps)]) for t in s.outputs.values()}
        for index, step in enumerate(self.steps):
            specs = {t.name: t for t in self.members[step.model].spec.inputs}
            edges += [Edge(tensor, specs[name], writers.get(tensor), index) for name, tensor in step.inputs.items()]
        edges += [Edge(t.name, t, writers.get(t.name), None) for t in self.config.spec.outputs]
        return [
            replace(edge, crossing=self._crossing(edge, edges), is_repeated=edge.source in self._repeating)
            for edge in edges
        ]

    def crossings(self) -> list[Edge]:
        """Return the edges whose tensors are copied to another device, in the order of the steps."""
        return [edge for edge in self.edges() if edge.crossing]

    def device(self, step: int) -> str:
        """Name a step's device: ``GPU 0``, ``GPU 0, 1``, ``GPU`` (each one), ``CPU``, ``ensemble``, or ``auto``."""
        return name_device(self._model(step))

    def repeats(self, step: int) -> bool:
        """Whether a step answers a request any number of times: it is decoupled, or behind one that is."""
        return step in self._repeating

    @cached_property
    def _repeating(self) -> frozenset[int | None]:
        tensors: set[str] = set()
        found: set[int | None] = set()
        while new := {
            index
            for index, step in enumerate(self.steps)
            if index not in found and (self._model(index).spec.is_decoupled or tensors & set(step.inputs.values()))
        }:
            found |= new
            tensors |= {tensor for index in new for tensor in self.steps[index].outputs.values()}
        return frozenset(found)

    def calls(self) -> list[tuple[str, str]]:
        """Return who calls whom beside the steps (BLS), from the steps' models on: each caller with each callee."""
        callers = list(dict.fromkeys(step.model for step in self.steps))
        found: list[tuple[str, str]] = []
        for caller in callers:  # which grows
            for called in self.members[caller].calls if caller in self.members else ():
                found.append((caller, called))
                callers += [called] if called not in callers else []
        return found

    def levels(self) -> list[int]:
        """Return each step's level: the steps on the longest path to it, itself included. Equal levels run in parallel.

        Raises:
            ArtifactError: a step or an output waits for a tensor that no step writes, or in a circle.
        """
        # Kahn's topological sort, a whole level per round: the steps whose inputs are all known form the next level.
        known = {tensor.name for tensor in self.config.spec.inputs}
        levels: dict[int, int] = {}
        while ready := [i for i, s in enumerate(self.steps) if i not in levels and known >= set(s.inputs.values())]:
            level = 1 + max(levels.values(), default=0)
            levels |= dict.fromkeys(ready, level)
            known |= {tensor for index in ready for tensor in self.steps[index].outputs.values()}
        self._check_written(known)
        return [levels[index] for index in range(len(self.steps))]

    def _model(self, step: int) -> ModelConfig:
        return self.members[self.steps[step].model]

    def _crossing(self, edge: Edge, edges: list[Edge]) -> str:
        source, target = (None if index is None else self._model(index) for index in (edge.source, edge.target))
        crossing = find_crossing(source, target, edge.tensor)
        if crossing == TO_HOST and edge.target is not None:
            after = _steps_after(edge.target, edges)
            return ROUND_TRIP if any(is_on_gpu(self._model(index)) for index in after) else TO_HOST
        return crossing

    def _check_written(self, known: set[str]) -> None:
        """Check that every tensor is written, with the error text of Triton's core, which covers outputs alone."""
        outputs = [tensor.name for tensor in self.config.spec.outputs if tensor.name not in known]
        missing = [tensor for step in self.steps for tensor in step.inputs.values() if tensor not in known] + outputs
        if not missing:
            return
        written = {tensor for step in self.steps for tensor in step.outputs.values()}
        tensor = next((tensor for tensor in missing if tensor not in written), missing[0])
        name = self.config.name
        what = f"output '{outputs[0]}' for" if outputs else "a step of"
        raise ArtifactError(
            f"{what} ensemble '{name}' is not {'written' if outputs else 'run'}: at least one of its depending tensors,"
            f" '{tensor}', is not connected.",
            "Steps wait for one another in a circle: take one out."
            if tensor in written
            else f"No step writes '{tensor}', and it is not an input of the ensemble.",
        )


def find_members(config: ModelConfig, find: Callable[[str], ModelConfig | None]) -> dict[str, ModelConfig]:
    """Find the models of an ensemble's steps and those that code calls, but not what is within nested ensembles.

    The declaration of a nested ensemble gets ``is_decoupled``, which its configuration does not say itself.
    """
    found: dict[str, ModelConfig] = {}
    waiting = [*sorted({step.model for step in config.steps}), *config.calls]
    while waiting:
        name = waiting.pop(0)
        member = find(name) if name not in found and name != config.name else None
        if member is not None:
            found[name] = member
            waiting += member.calls
    return _mark_decoupled(found, find)


def _mark_decoupled(
    members: Mapping[str, ModelConfig], find: Callable[[str], ModelConfig | None]
) -> dict[str, ModelConfig]:
    return {
        name: replace(member, spec=replace(member.spec, is_decoupled=True)) if is_decoupled(member, find) else member
        for name, member in members.items()
    }


def is_decoupled(config: ModelConfig, find: Callable[[str], ModelConfig | None], above: tuple[str, ...] = ()) -> bool:
    """Whether a model, or a member of an ensemble, is decoupled, as far as the members are there."""
    for name in {step.model for step in config.steps} - {*above}:  # names of folders: configurations may share one
        with suppress(ArtifactError):
            member = find(name)
            if member is not None and is_decoupled(member, find, (*above, name)):
                return True
    return config.spec.is_decoupled


def _steps_after(step: int, edges: list[Edge]) -> set[int]:
    """Return all steps that depend on ``step``, directly or indirectly."""
    found: set[int] = set()
    left = [step]
    while left:
        here = left.pop()
        new = {e.target for e in edges if e.source == here and e.target is not None} - found
        found |= new
        left += new
    return found


def _check_names(ensemble: str, step: Step, spec: ModelSpec) -> None:
    """Check the tensor names that a step maps, with the error text of Triton's core."""
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
