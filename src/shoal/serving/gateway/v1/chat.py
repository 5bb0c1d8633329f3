"""OpenAI's chat completions and completions."""

from __future__ import annotations

import codecs
import math
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from shoal.kit.generation.calls import CallPiece
from shoal.kit.generation.pieces import Piece
from shoal.serving.gateway.v1.model_request import ModelRequest
from shoal.serving.gateway.v1.schema import ChatRequest, CompletionRequest
from shoal.serving.gateway.v1.sse import Event, Json, ResponseFormat, answer
from shoal.serving.gateway.v1.tools import make_id, to_call

_REASONS = {"stop": "stop", "length": "length"}  # others, such as cancelled, count as stop


async def answer_chat(asked: ChatRequest, model_request: ModelRequest) -> web.StreamResponse:
    """Answer a chat."""
    prompt = [message.to_plain() for message in asked.messages]
    return await answer(asked, model_request, [prompt], _Chat(asked))


async def answer_completion(asked: CompletionRequest, model_request: ModelRequest) -> web.StreamResponse:
    """Answer with the continuations of one text or several."""
    return await answer(asked, model_request, asked.prompts, _Completion(asked))


class _TextFormat(ResponseFormat):
    kind = piece_kind = ""

    def __init__(self, asked: ChatRequest | CompletionRequest) -> None:
        super().__init__(asked.model, asked.asked_tools if isinstance(asked, ChatRequest) else None)
        self._asked = asked
        self._head = {"id": self.id, "created": self.created, "model": self.model}

    @property
    def _usage(self) -> Json | None:
        prompt, answer = self.counts
        if not prompt:
            return None
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}

    def whole(self, pieces: Sequence[Piece]) -> Json:
        """Return the whole answer."""
        choices = [self._choice(number, piece) for number, piece in enumerate(pieces)]
        usage = {"usage": counted} if (counted := self._usage) else {}
        return {**self._head, "object": self.kind, "choices": choices, **usage}

    def events(self, number: int, piece: Piece) -> list[Event]:
        """Return the events for one piece."""
        options = self._asked.stream_options
        usage = self._usage if options is not None and options.continuous_usage_stats else None
        events = []
        for choice in self._choices(number, piece):
            is_first = "role" in choice.get("delta", {})  # it has no token
            zero = usage and is_first and {**usage, "completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
            events.append(self._chunk([choice], zero or usage))
        return events

    def last_events(self) -> list[Event]:
        """Return the event with the numbers of tokens, if it is asked for."""
        return [self._chunk([], self._usage)] if self._asked.wants_usage else []

    def _chunk(self, choices: Sequence[Json], usage: Json | None = None) -> Event:
        counted = {"usage": usage} if self._asked.wants_usage else {}
        return Event({**self._head, "object": self.piece_kind, "choices": choices, **counted})

    def _choice(self, number: int, piece: Piece) -> Json:
        raise NotImplementedError

    def _choices(self, number: int, piece: Piece) -> list[Json]:
        raise NotImplementedError


class _Chat(_TextFormat):
    prefix, kind, piece_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, asked: ChatRequest) -> None:
        super().__init__(asked)
        self._begun: set[int] = set()  # numbers of answers

    def _choice(self, number: int, piece: Piece) -> Json:
        reasoning, answer = self.find_reasoning(number, piece, is_last=True)
        parts = self.divide(number, answer, is_last=True)
        calls = [to_call(make_id("call_"), part.name, part.arguments) for part in parts if isinstance(part, CallPiece)]
        content = "".join(part for part in parts if isinstance(part, str))
        message: Json = {"role": "assistant", "content": content, "refusal": None, "annotations": []}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        reason = self._reason(number, piece)
        return {"index": number, "message": message, "logprobs": self._logprobs(piece), "finish_reason": reason}

    def _reason(self, number: int, piece: Piece) -> str:
        return self.find_reason(number, piece, _REASONS, "tool_calls", "stop")

    def _choices(self, number: int, piece: Piece) -> list[Json]:
        found: list[tuple[Json, Json | None, str | None]] = []
        if number not in self._begun:
            self._begun.add(number)
            found.append((({"role": "assistant", "content": "", "refusal": None}), None, None))
        reasoning, answer = self.find_reasoning(number, piece, is_last=bool(piece.finish_reason))
        parts, logprobs = self.divide(number, answer), self._logprobs(piece)
        if reasoning:
            found.append(({"reasoning_content": reasoning}, None, None))
        for part in parts or ([""] if logprobs else []):
            delta = {"tool_calls": [_describe_call(part)]} if isinstance(part, CallPiece) else {"content": part}
            found.append((delta, logprobs, None))
            logprobs = None
        if piece.finish_reason:
            found.append(({}, None, self._reason(number, piece)))
        return [
            {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            for delta, logprobs, reason in found
        ]

    def _logprobs(self, piece: Piece) -> Json | None:
        if not piece.logprobs:
            return None
        assert isinstance(self._asked, ChatRequest)
        return {"content": describe_places(piece, self._asked.top_logprobs or 0), "refusal": None}


class _Completion(_TextFormat):
    prefix, kind, piece_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(self, asked: CompletionRequest) -> None:
        super().__init__(asked)
        self._offsets: dict[int, int] = {}  # characters so far, by prompt
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}  # by prompt: a token may be a part of a character

    def _choice(self, number: int, piece: Piece) -> Json:
        return {
            "index": number,
            "text": piece.text,
            "logprobs": self._logprobs(number, piece),
            "finish_reason": _reason(piece) if piece.finish_reason else None,
        }

    def _choices(self, number: int, piece: Piece) -> list[Json]:
        return [self._choice(number, piece)] if piece.text or piece.logprobs or piece.finish_reason else []

    def _logprobs(self, number: int, piece: Piece) -> Json | None:
        if not piece.logprobs:
            return None
        chosen, tops, offsets = [], [], []
        decoder = self._decoders.setdefault(number, codecs.getincrementaldecoder("utf-8")("replace"))
        for place in piece.logprobs:
            first, *_ = place.values()
            chosen.append(first)
            top: Json = {}
            for each in sorted(place.values(), key=lambda each: each["rank"] or math.inf):  # the chosen one, too
                top.setdefault(_name(each), each["logprob"])
            tops.append(None if first["logprob"] is None else top)
            offsets.append(self._offsets.setdefault(number, 0))
            spelled = bytes(first.get("bytes", first["decoded_token"].encode()))
            self._offsets[number] += len(decoder.decode(spelled))
        return {
            "tokens": [*map(_name, chosen)],
            "top_logprobs": tops,
            "text_offset": offsets,
            "token_logprobs": [each["logprob"] for each in chosen],
        }


