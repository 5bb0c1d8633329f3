"""Adapter between Triton's Python backend and a component."""

from __future__ import annotations

import inspect
import locale
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from json import loads
from pathlib import Path
from typing import Any, ClassVar, Protocol

from shoal.errors import InputError, SetupError, ShoalError
from shoal.kit.component import tensors
from shoal.kit.component.context import Callees, Context
from shoal.kit.component.ledger import Beacon, Metrics
from shoal.kit.component.parameters import Parameters
from shoal.kit.component.spec import CALLS, FILES, OTHER_REPOSITORY, REPOSITORY, TOGETHER, Arrays, ModelSpec
from shoal.kit.component.tensors import Device

CALLING = "shoal.kit.component.callees"  # module that only the models that call others need
HOSTING = "shoal.kit.component.hosted"  # module that only the models that host others need


class Adapted(Protocol):
    """Part of ``Component`` that the adapter uses."""

    library: ClassVar[str]
    flat_outputs: ClassVar[frozenset[str]]
    context: Context

    def __init__(self, context: Context) -> None: ...
    def process(self, requests: Sequence[Arrays]) -> list[Arrays | ShoalError]: ...
    def failure(self, error: Exception) -> ShoalError: ...
    def is_ready(self) -> bool: ...
    def close(self) -> None: ...


class TritonModel:
    """Adapter between Triton's Python backend and a component."""

    component_class: ClassVar[type[Adapted]]
    component: Adapted
    _is_serving = False

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
        context = Context(spec=spec, folder=folder, device=device, num_threads=_threads(spec))
        self.component = self.component_class(replace(context, models=_load_callees(context)))
        family, instance = tensors.triton().MetricFamily, args["model_instance_name"]
        ledgers = {spec.name: device.ledger, **self.component.context.models.ledgers}
        self._metrics = [Metrics(ledger, family, name, instance) for name, ledger in ledgers.items()]
        self._beacon = Beacon()
        self._is_serving = True

    def is_ready(self) -> bool:
        """Whether the model's requests can be answered: not while it loads or is unloaded. Called from Triton 26.03 on.

        An exception would only be logged, and the model counted as not ready.
        """
        return self._is_serving and self.component.is_ready() and self.component.context.models.is_ready()

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
        spec = self.component.context.spec
        try:
            if not isinstance(answer, ShoalError):
                answer = tensors.to_inside(spec.outputs, answer, is_batched=spec.is_batched)
                flat = self.component.flat_outputs & answer.keys()
                answer = {**answer, **{name: answer[name].reshape(-1) for name in flat}} if flat else answer
            return tensors.make_response(answer)
        except Exception as error:
            return tensors.make_response(self.component.failure(error))

    def finalize(self) -> None:
        """Release the component's resources; called when the model is unloaded."""
        self._is_serving = False
        self._beacon.close()
        for each in self._metrics:
            each.close()
        self.component.close()
        self.component.context.models.close()


def _load_callees(context: Context) -> Callees:
    """Return the models that a component calls. Modules are imported by name: only those who need them have a copy."""
    called, hosted = (context.spec.parameters.get(name, "").split() for name in (CALLS, TOGETHER))
    models = Callees()
    if set(called) - set(hosted):
        models = import_module(CALLING).TritonCallees(context.spec, context.device)
    if hosted:
        models = import_module(HOSTING).host(replace(context, models=models), _threads)
    return models


def _threads(spec: ModelSpec) -> int:
    """Return the number of threads in the configuration, else the instance's share of the CPU cores."""
    parameters = Parameters(spec)
    # of Triton's own backends for ONNX, TorchScript and OpenVINO, where 0 is the library's choice
    names = ("intra_op_thread_count", "INTRA_OP_THREAD_COUNT", "INFERENCE_NUM_THREADS")
    native = next((parameters.whole(name, 0, least=0) for name in names if name in spec.parameters), 0)
    share = native or max(1, len(os.sched_getaffinity(0)) // spec.num_instances)
    return parameters.whole("threads", share) if "threads" in spec.parameters else share


def _refuse_foreign_repository(parameters: Mapping[str, Any], spec: ModelSpec) -> None:
    """Refuse a request if its client ran the pipeline's first steps from another repository than this server's."""
    for digest, what in ((REPOSITORY, "repository"), (FILES, f"model {spec.name}")):
        wanted, own = parameters.get(digest), spec.parameters.get(digest, "")
        if wanted is not None and wanted != own:
            raise InputError(
                f"{OTHER_REPOSITORY} {what}: {own[:12] or 'one without a manifest'}, not {str(wanted)[:12]}.",
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
