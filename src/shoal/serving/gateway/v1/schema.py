"""Requests of OpenAI's API: types that decode and check them in one step.

A field that OpenAI has and that is not served has the type of the values that ask for nothing; ``_UNSUPPORTED`` says
why other values are refused. The fields in ``IDLE`` matter to OpenAI alone: they are taken and do nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from shoal.kit.generation.sampling import CONTINUES, SETTINGS, VARIABLES
from shoal.kit.generation.tools import ASKS, AskedTools
from shoal.serving.gateway.http.json_scanning import MOST_PLAIN, scan, to_dict
from shoal.serving.gateway.refusals import RefusalReason, RefusedError
from shoal.serving.gateway.v1.errors import ApiError
from shoal.serving.gateway.v1.forms import ChatForm, StructuredOutputs, TextForm, find_guide
from shoal.serving.gateway.v1.tools import CallId, ChatCall, ChatToolChoice, ToolChoice, Tools, find_asked, to_variables

MOST_BODY = 2**22  # bytes
MOST_NESTED = 32  # brackets of JSON within each other
# Decoding holds the interpreter's lock: at these bounds for 40 ms.
MOST_VALUES = 2**18 + 2**10
MOST_KEYS = 2**16  # also lists and objects
MOST_ANSWERS = 128  # of a request
MOST_VARIABLES = 2**14  # bytes of a chat template's variables as JSON, which is written again
_IDLE = (
    "user metadata service_tier prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier store"
)
IDLE = tuple(_IDLE.split())
_TOOLS, _FUNCTIONS, _TEXTS = "send tools, whose type is function", "tools are functions", "contents are texts"
_NO_REASONING, _NO_STATE = "reasoning is a part of the text", "nothing is stored: send the whole chat"
_FORMS = "output_config.format has it"
_AS_CHAT, _WHOLE = "prompts are those of chats to answer", "conversations are not shortened"
_FREE = "nothing is billed"
_UNSUPPORTED = {
    "functions": _TOOLS, "function_call": _TOOLS, "tools.type": _FUNCTIONS, "tool_choice.type": _FUNCTIONS,
    "tool_calls.type": _FUNCTIONS, "async": _FUNCTIONS, "defer_loading": _FUNCTIONS, "allowed_callers": _FUNCTIONS,
    "output_schema": "what tools return is a text", "namespace": _FUNCTIONS, "toolset_name": _FUNCTIONS,
    "input_examples": "examples belong in the description", "format.type": "",
    "web_search_options": _FUNCTIONS, "best_of": "answers are not compared: send n",
    "image_url": _TEXTS, "input_audio": _TEXTS, "file": _TEXTS,
    "type": _TEXTS, "audio": "audio is not served", "modalities": "text is the only modality",
    "suffix": "texts are continued at their end alone",
    "prediction": "answers are not predicted", "store": _NO_STATE,
    "thinking": _NO_REASONING, "reasoning": _NO_REASONING,
    "summary": _NO_REASONING, "previous_response_id": _NO_STATE, "conversation": _NO_STATE, "background": _NO_STATE,
    "return_token_strs": "tokens are returned as ids", "chat_template": "the model has its own",
    "add_generation_prompt": _AS_CHAT, "continue_final_message": _AS_CHAT, "max_tool_calls": _FUNCTIONS,
    "background_options": _NO_STATE,
    "moderation": "nothing is moderated", "image": _TEXTS, "context_management": _WHOLE, "compaction": _WHOLE,
    "access_programs": "there are none", "inference_geo": "the service runs in one place", "container": _FUNCTIONS,
    "mcp_servers": _FUNCTIONS, "output_format": _FORMS, "effort": _NO_REASONING, "thread": _NO_STATE,
    "diagnostics": _NO_STATE, "speed": "there is one speed", "fallbacks": "the model that is asked for answers",
    "fallback_credit_token": _FREE, "billing_policy": _FREE,
}  # fmt: skip

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Number = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Verbosity = Literal["low", "medium", "high"]  # does nothing
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Text = Annotated[str, Meta(min_length=1)]
StopText = Annotated[str, Meta(max_length=4096)]
StopTexts = Annotated[list[StopText], Meta(max_length=64)]
T = TypeVar("T", bound=Struct)


class FieldNames(NamedTuple):
    """Fields of a request by which a model's refusals are explained: those with its prompt, and with settings.

    Without a prompt, ``prompt`` is empty. ``before`` is the field whose text is the first message, empty if there is
    none; ``is_list`` says whether the field ``prompt`` has the other messages. ``indices`` are, by message, those in
    this field, if they are others.
    """

    prompt: str = "messages"
    settings: Mapping[str, str] = {"stop_words": "stop"}
    before: str = ""
    is_list: bool = True
    indices: Sequence[int] = ()

    @property
    def max_tokens(self) -> str:
        """The field with the greatest number of tokens."""
        return self.settings.get("max_tokens", "max_tokens")

    def find(self, index: int) -> str:
        """Return the place of a message's content."""
        at = index - bool(self.before)
        at = self.indices[at] if 0 <= at < len(self.indices) else at
        return self.before if at < 0 else f"{self.prompt}[{at}].content" if self.is_list else self.prompt


