"""Sampling settings of one request, the same for every engine: one table, ``SETTINGS``, from which the rest is derived.

A number that engines apply is a field of ``Sampling``. Checks, the tensors of requests and the command line read the
table. What cannot read it (``config.pbtxt``, the types of the client's settings, pages) repeats it, and
``python docs/settings.py`` rewrites these places. An engine refuses the settings that it does not apply.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container
from dataclasses import dataclass, field, fields
from reprlib import repr as shorten
from typing import Any

from shoal.errors import InputError

COLDEST = 1e-3  # least temperature above 0: logits divided by less can exceed FP32
VARIABLES = "chat_template_kwargs"  # input and parameter: transformers' and vLLM's name of a template's own variables
CONTINUES = "continue_final_message"  # one of them, which is not the template's own
_FIX_VARIABLES = 'For example: {"enable_thinking": false}'
MOST_TOP = 20  # as in OpenAI's API, and vLLM's default
_MOST_SEED = 2**64 - 1


@dataclass(frozen=True)
class Setting:
    """One row of the table: an input of ``llm``, called ``name``, and its form as the input ``tensor`` of engines.

    ``dtype`` is Triton's, without ``TYPE_``; those of dtype STRING are texts, all others one number or truth value.
    ``allowed`` says in words what ``is_valid`` checks; it is None if the component `prompt` has a check of its own.
    ``openai`` and ``vllm`` are the names there, empty if there is no such setting. The value is a list of texts if
    ``is_list``.
    """

    name: str
    dtype: str
    allowed: str
    says: str
    default: Any
    tensor: str
    openai: str = ""
    vllm: str = ""
    is_valid: Callable[[Any], bool] | None = None
    is_list: bool = False


def setting(default: Any, dtype: str, is_valid: Callable[[Any], bool], allowed: str, says: str, **names: str) -> Any:
    """Return a field of ``Sampling``, with the rest of its row; ``tensor`` is the field's name unless given."""
    return field(
        default=default, metadata={"dtype": dtype, "is_valid": is_valid, "allowed": allowed, "says": says, **names}
    )


