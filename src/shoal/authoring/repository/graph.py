"""An ensemble as a graph: the steps and their devices, the tensors between steps, and the copies between devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from shoal.authoring.repository.call_graph import find_members, mark_decoupled
from shoal.authoring.repository.config import CONFIG, ModelConfig, Step, read_config
from shoal.authoring.repository.versions import LATEST
from shoal.errors import ArtifactError
from shoal.kit.component.spec import STRING, ModelSpec, TensorSpec

ROUND_TRIP, TO_HOST, TO_GPU, TO_OTHER_GPU = "host round trip", "to host", "to GPU", "to another GPU"
HOST, GPU, ENSEMBLE, AUTO = "CPU", "GPU", "ensemble", "auto"


@dataclass(frozen=True)
class Edge:
    """A tensor between two steps.

    ``source`` and ``target`` are the indices of the steps that write and read it; a ``source`` of None is the request,
    and a ``target`` of None is the answer. ``name`` is the tensor's name in the ensemble, and ``tensor`` is the
    reader's declaration of it. ``crossing`` names the copy of the tensor between devices, empty if there is none: ``to
    GPU``, ``to host``, ``to another GPU``, or ``host round trip``, which is a copy to the host of data that a later
    step needs on a GPU. ``is_repeated`` is True if a decoupled model sends the tensor any number of times per request.
    """

    name: str
    tensor: TensorSpec
    source: int | None
    target: int | None
    crossing: str = ""
    is_repeated: bool = False


@dataclass(frozen=True)
class Graph:
    """An ensemble and the models that it calls. A model that is not an ensemble is a graph of one step.

    ``members`` are, by name, the models of the steps and the models that their code calls (`ModelConfig.calls`). A
    model that only code calls may be missing.
    """

    config: ModelConfig
    steps: tuple[Step, ...]
    members: Mapping[str, ModelConfig]

    @classmethod
    def load(cls, folder: Path) -> Graph:
        """Read the ensemble (or single model) in ``folder``, and its members from the folders beside it.

        Raises:
            ArtifactError: the model of a step is missing, or a step maps a tensor that its model does not have.
        """
        config = read_config(folder)
        steps = {step.model for step in config.steps}

        def find(name: str) -> ModelConfig | None:
            member = folder.parent / name
            return read_config(member) if name in steps or (member / CONFIG).is_file() else None

        return cls.build(config, find_members(config, find))

    @classmethod
    def build(cls, config: ModelConfig, members: Mapping[str, ModelConfig]) -> Graph:
        """Build the graph of ``config``; ``members`` are the models that it may call, by name.

        Raises:
            ArtifactError: the model of a step is missing, or a step maps a tensor that its model does not have.
        """
        if not config.is_ensemble:
            maps = ({t.name: t.name for t in tensors} for tensors in (config.spec.inputs, config.spec.outputs))
            called = find_members(config, members.get)
            return cls(config, (Step(config.name, LATEST, *maps),), {config.name: config, **called})
        for step in config.steps:
            if step.model not in members:
                raise ArtifactError(
                    f"The ensemble {config.name} has a step of model {step.model}, which is not there.",
                    f"Known: {', '.join(sorted(members))}.",
                )
            _check_names(config.name, step, members[step.model].spec)
        return cls(config, config.steps, mark_decoupled(members, members.get))

    def producer(self, tensor: str) -> int | None:
        """Return the index of the step that writes a tensor of the ensemble; None for an input of the request.

        An engine's ``carry`` is an input and an output of the same name: the request sends it.
        """
        if any(tensor == sent.name for sent in self.config.spec.inputs):
            return None
        for index, step in enumerate(self.steps):
            if tensor in step.outputs.values():
                return index
        return None

    def edges(self) -> list[Edge]:
        """Return an edge for each tensor and step that reads it, in the order of steps, then edges to the answer."""
        edges, writers = [], {t: i for i, s in reversed([*enumerate(self.steps)]) for t in s.outputs.values()}
        sources = writers | {tensor.name: None for tensor in self.config.spec.inputs}  # as ``producer``
        for index, step in enumerate(self.steps):
            specs = {t.name: t for t in self.members[step.model].spec.inputs}
            edges += [Edge(tensor, specs[name], sources.get(tensor), index) for name, tensor in step.inputs.items()]
        edges += [Edge(t.name, t, writers.get(t.name), None) for t in self.config.spec.outputs]
        before_gpus = _find_before(edges, [i for i, step in enumerate(self.steps) if is_on_gpu(self._model(i))])
        return [
            replace(edge, crossing=self._crossing(edge, before_gpus), is_repeated=edge.source in self._repeating)
            for edge in edges
        ]

    def device(self, step: int) -> str:
        """Name the devices of a step's model, such as ``GPU 0`` or ``CPU``, as ``name_device`` does."""
        return name_device(self._model(step))

    def repeats(self, step: int) -> bool:
        """Whether a step can answer any number of times per request: its model or one before it is decoupled."""
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
        """Return the calls that models' code makes (BLS), as pairs of caller and callee.

        The callers are the steps' models and the models that they call in this way, directly or indirectly.
        """
        callers = list(dict.fromkeys(step.model for step in self.steps))
        found: list[tuple[str, str]] = []
        for caller in callers:  # the list grows in the loop
            for called in self.members[caller].calls if caller in self.members else ():
                found.append((caller, called))
                callers += [called] if called not in callers else []
        return found

    def levels(self) -> list[int]:
        """Return each step's level: the number of steps on the longest path to it, including the step itself.

        Steps of the same level run in parallel.

        Raises:
            ArtifactError: steps wait for one another in a circle, or a step or output waits for a tensor that no step
                writes.
        """
        known = {tensor.name for tensor in self.config.spec.inputs}
        levels: dict[int, int] = {}
        tensors = [(step.inputs.values(), step.outputs.values()) for step in self.steps]
        for level, ready in enumerate(find_rounds(tensors, known), start=1):
            levels |= dict.fromkeys(ready, level)
        self._check_written(known | {tensor for index in levels for tensor in tensors[index][1]})
        return [levels[index] for index in range(len(self.steps))]

    def _model(self, step: int) -> ModelConfig:
        return self.members[self.steps[step].model]

    def _crossing(self, edge: Edge, before_gpus: set[int]) -> str:
        source, target = (None if index is None else self._model(index) for index in (edge.source, edge.target))
        crossing = find_crossing(source, target, edge.tensor)
        return ROUND_TRIP if crossing == TO_HOST and edge.target in before_gpus else crossing

    def _check_written(self, known: set[str]) -> None:
        """Check that every tensor that a step or the answer reads is ``known``, that is, will be written."""
        needed = [tensor for step in self.steps for tensor in step.inputs.values()]
        needed += [tensor.name for tensor in self.config.spec.outputs]
        missing = [tensor for tensor in needed if tensor not in known]
        if missing:
            written = {tensor for step in self.steps for tensor in step.outputs.values()}
            unwritten = next((tensor for tensor in missing if tensor not in written), "")
            raise ArtifactError(
                f"In the ensemble {self.config.name}, no step writes the tensor {unwritten}."
                if unwritten
                else f"In the ensemble {self.config.name}, steps wait for one another in a circle: {missing[0]}.",
                f"Type: shoal check {self.config.folder}",
            )


