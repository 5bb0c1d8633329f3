"""Reading, screening and refusing Triton's gRPC messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, NoReturn

import grpc  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from shoal.client.failures import Kind, grpc_failure
from shoal.gateway.fronts import HEADERS, clean, is_dead, words
from shoal.gateway.limits import Pool
from shoal.gateway.refusals import RefusedError, Why
from shoal.gateway.screening import LARGE, screen_message

_STATUS = {
    Why.BUSY: grpc.StatusCode.RESOURCE_EXHAUSTED, Why.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Why.WRONG: grpc.StatusCode.INVALID_ARGUMENT, Why.ABSENT: grpc.StatusCode.NOT_FOUND,
    Why.CLOSED: grpc.StatusCode.PERMISSION_DENIED, Why.METHOD: grpc.StatusCode.UNIMPLEMENTED,
    Why.LARGE: grpc.StatusCode.INVALID_ARGUMENT, Why.SLOW: grpc.StatusCode.DEADLINE_EXCEEDED,
}  # fmt: skip
WITH_END, END = "triton_enable_empty_final_response", "triton_final_response"  # parameters of request and answer
_NO_SERVER = (Kind.UNREACHABLE, Kind.NOT_TRITON, Kind.CONNECTION_LOST)
_PAUSE = 0.02  # seconds between two checks of the pool
_NAME = 0x0A  # the first field of a request for inference, a string: the model's name


class StatusError(Exception):
    """A status from Triton to be passed to the client."""

    def __init__(self, code: Any, details: str) -> None:
        super().__init__(details)
        self.code, self.details = code, details


async def arrive(pool: Pool, address: str, context: Any, seconds: float) -> bytes | None:
    """Read the first message of a call, waiting for a place in ``pool``; ``None`` if the client sends none.

    Raises:
        RefusedError: it did not come in time.
    """
    start = time.monotonic()
    while not pool.has(address):
        if time.monotonic() - start > seconds:
            raise RefusedError(Why.BUSY, "Too many requests for this server: they arrive slowly.", 1.0)
        await asyncio.sleep(_PAUSE)
    pool.take(address)
    try:
        async with asyncio.timeout(seconds):
            message = await context.read()
    except TimeoutError:
        raise RefusedError(Why.SLOW, f"No whole message came within {seconds:g} s.") from None
    finally:
        pool.give_back(address)
    return None if message is grpc.aio.EOF else message


def parse(kind: str, content: bytes) -> Any:
    """Parse a message of Triton's service, of the named type.

    Raises:
        RefusedError: it is not one.
    """
    try:
        return getattr(service_pb2, kind).FromString(content)
    except DecodeError:
        raise RefusedError(Why.WRONG, f"The message is not a {kind}.") from None


async def screen(request: bytes) -> tuple[str, str]:
    """Screen a request for inference; returns its model and id.

    Raises:
        RefusedError: it is not such a request, or would crash Triton.
    """
    return await asyncio.to_thread(_screen, request) if len(request) > LARGE else _screen(request)


def _screen(request: bytes) -> tuple[str, str]:
    message = parse("ModelInferRequest", request)
    name = str(message.model_name)
    first = name
    if len(request) > 2 and request[0] == _NAME and request[1] < 0x80:  # where clients put it
        first = request[2 : 2 + request[1]].decode("utf-8", "replace")
    screen_message(message, first)
    return name, str(message.id)


def keep(entries: Any, is_wanted: Callable[[str], bool]) -> None:
    """Remove entries from a repeated field about models unless their name is wanted."""
    kept_ones = [entry for entry in entries if is_wanted(entry.name)]
    del entries[:]
    entries.extend(kept_ones)


def kept(metadata: Any) -> Any:
    """Return the metadata that is passed on to Triton."""
    return tuple((key, value) for key, value in metadata or () if key in HEADERS)


def is_cut(code: Any, details: str) -> bool:
    """Whether a status says that the server, or the model's process, has died."""
    is_unavailable = code == grpc.StatusCode.UNAVAILABLE
    return is_dead(details) or (is_unavailable and grpc_failure(code.name, details).kind in _NO_SERVER)


def mark(request: bytes, own_id: str) -> tuple[bytes, bool]:
    """Give a request an id of ours, and ask for a mark on its last answer; return whether the client asked for it too.

    Triton then ends the answers with an empty one, if the last is not known as such when it is sent.
    """
    message = parse("ModelInferRequest", request)
    is_wanted = bool(message.parameters[WITH_END].bool_param)
    message.id = own_id
    message.parameters[WITH_END].bool_param = True
    return bytes(message.SerializeToString()), is_wanted


def unmark(message: Any, request_id: str, *, is_end_wanted: bool) -> tuple[bytes | None, bool]:
    """Put the client's id back into an answer; return the answer, and whether it is the last of its request.

    The answer is None if it is empty and only marks the end, and the client did not ask for that mark.
    """
    answer, is_last = message.infer_response, find_last(message)
    if is_last and not is_end_wanted and not answer.outputs and not message.error_message:
        return None, True
    message.error_message = message.error_message.replace(answer.id, request_id or "<id_unknown>")
    answer.id = request_id
    if not is_end_wanted:
        answer.parameters.pop(END, None)
    message.error_message = clean(message.error_message)
    return bytes(message.SerializeToString()), is_last


def find_last(message: Any) -> bool:
    """Whether a marked answer is the last of its request.

    An error without a mark refuses the request; one that the model sends is followed by the end.
    """
    parameters = message.infer_response.parameters
    return bool(parameters[END].bool_param if END in parameters else message.error_message)


def clean_answer(answer: bytes) -> bytes:
    """Strip the traceback from an error answer of a stream."""
    if b"At:\n" not in answer:
        return answer
    message = parse("ModelStreamInferResponse", answer)
    message.error_message = clean(message.error_message)
    return bytes(message.SerializeToString())


def refusal(refused: RefusedError, request_id: str) -> bytes:
    """Build the answer that refuses one message of a stream."""
    message = service_pb2.ModelStreamInferResponse(error_message=words(refused))
    message.infer_response.id = request_id
    return bytes(message.SerializeToString())


async def refuse(context: Any, refused: RefusedError) -> NoReturn:
    """End a call with the status for a refusal."""
    if refused.retry_after:
        context.set_trailing_metadata((("retry-after", str(max(1, round(refused.retry_after)))),))
    await context.abort(_STATUS[refused.why], words(refused))
    raise refused  # unreachable: abort raises
