"""OpenAI's Responses API, without state: nothing is stored, so each request has the whole conversation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType, field

from shoal.kit.generation.calls import CallPiece
from shoal.kit.generation.pieces import Piece
from shoal.kit.generation.sampling import VARIABLES
from shoal.kit.generation.tools import AskedTools
from shoal.serving.gateway.refusals import RefusedError
from shoal.serving.gateway.v1.chat import describe_places
from shoal.serving.gateway.v1.forms import Form, TextForm, find_guide
from shoal.serving.gateway.v1.model_request import ModelRequest
from shoal.serving.gateway.v1.schema import (
    Body,
    Count,
    Effort,
    FieldNames,
    Number,
    Seed,
    Verbosity,
    check_variables,
    find_effort,
    read_settings,
)
from shoal.serving.gateway.v1.sse import Event, Json, ResponseFormat, answer
from shoal.serving.gateway.v1.tools import (
    CallId,
    ResponseToolChoice,
    ResponseTools,
    ToolChoice,
    ToolName,
    find_asked,
    make_id,
    to_call,
    to_variables,
)

_NOTHING: dict[str, Any] = {  # of what is not served
    "background": False, "error": None, "max_tool_calls": None, "metadata": {},
    "previous_response_id": None, "prompt_cache_key": None, "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None, "service_tier": "default", "store": False,
    "truncation": "disabled",
}  # fmt: skip


class Part(Struct, forbid_unknown_fields=True):
    """Part of a message's content."""

    type: Literal["input_text", "output_text"]
    text: str
    prompt_cache_breakpoint: dict[str, str] | None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    logprobs: list[Any] | None = None


Parts = Annotated[list[Part], Meta(min_length=1, max_length=1024)]


class Item(Struct, forbid_unknown_fields=True):
    """Message, call of a tool, or what the tool returned: each type has fields of its own.

    ``id``, ``status``, ``phase`` and ``caller`` are those of earlier answers, which clients send back.
    """

    role: Literal["developer", "system", "user", "assistant"] | UnsetType = UNSET
    content: str | Parts | UnsetType = UNSET
    type: Literal["message", "function_call", "function_call_output"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    call_id: CallId | UnsetType = UNSET
    name: ToolName | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    output: str | Parts | UnsetType = UNSET
    is_async: Literal[False] = field(default=False, name="async")
    caller: dict[str, str] | None = None
    namespace: None = None

    def __post_init__(self) -> None:
        """Check that the fields are those of the type."""
        fields = {each for names in _ITEMS.values() for each in names}
        given = {name for name in fields if getattr(self, name) is not UNSET}
        if given != {*_ITEMS[self.type]}:
            raise ValueError(f"an item of type {self.type} has {' and '.join(_ITEMS[self.type])}")

    def add_to(self, messages: list[Json]) -> None:
        """Add the item to a chat as language models take it: calls belong to the message of the assistant before."""
        if self.type == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            call = to_call(str(self.call_id), str(self.name), str(self.arguments))
            messages[-1].setdefault("tool_calls", []).append(call)
        elif self.type == "function_call_output":
            messages.append({"role": "tool", "content": _join(self.output), "tool_call_id": self.call_id})
        else:
            role = "system" if self.role == "developer" else self.role
            messages.append({"role": role, "content": _join(self.content)})


_ITEMS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}


class ResponseText(Struct, forbid_unknown_fields=True):
    """Form of the answer."""

    format: Form | None = None
    verbosity: Verbosity | None = None


