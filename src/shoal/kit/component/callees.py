"""Calls from a component to other models through Triton (BLS, business logic scripting)."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np

from shoal.errors import ServerError
from shoal.kit.component.answer_socket import ANSWERS, Answers, Listener
from shoal.kit.component.context import Callees, Leavable, choose
from shoal.kit.component.spec import CALLS, STOP, Array, Arrays, ModelSpec
from shoal.kit.component.tensors import Device, make_request, read_response


class TritonCallees(Callees):
    """Calls to models through Triton's core, from a process of the Python backend (a stub).

    Streaming components answer over a socket (see ``answer_socket.py``). All other decoupled models answer through
    BLS, one request at a time: a request waits until the last answer to the previous request has come.
    """

    def __init__(self, spec: ModelSpec, device: Device) -> None:
        super().__init__(spec.parameters.get(CALLS, "").split())
        self._name, self._device = spec.name, device
        self._numbers = itertools.count()
        self._bls = threading.Lock()  # held during each request for answers in pieces

    def _infer(self, model: str, inputs: Arrays, outputs: Sequence[str]) -> dict[str, Array]:
        with _explained(model):
            response = make_request(model, inputs, outputs, self._next_id()).exec()
        return read_response(response, self._device)

    def _stream(
        self, model: str, inputs: Arrays, outputs: Sequence[str], until: Leavable | None
    ) -> Generator[dict[str, Array]]:
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
                    yield choose(answer, outputs)
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
        """Yield the first answer, ``arrays``, and the answers that follow through BLS.

        Until the last answer, only this thread may send requests. So it also sends the request that stops the model.
        """
        try:
            while not has_left.is_set():
                if arrays:
                    yield arrays
                if (response := next(responses, None)) is None:
                    return
                arrays = read_response(response, self._device)  # no further after an error: that never ends
        except GeneratorExit:
            stop()
            # Triton frees the memory of answers only when they are read. A thread reads the rest; the caller goes on.
            threading.Thread(target=_exhaust, args=(responses, held.pop_all()), daemon=True).start()
            raise
        stop()
        _exhaust(responses, held.pop_all())

    def _stop(self, model: str, inputs: Arrays, request_id: str) -> None:
        """Send the request that stops the running request with this id.

        A model without the input ``stop`` refuses to stop and goes on computing. Whether the model's tensors have a row
        dimension is unknown here, so both shapes are tried.
        """
        for shape in ((1, 1), (1,)):
            request = make_request(model, {**inputs, STOP: np.ones(shape, np.bool_)}, (), request_id)
            with suppress(Exception):
                for response in request.exec(decoupled=True):
                    read_response(response, self._device)
                return

    def _next_id(self) -> str:
        """Return a request id that is unique on this server."""
        return f"{self._name}-{os.getpid()}-{next(self._numbers)}"


def _leave(has_left: threading.Event, answers: Answers) -> None:
    has_left.set()
    answers.shut()


def _exhaust(responses: Iterator[Any], held: ExitStack) -> None:
    with held:
        for _ in responses:
            pass


@contextmanager
def _explained(model: str) -> Iterator[None]:
    """Convert the exceptions that the stub raises, for example if the model is missing, to ``ServerError``."""
    try:
        yield
    except Exception as error:
        raise ServerError(f"Model {model} cannot be asked: {error}") from error
