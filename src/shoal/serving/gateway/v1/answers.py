"""Types of the answers and events of OpenAI's API and its neighbours, for the API's description."""
# ruff: noqa: UP013  # classes would take three times as many lines

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

_Zero = Literal[0]
_List = Literal["list"]
Reason = Literal["stop", "length"]
ChatReason = Literal["stop", "length", "tool_calls"]

# --- refusals and models --------------------------------------------------------------------------------------------

Fault = TypedDict("Fault", {"message": str, "type": str, "param": str | None, "code": str})
Error = TypedDict("Error", {"error": Fault})
Model = TypedDict(
    "Model",
    {
        "id": str,
        "object": Literal["model"],
        "created": int,
        "owned_by": Literal["shoal"],
        "serves": list[str],
        "ready": bool,
    },
)
Models = TypedDict("Models", {"object": _List, "data": list[Model]})

# --- language models ------------------------------------------------------------------------------------------------

Usage = TypedDict("Usage", {"prompt_tokens": int, "completion_tokens": int, "total_tokens": int})
TopToken = TypedDict("TopToken", {"token": str, "logprob": float, "bytes": list[int] | None})
TokenPlace = TypedDict(
    "TokenPlace", {"token": str, "logprob": float, "bytes": list[int] | None, "top_logprobs": list[TopToken]}
)
ChatLogprobs = TypedDict("ChatLogprobs", {"content": list[TokenPlace], "refusal": None})
AnswerFunction = TypedDict("AnswerFunction", {"name": str, "arguments": str})
AnswerCall = TypedDict("AnswerCall", {"id": str, "type": Literal["function"], "function": AnswerFunction})
ChatMessage = TypedDict(
    "ChatMessage",
    {
        "role": Literal["assistant"],
        "content": str | None,
        "refusal": None,
        "annotations": list[Any],
        "tool_calls": NotRequired[list[AnswerCall]],
        "reasoning_content": NotRequired[str],
    },
)
ChatChoice = TypedDict(
    "ChatChoice", {"index": int, "message": ChatMessage, "logprobs": ChatLogprobs | None, "finish_reason": ChatReason}
)
Chat = TypedDict(
    "Chat",
    {
        "id": str,
        "object": Literal["chat.completion"],
        "created": int,
        "model": str,
        "choices": list[ChatChoice],
        "usage": NotRequired[Usage],
    },
)
FunctionDelta = TypedDict("FunctionDelta", {"name": NotRequired[str], "arguments": str})
CallDelta = TypedDict(
    "CallDelta",
    {"index": int, "id": NotRequired[str], "type": NotRequired[Literal["function"]], "function": FunctionDelta},
)
ChatDelta = TypedDict(
    "ChatDelta",
    {
        "role": NotRequired[Literal["assistant"]],
        "content": NotRequired[str],
        "refusal": NotRequired[None],
        "tool_calls": NotRequired[list[CallDelta]],
        "reasoning_content": NotRequired[str],
    },
)
ChatPiece = TypedDict(
    "ChatPiece", {"index": int, "delta": ChatDelta, "logprobs": ChatLogprobs | None, "finish_reason": ChatReason | None}
)
ChatEvent = TypedDict(
    "ChatEvent",
    {
        "id": str,
        "object": Literal["chat.completion.chunk"],
        "created": int,
        "model": str,
        "choices": list[ChatPiece],
        "usage": NotRequired[Usage | None],
    },
)
CompletionLogprobs = TypedDict(
    "CompletionLogprobs",
    {
        "tokens": list[str],
        "token_logprobs": list[float | None],  # none of a prompt's first token
        "top_logprobs": list[dict[str, float] | None],
        "text_offset": list[int],
    },
)
CompletionChoice = TypedDict(
    "CompletionChoice",
    {"index": int, "text": str, "logprobs": CompletionLogprobs | None, "finish_reason": Reason | None},
)
Completion = TypedDict(
    "Completion",
    {
        "id": str,
        "object": Literal["text_completion"],
        "created": int,
        "model": str,
        "choices": list[CompletionChoice],
        "usage": NotRequired[Usage | None],
    },
)
Tokens = TypedDict("Tokens", {"count": int, "max_model_len": int, "tokens": list[int], "token_strs": None})
Text = TypedDict("Text", {"prompt": str})

