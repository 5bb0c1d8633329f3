"""Base class of components that answer a request in pieces, and its adapter to Triton's Python backend."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from queue import Queue
from typing import Any, ClassVar

import numpy as np

from shoal.component import tensors
from shoal.component.base import Component, TritonModel
from shoal.component.callees import STOP
from shoal.component.ledger import BATCHES, ROWS
from shoal.component.streams import QueueStream, Stream
from shoal.component.tensors import Arrays
from shoal.errors import InputError, ShoalError

_FAILURES = 1000  # that are kept
_WAITING = 1024  # answers on their way to Triton, of all streams; engines wait for room
_LOOK_SECONDS = 0.05  # between two looks for clients that left
_LOOK_SHARE = 4  # times as long as a look takes: it pauses at least

_log = logging.getLogger("shoal")


class StreamingComponent(Component):
    """Component that answers a request any number of times. Its model must be decoupled.

    Write ``answers``, a generator that runs in a thread of its own::

        class Count(StreamingComponent):
            def answers(self, inputs, stream):
                for number in range(int(inputs["COUNT"].item())):
                    yield {"NUMBER": np.array([number], np.int32)}

    An engine that answers many requests from its own threads overrides ``open`` instead. ``check`` refuses a request
    before it starts, as in any component. A model whose config.pbtxt declares the optional input ``stop`` (TYPE_BOOL
    ``[1]``) can be told to stop: a request with it ends the running one of the same request id.
    """

    is_decoupled = True

    def answers(self, inputs: Arrays, stream: Stream) -> Iterator[Arrays]:
        """Yield the answers to one request, each with every declared output.

        ``inputs`` are as for ``run``, for one request, and may be kept. The stream ends with the generator; what it
        raises becomes the client's error, after the answers so far. It is closed where it stands once the client has
        left; code that waits for something long looks at ``stream.is_open``.
        """
        raise NotImplementedError(f"{type(self).__name__} must define answers(inputs, stream) or open(inputs, stream)")

    def open(self, inputs: Arrays, stream: Stream) -> None:
        """Begin to answer one request, and return at once: ``stream`` is sent to and ended from any thread."""
        threading.Thread(target=self._answer_all, args=(inputs, stream), name="shoal-stream", daemon=True).start()

    def _answer_all(self, inputs: Arrays, stream: Stream) -> None:
        try:
            with self.context.device.active(), contextlib.closing(_as_generator(self.answers(inputs, stream))) as found:
                for outputs in found:
                    if not stream.send(outputs):
                        break
        except Exception as error:
            stream.end(error)
        else:
            stream.end()

    def begin(self, inputs: Arrays, stream: Stream) -> None:
        """Check one request, move its inputs to this component's device, and open it; called by the host.

        Errors end the stream. The inputs are copied, since Triton's memory ends with the call.
        """
        device = self.context.device
        try:
            self.check(inputs)
            with device.active():
                own = {name: device.put(_copy(array), name) for name, array in inputs.items()}
            device.ledger.count(BATCHES)
            device.ledger.count(ROWS, max(1, _num_rows(inputs)) if self.context.spec.is_batched else 1)
            self.open(own, stream)
        except Exception as error:
            stream.end(error)

    def stream(self, inputs: Arrays) -> QueueStream:
        """Answer one request in this process."""
        stream = QueueStream(self, _num_rows(inputs))
        self.begin(inputs, stream)
        return stream

    @classmethod
    def for_triton(cls) -> type[TritonModel]:
        """Return the ``TritonPythonModel`` class that Triton's Python backend looks for in ``model.py``."""
        return type("TritonPythonModel", (StreamingModel,), {"component_class": cls})


def _as_generator(answers: Any) -> Any:
    """Return an iterator with ``close``: ``answers`` may return a list."""
    return answers if hasattr(answers, "close") else (each for each in answers)


def _copy(array: Any) -> Any:
    return array.copy() if isinstance(array, np.ndarray) else tensors.namespace(array).asarray(array, copy=True)


def _num_rows(inputs: Arrays) -> int:
    return next((int(array.shape[0]) for array in inputs.values() if array.ndim), 0)


# --- Triton's side -----------------------------------------------------------------------------------------------


