"""OpenAI's Responses API, without state: nothing is stored, so each request has the whole conversation."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from shoal.kit.generation.pieces import Piece
from shoal.serving.gateway.refusals import RefusedError
from shoal.serving.gateway.v1.chat import describe_places
from shoal.serving.gateway.v1.forms import Form, TextForm, find_guide
from shoal.serving.gateway.v1.model_request import ModelRequest
from shoal.serving.gateway.v1.schema import Body, Count, FieldNames, Number, read_settings
from shoal.serving.gateway.v1.sse import Event, Json, ResponseFormat, answer

_NOTHING: dict[str, Any] = {  # of what is not served
    "background": False, "error": None, "max_tool_calls": None, "metadata": {}, "parallel_tool_calls": False,
    "previous_response_id": None, "prompt_cache_key": None, "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None, "service_tier": "default", "store": False,
    "tool_choice": "auto", "tools": [], "truncation": "disabled",
}  # fmt: skip


class Part(Struct, forbid_unknown_fields=True):
    """Part of a message's content."""

    type: Literal["input_text", "output_text"]
    text: str
    prompt_cache_breakpoint: dict[str, str] | None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    logprobs: list[Any] | None = None


class Item(Struct, forbid_unknown_fields=True):
    """Message; ``id``, ``status`` and ``phase`` are those of earlier answers, which clients send back."""

    role: Literal["developer", "system", "user", "assistant"]
    content: str | Annotated[list[Part], Meta(min_length=1, max_length=1024)]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class ResponseText(Struct, forbid_unknown_fields=True):
    """Form of the answer."""

    format: Form | None = None
    verbosity: None = None


class Reasoning(Struct, forbid_unknown_fields=True):
    """Reasoning before the answer, of which there is none."""

    effort: Literal["none"] | None = None
    summary: None = None


class ResponseOptions(Struct, forbid_unknown_fields=True):
    """Options of an answer that comes in pieces."""

    include_obfuscation: bool = False


