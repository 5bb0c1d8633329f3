"""HTTP: requests of KServe's inference protocol v2, Triton's generate extension, and the transports of the clients."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import weakref
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import numpy as np

from shoal.clients.client.calls import (
    Answer,
    Call,
    Description,
    Method,
    ServedModel,
    datatype,
    decode,
    encode,
    make_answer,
    restore_shape,
)
from shoal.clients.client.failures import CallError, Kind, connection_failure, http_failure, stream_failure
from shoal.clients.client.sources import AsyncSource, LoopSource
from shoal.clients.client.tls import Tls
from shoal.errors import InputError
from shoal.kit.component.spec import Array, ModelSpec, TensorSpec

T = TypeVar("T")

HEADER_LENGTH = "Inference-Header-Content-Length"  # header: bytes of the JSON before the tensors
ANY_BYTES = "surrogateescape"  # bytes that are not UTF-8 reach the other side unchanged
_USE_GRPC = "Use gRPC: protocol='grpc', on the command line --protocol grpc"


# --- requests and answers -------------------------------------------------------------------------------------------


class HttpRequest(NamedTuple):
    """An HTTP request, ready to send."""

    verb: str
    path: str
    headers: dict[str, str]
    body: bytes


class HttpReply(NamedTuple):
    """An HTTP response. ``header_length`` is the length of the JSON part in bytes; None if the body is only JSON."""

    status: int
    header_length: str | None
    body: bytes


def to_http(call: Call) -> HttpRequest:
    """Serialise ``call`` as an HTTP request."""
    path = f"/v2/models/{quote(call.model, safe='')}{f'/versions/{call.version}' if call.version else ''}"
    if call.method is Method.INDEX:
        return HttpRequest("POST", "/v2/repository/index", {}, b"")
    if call.method is Method.STREAM:
        return HttpRequest("POST", f"{path}/generate_stream", {"Content-Type": "application/json"}, to_generate(call))
    if call.method is not Method.INFER:
        ends = {Method.METADATA: "", Method.CONFIG: "/config", Method.READY: "/ready"}
        return HttpRequest("GET", path + ends[call.method], {}, b"")
    blobs = {name: encode(array) for name, array in call.arrays.items()}
    parts = _json_request(call, {name: len(blob) for name, blob in blobs.items()})
    header = json.dumps(parts).encode()
    headers = {HEADER_LENGTH: str(len(header)), "Content-Type": "application/octet-stream"}
    return HttpRequest("POST", f"{path}/infer", headers, b"".join([header, *blobs.values()]))


def _json_request(call: Call, sizes: Mapping[str, int]) -> dict[str, Any]:
    binary = {"binary_data": True}
    return {
        "id": call.request_id,
        "parameters": {**call.parameters, "binary_data_output": True},
        "inputs": [
            {
                "name": name,
                "shape": list(array.shape),
                "datatype": datatype(array),
                "parameters": {"binary_data_size": sizes[name]},
            }
            for name, array in call.arrays.items()
        ],
        **({"outputs": [{"name": name, "parameters": binary} for name in call.outputs]} if call.outputs else {}),
    }


def from_http(call: Call, reply: HttpReply) -> Any:
    """Parse ``reply`` according to the method of ``call``.

    INFER gives an ``Answer``, READY a bool, INDEX a list of ``ServedModel``, and others a ``Description``.

    Raises:
        CallError: the server refused the request, or ``reply`` is not an answer of Triton.
    """
    if call.method is Method.READY and reply.status in (400, 404):  # not ready, in Triton's protocol
        return False
    if reply.status != 200:
        raise http_failure(reply.status, reply.body)
    if call.method is Method.READY:
        return True
    try:
        if call.method is Method.INFER:
            return _http_answer(call, reply)
        document = json.loads(reply.body)
        if call.method is Method.INDEX:
            more = ServedModel._fields[1:]
            return [ServedModel(each["name"], *(each.get(name, "") for name in more)) for each in document]
        return (Description.from_config if call.method is Method.CONFIG else Description.from_metadata)(document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CallError(Kind.NOT_TRITON, f"unreadable answer: {error}") from None


def _http_answer(call: Call, reply: HttpReply) -> Answer:
    length = int(reply.header_length) if reply.header_length else len(reply.body)
    head, tail = json.loads(reply.body[:length]), memoryview(reply.body)[length:]
    arrays, start = {}, 0
    for output in head["outputs"]:
        size = output["parameters"]["binary_data_size"]
        arrays[output["name"]] = decode(output["datatype"], output["shape"], tail[start : start + size])
        start += size
    return make_answer(call, arrays, head.get("model_version", ""), head.get("parameters", {}))


# --- streamed answers ------------------------------------------------------------------------------------------------
# Triton's generate extension: requests of flat lists, answered by server-sent events. It carries neither dtypes nor
# shapes: both come from the model's description.


class Events:
    """Parser of server-sent events, for a body that comes in chunks."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Add the next bytes of the body; return the data of each event that is complete with them."""
        *events, self._rest = (self._rest + chunk).split(b"\n\n")
        return [event.removeprefix(b"data:").strip() for event in events]


