"""Components that answer a request in pieces: their base class, and the adapter to Triton."""

from __future__ import annotations

import contextlib
import logging
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, ClassVar

import numpy as np

from shoal.errors import InputError, ShoalError
from shoal.kit.component import tensors
from shoal.kit.component.answer_socket import Connection, connect
from shoal.kit.component.base import Component
from shoal.kit.component.ledger import BATCHES, ROWS
from shoal.kit.component.spec import STOP, Arrays
from shoal.kit.component.stream import QueueStream, Stream
from shoal.kit.component.triton import TritonModel

_WAITING = 1024  # answers in the queue to Triton, over all streams; if it is full, engines wait
_LOOK_SECONDS = 0.05  # least pause between two searches for clients that have left
_LOOK_SHARE = 4  # a pause takes at least this many times as long as the search before it

_NO_ANSWER = ShoalError("The request was stopped, and has no answer.")

_log = logging.getLogger("shoal")


class StreamingComponent(Component):
    """Component that answers a request any number of times. Its model must be decoupled.

    If it sets ``answers_either_way = True``, the model may also be one that is not decoupled. The component then sends
    exactly one answer to each request, at any time, and answers to other requests may come before it.

    Write ``answers``, a generator that runs in a thread of its own::

        class Count(StreamingComponent):
            def answers(self, inputs, stream):
                for number in range(int(inputs["COUNT"].item())):
                    yield {"NUMBER": np.array([number], np.int32)}

    A component that answers many requests from its own threads, such as a language model, overrides ``open`` instead.
    ``check`` can refuse a request before its first answer, as in any component. If the model's config.pbtxt declares
    the optional input ``stop`` (TYPE_BOOL ``[1]``), clients can stop a request: they send another request with the same
    request id and ``stop`` true.
    """

    is_decoupled = True

    def answers(self, inputs: Arrays, stream: Stream) -> Iterator[Arrays]:
        """Yield the answers to one request, each with every declared output.

        ``inputs`` are the inputs of one request, in the form that ``Component.run`` gets; the component may keep the
        arrays. The stream ends when the generator ends. If the generator raises, the client gets the error after the
        answers so far. When the client leaves, the generator is closed at its next ``yield``; code that takes long
        between two answers should check ``stream.is_open``.
        """
        raise NotImplementedError(f"{type(self).__name__} must define answers(inputs, stream) or open(inputs, stream)")

    def open(self, inputs: Arrays, stream: Stream) -> None:
        """Begin to answer one request and return at once.

        Any thread may send answers to ``stream``. After the last answer, a thread must end it.
        """
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
            if not stream.is_handed_over:
                stream.end()

    def begin(self, inputs: Arrays, stream: Stream) -> None:
        """Check one request, copy its inputs to this component's device, and call ``open``. Errors end the stream.

        The inputs are copied, because Triton frees their memory after this call.
        """
        device = self.context.device
        try:
            self.check(inputs)
            with device.active():
                own = {name: device.put(_copy(array), name) for name, array in inputs.items()}
            device.ledger.count(BATCHES)
            device.ledger.count(ROWS, max(1, count_rows(inputs)) if self.context.spec.is_batched else 1)
            self.open(own, stream)
        except Exception as error:
            stream.end(error)

    def process(self, requests: Sequence[Arrays]) -> list[Arrays | ShoalError]:
        """Return the only answer to each request, in order, or its error; for models that are not decoupled."""
        streams = [self.stream(inputs) for inputs in requests]
        return [_read_only(stream) for stream in streams]

    def stream(self, inputs: Arrays) -> QueueStream:
        """Begin to answer one request in this process, and return the stream of its answers."""
        stream = QueueStream(self, count_rows(inputs))
        self.begin(inputs, stream)
        return stream

    @classmethod
    def for_triton(cls) -> type[TritonModel]:
        """Return the ``TritonPythonModel`` class that Triton's Python backend looks for in ``model.py``."""
        return type("TritonPythonModel", (StreamingModel,), {"component_class": cls})


def _read_only(stream: QueueStream) -> Arrays | ShoalError:
    try:
        (answer,) = stream
    except ShoalError as error:
        return error
    return answer


def _as_generator(answers: Any) -> Any:
    """Return ``answers`` as an iterator with a ``close`` method; a list is wrapped in a generator."""
    return answers if hasattr(answers, "close") else (each for each in answers)


def _copy(array: Any) -> Any:
    return array.copy() if isinstance(array, np.ndarray) else tensors.namespace(array).asarray(array, copy=True)


def count_rows(inputs: Arrays) -> int:
    """Return the number of rows of a request."""
    return next((int(array.shape[0]) for array in inputs.values() if array.ndim), 0)