# --- responses ------------------------------------------------------------------------------------------------------

InputDetails = TypedDict("InputDetails", {"cached_tokens": _Zero, "cache_write_tokens": _Zero})
OutputDetails = TypedDict("OutputDetails", {"reasoning_tokens": _Zero})
ResponseUsage = TypedDict(
    "ResponseUsage",
    {
        "input_tokens": int,
        "input_tokens_details": InputDetails,
        "output_tokens": int,
        "output_tokens_details": OutputDetails,
        "total_tokens": int,
    },
)
OutputText = TypedDict(
    "OutputText", {"type": Literal["output_text"], "text": str, "annotations": list[Any], "logprobs": list[TokenPlace]}
)
Status = Literal["in_progress", "completed", "incomplete"]
OutputItem = TypedDict(  # a message, or a call
    "OutputItem",
    {
        "id": str,
        "type": Literal["message", "function_call"],
        "status": Status,
        "role": NotRequired[Literal["assistant"]],
        "content": NotRequired[list[OutputText]],
        "call_id": NotRequired[str],
        "name": NotRequired[str],
        "arguments": NotRequired[str],
    },
)
Incomplete = TypedDict("Incomplete", {"reason": Literal["max_output_tokens"]})
Form = TypedDict("Form", {"type": Literal["text"]})
Forms = TypedDict("Forms", {"format": Form})
NoReasoning = TypedDict("NoReasoning", {"effort": None, "summary": None})
Response = TypedDict(
    "Response",
    {
        "id": str, "object": Literal["response"], "created_at": int, "completed_at": int | None, "status": Status,
        "incomplete_details": Incomplete | None, "model": str, "instructions": str | None,
        "output": list[OutputItem], "usage": ResponseUsage | None, "max_output_tokens": int | None,
        "temperature": float, "top_p": float, "top_logprobs": int, "presence_penalty": float,
        "frequency_penalty": float, "background": Literal[False], "error": None, "max_tool_calls": None,
        "metadata": dict[str, str], "parallel_tool_calls": bool, "previous_response_id": None,
        "prompt_cache_key": None, "reasoning": NoReasoning, "safety_identifier": None,
        "service_tier": Literal["default"], "store": Literal[False], "text": Forms, "tool_choice": str | dict[str, str],
        "tools": list[Any], "truncation": Literal["disabled"],
    },
)  # fmt: skip
ResponseState = TypedDict(
    "ResponseState",
    {
        "type": Literal["response.created", "response.in_progress", "response.completed", "response.incomplete"],
        "sequence_number": int,
        "response": Response,
    },
)
ResponseItem = TypedDict(
    "ResponseItem",
    {
        "type": Literal["response.output_item.added", "response.output_item.done"],
        "sequence_number": int,
        "output_index": int,
        "item": OutputItem,
    },
)
ResponsePart = TypedDict(
    "ResponsePart",
    {
        "type": Literal["response.content_part.added", "response.content_part.done"],
        "sequence_number": int,
        "item_id": str,
        "output_index": int,
        "content_index": _Zero,
        "part": OutputText,
    },
)
ResponseDelta = TypedDict(
    "ResponseDelta",
    {
        "type": Literal["response.output_text.delta"],
        "sequence_number": int,
        "item_id": str,
        "output_index": int,
        "content_index": _Zero,
        "delta": str,
        "logprobs": list[TokenPlace],
    },
)
ArgumentsDelta = TypedDict(
    "ArgumentsDelta",
    {
        "type": Literal["response.function_call_arguments.delta"],
        "sequence_number": int,
        "item_id": str,
        "output_index": int,
        "delta": str,
    },
)
ArgumentsDone = TypedDict(
    "ArgumentsDone",
    {
        "type": Literal["response.function_call_arguments.done"],
        "sequence_number": int,
        "item_id": str,
        "output_index": int,
        "name": str,
        "arguments": str,
    },
)
ResponseDone = TypedDict(
    "ResponseDone",
    {
        "type": Literal["response.output_text.done"],
        "sequence_number": int,
        "item_id": str,
        "output_index": int,
        "content_index": _Zero,
        "text": str,
        "logprobs": list[TokenPlace],
    },
)
ResponseFault = TypedDict("ResponseFault", {"type": Literal["error"], "sequence_number": int, "error": Fault})

