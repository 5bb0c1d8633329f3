"""The other models that a component asks: in Triton (BLS), in this process, or in a test."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from shoal.component.spec import ModelSpec
from shoal.component.tensors import Array, Arrays, Device, make_request, read_response
from shoal.errors import ServerError, SetupError, ShoalError, suggest

if TYPE_CHECKING:
    from shoal.component.streams import Stream

CALLS = "calls"  # parameter of a model's configuration: the models that its code asks, separated by spaces
STOP = "stop"  # optional input of a streaming model: a request with it ends the running request of the same id


class Callees(Protocol):
    """Other models of the repository, as ``self.context.models``; the parameter ``calls`` lists them."""

    def infer(self, model: str, inputs: Arrays, *, outputs: Sequence[str] = ()) -> dict[str, Array]:
        """Ask a model that answers once, and wait; ``outputs`` asks for some only.

        Raises:
            InputError: it refused the request.
            SetupError: the parameter ``calls`` does not list it.
            ServerError: it cannot answer now.
            ShoalError: it failed.
        """

    def stream(
        self, model: str, inputs: Arrays, *, outputs: Sequence[str] = (), until: Stream | None = None
    ) -> Generator[dict[str, Array]]:
        """Yield a model's answers as they come; close the generator to leave, and it is told to stop.

        It is also told as soon as the client of the stream ``until`` leaves; then the answers end early.

        Raises:
            InputError, ServerError, ShoalError: as in ``infer``, before or after some answers.
        """


class LocalModel(Protocol):
    """A model in this process."""

    def call(self, inputs: Arrays) -> Arrays:
        """Answer once."""

    def stream(self, inputs: Arrays, until: Stream | None = None) -> Generator[Arrays]:
        """Yield the answers; closing the generator leaves, and so does the client of ``until``."""


class LocalCallees:
    """Models in this process, by name."""

    def __init__(self, models: Mapping[str, LocalModel] | None = None) -> None:
        self._models = models or {}

    def infer(self, model: str, inputs: Arrays, *, outputs: Sequence[str] = ()) -> dict[str, Array]:
        """Ask a model that answers once; see ``Callees``."""
        return _choose(self._find(model).call(inputs), outputs)

    def stream(
        self, model: str, inputs: Arrays, *, outputs: Sequence[str] = (), until: Stream | None = None
    ) -> Generator[dict[str, Array]]:
        """Yield a model's answers; see ``Callees``."""
        with closing(self._find(model).stream(inputs, until)) as answers:
            for answer in answers:
                yield _choose(answer, outputs)

    def _find(self, model: str) -> LocalModel:
        check_callee(model, self._models)
        return self._models[model]


def _choose(answer: Arrays, outputs: Sequence[str]) -> dict[str, Array]:
    return {name: answer[name] for name in outputs or answer}


class TritonCallees:
    """Models asked through Triton's core, from within a stub."""

    def __init__(self, spec: ModelSpec, device: Device) -> None:
        self._name, self._device = spec.name, device
        self._known = spec.parameters.get(CALLS, "").split()
        self._numbers = itertools.count()
        self._stops: dict[str, list[tuple[int, ...]]] = {}  # by model: shapes that its input ``stop`` may have

    def infer(self, model: str, inputs: Arrays, *, outputs: Sequence[str] = ()) -> dict[str, Array]:
        """Ask a model that answers once; see ``Callees``."""
        check_callee(model, self._known)
        with _explained(model):
            response = make_request(model, inputs, outputs, self._next_id()).exec()
        return read_response(response, self._device)

    def stream(
        self, model: str, inputs: Arrays, *, outputs: Sequence[str] = (), until: Stream | None = None
    ) -> Generator[dict[str, Array]]:
        """Yield a model's answers; see ``Callees``."""
        check_callee(model, self._known)
        request_id = self._next_id()
        with _explained(model):
            responses = iter(make_request(model, inputs, outputs, request_id).exec(decoupled=True))
        has_left = threading.Event()

        def stop() -> None:
            if not has_left.is_set():
                has_left.set()
                self._stop(model, inputs, request_id)

        if until is not None:
            until.on_leave(stop)
        num_answers = 0
        try:
            for response in responses:
                arrays = read_response(response, self._device)  # no further after an error: that never ends
                if arrays and not has_left.is_set():
                    yield arrays
                num_answers += bool(arrays)
        except GeneratorExit:
            stop()
            # What still comes has to be taken, or its memory is kept: but not by the caller.
            threading.Thread(target=_exhaust, args=(responses,), daemon=True).start()
            raise
        # Triton 24.10 gives an error that follows an answer as if it were the end. The model is asked how it ended: a
        # stop request for a stream that has failed is answered with its error.
        if num_answers and not has_left.is_set():
            self._stop(model, inputs, request_id)

    def _stop(self, model: str, inputs: Arrays, request_id: str) -> None:
        """Tell the model to stop; one that has no input ``stop`` refuses, and answers to the end.

        Whether the model's tensors have a row dimension is not known here: the wrong one of both shapes is refused.

        Raises:
            ShoalError: the stream has failed.
        """
        shapes = self._stops.setdefault(model, [(1, 1), (1,)])
        for shape in tuple(shapes):
            request = make_request(model, {**inputs, STOP: np.ones(shape, np.bool_)}, (), request_id)
            try:
                for response in request.exec(decoupled=True):
                    read_response(response, self._device)
            except ShoalError as error:
                if "unexpected" not in error.what:
                    raise
                self._stops[model] = [other for other in self._stops[model] if other != shape]
            else:
                return

    def _next_id(self) -> str:
        """Return an id that no other request to this server has."""
        return f"{self._name}-{os.getpid()}-{next(self._numbers)}"


def check_callee(model: str, known: Collection[str]) -> None:
    """Check that the code may ask ``model``.

    Raises:
        SetupError: the parameter ``calls`` of its configuration does not list it.
    """
    if model not in known:
        raise SetupError(
            f"The code asks model {model}, which its parameter calls does not list.", suggest(model, known)
        )


def _exhaust(responses: Iterator[Any]) -> None:
    for _ in responses:
        pass


@contextmanager
def _explained(model: str) -> Iterator[None]:
    """Convert the stub's exceptions, such as for a model that is not there."""
    try:
        yield
    except Exception as error:
        raise ServerError(f"Model {model} cannot be asked: {error}") from error
