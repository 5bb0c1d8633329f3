"""Base class of components. It joins requests to a batch, runs the batch once, and splits the outputs by request."""

from __future__ import annotations

import inspect
import locale
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from json import loads
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from array_api_compat import device as device_of

from shoal.component import tensors
from shoal.component.artifact_files import describe_place
from shoal.component.callees import Callees, TritonCallees
from shoal.component.ledger import BATCHES, ROWS, Beacon, Metrics
from shoal.component.spec import OTHER_REPOSITORY, REPOSITORY, ModelSpec, TensorSpec
from shoal.component.tensors import Array, Arrays, Device, namespace
from shoal.errors import ArtifactError, InputError, SetupError, ShoalError, forget_frames

_MAX_CONCAT = 8  # to concatenate more arrays in one call, CuPy uploads a table of pointers
_log = logging.getLogger("shoal")


@dataclass(frozen=True)
class Context:
    """Everything that a component gets at start-up: declaration, artifacts, device and threads.

    ``spec`` is the model's ``config.pbtxt``. ``folder`` is the model's version folder, which contains its artifacts.
    ``num_threads`` is the number of compute threads this instance may use; None keeps the process's own setting.
    ``models`` calls the other models that the configuration's parameter ``calls`` lists.
    """

    spec: ModelSpec
    folder: Path
    device: Device = field(default_factory=Device)
    num_threads: int | None = None
    models: Callees = field(default_factory=Callees)

    def artifact(self, name: str) -> Path:
        """Return the path of a required artifact of this model.

        Raises:
            ArtifactError: the artifact is missing, or is not a file.
        """
        path = self.folder / name
        if path.is_file():
            return path
        found = describe_place(path)
        missed = f"misses its artifact {name} in {self.folder}"
        raise ArtifactError(
            f"Model {self.spec.name} {missed if found == 'missing' else f'needs the file {path}, which is {found}'}.",
            "Copy it there from the artifact folder that `shoal train` wrote, or use `shoal compose`.",
        )

    def optional_artifact(self, name: str) -> Path | None:
        """Return the path of an optional artifact, or None if it is missing.

        Raises:
            ArtifactError: the artifact exists, but is not a file.
        """
        return self.artifact(name) if os.path.lexists(self.folder / name) else None


class Component:
    """Base class of a component: a model in Python code that Triton, a client, or this process can run.

    Subclass it in ``1/model.py``, write ``run``, and end the file with ``TritonPythonModel = Yours.for_triton()``::

        class Double(Component):
            def run(self, batch):
                return {"Y": batch["X"] * 2}

    Tensors are declared once, in the model's ``config.pbtxt``; ``self.context.spec`` has these declarations. On a
    GPU, arrays are CuPy arrays; set ``library = "torch"`` for torch tensors. Set ``is_stateful = True`` if answers
    depend on earlier requests: requests are then answered one by one, in order. By default, the requests of a batch
    that fails are run again one by one, which would change the state twice.
    """

    library: ClassVar[str] = "cupy"
    is_stateful: ClassVar[bool] = False
    is_decoupled: ClassVar[bool] = False

    def __init__(self, context: Context) -> None:
        if self.is_decoupled != context.spec.is_decoupled:
            raise SetupError(
                f"{type(self).__name__} answers a request {'in pieces' if self.is_decoupled else 'once'}, but the"
                f" config.pbtxt of model {context.spec.name} is {'not ' if self.is_decoupled else ''}decoupled.",
                f"{'Add' if self.is_decoupled else 'Remove'} model_transaction_policy {{ decoupled: true }}"
                f"{'' if self.is_decoupled else ', or write a StreamingComponent'}.",
            )
        self.context = context
        context.device.prepare()
        with context.device.active():
            self.setup(context)
        context.device.ledger.end_setup()

    def setup(self, context: Context) -> None:
        """Load artifacts and build the state that every call uses. Called once."""

    def check(self, inputs: Arrays) -> None:
        """Validate one request: raise ``InputError`` to refuse it. Other requests of the batch are not affected.

        ``inputs`` are arrays as received: tensors from a client are on the host, even if this component is on a GPU.
        """

    def run(self, batch: Arrays) -> Arrays:
        """Answer a whole batch.

        ``batch`` maps input names to arrays ``[rows, *dims]`` on ``self.context.device``; TYPE_STRING inputs are NumPy
        object arrays of ``bytes``; an optional input that was left out is absent. Return every declared output, with
        the same number of rows. Do not keep references to ``batch`` after the call.
        """
        raise NotImplementedError(f"{type(self).__name__} must define run(batch)")

    def close(self) -> None:
        """Release the resources that ``setup`` acquired. Called once, when the model is unloaded."""

    def process(self, requests: Sequence[Arrays]) -> list[Arrays | ShoalError]:
        """Return one answer per request, in order: its outputs, or its own error.

        Requests with the same set of inputs are joined to one batch if tensors have a batch dimension, unless the
        component is stateful. If a joined batch fails, each of its requests is run again alone, so that one bad request
        does not fail the others.
        """
        answers: list[Arrays | ShoalError] = [{}] * len(requests)
        groups: dict[tuple[frozenset[str], int], list[int]] = {}
        for index, inputs in enumerate(requests):
            try:
                self.check(inputs)
            except Exception as error:
                answers[index] = self.failure(error)
            else:
                alone = 0 if self.context.spec.is_batched and not self.is_stateful else index
                groups.setdefault((frozenset(inputs), alone), []).append(index)
        for members in groups.values():
            for index, answer in zip(members, self._answer([requests[i] for i in members]), strict=True):
                answers[index] = answer
        return answers

    def _answer(self, requests: list[Arrays]) -> list[Arrays | ShoalError]:
        spec, device = self.context.spec, self.context.device
        try:
            with device.active():
                batch, counts = join(spec, requests, device)
                device.ledger.count(BATCHES)
                device.ledger.count(ROWS, sum(counts))
                outputs = self.run(batch)
            check_outputs(spec, outputs, sum(counts))
            return list(split(outputs, counts))
        except Exception as error:
            if len(requests) == 1:
                return [self.failure(error)]
            forget_frames(error)
        return [self._answer([request])[0] for request in requests]

    def failure(self, error: Exception) -> ShoalError:
        """Return the error for the client. Unexpected errors may name local paths, so their text is only logged.

        The traceback is dropped: it holds the request.
        """
        if isinstance(error, ShoalError) and not isinstance(error, ArtifactError | SetupError):
            answer = error
        else:
            name = self.context.spec.name
            _log.error("model %s failed on a request", name, exc_info=error)
            answer = ShoalError(
                f"Model {name} failed on this request ({type(error).__name__}).", "See the server's log."
            )
        forget_frames(error)
        return answer

    @classmethod
    def for_triton(cls) -> type[TritonModel]:
        """Return the ``TritonPythonModel`` class that Triton's Python backend looks for in ``model.py``."""
        return type("TritonPythonModel", (TritonModel,), {"component_class": cls})


