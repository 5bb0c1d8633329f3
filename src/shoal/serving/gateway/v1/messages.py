"""Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType, field

from shoal.kit.generation.calls import CallPiece
from shoal.kit.generation.pieces import Piece
from shoal.kit.generation.sampling import CONTINUES, VARIABLES
from shoal.kit.generation.tools import AskedTools
from shoal.serving.gateway.http.routes import find_status
from shoal.serving.gateway.refusals import RefusedError
from shoal.serving.gateway.v1.errors import ApiError
from shoal.serving.gateway.v1.forms import SchemaForm, find_guide
from shoal.serving.gateway.v1.model_request import ModelRequest
from shoal.serving.gateway.v1.schema import Count, FieldNames, Name, Number, StopTexts, read_settings
from shoal.serving.gateway.v1.sse import Event, Json, ResponseFormat, answer
from shoal.serving.gateway.v1.tools import (
    CallId,
    MessageToolChoice,
    MessageTools,
    ToolName,
    find_asked,
    make_id,
    read_arguments,
    to_call,
    to_variables,
)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_REASONS = {"length": "max_tokens"}  # others end the turn: which stop sequence was found is not known
_UNUSED = (  # of the numbers of tokens
    "cache_creation cache_creation_input_tokens cache_read_input_tokens inference_geo output_tokens_details"
    " server_tool_use service_tier"
)
_TEXT = {"type": "text", "text": ""}
_NOTHING = dict.fromkeys(("stop_sequence", "stop_details", "container"))


class Block(Struct, forbid_unknown_fields=True):
    """Text of a message. ``cache_control`` and ``citations`` matter to Anthropic alone."""

    text: str
    type: Literal["text"] = "text"
    cache_control: dict[str, str] | None = None
    citations: Annotated[list[Any], Meta(max_length=0)] | None = None


Blocks = Annotated[list[Block], Meta(min_length=1, max_length=1024)]


class TurnBlock(Struct, forbid_unknown_fields=True):
    """Text, call of a tool, or what the tool returned: each type has fields of its own.

    ``cache_control``, ``citations`` and ``caller`` matter to Anthropic alone.
    """

    type: Literal["text", "tool_use", "tool_result"] = "text"
    text: str | UnsetType = UNSET
    id: CallId | UnsetType = UNSET
    name: ToolName | UnsetType = UNSET
    input: Json | UnsetType = UNSET
    tool_use_id: CallId | UnsetType = UNSET
    content: str | list[Block] | None = None
    is_error: bool | None = None
    cache_control: dict[str, str] | None = None
    citations: Annotated[list[Any], Meta(max_length=0)] | None = None
    caller: dict[str, str] | None = None
    toolset_name: None = None

    def __post_init__(self) -> None:
        """Check that the fields are those of the type."""
        fields = {each for names in _BLOCKS.values() for each in names}
        given = {name for name in fields if getattr(self, name) is not UNSET}
        is_result = self.content is not None or self.is_error is not None
        if given != {*_BLOCKS[self.type]} or (is_result and self.type != "tool_result"):
            raise ValueError(f"a block of type {self.type} has {' and '.join(_BLOCKS[self.type])}")

    @property
    def result(self) -> str:
        """The text that a tool returned; it says so if that is an error."""
        return f"{'Error: ' if self.is_error else ''}{_join(self.content or '')}"


_BLOCKS = {"text": ("text",), "tool_use": ("id", "name", "input"), "tool_result": ("tool_use_id",)}


class Turn(Struct, forbid_unknown_fields=True):
    """Message of the conversation."""

    role: Literal["user", "assistant"]
    content: str | Annotated[list[TurnBlock], Meta(min_length=1, max_length=1024)]

    def __post_init__(self) -> None:
        """Check that the blocks are those of the role."""
        wrong = "tool_result" if self.role == "assistant" else "tool_use"
        if any(block.type == wrong for block in self.content if isinstance(block, TurnBlock)):
            raise ValueError(f"a message of the role {self.role} has no {wrong}")

    def to_plain(self) -> list[Json]:
        """Return messages as language models take them: what tools returned comes before the texts."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        text = "\n".join(block.text for block in self.content if isinstance(block.text, str))
        results = [
            {"role": "tool", "content": block.result, "tool_call_id": block.tool_use_id}
            for block in self.content
            if block.type == "tool_result"
        ]
        calls = [
            to_call(str(block.id), str(block.name), msgspec.json.encode(block.input).decode())
            for block in self.content
            if block.type == "tool_use"
        ]
        own: Json = {"tool_calls": calls} if calls else {}
        rest = [{"role": self.role, "content": text, **own}] if text or not results else []
        return [*results, *rest]


class Thinking(Struct, forbid_unknown_fields=True):
    """Thinking before the answer, of which there is none."""

    type: Literal["disabled"]


class OutputConfig(Struct, forbid_unknown_fields=True):
    """Form of the answer."""

    format: SchemaForm | None = None
    effort: None = None


class CountRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /v1/messages/count_tokens``."""

    model: Name = field(default_factory=str)
    messages: Annotated[list[Turn], Meta(min_length=1, max_length=4096)]
    system: str | Blocks | None = None
    thinking: Thinking | None = None
    tools: MessageTools | None = None
    tool_choice: MessageToolChoice | None = None
    output_config: OutputConfig | None = None
    speed: Literal["standard"] | None = None
    cache_control: dict[str, str] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None

    def __post_init__(self) -> None:
        """Check what the types do not say."""
        _ = self.asked_tools

    @property
    def asked_tools(self) -> AskedTools:
        """The tools that the answer may call."""
        is_single = self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use
        return find_asked(self.tools, self.tool_choice, not is_single)

    @property
    def field_names(self) -> FieldNames:
        """Fields by which a model's refusals are explained."""
        form = "tools" if self.tools and not self.output_config else "output_config.format"
        names = {"stop_words": "stop_sequences", "guide": form}
        indices = [index for index, turn in enumerate(self.messages) for _ in turn.to_plain()]
        return FieldNames(settings=names, before="system" if self.system else "", indices=indices)

    @property
    def conversation(self) -> list[Json]:
        """The conversation as language models take it."""
        system = [{"role": "system", "content": _join(self.system)}] if self.system else []
        return [*system, *(message for turn in self.messages for message in turn.to_plain())]

    @property
    def variables(self) -> Json:
        """Variables of the chat template: a last message of the assistant is continued."""
        own = {CONTINUES: True} if self.messages[-1].role == "assistant" else {}
        return own | to_variables(self.asked_tools)


class MessageRequest(CountRequest, kw_only=True):
    """Body of ``POST /v1/messages``."""

    max_tokens: Count
    temperature: float | None = None
    top_p: float | None = None
    top_k: Number | None = None
    stop_sequences: StopTexts | None = None
    stream: bool | None = None
    metadata: dict[str, str | None] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: None = None
    diagnostics: None = None
    inference_geo: None = None

    @property
    def is_streaming(self) -> bool:
        """Whether the answer comes in pieces."""
        return bool(self.stream)

    def settings(self) -> Json:
        """Return the settings by the names that language models have for them."""
        form = find_guide(**{"output_config.format": self.output_config.format if self.output_config else None})
        own = {"stop_words": self.stop_sequences or None, VARIABLES: self.variables or None}
        found = read_settings(self) | form | own
        return {name: value for name, value in found.items() if value is not None}


async def answer_message(asked: MessageRequest, model_request: ModelRequest) -> web.StreamResponse:
    """Answer the conversation."""
    return await answer(asked, model_request, [asked.conversation], _Message(asked))


def to_anthropic(refused: RefusedError, status: int) -> Json:
    """Return the JSON of a refusal."""
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    error: Json = {"type": kind, "message": refused.client_message}
    if isinstance(refused, ApiError) and refused.param == "thread":  # Anthropic's client then asks without one
        error["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": error, "request_id": None}


def _join(content: str | list[Block]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


class _Message(ResponseFormat):
    prefix, end = "msg_", b""
    _has_begun = False
    _reason = "end_turn"

    def __init__(self, asked: MessageRequest) -> None:
        super().__init__(asked.model, asked.asked_tools)
        self._number, self._kind = 0, ""  # of the block that goes on, which is empty if there is none

    def whole(self, pieces: Sequence[Piece]) -> Json:
        """Return the whole answer."""
        (piece,) = pieces
        blocks: list[Json] = []
        for part in self.divide(0, piece, is_last=True):
            if isinstance(part, CallPiece):
                blocks.append({**_begin_call(part.name), "input": read_arguments(part.arguments)})
            elif blocks and "text" in blocks[-1]:
                blocks[-1]["text"] += part
            else:
                blocks.append({**_TEXT, "text": part})
        return self._document(blocks or [_TEXT], self._find_reason(piece))

    def events(self, number: int, piece: Piece) -> list[Event]:  # noqa: ARG002  # there is one prompt
        """Return the events for one piece."""
        events = [] if self._has_begun else self._begin()
        for part in self.divide(0, piece):
            if isinstance(part, CallPiece):
                events += self._open("tool_use", _begin_call(part.name)) if part.name else []
                delta = {"type": "input_json_delta", "partial_json": part.arguments}
                events += [self._event_delta(delta)] if part.arguments else []
            else:
                events += [] if self._kind == "text" else self._open("text", _TEXT)
                events.append(self._event_delta({"type": "text_delta", "text": part}))
        self._reason = self._find_reason(piece)
        return events

    def last_events(self) -> list[Event]:
        """Return the events that end the answer."""
        events = [] if self._has_begun else self._begin()
        events += [] if self._kind else self._open("text", _TEXT)
        delta = {"stop_reason": self._reason, **_NOTHING}
        return [
            *events,
            _event("content_block_stop", index=self._number),
            _event("message_delta", delta=delta, usage=self._usage),
            _event("message_stop"),
        ]

    def fail(self, refused: RefusedError) -> Event:
        """Return the event that ends an answer which has failed."""
        return Event(to_anthropic(refused, find_status(refused)), "error")

    def _begin(self) -> list[Event]:
        self._has_begun = True
        return [_event("message_start", message=self._document([], None))]

    def _open(self, kind: str, block: Json) -> list[Event]:
        """Begin a block; the one before ends."""
        ended = [_event("content_block_stop", index=self._number)] if self._kind else []
        self._number += len(ended)
        self._kind = kind
        return [*ended, _event("content_block_start", index=self._number, content_block=block)]

    def _event_delta(self, delta: Json) -> Event:
        return _event("content_block_delta", index=self._number, delta=delta)

    def _find_reason(self, piece: Piece) -> str:
        return self.find_reason(0, piece, _REASONS, "tool_use", "end_turn")

    @property
    def _usage(self) -> Json:
        prompt, made = self.counts
        return {**dict.fromkeys(_UNUSED.split()), "input_tokens": prompt, "output_tokens": made}

    def _document(self, content: Sequence[Json], reason: str | None) -> Json:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return {**head, "content": content, "stop_reason": reason, **_NOTHING, "usage": self._usage}


def _event(name: str, **fields: Any) -> Event:
    return Event({"type": name, **fields}, name)


def _begin_call(name: str) -> Json:
    return {"type": "tool_use", "id": make_id("toolu_"), "name": name, "input": {}}