# --- Triton's side -----------------------------------------------------------------------------------------------


class _TritonStream(Stream):
    """Stream whose answers go to Triton.

    Triton 24.10 crashes (signal 11) if ``is_cancelled`` is called after the final flag was sent. So the stream is
    closed under the lock before the flag is queued, and ``is_cancelled`` is called only under the lock while the stream
    is open.
    """

    def __init__(self, model: StreamingModel, sender: Any, num_rows: int, request_id: str) -> None:
        super().__init__(model.component, num_rows, request_id)
        self.sender = sender
        self._model = model

    def _deliver(self, item: Arrays | ShoalError | None) -> None:
        self._model.post(self, item)

    def defer(self, work: Callable[[], None]) -> None:
        """Run ``work`` in the thread that sends to Triton."""
        self._model.defer(work)

    def look(self) -> None:
        """Close the stream if the client has cancelled the request."""
        with self._lock:
            has_left = self._is_open and self.sender.is_cancelled()
        if has_left:
            self.leave()


class _DirectStream(Stream):
    """Stream whose answers go to another component over a socket; see ``answer_socket.py``."""

    def __init__(self, model: StreamingModel, connection: Connection, num_rows: int, request_id: str) -> None:
        super().__init__(model.component, num_rows, request_id)
        self._model, self._connection = model, connection
        self._has_ended = False

    def fileno(self) -> int:
        """Return the socket's file descriptor."""
        return self._connection.fileno()

    def _deliver(self, item: Arrays | ShoalError | None) -> None:
        try:
            is_sent = self._connection.send(item, self._component.context.device)
        except Exception as error:  # an array that cannot be sent, such as a string with a lone surrogate
            self._is_open = False
            is_sent = self._connection.send(self._component.failure(error), self._component.context.device)
            item = None
        self._has_ended = self._has_ended or item is None
        self._settle(is_sent)

    def react(self) -> None:
        """Send unsent bytes, and close the stream if its client has left; run by the thread that watches sockets."""
        with self._lock:
            has_left = self.fileno() >= 0 and self._connection.has_left()
        if has_left:
            self.leave()
        with self._lock:
            if self.fileno() >= 0:
                self._has_ended = self._has_ended or has_left
                self._settle(self._connection.flush())

    def defer(self, work: Callable[[], None]) -> None:
        """Run ``work`` in the thread that sends to Triton."""
        self._model.defer(work)

    def _settle(self, is_sent: bool) -> None:
        """Release the socket if the stream has ended and all bytes are sent, else watch it. The lock must be held."""
        if is_sent and self._has_ended:
            self._model.forget(self)
            self._connection.close()
        else:
            self._model.watch(self, wants_room=not is_sent)