class Reasoning(Struct, forbid_unknown_fields=True):
    """Reasoning before the answer, by models whose chat templates read its effort."""

    effort: Effort | None = None
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
    top_k: Number | None = None
    repetition_penalty: float | None = None
    seed: Seed | None = None
    top_logprobs: Number | None = None
    include: Annotated[list[Literal["message.output_text.logprobs"]], Meta(max_length=8)] | None = None
    stream: bool | None = None
    stream_options: ResponseOptions | None = None
    text: ResponseText | None = None
    truncation: Literal["auto", "disabled"] | None = None
    reasoning: Reasoning | None = None
    tools: ResponseTools | None = None
    tool_choice: ToolChoice | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Count | None = None
    chat_template_kwargs: dict[str, Any] | None = None
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

    def __post_init__(self) -> None:
        """Check what the types do not say."""
        check_variables(self.chat_template_kwargs)
        find_asked(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def asked_tools(self) -> AskedTools:
        """The tools that the answer may call."""
        return find_asked(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def messages(self) -> list[Json]:
        """The conversation as language models take it."""
        before = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return [*before, *self._conversation[0]]

    @property
    def _conversation(self) -> tuple[list[Json], list[int]]:
        """Messages, and the index of the item with which each begins."""
        messages: list[Json] = []
        indices: list[int] = []
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}], indices
        for index, item in enumerate(self.input):
            item.add_to(messages)
            indices += [index] * (len(messages) - len(indices))
        return messages, indices

    @property
    def _variables(self) -> Json:
        effort = find_effort(self.reasoning.effort if self.reasoning else None)
        return (self.chat_template_kwargs or {}) | effort | to_variables(self.asked_tools)

    @property
    def field_names(self) -> FieldNames:
        """Fields by which a model's refusals are explained."""
        before, is_list = "instructions" if self.instructions else "", not isinstance(self.input, str)
        form = "tools" if self.tools and not (self.text and self.text.format) else "text.format"
        names = {
            "max_tokens": "max_output_tokens",
            "guide": form,
            VARIABLES: "reasoning.effort" if self.reasoning else VARIABLES,
        }
        return FieldNames("input", names, before, is_list, self._conversation[1])

    def settings(self) -> Json:
        """Return the settings by the names that language models have for them."""
        form = find_guide(**{"text.format": self.text.format if self.text else None})
        own = {"max_tokens": self.max_output_tokens, VARIABLES: self._variables or self.chat_template_kwargs}
        found = read_settings(self) | form | own
        if self.include or self.top_logprobs:
            found |= {"return_logprobs": True, "top_logprobs": self.top_logprobs or 0}
        return {name: value for name, value in found.items() if value is not None}


async def answer_response(asked: ResponseRequest, model_request: ModelRequest) -> web.StreamResponse:
    """Answer the conversation."""
    return await answer(asked, model_request, [asked.messages], _Response(asked))


def _join(content: str | list[Part] | UnsetType) -> str:
    parts = content if isinstance(content, list) else ()
    return content if isinstance(content, str) else "\n".join(part.text for part in parts)