# --- batches -----------------------------------------------------------------------------------------------------


def join(spec: ModelSpec, requests: Sequence[Arrays], device: Device) -> tuple[Arrays, list[int]]:
    """Join requests with the same set of inputs to a batch on ``device``; return it and each request's row count.

    Inputs that allow ragged batches are padded with zeros to the width of the widest request. Host arrays are joined on
    the host and uploaded in one copy. A single request that is already on ``device`` is not copied.
    """
    counts = [_rows(request) for request in requests] if spec.is_batched else [1]
    names = requests[0].keys()
    inputs = {tensor.name: tensor for tensor in spec.inputs}
    return {name: _join(inputs[name], [request[name] for request in requests], device) for name in names}, counts


def _join(tensor: TensorSpec, arrays: Sequence[Array], device: Device) -> Array:
    if len(arrays) == 1:
        return device.put(arrays[0], tensor.name)
    if not all(isinstance(array, np.ndarray) for array in arrays):  # some, or all, are on the device already
        arrays = [device.put(array, tensor.name) for array in arrays]
    return device.put(_concat(tensor, arrays), tensor.name)


def _rows(request: Arrays) -> int:
    return int(next(iter(request.values())).shape[0])


def _concat(tensor: TensorSpec, arrays: Sequence[Array]) -> Array:
    xp = namespace(arrays[0])
    if tensor.is_ragged and len({a.shape[1:] for a in arrays}) > 1:
        widest = max(a.shape[1] for a in arrays)
        arrays = [_widen(a, widest) for a in arrays]
    while len(arrays) > _MAX_CONCAT and not isinstance(arrays[0], np.ndarray):
        arrays = [xp.concat(arrays[k : k + _MAX_CONCAT], axis=0) for k in range(0, len(arrays), _MAX_CONCAT)]
    return xp.concat(list(arrays), axis=0)


def _widen(array: Array, width: int) -> Array:
    xp = namespace(array)
    shape = (array.shape[0], width - array.shape[1], *array.shape[2:])
    zeros = xp.zeros(shape, dtype=array.dtype, device=device_of(array))
    return xp.concat([array, zeros], axis=1)