# --- messages -------------------------------------------------------------------------------------------------------

MessageFault = TypedDict("MessageFault", {"type": str, "message": str, "details": NotRequired[dict[str, Any]]})
MessageError = TypedDict("MessageError", {"type": Literal["error"], "error": MessageFault, "request_id": None})
AnswerBlock = TypedDict(  # a text, or a call
    "AnswerBlock",
    {
        "type": Literal["text", "tool_use"],
        "text": NotRequired[str],
        "id": NotRequired[str],
        "name": NotRequired[str],
        "input": NotRequired[dict[str, Any]],
    },
)
StopReason = Literal["end_turn", "max_tokens", "tool_use"]
MessageUsage = TypedDict(
    "MessageUsage",
    {
        "input_tokens": int,
        "output_tokens": int,
        "cache_creation": None,
        "cache_creation_input_tokens": None,
        "cache_read_input_tokens": None,
        "inference_geo": None,
        "output_tokens_details": None,
        "server_tool_use": None,
        "service_tier": None,
    },
)
MessageAnswer = TypedDict(
    "MessageAnswer",
    {
        "id": str,
        "type": Literal["message"],
        "role": Literal["assistant"],
        "model": str,
        "content": list[AnswerBlock],
        "stop_reason": StopReason | None,
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "usage": MessageUsage,
    },
)
MessageEnd = TypedDict(
    "MessageEnd", {"stop_reason": StopReason, "stop_sequence": None, "stop_details": None, "container": None}
)
AnswerDelta = TypedDict(
    "AnswerDelta",
    {"type": Literal["text_delta", "input_json_delta"], "text": NotRequired[str], "partial_json": NotRequired[str]},
)
MessageStart = TypedDict("MessageStart", {"type": Literal["message_start"], "message": MessageAnswer})
BlockStart = TypedDict(
    "BlockStart", {"type": Literal["content_block_start"], "index": int, "content_block": AnswerBlock}
)
BlockDelta = TypedDict("BlockDelta", {"type": Literal["content_block_delta"], "index": int, "delta": AnswerDelta})
BlockStop = TypedDict("BlockStop", {"type": Literal["content_block_stop"], "index": int})
MessageDelta = TypedDict("MessageDelta", {"type": Literal["message_delta"], "delta": MessageEnd, "usage": MessageUsage})
MessageStop = TypedDict("MessageStop", {"type": Literal["message_stop"]})
Count = TypedDict("Count", {"input_tokens": int})

# --- models of numbers ----------------------------------------------------------------------------------------------

TextUsage = TypedDict("TextUsage", {"prompt_tokens": int, "total_tokens": int, "completion_tokens": NotRequired[_Zero]})
Embedding = TypedDict("Embedding", {"object": Literal["embedding"], "index": int, "embedding": list[float] | str})
Classes = TypedDict("Classes", {"index": int, "label": str | None, "probs": list[float], "num_classes": int})
Document = TypedDict("Document", {"text": str})
Rank = TypedDict("Rank", {"index": int, "relevance_score": float, "document": NotRequired[Document]})
Score = TypedDict("Score", {"index": int, "object": Literal["score"], "score": float})


class _OfTexts(TypedDict):
    """Members of answers about texts: ``warnings`` is about those that may be cut."""

    model: str
    usage: TextUsage
    warnings: NotRequired[list[str]]


class Embeddings(_OfTexts):
    object: _List
    data: list[Embedding]


class Classification(_OfTexts):
    id: str
    object: _List
    created: int
    data: list[Classes]


class Ranking(_OfTexts):
    id: str
    results: list[Rank]


class Scores(_OfTexts):
    id: str
    object: _List
    created: int
    data: list[Score]


Predictions = TypedDict("Predictions", {"predictions": list[dict[str, Any]]})

# --- streams --------------------------------------------------------------------------------------------------------

CHAT_EVENTS, TEXT_EVENTS = (ChatEvent, Error), (Completion, Error)
RESPONSE_EVENTS = (
    ResponseState, ResponseItem, ResponsePart, ResponseDelta, ResponseDone,
    ArgumentsDelta, ArgumentsDone, ResponseFault,
)  # fmt: skip
MESSAGE_EVENTS = MessageStart, BlockStart, BlockDelta, BlockStop, MessageDelta, MessageStop, MessageError
