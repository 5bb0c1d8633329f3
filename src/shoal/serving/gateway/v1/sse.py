"""Answers of language models as JSON, whole or as server-sent events; each API has a form of its own."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
from aiohttp import web

from shoal.kit.generation.calls import CallPiece, CallReader
from shoal.kit.generation.pieces import Piece, join_pieces
from shoal.kit.generation.reasoning import ReasoningReader
from shoal.kit.generation.tools import AskedTools
from shoal.serving.gateway.http.client_stream import has_left
from shoal.serving.gateway.http.routes import find_status
from shoal.serving.gateway.logs import log
from shoal.serving.gateway.refusals import FAULT, RefusalReason, RefusedError
from shoal.serving.gateway.v1.errors import to_envelope
from shoal.serving.gateway.v1.model_request import ModelRequest
from shoal.serving.gateway.v1.tools import make_reader

_EVENTS = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
Json = dict[str, Any]


class Event(NamedTuple):
    """Server-sent event; APIs that name their events repeat the name in the document."""

    document: Json
    name: str = ""

    def encode(self) -> bytes:
        """Return the event as it is sent."""
        head = f"event: {self.name}\n".encode() if self.name else b""
        return head + b"data: " + msgspec.json.encode(self.document) + b"\n\n"


class Asked(Protocol):
    """Request to a language model."""

    @property
    def is_streaming(self) -> bool:
        """Whether the answer comes in pieces."""

    def settings(self) -> Mapping[str, Any]:
        """Return the settings by the names that language models have for them."""


class ResponseFormat:
    """Documents of one answer. Pieces are passed to it in their order, and it counts their tokens."""

    prefix = ""  # of the answer's id
    end = DONE  # of a stream
    copies = 1  # answers to each prompt

    def __init__(self, model: str, tools: AskedTools | None = None) -> None:
        """Take the name of the model, and the tools that the answer may call."""
        self.id = f"{self.prefix}{secrets.token_hex(12)}"
        self.created, self.model = int(time.time()), model
        self._counts: dict[int, tuple[int, int]] = {}  # tokens of prompt and answer so far, by prompt
        self._tools = tools
        self._readers: dict[int, CallReader | None] = {}  # of calls, by prompt
        self._reasoning: dict[int, ReasoningReader] = {}  # by prompt

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of tokens of the prompts and of the answers so far; 0 of a model that does not tell them."""
        prompts = sum(each[0] for number, each in self._counts.items() if number % self.copies == 0)
        return prompts, sum(each[1] for each in self._counts.values())

    def count(self, number: int, piece: Piece) -> None:
        """Count the tokens of a piece."""
        self._counts[number] = piece.num_input_tokens or 0, piece.num_output_tokens or 0

    def find_reasoning(self, number: int, piece: Piece, *, is_last: bool) -> tuple[str, Piece]:
        """Return the reasoning in a piece of the answer to a prompt, and the piece without it."""
        reader = self._reasoning.setdefault(number, ReasoningReader())
        reasoning, text = reader.step(piece.text, last=is_last)
        return reasoning, piece._replace(text=text)

    def divide(self, number: int, piece: Piece, *, is_last: bool | None = None) -> list[str | CallPiece]:
        """Return the texts and the parts of calls in a piece of the answer to a prompt."""
        if number not in self._readers:
            self._readers[number] = make_reader(self._tools) if self._tools else None
        reader, is_last = self._readers[number], bool(piece.finish_reason) if is_last is None else is_last
        if reader is None:
            return [piece.text] if piece.text else []
        return reader.step(piece.text, last=is_last)

    def find_reason(self, number: int, piece: Piece, reasons: Mapping[str, str], of_calls: str, other: str) -> str:
        """Return why an answer has ended, by the model's reason; ``of_calls`` if it ended by itself with a call."""
        reader = self._readers.get(number)
        if piece.finish_reason != "length" and reader is not None and reader.has_calls:
            return of_calls
        return reasons.get(piece.finish_reason, other)

    def whole(self, pieces: Sequence[Piece]) -> Json:
        """Return the whole answer; each piece is the whole answer to one prompt."""
        raise NotImplementedError

    def events(self, number: int, piece: Piece) -> list[Event]:
        """Return the events for one piece of the answer to a prompt."""
        raise NotImplementedError

    def last_events(self) -> list[Event]:
        """Return the events after the last piece."""
        return []

    def fail(self, refused: RefusedError) -> Event:
        """Return the event that ends an answer which has failed."""
        return Event(to_envelope(refused, find_status(refused)))


async def answer(
    asked: Asked, model_request: ModelRequest, prompts: Sequence[Any], form: ResponseFormat
) -> web.StreamResponse:
    """Answer a request to a language model.

    Raises:
        RefusedError: it was refused, or lost before its first piece.
        ConnectionError: the client has left.
    """
    form.copies = getattr(asked, "n", None) or 1
    settings = [_add_seed(asked.settings(), number) for _ in prompts for number in range(form.copies)]
    prompts = [prompt for prompt in prompts for _ in range(form.copies)]
    if not asked.is_streaming:
        found: list[list[Piece]] = [[] for _ in prompts]

        async def keep(number: int, piece: Piece) -> None:
            found[number].append(piece)

        await model_request.generate(prompts, settings, keep, is_streaming=False)
        if has_left(model_request.request):
            raise ConnectionResetError
        whole = [join_pieces(pieces) for pieces in found]
        for number, piece in enumerate(whole):
            form.count(number, piece)
        return to_response(form.whole(whole))
    events = _Events(model_request.request)

    async def send(number: int, piece: Piece) -> None:
        form.count(number, piece)
        await events.write(b"".join(event.encode() for event in form.events(number, piece)))

    try:
        await model_request.generate(prompts, settings, send, is_streaming=True)
    except RefusedError as refused:
        if not events.has_begun:
            raise
        return await events.finish(form.fail(refused).encode() + form.end)
    except Exception as error:
        if not events.has_begun or isinstance(error, ConnectionError):
            raise
        log.exception("An answer of %s failed", model_request.model)
        fault = RefusedError(RefusalReason.FAULT, FAULT)
        return await events.finish(form.fail(fault).encode() + form.end)
    return await events.finish(b"".join(event.encode() for event in form.last_events()) + form.end)


def _add_seed(settings: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """Return the settings of an answer by its number: several to one prompt are drawn with seeds of their own."""
    return {**settings, "seed": settings["seed"] + number} if settings.get("seed") is not None else settings


def to_response(document: Any) -> web.Response:
    """Return a response with JSON."""
    return web.Response(body=msgspec.json.encode(document), content_type="application/json")


class _Events:
    """Response of server-sent events. It begins with the first event, so that a refusal before it has its status."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(headers={"Content-Type": _EVENTS, "Cache-Control": "no-cache"})

    @property
    def has_begun(self) -> bool:
        return self._response.prepared

    async def write(self, content: bytes) -> None:
        if has_left(self._request) or not content:  # of a client that has left, the rest is read and discarded
            return
        with contextlib.suppress(ConnectionError):
            if not self.has_begun:
                await self._response.prepare(self._request)
            await self._response.write(content)

    async def finish(self, content: bytes) -> web.StreamResponse:
        await self.write(content)
        if not self.has_begun:
            raise ConnectionResetError
        if not has_left(self._request):
            with contextlib.suppress(ConnectionError):
                await self._response.write_eof()
        return self._response
