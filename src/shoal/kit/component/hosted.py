"""Models that run in another model's process: the models that a component hosts, and those of a local pipeline."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shoal.errors import InputError, SetupError, ShoalError
from shoal.kit.component.context import Callees, Context, Leavable, Passage, choose
from shoal.kit.component.ledger import Ledger
from shoal.kit.component.spec import HOSTED_CONFIG, TOGETHER, Array, Arrays, ModelSpec
from shoal.kit.component.stream import Stream
from shoal.kit.component.streaming import count_rows
from shoal.kit.component.tensors import Device

if TYPE_CHECKING:
    from shoal.kit.component.base import Component


@dataclass(frozen=True)
class HostedModel:
    """A model in this process: functions that run it, and the device of its outputs."""

    name: str
    ask: Callable[[Arrays], Arrays]
    ask_stream: Callable[[Arrays, Leavable | None], Generator[Arrays]]
    is_decoupled: bool
    device: Device = field(default_factory=Device)
    component: Component | None = None

    @classmethod
    def of_component(cls, component: Component) -> HostedModel:
        """Return the model of a component."""

        def ask(inputs: Arrays) -> Arrays:
            (answer,) = component.process([inputs])
            if isinstance(answer, ShoalError):
                try:
                    raise answer
                finally:
                    del answer  # or the error would hold this frame, and the frame the error
            return answer

        def ask_stream(inputs: Arrays, until: Leavable | None) -> Generator[Arrays]:
            with closing(component.stream(inputs)) as answers:  # type: ignore[attr-defined]  # a StreamingComponent
                if until is not None:
                    until.on_leave(answers.leave)
                yield from answers

        context = component.context
        return cls(context.spec.name, ask, ask_stream, context.spec.is_decoupled, context.device, component)

    def call(self, inputs: Arrays) -> Arrays:
        """Return the model's only answer."""
        if self.is_decoupled:
            raise InputError(f"Model {self.name} answers in pieces.", "Use stream(...).")
        return self.ask(inputs)

    def stream(self, inputs: Arrays, until: Leavable | None = None) -> Generator[Arrays]:
        """Yield the answers. The request ends when the generator is closed, or the client of ``until`` has left."""
        if self.is_decoupled:
            yield from self.ask_stream(inputs, until)
        else:
            yield self.ask(inputs)


class HostedCallees(Callees):
    """Models in this process that a component's code may call; it calls ``others`` elsewhere.

    Answers are copied to ``device``, where the caller computes.
    """

    def __init__(self, models: Mapping[str, HostedModel], device: Device, others: Callees | None = None) -> None:
        self._models, self._device, self._others = models, device, others or Callees()
        super().__init__([*models, *self._others.known])

    @property
    def ledgers(self) -> Mapping[str, Ledger]:
        """Ledgers of the hosted models, by name."""
        return {name: each.device.ledger for name, each in self._models.items()}

    def is_ready(self) -> bool:
        """Whether all hosted models can be asked now."""
        return all(each.component is None or each.component.is_ready() for each in self._models.values())

    def close(self) -> None:
        """Close the hosted models."""
        for each in self._models.values():
            if each.component is not None:
                each.component.close()

    def _infer(self, model: str, inputs: Arrays, outputs: Sequence[str]) -> dict[str, Array]:
        if model not in self._models:
            return self._others.infer(model, inputs, outputs=outputs)
        return self._take(self._models[model].call(inputs), outputs)

    def _stream(
        self, model: str, inputs: Arrays, outputs: Sequence[str], until: Leavable | None
    ) -> Generator[dict[str, Array]]:
        if model not in self._models:
            yield from self._others.stream(model, inputs, outputs=outputs, until=until)
            return
        with closing(self._models[model].stream(inputs, until)) as answers:
            for answer in answers:
                yield self._take(answer, outputs)

    def _pass_on(self, model: str, inputs: Arrays, stream: Any, through: Passage) -> Generator[Arrays]:
        component = self._models[model].component if model in self._models else None
        if component is None or not component.context.spec.is_decoupled:
            yield from super()._pass_on(model, inputs, stream, through)
            return
        passed = _Passed(component, count_rows(inputs), stream, through, self._device)
        stream.hand_over()
        stream.on_leave(passed.leave)
        component.begin(inputs, passed)  # type: ignore[attr-defined]  # a StreamingComponent

    def _take(self, answer: Arrays, outputs: Sequence[str]) -> dict[str, Array]:
        return {name: self._device.put(array, name) for name, array in choose(answer, outputs).items()}