def find_rounds(steps: Sequence[tuple[Iterable[str], Iterable[str]]], known: Iterable[str]) -> Iterator[list[int]]:
    """Sort steps, each given by the tensors that it reads and writes, into rounds; yield the indices of each round.

    A step is in the first round after which all tensors that it reads are known, ``known`` at first. Steps that wait
    for one another or for a tensor that no step writes are left out.
    """
    known, readers, missing = {*known}, dict[str, list[int]](), []
    for index, (reads, _) in enumerate(steps):
        unknown = {*reads} - known
        missing.append(len(unknown))
        for tensor in unknown:
            readers.setdefault(tensor, []).append(index)
    ready = [index for index, number in enumerate(missing) if not number]
    while ready:
        yield ready
        new = {tensor for index in ready for tensor in steps[index][1]} - known
        known |= new
        waiting = [index for tensor in new for index in readers.get(tensor, ())]
        for index in waiting:
            missing[index] -= 1
        ready = sorted({index for index in waiting if not missing[index]})


def _find_before(edges: list[Edge], steps: list[int]) -> set[int]:
    """Return the indices of all steps that one of ``steps`` depends on, directly or indirectly."""
    sources: dict[int | None, set[int]] = {}
    for edge in edges:
        if edge.source is not None:
            sources.setdefault(edge.target, set()).add(edge.source)
    found, left = set[int](), steps
    while left:
        new = sources.get(left.pop(), set()) - found
        found |= new
        left += new
    return found


