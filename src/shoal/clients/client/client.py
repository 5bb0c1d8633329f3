"""Blocking client for any served model or pipeline, over HTTP or gRPC."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar
from weakref import WeakSet

from shoal.clients.client.calls import Answer, Call, Parameter, ServedModel
from shoal.clients.client.failures import CallError, explain
from shoal.clients.client.flow import Attempts, BaseClient, Flow, InferRequest, check_timeout, closed_client
from shoal.clients.client.grpc_transport import Grpc
from shoal.clients.client.http_transport import Http
from shoal.clients.client.streams import Course, Replies
from shoal.errors import ShoalError
from shoal.kit.component.spec import ModelSpec

T = TypeVar("T")


class Client(BaseClient):
    """Client of one server::

        with shoal.Client("127.0.0.1:8001") as client:
            client.infer("my_ensemble", TEXT=["A text."], WEIGHT=[0.7])["SCORE"]

    ``protocol`` is ``grpc`` or ``http``. Without ``url``, the client uses this machine and Triton's port for the
    protocol: 8001 for gRPC, 8000 for HTTP. ``timeout`` is in seconds, for one request including retries.
    ``concurrency`` is how many parts of a split request are in flight at a time. ``retries`` is how many times a
    request may be resent. A request is resent only if the server certainly did not run it, because the server could not
    be reached or its queue was full. With ``is_repeatable``, requests whose connection broke are resent too, and may
    run twice. ``api_key`` is the key that the server wants, if it wants one.

    A ``url`` that begins with ``grpcs://`` or ``https://`` stands for TLS. ``ca_cert`` is a file with the certificates
    of the authorities, or of the server itself, that the client trusts; without it, those that the variable
    ``SSL_CERT_FILE`` names, or public ones. ``client_cert`` is a file with the client's own certificate and its key.
    All files are PEM.

    Threads may share a client. Close the client after use, because Triton waits for open HTTP connections before it
    stops.

    Raises:
        InputError: the value of an option is invalid.
    """

    def _open(self) -> None:
        make = Grpc if self.protocol == "grpc" else Http
        self._transport: Grpc | Http = self._connect(make)
        self._senders = ThreadPoolExecutor(self._options.concurrency, thread_name_prefix="shoal-client")
        self._streams: WeakSet[Replies] = WeakSet()

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Any] | None = None,
        /,
        *,
        outputs: Sequence[str] | None = None,
        request_id: str = "",
        timeout: float | None = None,
        parameters: Mapping[str, Parameter] | None = None,
        version: int | None = None,
        **named: Any,
    ) -> Answer:
        """Send one request, with a list or an array for each input, and return its outputs as arrays ``[rows, *dims]``.

        A data frame of pandas or polars, whose columns have the inputs' names, may stand for the mapping ``inputs``,
        and a column for a list. An input whose name is an option of this method, such as ``timeout``, goes into the
        mapping ``inputs``. ``outputs`` names the outputs to return; by default all. ``timeout`` is in seconds and
        replaces the client's time-out. A request with more rows than the model's ``max_batch_size`` is sent in parts,
        each with this time-out, and the answers to the parts are joined. ``request_id`` names the request in Triton's
        log; the parts of request ``ID`` are ``ID/1``, ``ID/2`` and so on. ``parameters`` reach every model of an
        ensemble. ``version`` is the version of the model to ask, by default the latest that the server has loaded.

        Raises:
            InputError: an input or a requested output does not fit the model's declaration, or the model refused the
                request.
            ServerError: the server cannot be reached, answers too late, or fails.
        """
        request = InferRequest(model, inputs, named, outputs, request_id, timeout, parameters, version)
        return self._run_flow(self._flows.infer(request))

    def stream(
        self,
        model: str,
        inputs: Mapping[str, Any] | None = None,
        /,
        *,
        outputs: Sequence[str] | None = None,
        request_id: str = "",
        timeout: float | None = None,
        between: float | None = None,
        parameters: Mapping[str, Parameter] | None = None,
        version: int | None = None,
        **named: Any,
    ) -> Replies:
        """Send one request to a decoupled model, which streams its answers, and iterate over them as they come::

            for answer in client.stream("my_model", TEXT=["A text."]):
                print(answer["WORD"])

        ``timeout`` is the longest time to the first answer in seconds, including retries; ``between`` is the longest
        time from one answer to the next, by default ``timeout``. The request is sent when the first answer is asked
        for, and is not sent again once an answer has come. A request with too many rows is refused, not split. A model
        that is not decoupled gives one answer. Leaving the loop ends the request.

        Over HTTP, if several dimensions of an input, with the rows, are declared as -1, all but the last of these must
        have the size 1.

        Raises:
            InputError: an input or a requested output does not fit the model's declaration, or the model refused the
                request.
            ServerError: the server cannot be reached, answers too late, or fails, possibly after some answers.
        """
        limit = None if between is None else check_timeout(between, "between")
        request = InferRequest(model, inputs, named, outputs, request_id, timeout, parameters, version)
        call = self._run_flow(self._flows.stream(request))
        replies = Replies(Course(call, self._options, limit, self._flows.note_refusal), self._transport.stream)
        self._streams.add(replies)
        return replies

    def is_ready(self, model: str) -> bool:
        """Whether the server has ``model`` loaded."""
        return self._run_flow(self._flows.is_ready(model))

    def models(self) -> list[ServedModel]:
        """Return the models of the server that the client may ask: ``name``, ``version``, ``state`` and ``is_ready``.

        Raises:
            ServerError: the server does not list its models, or cannot be reached.
        """
        return self._run_flow(self._flows.list_models())

    def default_model(self) -> str:
        """Return the name of the server's default model.

        A server started by ``shoal serve`` names its default model. On any other server, the default is the only
        ensemble that no other ensemble calls, or the only model if there is no ensemble.

        Raises:
            InputError: several models could be the default, or the server does not list its models.
        """
        return self._run_flow(self._flows.find_default())

    def describe(self, model: str) -> ModelSpec:
        """Return the declaration of ``model``: its inputs, its outputs and its ``max_batch_size``.

        A server that restricts access to configurations does not say which inputs are optional, nor how many rows a
        request may have. All inputs are then reported as optional, and ``max_batch_size`` is 2147483647, or 0 if the
        shapes of the inputs show that there is no batch dimension. The server refuses requests with too many rows.
        """
        return self._run_flow(self._flows.describe(model))

    def _run_flow(self, flow: Flow[T]) -> T:
        """Drive a request flow to completion."""
        if self._is_closed:
            raise closed_client()
        try:
            calls = next(flow)
            while True:
                try:
                    results = [self._send(calls[0])] if len(calls) == 1 else list(self._senders.map(self._send, calls))
                except ShoalError as error:
                    calls = flow.throw(error)
                else:
                    calls = flow.send(results)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    def _send(self, call: Call) -> Any:
        attempts = Attempts(call, self._options)
        while True:
            try:
                return self._transport.send(call, attempts.left)
            except CallError as failure:
                pause = attempts.pause(failure)
                if pause is None:
                    raise explain(failure, call, attempts.server) from None
            time.sleep(pause)

    def close(self) -> None:
        """Close every connection."""
        self._is_closed = True
        for replies in list(self._streams):
            replies._stop(closed_client())
        self._senders.shutdown(cancel_futures=True)
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