class _Response(ResponseFormat):
    prefix = "resp_"

    def __init__(self, asked: ResponseRequest) -> None:
        super().__init__(asked.model, asked.asked_tools)
        self._asked, self._num_events = asked, 0
        self._form = (asked.text and asked.text.format) or TextForm()
        self._output: list[Json] = []  # items; the last one may go on
        self._places: list[Json] = []  # log probabilities of tokens whose text is held back
        self._is_cut = False

    def whole(self, pieces: Sequence[Piece]) -> Json:
        """Return the whole answer."""
        (piece,) = pieces
        self._take(piece, is_last=True)
        self._end()
        return self._document("completed")

    def events(self, number: int, piece: Piece) -> list[Event]:  # noqa: ARG002  # there is one prompt
        """Return the events for one piece."""
        begin = [] if self._num_events else self._begin()
        return [*begin, *self._take(piece)]

    def last_events(self) -> list[Event]:
        """Return the events that end the answer."""
        events = [*([] if self._num_events else self._begin()), *self._end()]
        document = self._document("completed")
        return [*events, self._event(document["status"], response=document)]

    def fail(self, refused: RefusedError) -> Event:
        """Return the event that ends an answer which has failed."""
        error = super().fail(refused).document["error"]
        return Event({"type": "error", "sequence_number": self._num_events, "error": error}, "error")

    def _begin(self) -> list[Event]:
        document = self._document("in_progress")
        return [self._event("created", response=document), self._event("in_progress", response=document)]

    def _event(self, name: str, /, **fields: Any) -> Event:
        document = {"type": f"response.{name}", "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return Event(document, document["type"])

    def _take(self, piece: Piece, *, is_last: bool | None = None) -> list[Event]:
        """Add a piece to the items of the answer, and return its events; log probabilities belong to texts."""
        self._is_cut = piece.finish_reason == "length"
        self._places += self._describe_places(piece)
        parts = self.divide(0, piece, is_last=is_last)
        events: list[Event] = []
        if self._places and not parts and not self._asked.asked_tools.callable:
            parts = [""]
        for part in parts:
            if isinstance(part, CallPiece):
                events += self._open_call(part.name) if part.name else []
                self._output[-1]["arguments"] += part.arguments
                if part.arguments:
                    events.append(self._event("function_call_arguments.delta", **self._at, delta=part.arguments))
                self._places = []
                continue
            events += [] if self._is_open("message") else self._open_message()
            (content,) = self._output[-1]["content"]
            content["text"] += part
            content["logprobs"] += self._places
            delta = {**self._at, "content_index": 0, "delta": part, "logprobs": self._places}
            events.append(self._event("output_text.delta", **delta))
            self._places = []
        return events

    def _describe_places(self, piece: Piece) -> list[Json]:
        return [
            {
                **place,
                "bytes": place["bytes"] or [],
                "top_logprobs": [{**each, "bytes": each["bytes"] or []} for each in place["top_logprobs"]],
            }
            for place in describe_places(piece, self._asked.top_logprobs or 0)
        ]

    @property
    def _at(self) -> Json:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _is_open(self, kind: str) -> bool:
        """Whether the last item is one of this type that goes on."""
        return bool(self._output) and (self._output[-1]["type"], self._output[-1]["status"]) == (kind, "in_progress")

    def _open_message(self) -> list[Event]:
        events = self._open({"id": make_id("msg_"), "type": "message", "role": "assistant", "content": []})
        part = {"type": "output_text", "text": "", "annotations": []}
        self._output[-1]["content"] = [{**part, "logprobs": []}]
        at = {**self._at, "content_index": 0}
        return [*events, self._event("content_part.added", **at, part={**part, "logprobs": []})]

    def _open_call(self, name: str) -> list[Event]:
        call = {"id": make_id("fc_"), "type": "function_call", "call_id": make_id("call_")}
        return self._open({**call, "name": name, "arguments": ""})

    def _open(self, item: Json) -> list[Event]:
        closed = self._close("completed")
        self._output.append({**item, "status": "in_progress"})
        added = {"output_index": len(self._output) - 1, "item": dict(self._output[-1])}
        return [*closed, self._event("output_item.added", **added)]

    def _close(self, status: str) -> list[Event]:
        """End the last item, if it goes on."""
        if not self._output or self._output[-1]["status"] != "in_progress":
            return []
        item = self._output[-1]
        item["status"] = status
        if item["type"] == "message":
            (part,) = item["content"]
            at = {**self._at, "content_index": 0}
            done = {"text": part["text"], "logprobs": part["logprobs"]}
            ends = [self._event("output_text.done", **at, **done), self._event("content_part.done", **at, part=part)]
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            ends = [self._event("function_call_arguments.done", **self._at, **done)]
        return [*ends, self._event("output_item.done", output_index=len(self._output) - 1, item=item)]

    def _end(self) -> list[Event]:
        """End the answer, which has one item at least."""
        events = [] if self._output else self._open_message()
        return [*events, *self._close("incomplete" if self._is_cut else "completed")]

    def _document(self, status: str) -> Json:
        asked, is_over, (prompt, made) = self._asked, status == "completed", self.counts
        default = 0.0 if asked.top_p is None else 1.0  # without either, pipelines always take the most probable token
        is_cut = is_over and self._is_cut
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
            "output": self._output if is_over else [],
            "tools": [msgspec.to_builtins(tool) for tool in asked.tools or ()],
            "tool_choice": msgspec.to_builtins(asked.tool_choice) or "auto",
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "temperature": default if asked.temperature is None else asked.temperature,
            "top_p": 1.0 if asked.top_p is None else asked.top_p, "top_logprobs": asked.top_logprobs or 0,
            "presence_penalty": asked.presence_penalty or 0.0, "frequency_penalty": asked.frequency_penalty or 0.0,
            "usage": usage if is_over and prompt else None,
        }  # fmt: skip
