"""Run a repository in this process, with Triton's semantics: the same components and graph, without a server."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, Self

from shoal.authoring.repository.config import ModelConfig, Step, read_config
from shoal.authoring.repository.devices import is_in_client
from shoal.authoring.repository.find_graph import find_graph
from shoal.authoring.repository.graph import Graph
from shoal.authoring.repository.loading import component_class
from shoal.authoring.repository.manifest import check_manifest, read_manifest
from shoal.authoring.repository.versions import LATEST, find_version
from shoal.clients.client.calls import Answer, Call, Method, count_rows, join, split, to_arrays, too_many_rows
from shoal.clients.client.copies import Copies
from shoal.clients.client.failures import UnknownModelError, shift_row
from shoal.clients.client.flow import merge
from shoal.errors import ArtifactError, InputError, suggest
from shoal.kit.backends import BACKENDS
from shoal.kit.component.base import Component
from shoal.kit.component.context import Context
from shoal.kit.component.hosted import HostedCallees, HostedModel, host
from shoal.kit.component.spec import FILES, OTHER_REPOSITORY, REPOSITORY, Array, Arrays, ModelSpec, TensorSpec
from shoal.kit.component.tensors import Device

MAX_BRANCHES = 32  # steps of all callers that may run concurrently


class Remote(Protocol):
    """Interface that runs single models elsewhere. ``shoal.Client`` has it, plus ``stream`` for decoupled models."""

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        /,
        *,
        parameters: Mapping[str, Any] | None = None,
        version: int | None = None,
    ) -> Arrays:
        """Return the outputs of one request with request parameters; a ``version`` of None is the latest."""


class Pipeline:
    """An ensemble (or a single model) whose steps run in this process::

        scores = shoal.load("build/repository/my_ensemble")(TEXT=["A text."])["SCORE"]

    If it was loaded with a client as ``remote``, only Python components run in this process, and the other models run
    on the client's server, as in placement ``hybrid``. Threads may share a pipeline.
    """

    def __init__(
        self, graph: Graph, models: Mapping[tuple[str, int], HostedModel], held: ExitStack | None = None
    ) -> None:
        self._graph = graph
        self._models = models
        self._held = held or ExitStack()
        self._pool = self._held.enter_context(ThreadPoolExecutor(MAX_BRANCHES, thread_name_prefix="shoal-branch"))

    def copies(self) -> Copies:
        """Read the copies between host and device that the components have made so far, and their counts of batches.

        To check the copies of one request::

            before = pipeline.copies()
            pipeline(TEXT=["A text."])
            (pipeline.copies() - before).check(pipeline.graph)  # raises if they exceed the budget
        """
        return Copies.read((name, model.device.ledger) for (name, _), model in self._models.items())

    @property
    def name(self) -> str:
        """The model's name in its repository."""
        return self._graph.config.name

    @property
    def is_decoupled(self) -> bool:
        """Whether a request may have any number of answers; if so, use ``stream``."""
        return any(self._models[step.model, step.version].is_decoupled for step in self._graph.steps)

    @property
    def graph(self) -> Graph:
        """Graph of the steps."""
        return self._graph

    def close(self) -> None:
        """Close all components, and stop the threads that run the steps."""
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Inputs of a request."""
        return self._graph.config.spec.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Outputs of an answer."""
        return self._graph.config.spec.outputs

    @property
    def signature(self) -> str:
        """The pipeline as a function: ``name(TEXT: STRING [1]) -> SCORE: FP32 [1]``."""
        return self._graph.config.spec.signature

    def __repr__(self) -> str:
        return f"<Pipeline {self.signature}>"

    def __call__(self, inputs: Mapping[str, Any] | None = None, /, **named: Any) -> Answer:
        """Run one request, with a list or an array for each input, and return all outputs as arrays ``[rows, *dims]``.

        Inputs are given by keyword, in a mapping, or as a data frame of pandas or polars. A request with more rows than
        ``max_batch_size`` is run in parts, and their answers are joined.

        Raises:
            InputError: an input does not fit the model's declaration, or the model is decoupled.
        """
        if self.is_decoupled:
            raise InputError(f"{self.name} answers in pieces.", "Use stream(...).")
        spec = self._graph.config.spec
        arrays = to_arrays(spec.inputs, merge(inputs, named, spec.inputs), is_batched=spec.is_batched)
        call = Call(Method.INFER, self.name, arrays=arrays)
        if not spec.is_batched or count_rows(arrays) <= spec.max_batch_size:
            return self._infer(call)
        parts = split(call, spec.max_batch_size)
        return join(call, parts, [self._infer(part) for part in parts])

    def _infer(self, call: Call) -> Answer:
        tensors = dict(call.arrays)
        try:
            self._run(tensors)
        except InputError as error:
            if not call.first_row:
                raise
            raise InputError(shift_row(error.what, call.first_row), error.fix) from error
        return self._answer(tensors)

    def find_inputs(self, model: str, **inputs: Any) -> dict[str, Array]:
        """Return the tensors that a request gives to the step ``model``; only the steps before it are run.

        Raises:
            InputError: an input does not fit the model's declaration, or no step has that model.
        """
        tensors, steps = self._read(inputs), [step for step in self._graph.steps if step.model == model]
        if not steps:
            raise InputError(f"{self.name} has no step {model}.", suggest(model, [s.model for s in self._graph.steps]))
        while not self._is_due(steps[0], tensors):
            due = next(
                s for s in self._graph.steps if self._is_due(s, tensors) and not tensors.keys() >= {*s.outputs.values()}
            )
            _keep(due, self._call(due, tensors), tensors)
        return self._inputs(steps[0], tensors)

    def stream(self, inputs: Mapping[str, Any] | None = None, /, **named: Any) -> Generator[Answer]:
        """Run one request and yield its answers as they come, each with every output.

        A pipeline without a decoupled model gives one answer. Closing the generator ends the request.

        Raises:
            InputError: an input does not fit the model's declaration, or there are more rows than ``max_batch_size``.
            ShoalError: a model failed, possibly after some answers.
        """
        tensors = self._read(merge(inputs, named, self.inputs))
        return self._stream(tensors, list(self._graph.steps))

    def _stream(self, tensors: dict[str, Array], waiting: list[Step]) -> Generator[Answer]:
        """Run the steps in ``waiting``; the steps after a decoupled model run once for each answer of that model."""
        while waiting:
            due = [step for step in waiting if self._is_due(step, tensors)]
            step = next((step for step in due if not self._models[step.model, step.version].is_decoupled), due[0])
            waiting = [other for other in waiting if other is not step]
            if self._models[step.model, step.version].is_decoupled:
                with closing(self._models[step.model, step.version].stream(self._inputs(step, tensors))) as answers:
                    for outputs in answers:
                        now = dict(tensors)
                        _keep(step, outputs, now)
                        yield from self._stream(now, waiting)
                return
            _keep(step, self._call(step, tensors), tensors)
        yield self._answer(tensors)

    def _read(self, inputs: Mapping[str, Any]) -> dict[str, Array]:
        spec = self._graph.config.spec
        tensors = to_arrays(spec.inputs, inputs, is_batched=spec.is_batched)
        if spec.is_batched and count_rows(tensors) > spec.max_batch_size:
            raise too_many_rows(count_rows(tensors), spec)
        return tensors

    def _answer(self, tensors: Arrays) -> Answer:
        spec = self._graph.config.spec
        found = {out.name: array for out in spec.outputs if (array := tensors[out.name]) is not None}
        return Answer({name: self._fetch(name, array) for name, array in found.items()}, model=spec.name)

    def _fetch(self, tensor: str, array: Array) -> Array:
        """Copy an output of the graph to host memory."""
        index = self._graph.producer(tensor)
        step = self._graph.steps[index or 0]
        names = [name for name, written in step.outputs.items() if written == tensor]
        return self._models[step.model, step.version].device.fetch(array, *names)

    def _run(self, tensors: dict[str, Array]) -> None:
        """Run each step as soon as its inputs are there, independent steps concurrently."""
        waiting = list(self._graph.steps)
        running: dict[Future[Arrays], Step] = {}
        while waiting or running:
            due = [step for step in waiting if self._is_due(step, tensors)]
            waiting = [step for step in waiting if step not in due]
            if len(due) == 1 and not running:  # nothing to overlap with: run it in this thread
                _keep(due[0], self._call(due[0], tensors), tensors)
                continue
            running |= {self._pool.submit(self._call, step, tensors): step for step in due}
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                step = running.pop(future)
                try:
                    _keep(step, future.result(), tensors)
                finally:
                    del future  # or its error would hold this frame, and the frame the error

    def _call(self, step: Step, tensors: Arrays) -> Arrays:
        return self._models[step.model, step.version].call(self._inputs(step, tensors))

    def _inputs(self, step: Step, tensors: Arrays) -> dict[str, Array]:
        return {name: array for name, tensor in step.inputs.items() if (array := tensors.get(tensor)) is not None}

    def _is_due(self, step: Step, tensors: Arrays) -> bool:
        """Whether every tensor that the step reads is available, or was left out of the request."""
        return all(t in tensors or self._graph.producer(t) is None for t in step.inputs.values())