class StreamingModel(TritonModel):
    """Adapter between Triton's Python backend and a streaming component.

    One thread sends the answers of all streams: sending an answer to Triton's process takes about 0.1 ms, and
    engines should not wait for that. Another thread watches for clients that have left.
    """

    component_class: ClassVar[type[StreamingComponent]]
    component: StreamingComponent

    def initialize(self, args: dict[str, str]) -> None:
        """Create the component; an exception here makes the model fail to load."""
        super().initialize(args)
        self._is_whole = not self.component.context.spec.is_decoupled
        self._waiting: SimpleQueue[tuple[Callable[[], None], bool]] = SimpleQueue()  # work, and whether it has a place
        self._places = threading.Semaphore(_WAITING)
        self._open: set[Stream] = set()
        self._sockets: dict[int, _DirectStream] = {}  # by file descriptor
        self._room = select.epoll()  # reports a socket when its caller leaves, or when it has room again
        self._changing = threading.Lock()
        self._has_ended = threading.Event()
        self._whole: dict[Stream, Any] = {}  # of a model that is not decoupled: Triton takes an answer with its end
        self._poster, watcher = (
            threading.Thread(target=work, name=f"shoal{work.__name__}", daemon=True)
            for work in (self._send_all, self._look_for_leavers)
        )
        self._poster.start()
        watcher.start()

    def execute(self, requests: list[Any]) -> None:  # type: ignore[override]
        """Begin to answer the requests; other threads send the answers."""
        for request in requests:
            inputs = self._read(request)
            if isinstance(inputs, ShoalError):
                self._make_stream(request, None, 0).end(inputs)
                continue
            rows = count_rows(inputs)
            inputs = dict(inputs)
            if bool(np.asarray(inputs.pop(STOP, False)).any()):
                self._answer_stop(self._make_stream(request, None, rows, has_id=False), request.request_id())
                continue
            try:
                connection = None if self._is_whole else connect(tensors.request_parameters(request))
            except InputError as error:
                self._make_stream(request, None, rows).end(error)
                continue
            self.component.begin(inputs, self._make_stream(request, connection, rows))

    def _make_stream(self, request: Any, connection: Connection | None, rows: int, *, has_id: bool = True) -> Stream:
        """Register the stream of a request. With a ``connection``, answers go to it, and Triton's request ends."""
        sender, request_id = request.get_response_sender(), request.request_id() if has_id else ""
        stream: Stream
        if connection is None:
            stream = _TritonStream(self, sender, rows, request_id)
        else:
            sender.send(flags=tensors.triton().TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            stream = _DirectStream(self, connection, rows, request_id)
            self._sockets[connection.fileno()] = stream
            self._room.register(connection, 0)
        with self._changing:
            self._open.add(stream)
            self._beacon.open_batch()
        return stream

    def _answer_stop(self, answer: Stream, request_id: str) -> None:
        """Close the streams of the requests with this id, and end the stop request: without an answer, or an empty one.

        An error is sent if the id is empty.
        """
        if not request_id:
            error = InputError("A request with stop has no request id.", "Send it with the id of the request to stop.")
            answer.end(error)
            return
        for stream in list(self._open):
            if stream.request_id == request_id:
                stream.stop()
        answer.farewell = {} if self._is_whole else None
        answer.stop()

    def watch(self, stream: _DirectStream, *, wants_room: bool) -> None:
        """Watch whether the client at a stream's socket leaves and, with ``wants_room``, whether the socket is free."""
        self._room.modify(stream.fileno(), select.EPOLLOUT if wants_room else 0)
        self._note_move(None)

    def forget(self, stream: _DirectStream) -> None:
        """Stop watching the socket of a stream that has ended."""
        self._room.unregister(stream.fileno())
        self._sockets.pop(stream.fileno(), None)
        self._note_move(stream)

    def _note_move(self, ended: Stream | None) -> None:
        """Set this process's heartbeat to now, or to idle if no stream but ``ended`` is open."""
        with self._changing:
            self._open -= {ended}
            if self._open:
                self._beacon.open_batch()
            else:
                self._beacon.close_batch()

    def post(self, stream: _TritonStream, item: Arrays | ShoalError | None) -> None:
        """Send an answer or the end of a stream to Triton, after what waits already.

        Only answers wait for a place. An end is posted under the lock of a stream that the poster may be about to use.
        """
        if threading.current_thread() is self._poster:
            self._send(stream, item)
        elif item is None or isinstance(item, ShoalError):
            self._waiting.put((partial(self._send, stream, item), False))
        else:
            self.defer(partial(self._send, stream, item))

    def defer(self, work: Callable[[], None]) -> None:
        """Run ``work`` in the thread that sends to Triton, after what waits already."""
        self._places.acquire()
        self._waiting.put((work, True))

    def _send_all(self) -> None:
        """Do what is posted, in order."""
        while True:
            work, has_place = self._waiting.get()
            if has_place:
                self._places.release()
            try:
                work()
            except Exception:  # all other streams need this thread
                _log.exception("model %s could not send an answer", self.component.context.spec.name)
            del work  # which would live until the next one

    def _send(self, stream: _TritonStream, item: Arrays | ShoalError | None) -> None:
        """Send an answer or the end of a stream; drop an answer to a client that has left."""
        try:
            if item is None:
                end = {"flags": tensors.triton().TRITONSERVER_RESPONSE_COMPLETE_FINAL}
                if self._is_whole:
                    stream.sender.send(self._whole.pop(stream, None) or self._respond(_NO_ANSWER), **end)
                else:
                    stream.sender.send(**end)
            elif self._is_whole:
                self._whole[stream] = self._respond(item)
            elif not stream.has_left or item is stream.farewell:
                stream.sender.send(self._respond(item))
        except Exception:
            _log.exception("model %s could not send an answer", self.component.context.spec.name)
        self._note_move(stream if item is None else None)

    def _look_for_leavers(self) -> None:
        pause = _LOOK_SECONDS
        due = time.monotonic() + pause
        while not self._has_ended.is_set():
            for descriptor, _ in self._room.poll(max(0.0, due - time.monotonic())):
                if (stream := self._sockets.get(descriptor)) is not None:
                    stream.react()
            if (start := time.monotonic()) < due:
                continue
            for each in list(self._open):
                if isinstance(each, _TritonStream):
                    each.look()
            pause = max(_LOOK_SECONDS, _LOOK_SHARE * (time.monotonic() - start))
            due = time.monotonic() + pause

    def finalize(self) -> None:
        """Close open streams and release the component's resources; called when the model is unloaded."""
        self._is_serving = False
        self._has_ended.set()
        for stream in list(self._open):
            stream.leave()
        super().finalize()