class TextPart(Struct, forbid_unknown_fields=True):
    """Part of a message's content."""

    text: str
    type: Literal["text"] = "text"
    prompt_cache_breakpoint: dict[str, str] | None = None


class Message(Struct, forbid_unknown_fields=True):
    """Message of a chat. Besides ``role`` and ``content``, it may have what OpenAI's client gives back of an answer.

    The assistant's may have calls of tools, and no content; a tool's message names the call that it answers.
    """

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Meta(min_length=1, max_length=1024)] | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    refusal: None = None
    tool_calls: Annotated[list[ChatCall], Meta(max_length=128)] | None = None
    tool_call_id: CallId | None = None
    function_call: None = None
    audio: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    reasoning_content: str | None = None

    def __post_init__(self) -> None:
        """Check what the types do not say."""
        of_tool = self.tool_call_id is not None
        for name, is_missing in (
            ("content", self.content is None and self.role != "assistant"),
            ("tool_call_id", self.role == "tool" and not of_tool),
        ):
            if is_missing:
                raise ValueError(f"Object missing required field `{name}`")
        if of_tool and self.role != "tool":
            raise ValueError("Object contains unknown field `tool_call_id`")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("Object contains unknown field `tool_calls`")

    def to_plain(self) -> dict[str, Any]:
        """Return the message as language models take it; parts are lines. Some templates read a participant's name."""
        content = (
            "\n".join(part.text for part in self.content) if isinstance(self.content, list) else self.content or ""
        )
        calls = [call.to_plain() for call in self.tool_calls or ()]
        more = {"name": self.name, "tool_calls": calls, "tool_call_id": self.tool_call_id}
        more["reasoning_content"] = self.reasoning_content
        own = {key: value for key, value in more.items() if value}
        return {"role": "system" if self.role == "developer" else self.role, "content": content, **own}


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Options of an answer that comes in pieces."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool = False


