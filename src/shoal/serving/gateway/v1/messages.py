"""Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from aiohttp import web
from msgspec import Meta, Struct, field

from shoal.kit.generation.pieces import Piece
from shoal.kit.generation.sampling import CONTINUES, VARIABLES
from shoal.serving.gateway.http.routes import find_status
from shoal.serving.gateway.refusals import RefusedError
from shoal.serving.gateway.v1.forms import SchemaForm, find_guide
from shoal.serving.gateway.v1.model_request import ModelRequest
from shoal.serving.gateway.v1.schema import Count, FieldNames, Name, Number, StopTexts, read_settings
from shoal.serving.gateway.v1.sse import Event, Json, ResponseFormat, answer

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
_NOTHING = dict.fromkeys(("stop_sequence", "stop_details", "container"))


class Block(Struct, forbid_unknown_fields=True):
    """Text of a message. ``cache_control`` and ``citations`` matter to Anthropic alone."""

    text: str
    type: Literal["text"] = "text"
    cache_control: dict[str, str] | None = None
    citations: Annotated[list[Any], Meta(max_length=0)] | None = None


Blocks = Annotated[list[Block], Meta(min_length=1, max_length=1024)]


class Turn(Struct, forbid_unknown_fields=True):
    """Message of the conversation."""

    role: Literal["user", "assistant"]
    content: str | Blocks


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
    tools: Annotated[list[Any], Meta(max_length=0)] | None = None
    tool_choice: None = None
    output_config: OutputConfig | None = None
    speed: Literal["standard"] | None = None
    cache_control: dict[str, str] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None

    @property
    def field_names(self) -> FieldNames:
        """Fields by which a model's refusals are explained."""
        names = {"stop_words": "stop_sequences", "guide": "output_config.format"}
        return FieldNames(settings=names, before="system" if self.system else "")

    @property
    def conversation(self) -> list[dict[str, str]]:
        """The conversation as language models take it."""
        system = [{"role": "system", "content": _join(self.system)}] if self.system else []
        return [*system, *({"role": turn.role, "content": _join(turn.content)} for turn in self.messages)]

    @property
    def variables(self) -> Json:
        """Variables of the chat template: a last message of the assistant is continued."""
        return {CONTINUES: True} if self.messages[-1].role == "assistant" else {}


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
    return await answer(asked, model_request, [asked.conversation], _Message(asked.model))


def to_anthropic(refused: RefusedError, status: int) -> Json:
    """Return the JSON of a refusal."""
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": refused.client_message}, "request_id": None}


def _join(content: str | list[Block]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


class _Message(ResponseFormat):
    prefix, end = "msg_", b""
    _has_begun = False
    _reason = "end_turn"

    def whole(self, pieces: Sequence[Piece]) -> Json:
        """Return the whole answer."""
        (piece,) = pieces
        block = {"type": "text", "text": piece.text, "citations": None}
        return self._document([block], _find_reason(piece))

    def events(self, number: int, piece: Piece) -> list[Event]:  # noqa: ARG002  # there is one prompt
        """Return the events for one piece."""
        begin = [] if self._has_begun else self._begin()
        self._reason = _find_reason(piece)
        delta = {"type": "text_delta", "text": piece.text}
        return [*begin, *([_event("content_block_delta", index=0, delta=delta)] if piece.text else [])]

    def last_events(self) -> list[Event]:
        """Return the events that end the answer."""
        delta = {"stop_reason": self._reason, **_NOTHING}
        return [
            *([] if self._has_begun else self._begin()),
            _event("content_block_stop", index=0),
            _event("message_delta", delta=delta, usage=self._usage),
            _event("message_stop"),
        ]

    def fail(self, refused: RefusedError) -> Event:
        """Return the event that ends an answer which has failed."""
        return Event(to_anthropic(refused, find_status(refused)), "error")

    def _begin(self) -> list[Event]:
        self._has_begun = True
        block = {"type": "text", "text": "", "citations": None}
        return [
            _event("message_start", message=self._document([], None)),
            _event("content_block_start", index=0, content_block=block),
        ]

    @property
    def _usage(self) -> Json:
        prompt, made = self.counts
        return {**dict.fromkeys(_UNUSED.split()), "input_tokens": prompt, "output_tokens": made}

    def _document(self, content: Sequence[Json], reason: str | None) -> Json:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return {**head, "content": content, "stop_reason": reason, **_NOTHING, "usage": self._usage}


def _event(name: str, **fields: Any) -> Event:
    return Event({"type": name, **fields}, name)


def _find_reason(piece: Piece) -> str:
    return _REASONS.get(piece.finish_reason, "end_turn")