class _TritonStream(Stream):
    """A stream whose answers go to Triton.

    Triton 24.10 ends with signal 11 if ``is_cancelled`` is asked after the final flag was sent. So the stream is
    closed, under the lock, before the flag is even queued, and asked only under the lock while it is open.
    """

    def __init__(self, model: StreamingModel, sender: Any, num_rows: int, request_id: str) -> None:
        super().__init__(model.component, num_rows, request_id)
        self.sender = sender
        self._model = model

    def _deliver(self, item: Arrays | ShoalError | None) -> None:
        if isinstance(item, ShoalError):
            self._model.note_failure(self.request_id, item)
        self._model.waiting.put((self, item))

    def look(self) -> None:
        """Leave if the client has."""
        with self._lock:
            has_left = self._is_open and self.sender.is_cancelled()
        if has_left:
            self.leave()


class StreamingModel(TritonModel):
    """Adapter between Triton's Python backend and a streaming component.

    One thread sends the answers of all streams, since each takes a tenth of a millisecond between processes that
    engines should not wait for; another one looks for clients that have left.
    """

    component_class: ClassVar[type[StreamingComponent]]
    component: StreamingComponent

    def initialize(self, args: dict[str, str]) -> None:
        """Create the component; an exception here makes the model fail to load."""
        super().initialize(args)
        self.waiting: Queue[tuple[_TritonStream, Arrays | ShoalError | None]] = Queue(_WAITING)
        self._open: set[_TritonStream] = set()
        self._changing = threading.Lock()
        self._failures: dict[str, ShoalError] = {}  # by request id
        self._has_ended = threading.Event()
        for work in (self._send_all, self._look_for_leavers):
            threading.Thread(target=work, name=f"shoal{work.__name__}", daemon=True).start()

    def execute(self, requests: list[Any]) -> None:  # type: ignore[override]
        """Begin the requests; their answers come later."""
        for request in requests:
            inputs = self._read(request)
            rows = 0 if isinstance(inputs, ShoalError) else _num_rows(inputs)
            is_stop = not isinstance(inputs, ShoalError) and STOP in inputs and bool(np.asarray(inputs[STOP]).any())
            # A request to stop has no id of its own.
            stream = _TritonStream(self, request.get_response_sender(), rows, "" if is_stop else request.request_id())
            self._register(stream)
            if isinstance(inputs, ShoalError):
                stream.end(inputs)
            elif is_stop:
                stream.end(self._stop(request.request_id()))
            else:
                self.component.begin({name: array for name, array in inputs.items() if name != STOP}, stream)

    def _register(self, stream: _TritonStream) -> None:
        with self._changing:
            self._open.add(stream)
            self._beacon.open_batch()

    def _stop(self, request_id: str) -> ShoalError | None:
        """End the streams of this id; return the error of one that has failed lately."""
        if not request_id:
            return InputError("A request to stop names no other one.", "Send it with that request's id.")
        for stream in list(self._open):
            if stream.request_id == request_id:
                stream.leave()
        return self._failures.pop(request_id, None)

    def note_failure(self, request_id: str, error: ShoalError) -> None:
        """Keep the error of a stream for a while, for a stop request: BLS in Triton 24.10 loses it."""
        if request_id:
            self._failures[request_id] = error
            while len(self._failures) > _FAILURES:
                self._failures.pop(next(iter(self._failures)), None)

    def _send_all(self) -> None:
        """Send what waits, in order. Nothing but the end goes to a client that has left."""
        while True:
            stream, item = self.waiting.get()
            try:
                if item is None:
                    stream.sender.send(flags=tensors.final_flag())
                elif not stream.has_left:
                    stream.sender.send(self._respond(item))
            except Exception:
                _log.exception("model %s could not send an answer", self.component.context.spec.name)
            with self._changing:
                if item is None:
                    self._open.discard(stream)
                if self._open:  # the heartbeat of this process: the last time that any stream moved
                    self._beacon.open_batch()
                else:
                    self._beacon.close_batch()

    def _look_for_leavers(self) -> None:
        pause = _LOOK_SECONDS
        while not self._has_ended.wait(pause):
            start = time.monotonic()
            for stream in list(self._open):
                stream.look()
            pause = max(_LOOK_SECONDS, _LOOK_SHARE * (time.monotonic() - start))

    def finalize(self) -> None:
        """Release the component's resources; called when the model is unloaded, after its last answer."""
        self._has_ended.set()
        for stream in list(self._open):
            stream.leave()
        super().finalize()
