"""Answers of language models in OpenAI's forms, whole and as server-sent events: chat completions and completions."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from shoal.gateway.core.client_stream import has_left
from shoal.gateway.core.refusals import RefusedError
from shoal.gateway.core.routes import find_status
from shoal.gateway.v1.ask import Asker
from shoal.gateway.v1.errors import to_envelope
from shoal.gateway.v1.schema import ChatRequest, CompletionRequest
from shoal.pieces import Piece, join_pieces

_EVENTS = "text/event-stream; charset=utf-8"
_REASONS = {"stop": "stop", "length": "length"}  # others, such as cancelled, count as stop
Json = dict[str, Any]


async def answer_chat(request: web.Request, asked: ChatRequest, asker: Asker) -> web.StreamResponse:
    """Answer a chat."""
    prompt = [message.to_plain() for message in asked.messages]
    return await _answer(request, asked, asker, [prompt], _Chat(asked))


async def answer_completion(request: web.Request, asked: CompletionRequest, asker: Asker) -> web.StreamResponse:
    """Answer with the continuations of one text or several."""
    return await _answer(request, asked, asker, asked.prompts, _Completion(asked))


async def _answer(
    request: web.Request,
    asked: ChatRequest | CompletionRequest,
    asker: Asker,
    prompts: Sequence[Any],
    form: _Form,
) -> web.StreamResponse:
    settings = asked.settings()
    if not asked.is_streaming:
        found: list[list[Piece]] = [[] for _ in prompts]

        async def keep(number: int, piece: Piece) -> None:
            found[number].append(piece)

        await asker.write(prompts, settings, keep, is_streaming=False)
        if has_left(request):
            raise ConnectionResetError
        return to_response(form.whole([join_pieces(pieces) for pieces in found]))
    events = Events(request)

    async def send(number: int, piece: Piece) -> None:
        await events.send(*form.pieces(number, piece))

    try:
        await asker.write(prompts, settings, send, is_streaming=True)
    except RefusedError as refused:
        return await events.fail(refused)
    if asked.wants_usage:
        await events.send(form.chunk([], form.usage))
    return await events.finish()


def to_response(document: Any) -> web.Response:
    """Return a response with JSON."""
    return web.Response(body=msgspec.json.encode(document), content_type="application/json")


class Events:
    """Response of server-sent events. It begins with the first event, so that a refusal before it has its status."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None

    async def send(self, *documents: Json) -> None:
        """Send events."""
        await self._write(b"".join(b"data: " + msgspec.json.encode(each) + b"\n\n" for each in documents))

    async def _write(self, content: bytes) -> None:
        if has_left(self._request):  # the rest of the answer is read and discarded
            return
        with contextlib.suppress(ConnectionError):
            if self._response is None:
                self._response = web.StreamResponse(headers={"Content-Type": _EVENTS, "Cache-Control": "no-cache"})
                await self._response.prepare(self._request)
            await self._response.write(content)

    async def finish(self) -> web.StreamResponse:
        """End the response with ``[DONE]``, and return it."""
        await self._write(b"data: [DONE]\n\n")
        if self._response is None:
            raise ConnectionResetError
        if not has_left(self._request):
            with contextlib.suppress(ConnectionError):
                await self._response.write_eof()
        return self._response

    async def fail(self, refused: RefusedError) -> web.StreamResponse:
        """End a response that has begun with an error; one that has not is refused.

        Raises:
            RefusedError: no event has been sent.
        """
        if self._response is None:
            raise refused
        await self.send(to_envelope(refused, find_status(refused)))
        return await self.finish()


# --- forms -----------------------------------------------------------------------------------------------------------