def _check_names(ensemble: str, step: Step, spec: ModelSpec) -> None:
    """Check that the model of a step has every tensor that the step maps."""
    for kind, mapped, tensors in (("input", step.inputs, spec.inputs), ("output", step.outputs, spec.outputs)):
        known = sorted(tensor.name for tensor in tensors)
        if unknown := sorted(mapped.keys() - set(known)):
            raise ArtifactError(
                f"The ensemble {ensemble} maps {kind} {unknown[0]} of model {step.model}, which has no such {kind}.",
                f"Its {kind}s are: {', '.join(known)}.",
            )


# --- devices ---------------------------------------------------------------------------------------------------------


def name_device(config: ModelConfig) -> str:
    """Name the devices of a model's instances: ``CPU``, ``GPU 0, 1``, ``GPU`` (every GPU), ``ensemble``, or ``auto``.

    ``auto`` means that Triton chooses when it starts; ``by model`` means that the backend chooses (KIND_MODEL).
    Different devices of instance groups are joined: ``GPU 0 + CPU``.
    """
    if config.is_ensemble:
        return ENSEMBLE
    groups = config.message.instance_group
    names = [_name_gpus(config)] if any(group.kind == group.KIND_GPU for group in groups) else []
    for kind, name in (("KIND_CPU", HOST), ("KIND_AUTO", AUTO), ("KIND_MODEL", "by model")):
        names += [name] if any(group.kind == getattr(group, kind) for group in groups) else []
    return " + ".join(names) or AUTO


def _name_gpus(config: ModelConfig) -> str:
    listed = _gpus(config)
    return f"{GPU} {', '.join(map(str, sorted(listed)))}" if listed else GPU


def _gpus(config: ModelConfig) -> set[int]:
    """Return the GPUs that a model is pinned to; empty if one of its GPU instance groups runs on every GPU."""
    groups = [group for group in config.message.instance_group if group.kind == group.KIND_GPU]
    return set() if any(not group.gpus for group in groups) else {int(gpu) for group in groups for gpu in group.gpus}


def is_on_gpu(config: ModelConfig) -> bool:
    """Whether the configuration places every instance on a GPU; False if it leaves the device open."""
    groups = config.message.instance_group
    return not config.is_ensemble and bool(groups) and all(group.kind == group.KIND_GPU for group in groups)


def is_on_host(config: ModelConfig) -> bool:
    """Whether the configuration places every instance on the CPU; False if it leaves the device open."""
    return name_device(config) == HOST


def gets_host_copies(config: ModelConfig) -> bool:
    """Whether Triton gives the model all inputs on the host, even those that are on a GPU.

    This is the default of the Python backend and of backends written in Python (see ``FORCE_CPU_ONLY_INPUT_TENSORS`` in
    python_be.cc).
    """
    is_python = config.backend == "python" or config.message.runtime.endswith(".py")
    return is_python and config.gets_host_inputs


def find_crossing(source: ModelConfig | None, target: ModelConfig | None, tensor: TensorSpec) -> str:
    """Name the copy between devices of a tensor that the model ``source`` writes and the model ``target`` reads.

    A ``source`` of None is the request, and a ``target`` of None is the answer; both are on the host. The result is
    empty if there is no copy, as for texts, which are always on the host. It is also empty if a configuration leaves
    the device open, or if both models have a GPU in common.
    """
    if tensor.dtype == STRING:
        return ""
    comes_from_gpu = source is not None and is_on_gpu(source)
    comes_from_host = source is None or is_on_host(source)
    goes_to_gpu = target is not None and is_on_gpu(target)
    goes_to_host = target is None or is_on_host(target)
    if comes_from_gpu and goes_to_gpu and source is not None and target is not None:
        if gets_host_copies(target):
            return ROUND_TRIP
        first, then = _gpus(source), _gpus(target)
        return TO_OTHER_GPU if first and then and not first & then else ""
    if comes_from_gpu and goes_to_host:
        return TO_HOST
    return TO_GPU if comes_from_host and goes_to_gpu else ""