def check_outputs(spec: ModelSpec, outputs: Arrays, num_rows: int) -> None:
    """Check the outputs' names, dtypes, shapes and row counts, since Triton does not check them.

    Raises:
        ShoalError: an output differs from its declaration in ``config.pbtxt``.
    """
    declared = {tensor.name: tensor for tensor in spec.outputs}
    if outputs.keys() != declared.keys():
        raise ShoalError(f"Model {spec.name} gave outputs {sorted(outputs)}, its config declares {sorted(declared)}.")
    for name, array in outputs.items():
        mismatch = declared[name].mismatch(array, is_batched=spec.is_batched)
        if mismatch:
            raise ShoalError(f"Output {mismatch}, as the config of model {spec.name} declares.")
        if spec.is_batched and array.shape[0] != num_rows:
            raise ShoalError(f"Output {name} of model {spec.name} has {array.shape[0]} rows for {num_rows} rows in.")


def split(outputs: Arrays, counts: Sequence[int]) -> Iterator[Arrays]:
    """Yield each request's part of a batch's outputs, as views; ``counts`` are the numbers of rows of the requests."""
    if len(counts) == 1:
        yield outputs
        return
    start = 0
    for count in counts:
        yield {name: array[start : start + count] for name, array in outputs.items()}
        start += count


# --- Triton's side -----------------------------------------------------------------------------------------------


class TritonModel:
    """Adapter between Triton's Python backend and a component."""

    component_class: ClassVar[type[Component]]
    component: Component

    def initialize(self, args: dict[str, str]) -> None:
        """Create the component; an exception here makes the model fail to load."""
        device = Device.from_triton(args, self.component_class.library)
        # Stubs start in the C locale, where open() without an encoding reads ASCII.
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
        folder = Path(args["model_repository"]) / args["model_version"]
        for place in (folder, Path(inspect.getfile(self.component_class)).parent):
            _refuse_foreign_package(place)
        tensors.check_stub()
        spec = ModelSpec.from_config(loads(args["model_config"]))
        self.component = self.component_class(
            Context(
                spec=spec,
                folder=folder,
                device=device,
                num_threads=_threads(spec),
                models=TritonCallees(spec, device),
            )
        )
        self._metrics = Metrics(device.ledger, tensors.triton().MetricFamily, spec.name, args["model_instance_name"])
        self._beacon = Beacon()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return one response per request, in order."""
        self._beacon.open_batch()
        try:
            read = [self._read(request) for request in requests]
            answers = iter(self.component.process([inputs for inputs in read if not isinstance(inputs, ShoalError)]))
            return [self._respond(inputs if isinstance(inputs, ShoalError) else next(answers)) for inputs in read]
        finally:
            self._beacon.close_batch()

    # An exception that escaped from the next two methods would fail the whole batch, and Triton would send its message
    # and a file path to the clients.

    def _read(self, request: Any) -> Arrays | ShoalError:
        context = self.component.context
        try:
            _refuse_foreign_repository(tensors.request_parameters(request), context.spec)
            return tensors.read_request(request, context.spec, context.device)
        except Exception as error:
            return self.component.failure(error)

    def _respond(self, answer: Arrays | ShoalError) -> Any:
        try:
            return tensors.make_response(answer)
        except Exception as error:
            return tensors.make_response(self.component.failure(error))

    def finalize(self) -> None:
        """Release the component's resources; called when the model is unloaded."""
        self._beacon.close()
        self._metrics.close()
        self.component.close()


def _threads(spec: ModelSpec) -> int:
    """Return the ``threads`` parameter of the configuration, else the instance's share of the CPU cores."""
    if "threads" in spec.parameters:
        return int(spec.parameters["threads"])
    return max(1, len(os.sched_getaffinity(0)) // spec.num_instances)


def _refuse_foreign_repository(parameters: Mapping[str, Any], spec: ModelSpec) -> None:
    """Refuse a request if its client ran the pipeline's first steps from another repository than this server's."""
    wanted, own = parameters.get(REPOSITORY), spec.parameters.get(REPOSITORY, "")
    if wanted is not None and wanted != own:
        raise InputError(
            f"{OTHER_REPOSITORY}: {own[:12] or 'one without a manifest'}, not {str(wanted)[:12]}.",
            "Compose on both sides from the same artifacts, with the same version of shoal.",
        )


def _refuse_foreign_package(folder: Path) -> None:
    """Refuse to start if ``folder`` contains a copy of shoal but another copy was imported."""
    copy, imported = folder / "shoal", Path(inspect.getfile(ShoalError)).parent
    if copy.is_dir() and not imported.samefile(copy):
        raise SetupError(
            f"{folder} contains its own copy of shoal, but the one in {imported} was imported.",
            "Let model.py begin with: import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))",
        )
