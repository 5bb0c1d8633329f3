"""Prompts of language models: conversion of a text or a chat, with its settings, to the inputs of an engine."""

from __future__ import annotations

import json
import secrets
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from reprlib import repr as shorten
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.errors import ArtifactError, InputError
from shoal.kit.component.files import read_text, refusal
from shoal.kit.component.parameters import Parameters, fixed_by
from shoal.kit.component.spec import DTYPES, Array, Arrays
from shoal.kit.generation.chat_rendering import LLAMA2, ChatRenderer, Render
from shoal.kit.generation.chats import Message, llama2, read_messages
from shoal.kit.generation.completions import RETURNS
from shoal.kit.generation.contract import MAX_WORDS, MOST_PASSTHROUGH, as_python, naming_row, pack_words
from shoal.kit.generation.detokenizer import find_specials as find_special_ids
from shoal.kit.generation.guides import GUIDE, read_guide
from shoal.kit.generation.reasoning import find_opening
from shoal.kit.generation.sampling import NUMBERS, SETTINGS, VARIABLES, Sampling, read_variables
from shoal.kit.generation.templates import ChatTemplate
from shoal.kit.generation.tokenizer import TOKENIZER_CONFIG, find_specials, read_model_tokenizer, read_settings
from shoal.kit.generation.tool_forms import FORMS, Form
from shoal.kit.generation.weights import read_context, read_folder, read_vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_TOKENS = 256
MAX_TEXT_BYTES = 2**20
_SPARE, _PER_TOKEN = 64, 8  # tokens, and characters of a token, of the beginning of a text that is tried first
_OTHER_TEMPLATES = "additional_chat_templates"
_WORDS = tuple(row.name for row in SETTINGS if row.is_list)
_BIAS = "embedding_bias_words", "embedding_bias_weights"
LOGIT_BIAS, PROMPT_IDS = "logit_bias", "prompt_ids"  # inputs
_PROMPTS = "text_input", "messages", PROMPT_IDS  # inputs, of which a request has one
MOST_BIASED = 1024  # tokens
_LISTS = frozenset({*_WORDS, *_BIAS, PROMPT_IDS})
_FIX_FOLDER = "Let the parameter model name a folder with tokenizer.json, tokenizer_config.json and config.json."


# --- prompts -----------------------------------------------------------------------------------------------------