class ResponseRequest(Body, kw_only=True):
    """Body of ``POST /v1/responses``."""

    input: str | Annotated[list[Item], Meta(min_length=1, max_length=4096)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_logprobs: Number | None = None
    include: Annotated[list[Literal["message.output_text.logprobs"]], Meta(max_length=8)] | None = None
    stream: bool | None = None
    stream_options: ResponseOptions | None = None
    text: ResponseText | None = None
    truncation: Literal["disabled"] | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[list[Any], Meta(max_length=0)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Count | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    background: Literal[False] | None = None
    moderation: None = None
    context_management: None = None

    @property
    def is_streaming(self) -> bool:
        """Whether the answer comes in pieces."""
        return bool(self.stream)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation as language models take it."""
        found = [("system", self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            found.append(("user", self.input))
        else:
            found += [(item.role, _join(item)) for item in self.input]
        return [{"role": "system" if role == "developer" else role, "content": text} for role, text in found]

    @property
    def field_names(self) -> FieldNames:
        """Fields by which a model's refusals are explained."""
        before, is_list = "instructions" if self.instructions else "", not isinstance(self.input, str)
        names = {"max_tokens": "max_output_tokens", "guide": "text.format"}
        return FieldNames("input", names, before, is_list)

    def settings(self) -> Json:
        """Return the settings by the names that language models have for them."""
        form = find_guide(**{"text.format": self.text.format if self.text else None})
        found = read_settings(self) | form | {"max_tokens": self.max_output_tokens}
        if self.include or self.top_logprobs:
            found |= {"return_logprobs": True, "top_logprobs": self.top_logprobs or 0}
        return {name: value for name, value in found.items() if value is not None}


async def answer_response(asked: ResponseRequest, model_request: ModelRequest) -> web.StreamResponse:
    """Answer the conversation."""
    return await answer(asked, model_request, [asked.messages], _Response(asked))


def _join(item: Item) -> str:
    return item.content if isinstance(item.content, str) else "\n".join(part.text for part in item.content)


class _Response(ResponseFormat):
    prefix = "resp_"

    def __init__(self, asked: ResponseRequest) -> None:
        super().__init__(asked.model)
        self._asked, self._item_id, self._num_events = asked, f"msg_{secrets.token_hex(12)}", 0
        self._form = (asked.text and asked.text.format) or TextForm()
        self._texts: list[str] = []
        self._places: list[Json] = []
        self._last: Piece | None = None

    def whole(self, pieces: Sequence[Piece]) -> Json:
        """Return the whole answer."""
        (piece,) = pieces
        self._take(piece)
        return self._document("completed")

    def events(self, number: int, piece: Piece) -> list[Event]:  # noqa: ARG002  # there is one prompt
        """Return the events for one piece."""
        begin = [] if self._last else self._begin()
        places = self._take(piece)
        if not (piece.text or places):
            return begin
        return [*begin, self._event("output_text.delta", **self._at, delta=piece.text, logprobs=places)]

    def last_events(self) -> list[Event]:
        """Return the events that end the answer."""
        begin = [] if self._num_events else self._begin()
        document = self._document("completed")
        (item,) = document["output"]
        (part,) = item["content"]
        return [
            *begin,
            self._event("output_text.done", **self._at, text=part["text"], logprobs=part["logprobs"]),
            self._event("content_part.done", **self._at, part=part),
            self._event("output_item.done", output_index=0, item=item),
            self._event(document["status"], response=document),
        ]

    def fail(self, refused: RefusedError) -> Event:
        """Return the event that ends an answer which has failed."""
        error = super().fail(refused).document["error"]
        return Event({"type": "error", "sequence_number": self._num_events, "error": error}, "error")

    @property
    def _at(self) -> Json:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _begin(self) -> list[Event]:
        document, empty = self._document("in_progress", []), {"type": "output_text", "text": "", "annotations": []}
        item = {**self._item("in_progress"), "content": []}
        return [
            self._event("created", response=document),
            self._event("in_progress", response=document),
            self._event("output_item.added", output_index=0, item=item),
            self._event("content_part.added", **self._at, part={**empty, "logprobs": []}),
        ]

    def _event(self, name: str, **fields: Any) -> Event:
        document = {"type": f"response.{name}", "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return Event(document, document["type"])

    def _take(self, piece: Piece) -> list[Json]:
        places = [
            {
                **place,
                "bytes": place["bytes"] or [],
                "top_logprobs": [{**each, "bytes": each["bytes"] or []} for each in place["top_logprobs"]],
            }
            for place in describe_places(piece, self._asked.top_logprobs or 0)
        ]
        self._texts.append(piece.text)
        self._places += places
        self._last = piece
        return places

    def _item(self, status: str) -> Json:
        part = {"type": "output_text", "text": "".join(self._texts), "annotations": [], "logprobs": self._places}
        return {"id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": [part]}

    def _document(self, status: str, output: Sequence[Json] | None = None) -> Json:
        asked, is_over, (prompt, made) = self._asked, output is None, self.counts
        default = 0.0 if asked.top_p is None else 1.0  # without either, pipelines always take the most probable token
        is_cut = is_over and self._last is not None and self._last.finish_reason == "length"
        status = "incomplete" if is_cut else status
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + made,
        }
        return {
            **_NOTHING, "id": self.id, "object": "response", "created_at": self.created, "model": self.model,
            "status": status, "completed_at": int(time.time()) if is_over and not is_cut else None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "text": {"format": msgspec.to_builtins(self._form)},
            "instructions": asked.instructions, "max_output_tokens": asked.max_output_tokens,
            "output": [self._item(status)] if output is None else output,
            "temperature": default if asked.temperature is None else asked.temperature,
            "top_p": 1.0 if asked.top_p is None else asked.top_p, "top_logprobs": asked.top_logprobs or 0,
            "presence_penalty": asked.presence_penalty or 0.0, "frequency_penalty": asked.frequency_penalty or 0.0,
            "usage": usage if is_over and prompt else None,
        }  # fmt: skip
