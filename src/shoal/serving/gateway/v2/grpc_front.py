"""gRPC front end: forwards calls to Triton, as bytes, if their method is open to clients, and refuses other calls."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, NoReturn
from urllib.parse import unquote

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2

from shoal.errors import SetupError, forget_frames
from shoal.serving.gateway.callers.access_log import AccessEntry, begin_entry, current_entry
from shoal.serving.gateway.callers.callers import Caller, Scope
from shoal.serving.gateway.callers.quotas import Quota
from shoal.serving.gateway.core.gate import Gate
from shoal.serving.gateway.core.triton_errors import forwarded_metadata
from shoal.serving.gateway.core.upstream import SERVICE, Upstream
from shoal.serving.gateway.http.certificates import Certificates
from shoal.serving.gateway.http.routes import Route
from shoal.serving.gateway.options import STREAM_SECONDS, Limits
from shoal.serving.gateway.refusals import FailedError, RefusalReason, RefusedError, closed, keyless
from shoal.serving.gateway.v2.arrivals import PAUSE, Arrival, LatePlaces
from shoal.serving.gateway.v2.grpc_stream import GrpcStream
from shoal.serving.gateway.v2.questions import PRIVATE, QUESTIONS, READY, Question
from shoal.serving.gateway.v2.rules import Rules
from shoal.serving.gateway.v2.screening import parse, screen_grpc

HEALTH = "/grpc.health.v1.Health/Check"
MOST_CALLS = 2048  # concurrent calls, including refused ones
_LIVE, _SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x01", b"\x08\x02"  # messages of one field
_CLOSED = {
    "RepositoryModel": "Model control",
    "SystemSharedMemory": "Shared memory",
    "CudaSharedMemory": "Shared memory",
    "TraceSetting": "Tracing",
    "LogSettings": "Logging",
}
_STATUSES = (
    "RESOURCE_EXHAUSTED UNAVAILABLE INVALID_ARGUMENT NOT_FOUND PERMISSION_DENIED UNAUTHENTICATED RESOURCE_EXHAUSTED"
    " UNIMPLEMENTED INVALID_ARGUMENT INVALID_ARGUMENT DEADLINE_EXCEEDED INTERNAL"
)
_STATUS = {reason: grpc.StatusCode[name] for reason, name in zip(RefusalReason, _STATUSES.split(), strict=True)}
_MOST_QUESTION = 2**16  # bytes of a message that is not for inference


class GrpcFront(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Handler of all gRPC methods: passes calls to the active Triton server if their method is open to clients."""

    def __init__(self, gate: Gate, rules: Mapping[str, Rules]) -> None:
        self._gate, self._rules = gate, rules
        self._calls = Quota(MOST_CALLS, gate.limits.client_share)
        # a message is in memory before its size is known: these bound how many arrive at a time
        most, share = max(4, gate.traffic.memory.most // gate.limits.request_bytes), gate.limits.client_share
        self._reading = Quota(2 * most, share)
        self._late = LatePlaces(most, share)
        self._opened = LatePlaces(
            max(4, gate.traffic.streams.most // 4), share
        )  # streams, which may begin with a pause
        everybody, infer = Scope.OPEN, Scope.INFER
        self._stream_route = Route("Inference", infer, f"{SERVICE}ModelStreamInfer", self._stream)
        self.routes = [
            Route("Liveness", everybody, f"{SERVICE}ServerLive", self._answer_live),
            Route("Readiness", everybody, f"{SERVICE}ServerReady", self._answer_ready),
            Route("Health", everybody, HEALTH, self._answer_health),
            *(Route(q.name, q.scope, SERVICE + q.method, partial(self._answer, q)) for q in QUESTIONS),
            Route("Inference", infer, f"{SERVICE}ModelInfer", self._answer_infer),
        ]
        # each unary call is handled as a stream of one message, which can be read with a time-out
        self._handlers: dict[str, Any] = {
            route.path: grpc.stream_unary_rpc_method_handler(partial(self._unary, route)) for route in self.routes
        }
        self._handlers[self._stream_route.path] = grpc.stream_stream_rpc_method_handler(self._stream)

    def service(self, details: Any) -> Any:
        """Return the handler for the method of a call (grpc's interface)."""
        if handler := self._handlers.get(details.method):
            return handler
        unknown = Route("Nothing", Scope.HEALTH, details.method, partial(self._answer_unknown, details.method))
        return grpc.stream_unary_rpc_method_handler(partial(self._unary, unknown))

    async def _unary(self, route: Route, _: Any, context: Any) -> bytes:
        limits, entry, status = self._gate.limits, self._begin(route, context), "CANCELLED"
        caller = entry.caller
        seconds = limits.body_seconds + limits.request_bytes / (limits.body_kib * 2**10)
        is_free = self._calls.has(caller)
        self._calls.take(caller)
        try:
            if not is_free:
                raise RefusedError(RefusalReason.BUSY, "Too many requests for this server: too many open calls.", 1.0)
            route.check(caller)
            most = limits.request_bytes if route.scope is Scope.INFER else _MOST_QUESTION
            # grpc keeps the error of ``abort`` with this frame: the request is not one of its variables
            answer = bytes(
                await route.answer(
                    await self._arrive(self._late, caller, context, seconds, most) or b"", caller, context
                )
            )
            self._gate.callers.check_valid(caller)
            status, entry.sent = "OK", len(answer)
            context.set_trailing_metadata(tuple(entry.headers()))
            return answer
        except RefusedError as refused:
            status = _STATUS[refused.reason].name
            await self._refuse(context, refused)
        except FailedError as error:
            status = error.status.name
            await self._fail(context, error)
        finally:
            entry.end(status, is_answered=status == "OK")
            self._calls.give_back(caller)
        raise AssertionError  # abort raises

    async def _arrive(self, late: LatePlaces, caller: Caller, context: Any, seconds: float, most: int) -> bytes | None:
        """Read the first message of a call, of at most ``most`` bytes; return ``None`` if the client sends none.

        A message that the client has sent is there at once. Another one needs a place in ``late``, or else messages
        that are sent by half would keep all others waiting.

        Raises:
            RefusedError: no place was free, or the message is too large or did not arrive within ``seconds``.
        """
        while not self._reading.has(caller):
            await asyncio.sleep(PAUSE)
        arrival = Arrival(self._reading, late, caller, seconds)
        try:
            async with arrival.timer:
                message = await context.read()
        except TimeoutError:
            if context.done():
                raise asyncio.CancelledError from None
            raise arrival.refusal from None
        finally:
            arrival.end()
        if message is grpc.aio.EOF:
            return None
        if len(message) > most:
            raise RefusedError(
                RefusalReason.LARGE, f"The message has {len(message)} bytes; at most {most} are read here."
            )
        current_entry().received += len(message)
        return bytes(message)

    def _begin(self, route: Route, context: Any) -> AccessEntry:
        """Return the access log's entry of a call, with its caller."""
        peer = _host(context.peer())
        given = {"x-forwarded-for": list[str](), "authorization": list[str](), "x-request-id": list[str]()}
        for name, value in context.invocation_metadata() or ():
            if name in given:
                given[name].append(value if isinstance(value, str) else "")
        entry = begin_entry(self._gate.audit, peer, given.pop("x-request-id"), route.name)
        entry.caller = self._gate.callers.find(peer, *given.values())
        return entry

    # --- questions -----------------------------------------------------------------------------------------------

    async def _answer_live(self, *_: Any) -> bytes:
        return _LIVE

    async def _answer_ready(self, *_: Any) -> bytes:
        return b"" if self._gate.active.trouble() else _LIVE

    async def _answer_health(self, *_: Any) -> bytes:
        return _NOT_SERVING if self._gate.active.trouble() else _SERVING

    async def _answer(self, question: Question, request: bytes, caller: Caller, _: Any) -> bytes:
        exposure = self._gate.exposure
        wanted = parse(f"{question.method}Request", request) if question.check else None
        named = wanted.name if wanted is not None else ""
        model = question.find_model(exposure, named, caller)
        if question is READY and self._gate.is_unready(model, caller):
            return b""
        if wanted is not None and model != named:
            wanted.name = model
            request = wanted.SerializeToString()
        content = await self._fetch(question.method, request, caller)
        if not (question.entries or question.is_config):
            return content
        answer = parse(f"{question.method}Response", content)
        if question.entries:
            entries = getattr(answer, question.entries)
            seen = question.select(entries, lambda entry: getattr(entry, "name", entry), exposure, caller)
            del entries[:]
            entries.extend(seen)
        for name in PRIVATE if question.is_config else ():
            answer.config.ClearField(name)
        return bytes(answer.SerializeToString())

    async def _answer_unknown(self, method: str, *_: Any) -> bytes:
        name = method.removeprefix(SERVICE)
        if what := next((what for prefix, what in _CLOSED.items() if name.startswith(prefix)), ""):
            raise closed(what)
        raise RefusedError(RefusalReason.METHOD, f"There is no method {method[:100]!r} here.")

    async def _fetch(self, method: str, request: bytes, caller: Caller) -> bytes:
        """Send a client's request to Triton with the administrator's key, which the client does not have."""

        async def call(upstream: Upstream, _: str) -> bytes:
            return await upstream.ask(method, request, is_admin=True)

        return await self._gate.ask(caller, "", request, call)

    # --- inference -----------------------------------------------------------------------------------------------

    async def _answer_infer(self, request: bytes, caller: Caller, context: Any) -> bytes:
        held = self._gate.reserve_memory(caller)
        context.add_done_callback(lambda _: held.release())  # once the client has the answer
        self._gate.traffic.grow(held, len(request))
        model, _, request_id, _ = await screen_grpc(request, self._rules)
        self._gate.exposure.check_exposed(model, caller)
        if self._gate.requests.is_stop(model, request):
            self._gate.stop(caller, model, request_id)
            return bytes(service_pb2.ModelInferResponse(model_name=model, id=request_id).SerializeToString())
        metadata = forwarded_metadata(context.invocation_metadata())

        async def call(upstream: Upstream, own_id: str) -> bytes:
            if not own_id:
                return await upstream.ask("ModelInfer", request, metadata)
            marks = service_pb2.ModelInferRequest(id=own_id), service_pb2.ModelInferResponse(id=request_id)
            sent, mark = (each.SerializeToString() for each in marks)  # of two fields ``id``, the later one counts
            return bytes(await upstream.ask("ModelInfer", request + sent, metadata) + mark)

        # Triton 24.10 can crash on disconnecting clients: the request always runs to its end, and keeps its place
        answer = await self._gate.ask(
            caller, model, request, call, is_waited_for=lambda: not context.done(), request_id=request_id
        )
        if context.done():
            raise asyncio.CancelledError
        held.grow(len(answer))
        return answer

    # --- streams -------------------------------------------------------------------------------------------------

    async def _stream(self, _: Any, context: Any) -> None:
        entry, limits, status = self._begin(self._stream_route, context), self._gate.limits, "CANCELLED"
        caller = entry.caller

        async def relay() -> None:
            self._stream_route.check(caller)
            with self._gate.traffic.reserve_stream(caller):
                first = [await self._arrive(self._opened, caller, context, limits.head_seconds, limits.request_bytes)]
                if first[0] is not None:
                    await GrpcStream(self._gate, self._rules, caller, context).run(first)

        # Triton 24.10 can crash when a stream is abandoned: the rest of it is read and discarded
        relaying = asyncio.ensure_future(relay())
        relaying.add_done_callback(_retrieve_error)
        revoked = asyncio.Event()
        try:
            with self._gate.callers.watch(caller, revoked.set):
                await self._wait_first(relaying, revoked)
            status = "OK"
            context.set_trailing_metadata(tuple(entry.headers()))
        except RefusedError as refused:
            del relaying  # as in _unary: it has the error, with the traceback
            status = _STATUS[refused.reason].name
            await self._refuse(context, refused)
        except FailedError as error:
            del relaying
            status = error.status.name
            await self._fail(context, error)
        finally:
            if entry.reason or not entry.num_messages:  # otherwise, its messages have lines of their own
                entry.end(status, is_answered=status == "OK")

    async def _wait_first(self, relaying: asyncio.Future[None], revoked: asyncio.Event) -> None:
        """Wait until a stream has ended, which then may raise its error, or its key is revoked.

        Raises:
            RefusedError: the key was revoked. The stream is then read to its end, as if the client had disconnected.
        """
        waiting: asyncio.Future[Any] = asyncio.ensure_future(revoked.wait())
        try:
            await asyncio.wait([relaying, waiting], return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if not relaying.done():
            raise keyless()
        relaying.result()

    async def _refuse(self, context: Any, refused: RefusedError) -> NoReturn:
        """End a call with the gRPC status and the message of a refusal."""
        self._gate.note_refusal(refused)
        forget_frames(refused)
        entry = current_entry()
        entry.refuse(refused)
        context.set_trailing_metadata((*entry.headers(), *refused.headers))
        await context.abort(_STATUS[refused.reason], refused.client_message)
        raise refused  # unreachable: abort raises

    async def _fail(self, context: Any, error: FailedError) -> NoReturn:
        """End a call with an error of Triton's."""
        forget_frames(error)
        context.set_trailing_metadata(tuple(current_entry().headers()))
        await context.abort(error.status, error.message)
        raise error  # unreachable


def make_server(front: GrpcFront, address: str, limits: Limits, tls: Certificates | None = None) -> Any:
    """Create the gRPC server that listens at ``address`` once it is started, with ``front`` as its handler.

    Raises:
        SetupError: grpc does not take the certificate.
    """
    options = [
        ("grpc.max_receive_message_length", limits.request_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),  # a second server at the same port is an error
        ("grpc.max_allowed_incoming_connections", limits.connections),
        ("grpc.max_connection_idle_ms", int(1000 * STREAM_SECONDS)),
        ("grpc.server_handshake_timeout_ms", int(1000 * limits.head_seconds)),
        # limits read-ahead to 64 KiB per call instead of megabytes
        ("grpc.http2.bdp_probe", 0),
    ]
    server = grpc.aio.server(handlers=[front], options=options, maximum_concurrent_rpcs=MOST_CALLS)
    if tls is None:
        server.add_insecure_port(address)
        return server
    try:
        server.add_secure_port(address, tls.credentials())
    except RuntimeError:
        raise SetupError("gRPC does not take this certificate.", "Give one with an RSA, P-256 or P-384 key.") from None
    return server


@lru_cache(4096)
def _host(peer: str) -> str:
    """Extract the host from a gRPC peer such as ``ipv4:127.0.0.1:4711``."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")


def _retrieve_error(task: asyncio.Future[Any]) -> None:
    """Retrieve a task's error, because asyncio logs errors that are never retrieved."""
    if task.done() and not task.cancelled():
        task.exception()