def to_generate(call: Call) -> bytes:
    """Serialise a streamed request as the JSON body for Triton's ``generate_stream``.

    Raises:
        InputError: an input has a shape that Triton could not restore, such as several rows of lists.
    """
    model = _model_of(call)
    document: dict[str, Any] = {"parameters": dict(call.parameters)}
    if call.request_id:
        document["id"] = call.request_id
    for spec in model.inputs:
        if spec.name in call.arrays:
            array = call.arrays[spec.name]
            if restore_shape(_declared(spec, model), array.size) != array.shape:
                raise InputError(
                    f"{spec.name} has shape {list(array.shape)}, and HTTP streams carry flat lists without shapes.",
                    _USE_GRPC,
                )
            document[spec.name] = [_as_json(value) for value in array.ravel().tolist()]
    return json.dumps(document, ensure_ascii=False).encode("utf-8", ANY_BYTES)


def from_generate(call: Call, data: bytes) -> Answer:
    """Parse the data of one event.

    Raises:
        CallError: the event is an error, or is not an answer of Triton.
        InputError: the shape of an output cannot be restored from a flat list.
    """
    model = _model_of(call)
    try:
        document = json.loads(data.decode("utf-8", ANY_BYTES))
        if "model_name" not in document:
            raise stream_failure(document["error"])
        wanted = [spec for spec in model.outputs if spec.name in (call.outputs or document)]
        is_one_row = not model.is_batched or {len(array) for array in call.arrays.values()} <= {1}
        arrays = {spec.name: _to_array(spec, model, document[spec.name], is_one_row=is_one_row) for spec in wanted}
        return Answer(
            {name: arrays[name] for name in call.outputs or arrays},
            model=call.model,
            version=document.get("model_version", ""),
            request_id=call.request_id,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CallError(Kind.NOT_TRITON, f"unreadable answer: {error}") from None


def _to_array(spec: TensorSpec, model: ModelSpec, value: Any, *, is_one_row: bool) -> Array:
    values = value if isinstance(value, list) else [value]
    if spec.dims.count(-1) > is_one_row and len(values) > 1:
        raise InputError(
            f"Output {spec.name} is {spec.kind}, and HTTP streams carry flat lists without shapes.",
            f"{_USE_GRPC}; or ask for others: outputs=[...]",
        )
    array = np.array([_from_json(each) for each in values], spec.numpy_dtype)
    return array.reshape(restore_shape(_declared(spec, model), len(values)))


def _declared(spec: TensorSpec, model: ModelSpec) -> Sequence[int]:
    return (-1, *spec.dims) if model.is_batched else spec.dims


def _model_of(call: Call) -> ModelSpec:
    assert call.spec is not None
    return call.spec


def _as_json(value: Any) -> Any:
    return value.decode("utf-8", ANY_BYTES) if isinstance(value, bytes) else value


def _from_json(value: Any) -> Any:
    return value.encode("utf-8", ANY_BYTES) if isinstance(value, str) else value


# --- transports -----------------------------------------------------------------------------------------------------


class AsyncHttp:
    """Asynchronous transport over HTTP: aiohttp's pool of keep-alive connections, bound to one event loop.

    aiohttp uses no proxy unless configured to, and does not send a POST twice. Unlike the blocking libraries, it limits
    the time of a whole request, not only of each read.
    """

    def __init__(self, url: str, api_key: str = "", tls: Tls | None = None) -> None:
        import aiohttp

        self._url = f"{'https' if tls else 'http'}://{url}"
        self._aiohttp = aiohttp
        headers = {"Accept-Encoding": "identity"}  # compression by Triton costs more than it saves
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._sockets = weakref.WeakSet[socket.socket]()
        trust = tls.context if tls else True
        connector = aiohttp.TCPConnector(limit=0, ssl=trust, socket_factory=self._open_socket)
        self._session = aiohttp.ClientSession(connector=connector, headers=headers)

    async def send(self, call: Call, seconds: float) -> Any:
        return from_http(call, await self.exchange(to_http(call), seconds))

    async def exchange(self, request: HttpRequest, seconds: float) -> HttpReply:
        """Return the server's reply within ``seconds``, or raise ``CallError``."""
        with self._failures():
            async with self._request(request, seconds) as answer:
                return HttpReply(answer.status, answer.headers.get(HEADER_LENGTH), await answer.read())

    def stream(self, call: Call) -> AsyncSource:
        return AsyncSource(self._receive(call))

    async def _receive(self, call: Call) -> AsyncGenerator[Answer, None]:
        events = Events()
        with self._failures():
            async with self._request(to_http(call), None) as answer:
                if answer.content_type != "text/event-stream":  # an error may have any status, and be an event
                    raise http_failure(answer.status, await answer.read())
                async for chunk in answer.content.iter_any():
                    for data in events.feed(chunk):
                        yield from_generate(call, data)

    def _request(self, request: HttpRequest, seconds: float | None) -> Any:
        from yarl import URL

        verb, path, headers, body = request
        options: dict[str, Any] = {"timeout": self._aiohttp.ClientTimeout(total=seconds), "allow_redirects": False}
        url = URL(self._url + path, encoded=True)
        return self._session.request(verb, url, data=body or None, headers=headers, **options)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Translate aiohttp's errors to ``CallError``."""
        try:
            yield
        except TimeoutError:
            raise CallError(Kind.TIMEOUT, "while waiting") from None
        except self._aiohttp.ClientConnectorError as error:
            raise connection_failure(error.os_error) from None
        except (self._aiohttp.ClientConnectionError, self._aiohttp.ClientPayloadError):
            raise CallError(Kind.CONNECTION_LOST, "connection closed") from None
        except self._aiohttp.ClientError as error:
            raise CallError(Kind.NOT_TRITON, f"unreadable answer: {str(error)[:40]!r}") from None

    def _open_socket(self, address: tuple[Any, ...]) -> socket.socket:
        opened = socket.socket(*address[:3])
        self._sockets.add(opened)
        return opened

    async def close(self) -> None:
        await self._session.close()
        # A connection with TLS that had ended before waits for the server to confirm it. The loop may stop earlier.
        for opened in [*self._sockets]:
            with suppress(OSError):  # it is closed
                opened.shutdown(socket.SHUT_RDWR)
        for _ in range(3):  # rounds of the loop: it reads the end of a connection, and closes it in the next round
            await asyncio.sleep(0)


class Http:
    """Blocking transport over HTTP: threads share one ``AsyncHttp``, whose event loop runs in a thread of its own."""

    def __init__(self, url: str, api_key: str = "", tls: Tls | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run_loop, args=[self._loop], name="shoal-http", daemon=True)
        self._thread.start()
        self._transport = self._wait(_open(url, api_key, tls))
        # Also ends a client that is dropped without close(). It does not wait: it may run in any thread.
        self._end = weakref.finalize(self, asyncio.run_coroutine_threadsafe, _end(self._transport), self._loop)

    def send(self, call: Call, seconds: float) -> Any:
        return from_http(call, self._wait(self._transport.exchange(to_http(call), seconds)))

    def stream(self, call: Call) -> LoopSource:
        return LoopSource(self._transport.stream(call), self._loop)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # also an interrupt
            future.cancel()
            raise
        finally:
            del future  # or its error would hold this frame, and the frame the error

    def close(self) -> None:
        self._end()
        self._thread.join()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


async def _open(url: str, api_key: str, tls: Tls | None) -> AsyncHttp:
    return AsyncHttp(url, api_key, tls)  # within the loop, which aiohttp's session belongs to


async def _end(transport: AsyncHttp) -> None:
    await transport.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)  # cancelled streams end first
    asyncio.get_running_loop().stop()