class Prompts:
    """Checks requests with texts or chats, and converts them to an engine's inputs. Thread-safe.

    ``template`` turns a chat into one text; None if the model takes no chats. ``context`` is the greatest number of
    tokens of a prompt and its answer together. ``max_tokens`` is the greatest number of new tokens for a request
    that does not set one; it is reduced to what fits the context. A request that sets a greater number than fits is
    refused. ``variables`` are values of the template's own variables, for requests that do not set them. ``form`` is
    the form of calls of tools, if it is not to be found in the template.

    Raises:
        InputError: the template does not read one of ``variables``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | Render | None,
        *,
        context: int,
        max_tokens: int = MAX_TOKENS,
        max_text_bytes: int = MAX_TEXT_BYTES,
        vocabulary: int | None = None,
        variables: Mapping[str, Any] | None = None,
        form: Form | None = None,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer, self._chats = tokenizer, ChatRenderer(template, variables, form)
        self._context, self._max_tokens, self._max_text_bytes = context, max_tokens, max_text_bytes
        self._vocabulary = vocabulary
        self._specials = frozenset(find_special_ids(tokenizer))
        byte = tokenizer.token_to_id("<0xE2>")  # the first of three
        self._contexts = [[], self._ids("x"), *([] if byte is None else [[byte]])]

    def encode(
        self,
        text_input: str | None = None,
        messages: Sequence[Message] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a text, or of a chat; ``variables`` are the chat template's own, by name.

        In a text, the tokenizer adds special tokens; in a chat, the template does. Some variables are not the
        template's: if ``continue_final_message`` is true, the answer continues the last message, which is the
        assistant's; and those in ``tools.ASKS``.

        Raises:
            InputError: the text is empty, the model takes no chats, the template cannot render this chat or does not
                read a variable, or the context has no room for the ids and one new token.
        """
        return self._encode(text_input, None if messages is None else self._render(messages, variables or {}))

    def _render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        text = self._chats.render(messages, variables)
        self._check_size(len(text.encode()), "The rendered chat")
        return text

    def _encode(self, text_input: str | None, chat: str | None) -> list[int]:
        self._check_length(text_input or chat or "")
        if chat is not None:
            ids = self._ids(chat)
        else:
            ids = list(self._tokenizer.encode(text_input).ids) if text_input else []
        if not ids:
            raise InputError("The prompt is empty.", "Send a text of at least one token.")
        if self._vocabulary is not None and max(ids) >= self._vocabulary:
            token = self._tokenizer.id_to_token(max(ids))
            raise InputError(f"The prompt has {shorten(token)}, which the model has no weights for.", "Leave it out.")
        if len(ids) >= self._context:
            raise self._refuse_length(len(ids))
        return ids

    def _read_ids(self, given: Sequence[int]) -> list[int]:
        """Return the token ids of a prompt that has no text."""
        if not given:
            raise InputError(f"{PROMPT_IDS} is empty.", "Send at least one token.")
        if len(given) >= self._context:
            raise self._refuse_length(len(given))
        return self._check_ids(PROMPT_IDS, [int(each) for each in given])

    def _check_ids(self, name: str, ids: list[int]) -> list[int]:
        most = self._tokenizer.get_vocab_size() if self._vocabulary is None else self._vocabulary
        if wrong := [token for token in ids if not 0 <= token < most]:
            what = f"{name} has the token {wrong[0]}, and the model's vocabulary has {most} tokens."
            raise InputError(what, f"Send ids from 0 to {most - 1}.")
        return ids

    def _check_length(self, text: str) -> None:
        """Refuse a text that cannot fit the context by its beginning: the whole of it would keep all others waiting.

        The beginning is cut anywhere, so its last tokens may differ from the whole text's: it must have a quarter more
        tokens than the context. A tokenizer may write any number of characters as one token, so there is no length at
        which a text is too long.
        """
        most, end = self._context * 5 // 4 + _SPARE, _PER_TOKEN * (self._context + _SPARE)
        while end < len(text):
            if (count := len(self._ids(text[:end]))) > most:
                raise self._refuse_length(f"more than {count - _SPARE}")
            end *= 4

    def _refuse_length(self, count: int | str) -> InputError:
        return InputError(
            f"The prompt has {count} tokens; the model's context is {self._context}, with the answer.",
            f"Shorten the prompt to {self._context - 1} tokens or fewer: it is never cut.",
        )

    def _check_size(self, size: int, name: str) -> None:
        if size > self._max_text_bytes:
            raise InputError(
                f"{name} has {size} bytes; at most {self._max_text_bytes} are allowed.",
                "Shorten it, or raise the parameter max_text_bytes of the prompt model.",
            )

    def check(self, names: Container[str]) -> None:
        """Check that a request with inputs of these ``names`` has a text, a chat or token ids, and one of them alone.

        Raises:
            InputError: the request has none, or several.
        """
        given = [name for name in _PROMPTS if name in names]
        if len(given) != 1:
            what = " and ".join(given) or f"none of {', '.join(_PROMPTS)}"
            raise InputError(f"The request has {what}.", "Send exactly one of them.")
        if VARIABLES in names and "messages" not in names:
            raise InputError(f"The request has {VARIABLES}, and {given[0]}.", "Send messages, or leave it out.")

    def request(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return an engine's inputs for one request by name: lists, numbers and arrays, as ``stack`` takes them.

        ``row`` has the inputs of the component ``prompt`` by name: numbers, ``bytes``, and lists of ``bytes`` for word
        lists. Inputs that are left out get their defaults.

        Raises:
            InputError: a value cannot be used.
        """
        self.check(row)
        variables = self._own_variables(row)
        messages = self._messages(row)
        chat = None if messages is None else self._render(messages, variables)
        ids = self._read_ids(row[PROMPT_IDS]) if PROMPT_IDS in row else self._encode(self._text(row), chat)
        stops, bad = ([word for word in self._words(row, name) if word] for name in _WORDS)
        max_new = self._max_new(row, len(ids))
        sampling = _sampling(row).check(max_new)
        rest: dict[str, Any] = {"num_input_tokens": len(ids), "min_tokens": sampling.min_tokens}
        if row.get("return_num_output_tokens"):
            rest["counts_each"] = True
        asked = {"logprobs"} if sampling.top_logprobs else set()
        if returns := [name for name in RETURNS if name in asked or row.get(f"return_{name}")]:
            rest["returns"] = returns
        final = read_guide(row.get(GUIDE, b""))
        guide, form = self._chats.write_guide(variables, final, self._tokenizer.token_to_id)
        if form is not None and any(mark in self._specials for mark in form.marks):  # they are read in the text
            rest["keeps_specials"] = True
        if sampling.echo:
            rest["num_echoed"] = len(ids)
            if row.get("max_tokens") == 0:
                rest["echoes_alone"] = True
        elif begin := find_opening(chat or ""):
            rest["begin"] = begin
        text = json.dumps({"stops": stops, **rest}, ensure_ascii=False).encode()
        if len(text) > MOST_PASSTHROUGH:
            most = f"at most {MOST_PASSTHROUGH} are allowed"
            raise InputError(f"stop_words has {len(text)} bytes as JSON; {most}.", "Shorten them.")
        return {
            "input_ids": ids,
            "input_lengths": len(ids),
            "request_output_len": max_new,
            **{number.tensor: getattr(sampling, number.name) for number in NUMBERS},
            "streaming": row.get("stream", True),
            "return_log_probs": bool(returns),
            "stop_words_list": pack_words([found for stop in stops if (found := self._spell_stop(stop))]),
            "bad_words_list": pack_words([self._spell_bad(word) for word in bad]),
            "embedding_bias": self._bias(row),
            "carry": text,
            GUIDE: guide or bytes(row.get(GUIDE, b"")),
        }

    def requests(self, inputs: Arrays) -> dict[str, Array]:
        """Return an engine's inputs for the rows of a request, ``[rows, *dims]``; see ``request``, ``rows``, ``stack``.

        Raises:
            InputError: a value cannot be used; the message has the row, if there are several.
        """
        if not (count := len(next(iter(inputs.values())))):
            raise InputError("The request has no rows.", "Send one prompt or more.")
        found = []
        for number, row in enumerate(rows(inputs)):
            with naming_row(number, count):
                found.append(self.request(row))
        return stack(found)

    def _text(self, row: Mapping[str, Any]) -> str | None:
        return self.decode(row["text_input"], "text_input") if "text_input" in row else None

    def _messages(self, row: Mapping[str, Any]) -> list[Message] | None:
        return read_messages(self.decode(row["messages"], "messages")) if "messages" in row else None

    def _own_variables(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return read_variables(self.decode(row[VARIABLES], VARIABLES)) if VARIABLES in row else {}

    def decode(self, value: bytes, name: str) -> str:
        """Decode the text ``value``, of the input ``name``, from UTF-8.

        Raises:
            InputError: the text is too long, or not UTF-8.
        """
        self._check_size(len(value), name)
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise InputError(
                f"{name} is not valid UTF-8: byte 0x{value[error.start]:02x} at position {error.start}.",
                "Encode the text as UTF-8.",
            ) from None

    def _words(self, row: Mapping[str, Any], name: str) -> list[str]:
        """Return the texts of a list; clients of TensorRT-LLM send an empty one for none."""
        words = [self.decode(word, f"{name}[{index}]") for index, word in enumerate(row.get(name, ()))]
        if len(words) > MAX_WORDS:
            raise InputError(f"{name} has {len(words)} entries; at most {MAX_WORDS} are allowed.", "Shorten the list.")
        if (size := sum(map(len, words))) > MOST_PASSTHROUGH:  # each is tokenised
            raise InputError(
                f"{name} has {size} characters; at most {MOST_PASSTHROUGH} are allowed.", "Shorten the words."
            )
        return words

    def _bias(self, row: Mapping[str, Any]) -> Array:
        """Return what is added to the logits of tokens 0, 1, ...: weights by token id, and of each token of a word."""
        words, weights = (row.get(name, ()) for name in _BIAS)
        if len(words) != len(weights):
            counts = f"{_BIAS[0]} has {len(words)} entries, and {_BIAS[1]} has {len(weights)}."
            raise InputError(counts, "Send a weight for each word.")
        found = [
            (token, weight)
            for text, weight in zip(self._words(row, _BIAS[0]), weights, strict=True)
            for token in self._ids(text)
        ]
        found += self._read_logit_bias(row)
        bias = np.zeros(max((token + 1 for token, _ in found), default=0), np.float32)
        for token, weight in found:
            bias[token] += weight
        return bias

    def _read_logit_bias(self, row: Mapping[str, Any]) -> list[tuple[int, float]]:
        text = row.get(LOGIT_BIAS, b"")
        if len(text) > 2**16:
            raise InputError(f"{LOGIT_BIAS} has {len(text)} bytes; at most {2**16} are read.", "Shorten it.")
        try:
            given = [(int(token), float(value)) for token, value in json.loads(text or "{}").items()]
        except (ValueError, TypeError, AttributeError, RecursionError):
            fix = 'Send an object of numbers by token id, such as {"42": -100}.'
            raise InputError(f"{LOGIT_BIAS} is {shorten(text)}.", fix) from None
        if len(given) > MOST_BIASED:
            raise InputError(f"{LOGIT_BIAS} has {len(given)} tokens; at most {MOST_BIASED} are read.", "Send fewer.")
        self._check_ids(LOGIT_BIAS, [token for token, _ in given])
        for token, value in given:
            if not -100 <= value <= 100:  # as in OpenAI's API
                raise InputError(f"{LOGIT_BIAS} is {value} for the token {token}.", "Send numbers from -100 to 100.")
        return given

    def _max_new(self, row: Mapping[str, Any], num_ids: int) -> int:
        """Return the greatest number of new tokens of a request whose prompt has ``num_ids`` tokens."""
        room = self._context - num_ids
        wanted: int | None = row.get("max_tokens")
        if wanted is None:
            return min(self._max_tokens, room)
        if wanted == 0 and row.get("echo"):
            return 1  # which is not sent
        if wanted < 1:
            raise InputError(f"max_tokens is {wanted}.", "Set it to 1 or more, or leave it out.")
        if wanted > room:
            raise InputError(
                f"The prompt has {num_ids} tokens and max_tokens is {wanted}: {num_ids + wanted} together; the model's"
                f" context is {self._context}.",
                f"Set max_tokens to {room} or less, or shorten the prompt.",
            )
        return wanted

    def _spell_stop(self, stop: str) -> list[int]:
        """Return the ids that write a stop word wherever they occur; empty if they sometimes write other text.

        Some tokenizers add a space, except to the first token, or write no token's bytes next to those of an incomplete
        character. The engine ends an answer at these ids. The component ``completion`` ends it at the stop word itself,
        even if other ids write this word.
        """
        ids = self._ids(stop)
        is_exact = all(self._write([*before, *ids]) == self._write(before) + stop for before in self._contexts)
        return ids if is_exact else []

    def _spell_bad(self, word: str) -> list[int]:
        ids = self._ids(word)
        if self._write(ids) != word:
            raise InputError(f"bad_words has {shorten(word)}, which the model's tokens cannot write.", "Leave it out.")
        return ids

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _write(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    @classmethod
    def read(cls, parameters: Parameters) -> Prompts:
        """Read the parameters, and the tokenizer, the configuration and the chat template of the folder ``model``.

        Raises:
            ArtifactError: a parameter or a file cannot be used.
            SetupError: the chat template cannot be rendered on this machine.
        """
        template = parameters.text("template")
        try:
            variables = read_variables(parameters.text(VARIABLES) or "{}")
        except InputError:
            raise parameters.refusal(VARIABLES, "expected a JSON object", '{"enable_thinking": false}') from None
        form = parameters.text("tool_form")
        if form and form not in FORMS:
            raise parameters.refusal("tool_form", f"expected one of {', '.join(FORMS)}, or nothing", "hermes")
        context, max_tokens = parameters.whole("context", 0, least=0), parameters.whole("max_tokens", MAX_TOKENS)
        max_text_bytes, folder = parameters.whole("max_text_bytes", MAX_TEXT_BYTES), read_folder(parameters)
        with fixed_by(_FIX_FOLDER):
            context = context or read_context(folder)
            tokenizer, vocabulary = read_model_tokenizer(folder), read_vocabulary(folder)
            templates, place = _read_templates(folder)
        if template and template not in (LLAMA2, *templates):
            known = ", ".join([LLAMA2, *sorted(templates)])
            raise parameters.refusal("template", f"expected one of {known}, or nothing for the default one", LLAMA2)
        source = templates.get(template or "default")
        if templates and not template and source is None:
            names = ", ".join(sorted(templates))
            raise parameters.refusal("template", f"there is no default one, expected one of {names}", min(templates))
        with fixed_by(_FIX_FOLDER):  # last, because it starts a process
            chosen = llama2 if template == LLAMA2 else _compile_template(folder, source, place)
        try:
            sizes = {"context": context, "max_tokens": max_tokens, "max_text_bytes": max_text_bytes}
            return cls(tokenizer, chosen, **sizes, vocabulary=vocabulary, variables=variables, form=FORMS.get(form))
        except InputError as error:
            if isinstance(chosen, ChatTemplate):
                chosen.close()
            raise ArtifactError(error.what, error.fix) from error

    def close(self) -> None:
        """End the process that renders the chat template, if there is one."""
        self._chats.close()


def _sampling(row: Mapping[str, Any]) -> Sampling:
    """Return the sampling settings, with a seed: greedy, unless there is a temperature, ``top_k`` or ``top_p``."""
    given = {number.name: row[number.name] for number in NUMBERS if number.name in row}
    is_greedy = not given.keys() & {"temperature", "top_k", "top_p"}
    return Sampling(**{"top_k": 1 if is_greedy else 0, "seed": secrets.randbits(64), **given})


# --- a model's folder --------------------------------------------------------------------------------------------


def _read_templates(folder: Path) -> tuple[dict[str, str], Path]:
    """Return the chat templates by name, and the file that has them, as transformers 5.23 finds them.

    ``chat_template.jinja`` is the default one, and ``additional_chat_templates`` has others; without these files, they
    are in ``tokenizer_config.json``: one, or a list of several with names.
    """
    path, file, others = folder / TOKENIZER_CONFIG, folder / "chat_template.jinja", folder / _OTHER_TEMPLATES
    found = {"default": read_text(file, "chat template")} if file.is_file() else {}
    found |= {each.stem: read_text(each, "chat template") for each in sorted(others.glob("*.jinja"))}
    if found:
        return found, file if file.is_file() else others
    source = read_settings(folder).get("chat_template")
    try:
        entries = source if isinstance(source, list) else [{"name": "default", "template": source}] if source else []
        return {str(entry["name"]): str(entry["template"]) for entry in entries}, path
    except (LookupError, TypeError) as error:
        raise refusal(path, "tokenizer's configuration", f"its template has another form: {error}") from error


def _compile_template(folder: Path, source: str | None, place: Path) -> ChatTemplate | None:
    """Return the chat template with the model's special tokens; None without a ``source``, which ``place`` has."""
    try:
        tokens = find_specials(read_settings(folder), folder / TOKENIZER_CONFIG)
        return ChatTemplate(source, tokens) if source else None
    except InputError as error:
        raise ArtifactError(f"{place}: {error.what}") from error


# --- batches -----------------------------------------------------------------------------------------------------

_DTYPES = {
    **dict.fromkeys(("input_lengths", "request_output_len"), np.int32),
    **dict.fromkeys(("streaming", "return_log_probs"), np.bool_),
    **dict.fromkeys(("carry", GUIDE), np.object_),
    **{number.tensor: DTYPES[f"TYPE_{number.dtype}"] for number in NUMBERS},
}


def rows(inputs: Arrays) -> Iterator[dict[str, Any]]:
    """Yield each row of inputs, ``[rows, 1]`` or for word lists ``[rows, words]``, as Python values by name."""
    for index in range(next(array.shape[0] for array in inputs.values())):
        values = {name: [*array[index]] if name in _LISTS else array[index, 0] for name, array in inputs.items()}
        yield {name: as_python(value) for name, value in values.items()}


def stack(requests: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
    """Stack the results of ``Prompts.request`` to arrays ``[rows, *dims]``, as wide as the widest row.

    Token ids and biases are padded with 0, the ends of words in a word list with -1.
    """
    arrays: dict[str, Array] = {}
    for name, kind in (("input_ids", np.int32), ("embedding_bias", np.float32)):
        arrays[name] = np.zeros((len(requests), max(len(request[name]) for request in requests)), kind)
        for row, request in zip(arrays[name], requests, strict=True):
            row[: len(request[name])] = request[name]
    for name, dtype in _DTYPES.items():
        arrays[name] = np.array([[request[name]] for request in requests], dtype)
    for name in ("stop_words_list", "bad_words_list"):
        arrays[name] = stack_words([request[name] for request in requests])
    return arrays


def stack_words(lists: Sequence[Array]) -> Array:
    """Stack word lists, each ``[2, n]``, to ``[rows, 2, widest]``; ids are padded with 0, ends with -1."""
    stacked = np.zeros((len(lists), 2, max(1, *(each.shape[1] for each in lists))), np.int32)
    stacked[:, 1] = -1
    for row, each in zip(stacked, lists, strict=True):
        row[:, : each.shape[1]] = each
    return stacked
