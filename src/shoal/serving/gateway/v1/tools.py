"""Tools in the words of each API, as variables of a chat template, and the calls of earlier answers."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field, to_builtins

from shoal.errors import InputError
from shoal.kit.generation.calls import CallReader
from shoal.kit.generation.tools import CHOICE, MOST_TOOLS, PARALLEL, REQUIRED, TOOLS, AskedTools, split_asked
from shoal.serving.gateway.v1.errors import ApiError

Json = dict[str, Any]
ToolName = Annotated[str, Meta(min_length=1, max_length=128)]
CallId = Annotated[str, Meta(min_length=1, max_length=256)]
ToolChoice = Literal["none", "auto", "required"]


class Function(Struct, forbid_unknown_fields=True):
    """Function of a tool. Its ``parameters`` are a JSON schema, which calls follow; with ``strict``, all of it."""

    name: ToolName
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class ChatTool(Struct, forbid_unknown_fields=True):
    """Tool of a chat."""

    type: Literal["function"]
    function: Function


class FunctionName(Struct, forbid_unknown_fields=True):
    """Name of a function."""

    name: ToolName


class ChatToolChoice(Struct, forbid_unknown_fields=True):
    """The tool that an answer has to call."""

    type: Literal["function"]
    function: FunctionName


class FunctionCall(Struct, forbid_unknown_fields=True):
    """Function that was called, with arguments as JSON."""

    name: ToolName
    arguments: str


class ChatCall(Struct, forbid_unknown_fields=True):
    """Call of an earlier answer."""

    id: CallId
    function: FunctionCall
    type: Literal["function"] = "function"
    index: int | None = None

    def to_plain(self) -> Json:
        """Return the call as language models take it."""
        return to_call(self.id, self.function.name, self.function.arguments)


class ResponseTool(Struct, forbid_unknown_fields=True):
    """Tool of a response."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None
    is_async: Literal[False] = field(default=False, name="async")
    defer_loading: Literal[False] = False
    allowed_callers: list[Literal["direct"]] | None = None
    output_schema: None = None


class ResponseToolChoice(Struct, forbid_unknown_fields=True):
    """The tool that an answer has to call."""

    type: Literal["function"]
    name: ToolName


class MessageTool(Struct, forbid_unknown_fields=True):
    """Tool of Anthropic's API. ``cache_control`` and ``eager_input_streaming`` matter to Anthropic alone."""

    name: ToolName
    input_schema: Json
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: dict[str, str] | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] = False
    allowed_callers: list[Literal["direct"]] | None = None
    input_examples: Annotated[list[Any], Meta(max_length=0)] | None = None


class MessageToolChoice(Struct, forbid_unknown_fields=True):
    """Whether an answer may or has to call tools, in Anthropic's words."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | UnsetType = UNSET
    disable_parallel_tool_use: bool | None = None

    def __post_init__(self) -> None:
        """Check what the types do not say."""
        if (self.name is UNSET) == (self.type == "tool"):
            raise ValueError(f"the type {self.type} {'needs a' if self.type == 'tool' else 'has no'} name")


Tools = Annotated[list[ChatTool], Meta(max_length=MOST_TOOLS)]
ResponseTools = Annotated[list[ResponseTool], Meta(max_length=MOST_TOOLS)]
MessageTools = Annotated[list[MessageTool], Meta(max_length=MOST_TOOLS)]
_ToolChoice = ToolChoice | ChatToolChoice | ResponseToolChoice | MessageToolChoice | None


def to_call(number: str, name: str, arguments: str) -> Json:
    """Return a call as language models take it."""
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def make_id(prefix: str) -> str:
    """Return an id for a new call."""
    return f"{prefix}{secrets.token_hex(12)}"


def find_asked(
    tools: Sequence[ChatTool | ResponseTool | MessageTool] | None, choice: _ToolChoice, is_parallel: bool | None
) -> AskedTools:
    """Return the tools of a request.

    Raises:
        ApiError: they are not valid together; the error names the place.
    """
    plain = [_to_plain(tool) for tool in tools or ()]
    given = {TOOLS: plain, CHOICE: _to_choice(choice), PARALLEL: is_parallel is not False}
    try:
        return split_asked(given)[1]
    except InputError as error:
        message = error.what if tools and isinstance(tools[0], ChatTool) else error.what.replace(".function", "")
        raise ApiError(f"{message} {error.fix}", message.partition(" ")[0]) from None


def to_variables(asked: AskedTools) -> Json:
    """Return the variables of a chat template for tools; none without them."""
    own = {TOOLS: [*asked.tools], CHOICE: asked.choice, PARALLEL: asked.is_parallel}
    return own if asked.tools else {}


def make_reader(asked: AskedTools) -> CallReader | None:
    """Return a reader of an answer's calls; None if it may have none."""
    names = [function["name"] for function in asked.callable]
    return CallReader(names, None if asked.is_parallel else 1) if names else None


def read_arguments(text: str) -> Any:
    """Return a call's arguments; as a text in an object if they are not one, which a model without a grammar wrote."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"arguments": text}


def _to_plain(tool: ChatTool | ResponseTool | MessageTool) -> Json:
    if isinstance(tool, ChatTool):
        function = to_builtins(tool.function)
    else:
        schema = tool.input_schema if isinstance(tool, MessageTool) else tool.parameters
        function = {"name": tool.name, "description": tool.description, "parameters": schema, "strict": tool.strict}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _to_choice(choice: _ToolChoice) -> str:
    if isinstance(choice, ChatToolChoice):
        return choice.function.name
    if isinstance(choice, MessageToolChoice):
        return {"any": REQUIRED, "tool": choice.name or ""}.get(choice.type, choice.type)
    return choice.name if isinstance(choice, ResponseToolChoice) else choice or "auto"
