"""Dialects of language models: the tensors of a request and of its answers, recognised by the model's inputs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard, cast

import numpy as np

from shoal.errors import InputError, ServerError
from shoal.kit.component.spec import TensorSpec
from shoal.kit.generation.pieces import Piece

Messages: TypeAlias = Sequence[Mapping[str, str]]
Prompt: TypeAlias = str | Messages | Sequence[int]  # a text, a chat, or token ids

_LISTS = {"stop_words", "bad_words"}  # settings that are lists of texts
_VLLM = {"stop_words": "stop", "top_logprobs": "logprobs"}  # vLLM's names where they differ
_TENSORRT_LLM = {"seed": "random_seed", "min_tokens": "min_length"}  # names of releases up to 0.19


class Dialect:
    """The tensors of ``llm`` and ``llm_bls``. An object is for one request to a model with these ``inputs``."""

    def __init__(self, inputs: Iterable[TensorSpec]) -> None:
        self._names = {tensor.name for tensor in inputs}
        self._num_output_tokens = 0

    def to_inputs(self, prompt: Prompt, settings: Mapping[str, Any], *, is_streaming: bool) -> dict[str, Any]:
        """Return the inputs of the request, of one row. The client or the pipeline converts and checks values.

        Raises:
            InputError: the model has no chats, or lacks a setting.
        """
        inputs: dict[str, Any] = {"stream": [is_streaming]}
        if isinstance(prompt, str):
            inputs["text_input"] = [prompt]
        elif _are_ids(prompt):
            inputs["prompt_ids"] = [prompt]
        else:
            inputs["messages"] = [_to_json(prompt)]
        for name, value in _given(settings).items():
            inputs[name] = [json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping) else value]
        return inputs

    def _check_known(self, given: Mapping[str, Any]) -> None:
        if missing := next((name for name in given if name not in self._names), None):
            members = f" ({', '.join(given[missing])})" if isinstance(given[missing], Mapping) else ""
            raise InputError(f"The model has no setting {missing}{members}.", "Leave it out, or ask llm.")

    def read(self, answer: Mapping[str, Any]) -> Piece:
        """Convert an answer to a ``Piece``."""
        found = [_read(answer, name) for name in ("text_output", *Piece._fields[1:4])]
        return Piece._make([*found, *_read_log_probs(answer)])

    def find_reason(self, last: Piece) -> str:  # noqa: ARG002
        """Return why an answer ended that says no reason; ``last`` is its last piece."""
        return "stop"

    def check_end(self, last: Piece | None) -> None:
        """Raise ``ServerError`` if ``last`` is not the end of an answer."""
        if last is None or not last.finish_reason:
            raise ServerError("The answer ended before its last piece.", "The server's log says why; try again.")


class Llamav2(Dialect):
    """The tensors of ``llamav2``: one whole answer, which says neither why it ended nor its numbers of tokens."""

    def to_inputs(self, prompt: Prompt, settings: Mapping[str, Any], *, is_streaming: bool) -> dict[str, Any]:  # noqa: ARG002
        """Return the inputs; the messages before the last one are the history."""
        given = _given(settings)
        if not isinstance(prompt, str):
            prompt = _check_chat(prompt)
            if (role := prompt[-1]["role"]) != "user":
                raise InputError(f"The last message's role is {role!r}.", "Send a user's message at the end.")
        self._check_known(given)
        inputs = {name: [value] for name, value in given.items()}
        if isinstance(prompt, str):
            return {"prompt": [prompt], **inputs}
        *before, last = prompt
        if before and "history" not in self._names:
            raise InputError("The model takes one message: it has no input history.", "Send it alone, or ask llm.")
        return {"prompt": [last["content"]], **({"history": [_to_json(before)]} if before else {}), **inputs}

    def read(self, answer: Mapping[str, Any]) -> Piece:
        """Convert the answer."""
        return Piece(_read(answer, "generated_text"), "", 0, 0)

    def check_end(self, last: Piece | None) -> None:
        """Raise ``ServerError`` if there is no answer."""
        if last is None:
            super().check_end(last)


class Vllm(Dialect):
    """The tensors of NVIDIA's vLLM backend, with vLLM's names of the settings."""

    def to_inputs(self, prompt: Prompt, settings: Mapping[str, Any], *, is_streaming: bool) -> dict[str, Any]:
        """Return the inputs; those that only newer backends have are sent where the model declares them."""
        if not isinstance(prompt, str):
            raise InputError("NVIDIA's vLLM backend takes texts alone.", "Send the chat as one text, or ask llm.")
        given = _given(settings)
        if own := given.keys() & {_VARIABLES, "guide", "logit_bias", "echo"}:
            raise InputError(f"NVIDIA's vLLM backend takes texts alone, without {min(own)}.", "Leave it out.")
        log_probs = {name: given.pop(name) for name in _LOG_PROBS if name in given}
        sampling = {_VLLM.get(name, name): value for name, value in given.items()}
        wanted = [name for name in ("exclude_input_in_output", *_RETURNS) if name in self._names]
        return {
            "text_input": [prompt],
            "stream": [is_streaming],
            "sampling_parameters": [json.dumps(sampling, ensure_ascii=False)],
            **{name: [True] for name in wanted},
            **{name: [value] for name, value in log_probs.items()},
        }

    def read(self, answer: Mapping[str, Any]) -> Piece:
        """Convert an answer; the backend counts the new tokens of each answer alone, and writes None for no reason."""
        self._num_output_tokens += _read(answer, "num_output_tokens") or 0
        reason, num_input_tokens = _read(answer, "finish_reason"), _read(answer, "num_input_tokens") or 0
        text = _read(answer, "text_output") or ""
        reason = "" if reason in (None, "None") else reason
        return Piece(text, reason, num_input_tokens, self._num_output_tokens, *_read_log_probs(answer))

    def check_end(self, last: Piece | None) -> None:
        """Raise ``ServerError`` if the last answer has no reason, or none came."""
        if last is None or "return_finish_reason" in self._names:
            super().check_end(last)


class TensorrtLlm(Vllm):
    """The tensors of TensorRT-LLM's ``ensemble`` and ``tensorrt_llm_bls``, with answers as of vLLM's backend."""

    def to_inputs(self, prompt: Prompt, settings: Mapping[str, Any], *, is_streaming: bool) -> dict[str, Any]:
        """Return the inputs, so that the text has no prompt and each answer counts its own tokens."""
        if not isinstance(prompt, str):
            raise InputError("TensorRT-LLM's models take texts alone.", "Send the chat as one text, or ask llm.")
        names = {name: theirs for name, theirs in _TENSORRT_LLM.items() if name not in self._names}
        given = {names.get(name, name): value for name, value in _given(settings).items()}
        self._check_known(given)
        if "max_tokens" not in given:
            raise InputError("TensorRT-LLM's models have no default for max_tokens.", "Send max_tokens.")
        self._max_tokens = given["max_tokens"]
        wanted = [name for name in ("exclude_input_in_output", *_RETURNS) if name in self._names]
        return {
            "text_input": [prompt],
            "stream": [is_streaming],
            **{name: [True] for name in wanted},
            **{name: [value] for name, value in given.items()},
        }

    def find_reason(self, last: Piece) -> str:
        """Return ``length`` if the answer has all tokens that it may have."""
        return "length" if last.num_output_tokens >= self._max_tokens else "stop"


_VARIABLES = "chat_template_kwargs"
_PLAIN = bytes, int, float  # what the gateway, which reads every token, has instead of arrays
_LOG_PROBS = ("return_cumulative_logprob", "return_logprobs")  # inputs
_RETURNS = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")


def find_dialect(inputs: Sequence[TensorSpec]) -> Dialect:
    """Return the dialect of a model with these inputs, for one request.

    Raises:
        InputError: none of them takes a prompt.
    """
    names = {tensor.name for tensor in inputs}
    if names.isdisjoint(("text_input", "messages", "prompt", "sampling_parameters")):
        said = f"The model is not a language model: its inputs are {', '.join(sorted(names))}."
        raise InputError(said, "Ask it with shoal infer, in Python with Client.infer.")
    if "sampling_parameters" in names:
        return Vllm(inputs)
    if {"text_input", "beam_width"} <= names:
        return TensorrtLlm(inputs)
    return (Llamav2 if "prompt" in names and "text_input" not in names else Dialect)(inputs)


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that have a value; lists of texts as lists."""
    given = {name: value for name, value in settings.items() if (value if name in _LISTS else value is not None)}
    return {
        name: ([value] if isinstance(value, str) else [*value]) if name in _LISTS else value
        for name, value in given.items()
    }