class _Form:
    """Documents of one answer. Pieces are passed to it in their order, so that it counts tokens."""

    prefix = kind = piece_kind = ""

    def __init__(self, asked: ChatRequest | CompletionRequest) -> None:
        self._asked = asked
        self._head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": asked.model}
        self._counts: dict[int, tuple[int, int]] = {}  # tokens of prompt and answer so far, by prompt

    @property
    def usage(self) -> Json | None:
        """Numbers of tokens; None if the model does not tell them."""
        prompt, answer = (sum(each[at] for each in self._counts.values()) for at in (0, 1))
        if not prompt:
            return None
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}

    def whole(self, pieces: Sequence[Piece]) -> Json:
        """Return the whole answer; ``pieces`` are those of each prompt."""
        for number, piece in enumerate(pieces):
            self._count(number, piece)
        choices = [self._choice(number, piece) for number, piece in enumerate(pieces)]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self.usage}

    def pieces(self, number: int, piece: Piece) -> list[Json]:
        """Return the events for one piece of an answer."""
        self._count(number, piece)
        return [self.chunk([choice]) for choice in self._choices(number, piece)]

    def chunk(self, choices: Sequence[Json], usage: Json | None = None) -> Json:
        """Return an event."""
        counted = {"usage": usage} if self._asked.wants_usage else {}
        return {**self._head, "object": self.piece_kind, "choices": choices, **counted}

    def _count(self, number: int, piece: Piece) -> None:
        self._counts[number] = piece.num_input_tokens, piece.num_output_tokens

    def _choice(self, number: int, piece: Piece) -> Json:
        raise NotImplementedError

    def _choices(self, number: int, piece: Piece) -> list[Json]:
        raise NotImplementedError


class _Chat(_Form):
    prefix, kind, piece_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    _has_begun = False

    def _choice(self, number: int, piece: Piece) -> Json:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {
            "index": number, "message": message, "logprobs": self._logprobs(piece), "finish_reason": _reason(piece),
        }  # fmt: skip

    def _choices(self, number: int, piece: Piece) -> list[Json]:
        found: list[tuple[Json, Json | None, str | None]] = []
        if not self._has_begun:
            self._has_begun = True
            found.append((({"role": "assistant", "content": "", "refusal": None}), None, None))
        if piece.text or piece.logprobs:
            found.append(({"content": piece.text}, self._logprobs(piece), None))
        if piece.finish_reason:
            found.append(({}, None, _reason(piece)))
        return [
            {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            for delta, logprobs, reason in found
        ]

    def _logprobs(self, piece: Piece) -> Json | None:
        if not piece.logprobs:
            return None
        most = self._asked.top_logprobs or 0  # type: ignore[union-attr]
        places = []
        for place in piece.logprobs:
            first, *_ = place.values()
            ranked = sorted((each for each in place.values() if each["rank"]), key=lambda each: each["rank"])
            places.append({**_token(first), "top_logprobs": [_token(each) for each in ranked[:most]]})
        return {"content": places, "refusal": None}


class _Completion(_Form):
    prefix, kind, piece_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, asked: CompletionRequest) -> None:
        super().__init__(asked)
        self._offsets: dict[int, int] = {}  # characters so far, by prompt

    def _choice(self, number: int, piece: Piece) -> Json:
        return {
            "index": number, "text": piece.text, "logprobs": self._logprobs(number, piece),
            "finish_reason": _reason(piece) if piece.finish_reason else None,
        }  # fmt: skip

    def _choices(self, number: int, piece: Piece) -> list[Json]:
        return [self._choice(number, piece)] if piece.text or piece.logprobs or piece.finish_reason else []

    def _logprobs(self, number: int, piece: Piece) -> Json | None:
        if not piece.logprobs:
            return None
        chosen, tops, offsets = [], [], []
        for place in piece.logprobs:
            first, *_ = place.values()
            chosen.append(first)
            tops.append({each["decoded_token"]: each["logprob"] for each in place.values() if each["rank"]})
            offsets.append(self._offsets.setdefault(number, 0))
            self._offsets[number] += len(first["decoded_token"])
        return {
            "tokens": [each["decoded_token"] for each in chosen], "top_logprobs": tops, "text_offset": offsets,
            "token_logprobs": [each["logprob"] for each in chosen],
        }  # fmt: skip


def _reason(piece: Piece) -> str:
    return _REASONS.get(piece.finish_reason, "stop")


def _token(place: Mapping[str, Any]) -> Json:
    text = place["decoded_token"]
    return {
        "token": text, "logprob": place["logprob"], "bytes": None if "\ufffd" in text else [*text.encode()],
    }  # fmt: skip
