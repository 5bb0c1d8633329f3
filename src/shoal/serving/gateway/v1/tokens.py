"""Token ids of prompts, and texts of token ids, in vLLM's form: ``POST /tokenize`` and ``/detokenize``.

Both ask the pipeline's own steps: that which turns prompts into token ids, and that which turns token ids into texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from aiohttp import web
from msgspec import Meta, Struct, field

from shoal.authoring.repository.apis import has_tensors, makes_token_ids
from shoal.authoring.repository.config import ModelConfig
from shoal.kit.component.parameters import Parameters
from shoal.kit.generation.sampling import VARIABLES
from shoal.serving.gateway.v1.errors import ApiError
from shoal.serving.gateway.v1.model_request import ModelRequest
from shoal.serving.gateway.v1.schema import Message, Name, check_variables
from shoal.serving.gateway.v1.sse import to_response
from shoal.serving.gateway.v1.tools import Tools, find_asked, to_variables

_TEXT = {"output_ids", "sequence_length", "carry"}, {"text_output"}  # inputs and outputs of the step for texts
_CARRY = '{"stops": [], "num_input_tokens": 0, "keeps_specials": true}'


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /tokenize``: a text, which gets the tokenizer's special tokens; or a chat, as its template is."""

    model: Name = field(default_factory=str)
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None
    return_token_strs: Literal[False] | None = None
    chat_template: None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Check what the types do not say."""
        check_variables(self.chat_template_kwargs)
        find_asked(self.tools, None, None)

    @property
    def inputs(self) -> dict[str, list[str]]:
        """The prompt as the pipeline's step takes it."""
        if (self.prompt is None) == (self.messages is None):
            raise ApiError("The request needs either prompt or messages.", "prompt")
        if self.add_special_tokens is (self.prompt is None):
            what = "A text gets the tokenizer's special tokens, and a chat those of its template."
            raise ApiError(f"{what} Leave add_special_tokens out.", "add_special_tokens", "unsupported_parameter")
        if self.messages is None and (self.chat_template_kwargs is not None or self.tools):
            raise ApiError("A text has no chat template. Send messages.", "tools" if self.tools else VARIABLES)
        if self.messages is None:
            return {"text_input": [self.prompt or ""]}
        variables = (self.chat_template_kwargs or {}) | to_variables(find_asked(self.tools, None, None))
        own = {VARIABLES: [json.dumps(variables)]} if variables or self.chat_template_kwargs is not None else {}
        return {"messages": [json.dumps([message.to_plain() for message in self.messages])], **own}


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /detokenize``."""

    model: Name = field(default_factory=str)
    tokens: Annotated[list[Annotated[int, Meta(ge=0, le=2**31 - 1)]], Meta(max_length=2**18)]


class Steps(NamedTuple):
    """Steps of a language model, empty if it has none, and the greatest number of tokens of prompt and answer."""

    prompt: str = ""
    text: str = ""
    context: int = 0


def find_steps(names: Iterable[str], configs: Mapping[str, ModelConfig]) -> Steps:
    """Return the steps of those models that turn prompts into token ids, and token ids into texts.

    Raises:
        ArtifactError: the model's configuration in the folder of its weights cannot be read.
    """
    served = [name for name in names if name in configs]  # and not hosted by another
    prompt = next((name for name in served if makes_token_ids(configs[name])), "")
    text = next((each for each in served if _makes_texts(configs[each])), "")
    if not prompt:
        return Steps()
    context, weights = Parameters(configs[prompt].spec).whole("context", 0, least=0), configs[prompt].weights
    if not context and weights:
        from shoal.kit.generation.weights import read_context

        context = read_context(Path(weights))
    return Steps(prompt, text, context)


def _makes_texts(config: ModelConfig) -> bool:
    return has_tensors(config, *_TEXT) and not config.spec.is_decoupled


async def count_tokens(messages: list[dict[str, str]], variables: Mapping[str, Any], step: ModelRequest) -> int:
    """Return the number of tokens of a chat with a template's variables; ``step`` asks the step for prompts."""
    own = {VARIABLES: [json.dumps(variables)]} if variables else {}
    answer = await step.infer({"messages": [json.dumps(messages)], **own})
    return int(answer["input_lengths"][0, 0])


async def answer_tokenize(asked: TokenizeRequest, step: ModelRequest, context: int) -> web.Response:
    """Answer with the token ids of a prompt; ``step`` asks the step for prompts."""
    answer = await step.infer(asked.inputs)
    count = int(answer["input_lengths"][0, 0])
    tokens = answer["input_ids"][0, :count].tolist()
    return to_response({"count": count, "max_model_len": context, "tokens": tokens, "token_strs": None})


async def answer_detokenize(asked: DetokenizeRequest, step: ModelRequest) -> web.Response:
    """Answer with the text of token ids, special tokens included; ``step`` asks the step for texts."""
    ids = np.array([[asked.tokens]], np.int32)
    lengths = np.array([[ids.size]], np.int32)
    answer = await step.infer({"output_ids": ids, "sequence_length": lengths, "carry": [_CARRY]})
    return to_response({"prompt": answer["text_output"][0, 0].decode()})
