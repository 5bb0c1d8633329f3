"""Any served model or pipeline that batches, over HTTP or gRPC."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from shoal.component.spec import STRING, TensorSpec
from shoal.component.tensors import Array
from shoal.errors import InputError, ServerError
from shoal.serving.arrays import to_arrays

PROTOCOLS = ("grpc", "http")
# Triton's words for: the request is at fault, not the server.
_CALLERS_FAULT = {"StatusCode.INVALID_ARGUMENT", "StatusCode.NOT_FOUND", "400", "404"}


class Client:
    """A connection to one server::

        with shoal.Client("127.0.0.1:8001") as client:
            client.infer("my_ensemble", TEXT=["A text."], WEIGHT=[0.7])["SCORE"]

    ``protocol`` is ``grpc`` (port 8001, as Triton has it) or ``http`` (port 8000). Threads may share a client. Close
    it: Triton waits for open HTTP connections before it stops.
    """

    def __init__(self, url: str = "127.0.0.1:8001", *, protocol: str = "grpc", timeout: float = 60.0) -> None:
        if protocol not in PROTOCOLS:
            raise InputError(f"There is no protocol {protocol!r}.", f"Known: {', '.join(PROTOCOLS)}.")
        self.url, self.protocol, self.timeout = url, protocol, timeout
        self._specs: dict[str, tuple[TensorSpec, ...]] = {}
        self._here = threading.local()
        self._connections: weakref.WeakSet[Any] = weakref.WeakSet()
        self._shared = self._connect() if protocol == "grpc" else None

    def _connect(self) -> Any:
        options: dict[str, Any] = {"connection_timeout": self.timeout, "network_timeout": self.timeout}
        if self.protocol == "grpc":
            options = {"channel_args": _channel_options(self.url)}
        connection = _module(self.protocol).InferenceServerClient(self.url, **options)
        self._connections.add(connection)
        return connection

    @property
    def _connection(self) -> Any:
        """tritonclient's own client; over HTTP one a thread, since it deadlocks when two share it."""
        if self._shared is not None:
            return self._shared
        if not hasattr(self._here, "connection"):
            self._here.connection = self._connect()
        return self._here.connection

    def infer(self, model: str, /, **inputs: Any) -> dict[str, Array]:
        """Send one request: lists or arrays in, by input name; every output, ``[rows, *dims]``.

        Raises:
            InputError: an input is not what the model declares, or the model refused it.
            ServerError: no server answers, or it failed.
        """
        tensors = to_arrays(self.inputs(model), inputs, is_batched=True)
        answer = self._call("infer", model, [self._input(name, array) for name, array in tensors.items()])
        response = answer.get_response()
        if self.protocol == "http":
            names = [output["name"] for output in response["outputs"]]
        else:
            names = [output.name for output in response.outputs]
        return {name: answer.as_numpy(name) for name in names}

    def is_ready(self, model: str) -> bool:
        """Whether the server has ``model`` loaded."""
        return bool(self._call("is_model_ready", model))

    def inputs(self, model: str) -> tuple[TensorSpec, ...]:
        """The inputs of ``model`` as the server describes them; which are optional, it does not say."""
        if model not in self._specs:
            metadata = self._metadata(model)
            self._specs[model] = tuple(_spec(entry) for entry in metadata["inputs"])
        return self._specs[model]

    def _metadata(self, model: str) -> Mapping[str, Any]:
        if self.protocol == "http":
            return dict(self._call("get_model_metadata", model))
        return dict(self._call("get_model_metadata", model, as_json=True))

    def _input(self, name: str, array: Array) -> Any:
        from tritonclient.utils import np_to_triton_dtype

        tensor = _module(self.protocol).InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        return tensor

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        from geventhttpclient.response import HTTPParseError
        from tritonclient.utils import InferenceServerException

        if self.protocol == "grpc":
            options["client_timeout"] = self.timeout
        try:
            return getattr(self._connection, method)(*args, **options)
        except InferenceServerException as error:
            raise _translate(error, self.url) from None
        except (OSError, RuntimeError, HTTPParseError) as error:  # the HTTP client's: refused, cut off, timed out
            raise _absent(self.url, str(error)) from None

    def close(self) -> None:
        """Close every connection."""
        for connection in list(self._connections):
            try:
                connection.close()
            except RuntimeError:  # gevent refuses to wait for another thread's requests; there are none
                connection._client_stub.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _module(protocol: str) -> Any:
    if protocol == "http":
        import tritonclient.http as module
    else:
        import tritonclient.grpc as module
    return module


def _channel_options(url: str) -> list[tuple[str, int]]:
    """No limit to messages, and no proxy between this machine and itself."""
    is_here = url.startswith(("127.", "localhost", "[::1]"))
    limits = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    return [*limits, ("grpc.enable_http_proxy", 0)] if is_here else limits


def _spec(entry: Mapping[str, Any]) -> TensorSpec:
    dtype = STRING if entry["datatype"] == "BYTES" else f"TYPE_{entry['datatype']}"
    dims = tuple(int(size) for size in entry["shape"][1:])
    return TensorSpec(entry["name"], dtype, dims, is_optional=True)


def _translate(error: Any, url: str) -> InputError | ServerError:
    status, message = str(error.status() or ""), str(error.message())
    if status == "StatusCode.UNAVAILABLE" and "connect" in message.lower():
        return _absent(url, "connection refused")
    if status in _CALLERS_FAULT:
        return InputError(message)
    return ServerError(f"The server at {url} failed: {message} ({_short(status)})")


def _short(status: str) -> str:
    return re.sub(r"^StatusCode\.", "", status) or "no status"


def _absent(url: str, reason: str) -> ServerError:
    return ServerError(f"No Triton answers at {url} ({reason}).", "Start one: shoal serve REPOSITORY")