def _keep(step: Step, outputs: Arrays, tensors: dict[str, Array]) -> None:
    """Add a step's outputs to the tensors; those that the answer leaves out are None."""
    tensors.update({tensor: outputs.get(name) for name, tensor in step.outputs.items()})


def _check_same(graph: Graph, remote: Remote, identity: str | None) -> None:
    """Check that ``remote`` serves the same repository, by a dummy request with the repository's identity.

    Components of another repository refuse the request. A server that has only the models which do not run here is
    asked about the files of each of them; native backends ignore the question.
    """
    if not identity or all(member.backend != "python" for member in graph.members.values()):
        return
    try:
        _ask(remote, graph.config.spec, {REPOSITORY: identity})
    except UnknownModelError:
        for member in graph.members.values():
            if member.is_native:
                own = member.spec.parameters
                _ask(remote, member.spec, {FILES: own[FILES]} if FILES in own else {})


def _ask(remote: Remote, spec: ModelSpec, parameters: Mapping[str, str]) -> None:
    """Send a dummy request; raise the errors that say that the server has other models than this repository."""
    rows = 1 if spec.is_batched else None
    nothing = {tensor.name: tensor.zeros(rows) for tensor in spec.inputs if not tensor.is_optional}
    try:
        remote.infer(spec.name, nothing, parameters=parameters)
    except InputError as error:  # a model may refuse the dummy values, but only after the identity check
        if isinstance(error, UnknownModelError) or str(error).startswith(OTHER_REPOSITORY):
            raise