def _is_penalty(value: float) -> bool:
    return -2 <= value <= 2


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of one request; the defaults draw from the model's own distribution.

    With temperature 0 or ``top_k`` 1, decoding is greedy; ``temperature``, ``top_k`` and ``top_p`` are then ignored and
    not refused, because many clients always send all settings. The penalties are applied in any case, in this order:
    ``repetition_penalty`` divides positive logits, and multiplies negative ones, of tokens in the prompt or the answer;
    ``frequency_penalty``, times a token's number in the answer, and ``presence_penalty`` are subtracted from the logits
    of tokens in the answer. The random numbers depend on ``seed`` alone; without one, each request has different ones.
    In FP32, the same request with the same seed gets the same tokens again; in half precision it does if it is computed
    alone, because rounding depends on the rest of a batch. ``top_logprobs`` and ``echo`` change no token.
    """

    temperature: float = setting(
        1.0, "FP32", lambda value: value == 0 or COLDEST <= value < math.inf, f"0 or {COLDEST} or more",
        "Randomness; 0: always the most probable token.", openai="temperature", vllm="temperature",
    )  # fmt: skip
    top_k: int = setting(
        0, "INT32", lambda value: value >= 0, "0 (all tokens) or more",
        "Draw from this many most probable tokens; 1: always the most probable one.",
        tensor="runtime_top_k", vllm="top_k",
    )  # fmt: skip
    top_p: float = setting(
        1.0, "FP32", lambda value: 0 < value <= 1, "more than 0, and at most 1",
        "Draw from the most probable tokens that together have this probability.",
        tensor="runtime_top_p", openai="top_p", vllm="top_p",
    )  # fmt: skip
    repetition_penalty: float = setting(
        1.0, "FP32", lambda value: 0 < value < math.inf, "more than 0, and finite",
        "Above 1: repeat less of the prompt and the answer.", vllm="repetition_penalty",
    )  # fmt: skip
    seed: int | None = setting(
        None, "UINT64", lambda value: value is None or 0 <= value <= _MOST_SEED, f"from 0 to {_MOST_SEED}",
        "In FP32, the same seed gives the same text.", openai="seed", vllm="seed",
    )  # fmt: skip
    min_tokens: int = setting(
        0, "INT32", lambda value: value >= 0, "from 0 to max_tokens",
        "Before there are as many new tokens, neither the end token nor a stop word ends the answer.",
        vllm="min_tokens",
    )  # fmt: skip
    frequency_penalty: float = setting(
        0.0, "FP32", _is_penalty, "from -2 to 2", "Above 0: use tokens less, the more often the answer has them.",
        openai="frequency_penalty", vllm="frequency_penalty",
    )  # fmt: skip
    presence_penalty: float = setting(
        0.0, "FP32", _is_penalty, "from -2 to 2", "Above 0: use tokens less that the answer has.",
        openai="presence_penalty", vllm="presence_penalty",
    )  # fmt: skip
    top_logprobs: int = setting(
        0, "INT32", lambda value: 0 <= value <= MOST_TOP, f"from 0 to {MOST_TOP}, and to the vocabulary's size",
        "Also return the log probabilities of this many most probable tokens at each place.",
        openai="top_logprobs", vllm="logprobs",
    )  # fmt: skip
    echo: bool = setting(
        False, "BOOL", lambda value: value in (False, True), "true or false",
        "The answer begins with the prompt; its tokens have log probabilities, if those are asked for.",
        openai="echo",
    )  # fmt: skip

    @property
    def is_greedy(self) -> bool:
        """Whether the token with the greatest logit is always taken."""
        return self.temperature == 0 or self.top_k == 1

    def check(self, max_tokens: int | None = None, *, by_tensor: bool = False) -> Sampling:
        """Check the settings, and return them.

        ``max_tokens`` is the greatest number of new tokens, if it is known. With ``by_tensor``, errors have the names
        of the engine's tensors.

        Raises:
            InputError: a setting is out of range; the message has its name and its value.
        """
        names = {row.name: row.tensor if by_tensor else row.name for row in SETTINGS}
        for row in NUMBERS:
            value = getattr(self, row.name)
            if row.is_valid and not row.is_valid(value):  # NaN is not, either
                raise InputError(f"{names[row.name]} is {value}.", f"Send {row.allowed}.")
        if max_tokens is not None and self.min_tokens > max_tokens:
            raise InputError(
                f"{names['min_tokens']} is {self.min_tokens}, and {names['max_tokens']} is {max_tokens}.",
                "Send a min_tokens that is not greater.",
            )
        return self

    def check_applied(self, applied: Container[str]) -> None:
        """Check that an engine that applies the settings ``applied`` applies all settings that are not the default.

        Raises:
            InputError: the engine does not apply a setting; the message has the engine's name of the setting.
        """
        for row in NUMBERS:
            value = getattr(self, row.name)
            if value != row.default and row.name not in applied:
                raise InputError(
                    f"{row.tensor} is {value}, and this model's engine does not apply it.", "Leave it out."
                )


NUMBERS = tuple(
    Setting(**{"name": each.name, "default": each.default, "tensor": each.name, **each.metadata})
    for each in fields(Sampling)
)
_MAX_TOKENS = Setting(
    "max_tokens", "INT32", "1 or more; prompt and answer together fit the model's context",
    "Most new tokens.", "256, or what fits", "request_output_len", "max_completion_tokens", "max_tokens",
)  # fmt: skip
_WORDS = (
    Setting(
        "stop_words", "STRING", "at most 64, 4,096 bytes as JSON; empty ones do not count",
        "Texts that end the answer, and are not a part of it.", "none", "stop_words_list", "stop", "stop",
        is_list=True,
    ),
    Setting(
        "bad_words", "STRING", "at most 64; the model's tokens can write them; empty ones do not count",
        "Texts that do not occur in the answer.", "none", "bad_words_list", "", "bad_words",
        is_list=True,
    ),
)  # fmt: skip
_GUIDE = Setting(
    "guide", "STRING", "an object with one of `json`, `json_object`, `regex`, `choice`, `grammar`; 524,288 bytes",
    "What the answer follows, as JSON.", "none", "guide", "response_format", "structured_outputs",
)  # fmt: skip
SETTINGS = (_MAX_TOKENS, *NUMBERS, *_WORDS, _GUIDE)


def read_variables(text: str) -> dict[str, Any]:
    """Read the variables of a chat template: a JSON object.

    Raises:
        InputError: ``text`` is not a JSON object.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{VARIABLES} is not JSON ({error}): {shorten(text)}.", _FIX_VARIABLES) from None
    if not isinstance(found, dict):
        raise InputError(f"{VARIABLES} is {shorten(found)}, expected an object.", _FIX_VARIABLES)
    return found
