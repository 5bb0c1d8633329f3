"""Component: many requests -> one batch -> one call -> many responses; an error belongs to one request."""

from __future__ import annotations

import inspect
import locale
import logging
import os
from collections.abc import Mapping, Sequence
from json import loads
from pathlib import Path
from typing import Any, ClassVar

from shoal.component import batching, tensors
from shoal.component.context import Context
from shoal.component.heartbeat import Beacon
from shoal.component.ledger import BATCHES, ROWS
from shoal.component.metrics import Metrics
from shoal.component.spec import OTHER_REPOSITORY, REPOSITORY, ModelSpec
from shoal.component.stub_check import check_stub
from shoal.component.tensors import Arrays
from shoal.errors import ArtifactError, InputError, SetupError, ShoalError

_log = logging.getLogger("shoal")


class Component:
    """A model over arrays, which runs in Triton's Python backend, in a client, or in this process.

    Subclass it in ``1/model.py``, write ``run``, and end the file with ``TritonPythonModel = Yours.for_triton()``::

        class Double(Component):
            def run(self, batch):
                return {"Y": batch["X"] * 2}

    Tensors are declared once, in the ``config.pbtxt`` beside it; ``self.context.spec`` holds them. On a GPU arrays are
    CuPy's; a component that computes with torch says ``library = "torch"``.
    """

    library: ClassVar[str] = "cupy"

    def __init__(self, context: Context) -> None:
        self.context = context
        context.device.prepare()
        with context.device.active():
            self.setup(context)
        context.device.ledger.end_setup()

    def setup(self, context: Context) -> None:
        """Load artifacts and build what every call uses. Called once."""

    def check(self, inputs: Arrays) -> None:
        """Raise ``InputError`` if this one request cannot be answered. Its batch neighbours are not affected.

        ``inputs`` are as they came: what a client sent is on the host, whatever this component's device.
        """

    def run(self, batch: Arrays) -> Arrays:
        """Answer a whole batch.

        ``batch`` maps input names to arrays ``[rows, *dims]`` on ``self.context.device``; TYPE_STRING inputs are NumPy
        object arrays of ``bytes``; an optional input that was left out is absent. Returns every declared output, with
        the same number of rows. Nothing of ``batch`` may be kept after the call.
        """
        raise NotImplementedError(f"{type(self).__name__} must define run(batch)")

    def close(self) -> None:
        """Release what ``setup`` took. Called once, when the model is unloaded."""

    def process(self, requests: Sequence[Arrays]) -> list[Arrays | ShoalError]:
        """Answer requests in order, each with its outputs or its own error.

        Requests with the same set of inputs are joined to one batch, where the model batches at all. If a joined batch
        fails, each of its requests is tried alone, so that one bad request never fails its neighbours.
        """
        answers: list[Arrays | ShoalError] = [{}] * len(requests)
        groups: dict[tuple[frozenset[str], int], list[int]] = {}
        for index, inputs in enumerate(requests):
            try:
                self.check(inputs)
            except Exception as error:
                answers[index] = self.failure(error)
            else:
                alone = 0 if self.context.spec.is_batched else index
                groups.setdefault((frozenset(inputs), alone), []).append(index)
        for members in groups.values():
            for index, answer in zip(members, self._answer([requests[i] for i in members]), strict=True):
                answers[index] = answer
        return answers

    def _answer(self, requests: list[Arrays]) -> list[Arrays | ShoalError]:
        spec, device = self.context.spec, self.context.device
        try:
            with device.active():
                batch, counts = batching.join(spec, requests, device)
                device.ledger.count(BATCHES)
                device.ledger.count(ROWS, sum(counts))
                outputs = self.run(batch)
            batching.check_outputs(spec, outputs, sum(counts))
            return list(batching.split(outputs, counts))
        except Exception as error:
            if len(requests) == 1:
                return [self.failure(error)]
            return [self._answer([request])[0] for request in requests]

    def failure(self, error: Exception) -> ShoalError:
        """The error that a client may see: errors of files and machines name paths, so they go to the log alone."""
        if isinstance(error, ShoalError) and not isinstance(error, ArtifactError | SetupError):
            return error
        name = self.context.spec.name
        _log.error("model %s failed on a request", name, exc_info=error)
        return ShoalError(f"Model {name} failed on this request ({type(error).__name__}).", "See the server's log.")

    @classmethod
    def for_triton(cls) -> type[TritonModel]:
        """The class that Triton's Python backend looks for in ``model.py`` under the name ``TritonPythonModel``."""
        return type("TritonPythonModel", (TritonModel,), {"component_class": cls})


class TritonModel:
    """Triton's side of a component: requests in, responses out."""

    component_class: ClassVar[type[Component]]
    component: Component

    def initialize(self, args: dict[str, str]) -> None:
        """Start the component; an exception here fails the load of the model."""
        device = tensors.Device.from_triton(args, self.component_class.library)
        # Stubs start in the C locale, where open() without an encoding reads ASCII.
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
        folder = Path(args["model_repository"]) / args["model_version"]
        for place in (folder, Path(inspect.getfile(self.component_class)).parent):
            _refuse_foreign_package(place)
        check_stub()
        spec = ModelSpec.from_config(loads(args["model_config"]))
        self.component = self.component_class(
            Context(
                spec=spec,
                folder=folder,
                device=device,
                num_threads=_threads(spec),
            )
        )
        self._metrics = Metrics(device.ledger, spec.name, args["model_instance_name"])
        self._beacon = Beacon()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer every request, each with its own response."""
        self._beacon.open_batch()
        try:
            read = [self._read(request) for request in requests]
            answers = iter(self.component.process([inputs for inputs in read if not isinstance(inputs, ShoalError)]))
            return [self._respond(inputs if isinstance(inputs, ShoalError) else next(answers)) for inputs in read]
        finally:
            self._beacon.close_batch()

    # What escaped from these two would fail the whole batch, and show its clients the message and the file's path.

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
        """Release what the component holds."""
        self._beacon.close()
        self._metrics.close()
        self.component.close()


def _threads(spec: ModelSpec) -> int:
    """The instance's share of the cores, unless the configuration's ``threads`` parameter says otherwise."""
    if "threads" in spec.parameters:
        return int(spec.parameters["threads"])
    return max(1, len(os.sched_getaffinity(0)) // spec.num_instances)


def _refuse_foreign_repository(parameters: Mapping[str, Any], spec: ModelSpec) -> None:
    """Refuse a request that is for the models of another repository, as one of a client that runs its other half is."""
    wanted, own = parameters.get(REPOSITORY), spec.parameters.get(REPOSITORY, "")
    if wanted is not None and wanted != own:
        raise InputError(
            f"{OTHER_REPOSITORY}: {own[:12] or 'one without a manifest'}, not {str(wanted)[:12]}.",
            "Compose on both sides from the same artifacts, with the same version of shoal.",
        )


def _refuse_foreign_package(folder: Path) -> None:
    """Refuse to start when ``folder`` carries its own copy of shoal and another one was imported."""
    copy, imported = folder / "shoal", Path(inspect.getfile(ShoalError)).parent
    if copy.is_dir() and not imported.samefile(copy):
        raise SetupError(
            f"{folder} carries its own copy of shoal, but the one in {imported} was imported.",
            "Let model.py begin with: import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))",
        )