def load(path: Path | str, *, remote: Remote | None = None) -> Pipeline:
    """Load a model, usually an ensemble with its members, to be called in this process.

    ``path`` is a model's folder or a repository. From a repository, the ensemble for which it was composed is loaded,
    or else its only ensemble. With ``remote``, a ``Client``, only Python components run in this process, and the other
    models run on the client's server, which needs to have only these. Each step gets the version of its model that
    Triton would take by ``model_version`` and ``version_policy``.

    Raises:
        ArtifactError: a model, an artifact or a backend is missing.
        InputError: the repository has several ensembles, or ``remote`` serves another repository.
    """
    graph = find_graph(Path(path))
    graph.levels()  # raises if a step waits for a tensor that no step writes
    repository = graph.config.folder.parent
    check_manifest(repository)
    if remote is not None:
        _check_same(graph, remote, read_manifest(repository).get("identity"))
    with ExitStack() as held:
        wanted = sorted({(step.model, step.version) for step in graph.steps})
        models = {(name, number): _load_model(graph.members[name], remote, held, number) for name, number in wanted}
        return Pipeline(graph, models, held.pop_all())


def _load_model(config: ModelConfig, remote: Remote | None, held: ExitStack, version: int = LATEST) -> HostedModel:
    if remote is not None and not config.is_ensemble and not is_in_client(config):
        at: dict[str, Any] = {} if version == LATEST else {"version": version}
        return HostedModel(
            config.name,
            lambda inputs: remote.infer(config.name, inputs, **at),
            lambda inputs, _: remote.stream(config.name, inputs, **at),  # type: ignore[attr-defined]  # a Client has it
            is_decoupled=config.spec.is_decoupled,
        )
    if config.is_ensemble:
        find_version(config, version)  # the graph is the same in each, but Triton refuses a version that is not there
        try:
            nested = load(config.folder, remote=remote)
        except RecursionError:
            raise ArtifactError(
                f"The ensembles below {config.name} call one another in a circle, or too deep.",
                f"Type: shoal check {config.folder.parent}",
            ) from None
        held.callback(nested.close)
        return HostedModel(
            config.name,
            lambda inputs: nested(**inputs),
            lambda inputs, _: nested.stream(**inputs),
            is_decoupled=nested.is_decoupled,
        )
    others = [name for name in config.calls if name not in config.hosts]
    callees = {name: _load_model(read_config(config.folder.parent / name), remote, held) for name in others}
    component = load_component(config, callees, version)
    held.callback(component.context.models.close)
    held.callback(component.close)
    return HostedModel.of_component(component)


def load_component(
    config: ModelConfig, models: Mapping[str, HostedModel] | None = None, version: int = LATEST
) -> Component:
    """Start the component of a model: its own ``model.py``, or the python-based backend that its configuration names.

    ``models`` are the models that the component's code may call, but for those that it hosts. ``version`` is a step's
    ``model_version``.

    Raises:
        ArtifactError: the model has no such version, or no ``model.py``, and shoal has no such backend.
    """
    folder = find_version(config, version)
    path = folder / "model.py" if config.backend == "python" else BACKENDS / config.backend / "model.py"
    if not path.is_file():
        known = ", ".join(["python", *sorted(p.parent.name for p in BACKENDS.glob("*/model.py"))])
        raise ArtifactError(
            f"Model {config.name} has no {path.name} for backend {config.backend!r}.", f"Known: {known}."
        )
    component = component_class(path)
    device = _device(config, component.library)
    callees = HostedCallees(models or {}, device)
    context = Context(config.spec, folder.resolve(), device, models=callees, is_local=True)
    return component(replace(context, models=host(context)) if config.hosts else context)


def _device(config: ModelConfig, library: str) -> Device:
    """Return the device that the configuration gives a model's first instance."""
    group = next(iter(config.message.instance_group), None)
    kinds = {} if group is None else {group.KIND_GPU: "gpu", group.KIND_MODEL: "model"}
    if group is None or group.kind not in kinds:
        return Device()
    return Device(kinds[group.kind], next(iter(group.gpus), 0), library)