class _Passed(Stream):
    """Stream of a hosted model's answers, which the thread that sends its caller's answers makes of them.

    While that thread is behind, a few answers of a stream wait together, and are passed on at once. Then the model
    waits, so that no stream is far behind it.
    """

    def __init__(self, component: Component, num_rows: int, to: Stream, through: Passage, device: Device) -> None:
        super().__init__(component, num_rows)
        self._to, self._through, self._device = to, through, device
        self._waiting: list[Arrays | ShoalError | None] = []
        self._taken = threading.Condition(self._lock)

    def _deliver(self, item: Arrays | ShoalError | None) -> None:
        most = self._to.most_ahead
        if len(self._waiting) >= most and item is not None and not isinstance(item, ShoalError):
            self._taken.wait_for(lambda: len(self._waiting) < most or not self._is_open)
            if not self._is_open:  # it was ended meanwhile
                return
        self._waiting.append(item)
        if not self._is_open:  # the end: an answer that waits has none to go to
            self._taken.notify_all()
        if len(self._waiting) == 1:  # otherwise work is deferred already, which takes this item, too
            self._to.defer(self._pass)

    def _pass(self) -> None:
        """Send what the answers make; the one that completes the caller's ends this model's work.

        The work is ended in a thread of its own: the engine's may hold this stream's lock, and wait for this one.
        """
        with self._lock:
            items, self._waiting = self._waiting, []
            self._taken.notify_all()
        self._send(items)
        if self.is_open and not self._to.is_open:
            threading.Thread(target=self.leave, daemon=True).start()

    def _send(self, items: Sequence[Arrays | ShoalError | None]) -> None:
        if not self._to.is_open:
            return
        failure = None
        try:
            answers = [item for item in items if item is not None and not isinstance(item, ShoalError)]
            taken = [{name: self._device.put(array, name) for name, array in each.items()} for each in answers]
            for outputs in self._through.take(taken):
                self._to.send(outputs)
            failure = next((item for item in items if isinstance(item, ShoalError)), None)
            if failure is not None and not self._through.is_complete:
                raise failure
            if items[-1] is None or self._through.is_complete:
                for outputs in self._through.end():
                    self._to.send(outputs)
                self._to.end()
        except Exception as error:
            self._to.end(error)
        finally:
            del items, failure  # or an error would hold this frame, and the frame the error


def host(context: Context, find_threads: Callable[[ModelSpec], int | None] = lambda _: None) -> HostedCallees:
    """Start the models that the parameter ``together`` names, from the folder of that name in the version folder.

    The other models that the caller may call stay those of ``context``.

    Raises:
        SetupError: a model is not there, or is not a component.
        ArtifactError: a component cannot be started.
    """
    models, folder = {}, context.folder / TOGETHER
    for name in context.spec.parameters.get(TOGETHER, "").split():
        try:
            config = json.loads((folder / name / HOSTED_CONFIG).read_text(encoding="utf-8"))
            spec = ModelSpec.from_config(config)
        except (OSError, ValueError, KeyError):
            what = f"Model {context.spec.name} hosts {name}, whose {folder / name / HOSTED_CONFIG} cannot be read."
            raise SetupError(what, "Compose it again: shoal compose ... --together") from None
        kind: type[Component] = load_module(folder / name / "model.py").TritonPythonModel.component_class
        device = _find_device(config, kind.library)
        own = Context(spec, folder / name, device, find_threads(spec), is_local=context.is_local)
        models[name] = HostedModel.of_component(kind(own))
    return HostedCallees(models, context.device, context.models)


def _find_device(config: Mapping[str, Any], library: str) -> Device:
    """Return the device of a model's first instance; as for Triton, none but a GPU is asked for by name."""
    group: Mapping[str, Any] = next(iter(config.get("instance_group", [])), {})
    kinds = {"KIND_GPU": "gpu", "KIND_MODEL": "model"}
    if (kind := kinds.get(group.get("kind", ""))) is None:
        return Device()
    return Device(kind, int(next(iter(group.get("gpus", [])), 0)), library)


def load_module(path: Path) -> ModuleType:
    """Run a Python file as a module of its own; what it does to ``sys.path`` is undone.

    The first line of a ``model.py`` puts the file's folder first on the path, for the stub.
    """
    name = f"_shoal_model_{os.fsencode(path.resolve()).hex()}"  # a name without dots, another for each path
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module, before = importlib.util.module_from_spec(spec), list(sys.path)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module