class Body(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of each request of OpenAI's. Without ``model``, it is for the only model that serves the path."""

    model: Name = field(default_factory=str)
    user: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    store: Literal[False] | None = None


class GenerationBody(Body, kw_only=True):
    """Fields of every request to a language model; the numbers are checked by the model's pipeline.

    ``top_k``, ``repetition_penalty``, ``min_tokens``, ``ignore_eos`` and ``structured_outputs`` are vLLM's additions,
    as is ``chat_template_kwargs`` of chats and Responses.
    """

    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: Seed | None = None
    stop: StopText | StopTexts | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: Number | None = None
    repetition_penalty: float | None = None
    min_tokens: Number | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_ANSWERS)] | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=1024)] | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def is_streaming(self) -> bool:
        """Whether the answer comes in pieces."""
        return bool(self.stream)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def longest(self) -> int | None:
        """Greatest number of tokens of the answer."""
        return self.max_tokens

    @property
    def forms(self) -> dict[str, TextForm | StructuredOutputs | None]:
        """The fields that may have a form of the answer."""
        return {"structured_outputs": self.structured_outputs}

    def settings(self) -> dict[str, Any]:
        """Return the settings by the names that language models have for them."""
        if self.stream_options is not None and not self.stream:
            raise ApiError("stream_options needs stream: true.", "stream_options")
        words = [self.stop] if isinstance(self.stop, str) else self.stop
        given = read_settings(self)
        if self.ignore_eos and (words or self.longest is None):
            raise ApiError("ignore_eos needs max_tokens, and no stop.", "ignore_eos")
        given["min_tokens"] = self.longest if self.ignore_eos else self.min_tokens
        given["logit_bias"] = self.logit_bias or None
        found = {**given, **find_guide(**self.forms), "max_tokens": self.longest, "stop_words": words or None}
        return {name: value for name, value in found.items() if value is not None}


