"""The other models that a component asks: in Triton (BLS), in this process, or in a test."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from shoal.component.direct import ANSWERS, Answers, Listener
from shoal.component.spec import ModelSpec
from shoal.component.tensors import Array, Arrays, Device, make_request, read_response
from shoal.errors import ServerError, SetupError, suggest

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
    """Models asked through Triton's core, from within a stub.

    A streaming component sends its answers over a socket (``shoal.component.direct`` says why). Any other decoupled
    model answers through BLS, which can take the answers of one such request at a time: others wait for it to end.
    """

    def __init__(self, spec: ModelSpec, device: Device) -> None:
        self._name, self._device = spec.name, device
        self._known = spec.parameters.get(CALLS, "").split()
        self._numbers = itertools.count()
        self._bls = threading.Lock()  # held during each request for answers in pieces

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
        has_left = threading.Event()
        with ExitStack() as held:
            held.enter_context(self._bls)
            with closing(Listener()) as listener:
                request = make_request(model, inputs, outputs, request_id, {ANSWERS: listener.address})
                with _explained(model):
                    responses = iter(request.exec(decoupled=True))
                    first = next(responses, None)
                arrays = {} if first is None else read_response(first, self._device)
                answers = listener.accept()
            if answers is None:
                if until is not None:
                    until.on_leave(has_left.set)
                stop = partial(self._stop, model, inputs, request_id)
                yield from self._read_bls(responses, arrays, has_left, stop, held)
                return
        with closing(answers), closing(answers.read(model, self._device)) as found:
            if until is not None:
                until.on_leave(partial(_leave, has_left, answers))
            try:
                for answer in found:
                    yield _choose(answer, outputs)
            except ServerError:
                if not has_left.is_set():
                    raise

    def _read_bls(
        self,
        responses: Iterator[Any],
        arrays: dict[str, Array],
        has_left: threading.Event,
        stop: Callable[[], None],
        held: ExitStack,
    ) -> Generator[dict[str, Array]]:
        """Yield answers that come through BLS, from the first one on; only this thread may ask, so it also stops."""
        try:
            while not has_left.is_set():
                if arrays:
                    yield arrays
                if (response := next(responses, None)) is None:
                    return
                arrays = read_response(response, self._device)  # no further after an error: that never ends
        except GeneratorExit:
            stop()
            # What still comes has to be taken, or its memory is kept: but not by the caller.
            threading.Thread(target=_exhaust, args=(responses, held.pop_all()), daemon=True).start()
            raise
        stop()
        _exhaust(responses, held.pop_all())

    def _stop(self, model: str, inputs: Arrays, request_id: str) -> None:
        """Tell the model to stop; one that has no input ``stop`` refuses, and answers to the end.

        Whether the model's tensors have a row dimension is not known here: the wrong one of both shapes is refused.
        """
        for shape in ((1, 1), (1,)):
            request = make_request(model, {**inputs, STOP: np.ones(shape, np.bool_)}, (), request_id)
            with suppress(Exception):
                for response in request.exec(decoupled=True):
                    read_response(response, self._device)
                return

    def _next_id(self) -> str:
        """Return an id that no other request to this server has."""
        return f"{self._name}-{os.getpid()}-{next(self._numbers)}"


def _leave(has_left: threading.Event, answers: Answers) -> None:
    has_left.set()
    answers.shut()


def check_callee(model: str, known: Collection[str]) -> None:
    """Check that the code may ask ``model``.

    Raises:
        SetupError: the parameter ``calls`` of the calling model does not list ``model``.
    """
    if model not in known:
        raise SetupError(
            f"The code asks model {model}, which its parameter calls does not list.", suggest(model, known)
        )


def _exhaust(responses: Iterator[Any], held: ExitStack) -> None:
    with held:
        for _ in responses:
            pass


@contextmanager
def _explained(model: str) -> Iterator[None]:
    """Convert the stub's exceptions, such as for a model that is not there."""
    try:
        yield
    except Exception as error:
        raise ServerError(f"Model {model} cannot be asked: {error}") from error