def _are_ids(prompt: Messages | Sequence[int]) -> TypeGuard[Sequence[int]]:
    return len(prompt) > 0 and all(isinstance(each, int) for each in prompt)


def _check_chat(prompt: Messages | Sequence[int]) -> Messages:
    if any(isinstance(each, str) for each in prompt):
        raise InputError("The prompt is a list of texts.", "Ask generate_all(prompts), or send one text.")
    if _are_ids(prompt):
        raise InputError("The model takes no token ids.", "Send a text, or ask llm.")
    return cast(Messages, prompt)


def _to_json(prompt: Messages | Sequence[int]) -> str:
    return json.dumps([dict(each) for each in _check_chat(prompt)])


def _read_log_probs(answer: Mapping[str, Any]) -> tuple[float | None, Sequence[Any]]:
    logprobs = _read(answer, "logprobs")
    return _read(answer, "cumulative_logprob"), json.loads(logprobs) if logprobs else ()


def _read(answer: Mapping[str, Any], name: str) -> Any:
    """Return the only element of an output as a Python value; None if the answer does not have it."""
    if name not in answer:
        return None
    value = answer[name]
    if not isinstance(value, _PLAIN):
        if not np.size(value):
            return None
        value = np.asarray(value).item()
    return value.decode() if isinstance(value, bytes) else value