class ChatRequest(GenerationBody, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Number | None = None
    response_format: ChatForm | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | ChatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: None = None
    function_call: None = None
    audio: None = None
    modalities: Annotated[list[Literal["text"]], Meta(max_length=1)] | None = None
    prediction: None = None
    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None
    web_search_options: None = None
    moderation: None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def __post_init__(self) -> None:
        """Check what the types do not say."""
        if bool(self.continue_final_message) is not (self.add_generation_prompt is False):
            what = "continue_final_message is true if add_generation_prompt is false, and the other way round."
            raise ApiError(f"{what} Send both.", "add_generation_prompt")
        check_variables(self.chat_template_kwargs)
        find_asked(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def asked_tools(self) -> AskedTools:
        """The tools that the answer may call."""
        return find_asked(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def field_names(self) -> FieldNames:
        """Fields by which a model's refusals are explained."""
        longest = "max_completion_tokens" if self.max_tokens is None else "max_tokens"
        given = self.structured_outputs, self.response_format
        form = "response_format" if given[0] is None else "structured_outputs"
        form = "tools" if self.tools and given == (None, None) else form
        own = {VARIABLES: "reasoning_effort"} if self.reasoning_effort and not self.chat_template_kwargs else {}
        return FieldNames(settings={"stop_words": "stop", "max_tokens": longest, "guide": form, **own})

    @property
    def forms(self) -> dict[str, TextForm | StructuredOutputs | None]:
        """The fields that may have a form of the answer."""
        return {"response_format": self.response_format, **super().forms}

    @property
    def longest(self) -> int | None:
        """Greatest number of tokens of the answer."""
        most = [number for number in (self.max_tokens, self.max_completion_tokens) if number is not None]
        if len({*most}) > 1:
            raise ApiError(
                f"max_tokens is {most[0]} and max_completion_tokens is {most[1]}. Send one of them.", "max_tokens"
            )
        return most[0] if most else None

    def settings(self) -> dict[str, Any]:
        """Return the settings by the names that language models have for them."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError("top_logprobs needs logprobs: true.", "top_logprobs")
        wanted = {"return_logprobs": True, "top_logprobs": self.top_logprobs or 0} if self.logprobs else {}
        own: dict[str, Any] = {CONTINUES: True} if self.continue_final_message else {}
        own |= find_effort(self.reasoning_effort)
        variables = (self.chat_template_kwargs or {}) | own | to_variables(self.asked_tools)
        own = {VARIABLES: variables} if variables or self.chat_template_kwargs is not None else {}
        return super().settings() | wanted | own


class CompletionRequest(GenerationBody, kw_only=True):
    """Body of ``POST /v1/completions``. A prompt is a text or token ids."""

    prompt: str | Annotated[list[str | Number | Annotated[list[Number], Meta(min_length=1)]], Meta(min_length=1)]
    max_tokens: Number | None = None  # 0: with echo
    logprobs: Number | None = None
    best_of: None = None
    echo: bool | None = None
    suffix: None = None

    def __post_init__(self) -> None:
        """Check what the types do not say."""
        if len({type(each) for each in self.prompt}) > 1:
            raise ApiError("prompt has texts and token ids. Send one kind.", "prompt")
        if self.max_tokens == 0 and not self.echo:
            raise ApiError("max_tokens is 0. Send more, or echo: true.", "max_tokens")
        if (number := len(self.prompts) * (self.n or 1)) > MOST_ANSWERS:
            what = f"The request has {number} answers; at most {MOST_ANSWERS} are given. Send less."
            raise ApiError(what, "n" if self.n else "prompt")

    @property
    def prompts(self) -> list[Any]:
        """The texts, or lists of token ids, to continue."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else [*self.prompt]

    @property
    def field_names(self) -> FieldNames:
        """Fields by which a model's refusals are explained."""
        names = {"stop_words": "stop", "top_logprobs": "logprobs", "guide": "structured_outputs"}
        return FieldNames("prompt", names)

    def settings(self) -> dict[str, Any]:
        """Return the settings by the names that language models have for them."""
        wanted = {} if self.logprobs is None else {"return_logprobs": True, "top_logprobs": self.logprobs}
        return {**super().settings(), **wanted, "echo": self.echo or None}


def decode(kind: type[T], body: bytes) -> T:
    """Decode a request.

    Raises:
        ApiError: the body is not JSON, or not such a request; the error names the place.
    """
    try:
        _, counts = scan(body, most=MOST_NESTED)
    except RefusedError as refused:
        raise ApiError(refused.message, code="invalid_json") from None
    for number, most, what in (
        (counts.commas, MOST_VALUES, "values"),
        (counts.openings, MOST_KEYS, "lists and objects"),
        (counts.colons, MOST_KEYS, "keys"),
        (counts.longest, MOST_PLAIN, "digits in a number"),
    ):
        if number > most:
            fewer = f"The JSON has {number} {what}; at most {most} are read. Send fewer rows at a time."
            raise ApiError(fewer, reason=RefusalReason.LARGE)
    try:
        found = msgspec.json.decode(body, type=kind)
        json.loads(body, object_pairs_hook=to_dict, parse_int=len, parse_float=len)  # for keys that are there twice
    except msgspec.ValidationError as error:
        from shoal.serving.gateway.v1.mistakes import explain

        raise explain(kind, str(error), _UNSUPPORTED) from None
    except (ValueError, RecursionError):  # also: not UTF-8
        raise ApiError("The body is not JSON.", code="invalid_json") from None
    except ApiError:
        raise
    except RefusedError as refused:
        raise ApiError(refused.message) from None
    return found


def read_settings(body: Struct) -> dict[str, Any]:
    """Return those fields of a request that are settings of language models, by the same names and in the same form."""
    names = (row.name for row in SETTINGS if row.name != "top_logprobs")
    found = {name: getattr(body, name) for name in names if name in body.__struct_fields__}
    if found.get("seed") is not None:
        found["seed"] %= 2**63  # models take seeds from 0
    return found


def find_effort(effort: str | None) -> dict[str, Any]:
    """Return the variable of a chat template for the effort of reasoning; none if there is to be no reasoning."""
    return {} if effort in (None, "none") else {"reasoning_effort": effort}


def check_variables(variables: Mapping[str, Any] | None) -> None:
    """Check the variables of a chat template, which are written as JSON several times."""
    if own := sorted(ASKS & (variables or {}).keys()):
        raise ApiError(f"{VARIABLES} has {own[0]}. Send it beside {VARIABLES}.", VARIABLES)
    if (size := len(msgspec.json.encode(variables))) > MOST_VARIABLES:
        raise ApiError(f"{VARIABLES} has {size} bytes as JSON; at most {MOST_VARIABLES} are read.", VARIABLES)