def describe_places(piece: Piece, most: int) -> list[Json]:
    """Return the log probabilities of a piece's tokens, and of the ``most`` most probable ones at each place."""
    places = []
    for place in piece.logprobs:
        first, *_ = place.values()
        ranked = sorted((each for each in place.values() if each["rank"]), key=lambda each: each["rank"])
        places.append({**_token(first), "top_logprobs": [_token(each) for each in ranked[:most]]})
    return places


def _describe_call(part: CallPiece) -> Json:
    """Return a part of a call; the first one has its id and name."""
    function = {"arguments": part.arguments}
    if not part.name:
        return {"index": part.number, "function": function}
    head = {"index": part.number, "id": make_id("call_"), "type": "function"}
    return {**head, "function": {"name": part.name, **function}}


def _reason(piece: Piece) -> str:
    return _REASONS.get(piece.finish_reason, "stop")


def _name(place: Mapping[str, Any]) -> str:
    """Return a token as OpenAI's completions have it: with its bytes, if it is a part of a character."""
    text, spelled = place["decoded_token"], place.get("bytes")
    if not spelled or "\ufffd" not in text:
        return str(text)
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _token(place: Mapping[str, Any]) -> Json:
    text = place["decoded_token"]
    spelled = place.get("bytes", None if "\ufffd" in text else [*text.encode()])  # vLLM's backend has no bytes
    return {"token": text, "logprob": place["logprob"], "bytes": spelled}
