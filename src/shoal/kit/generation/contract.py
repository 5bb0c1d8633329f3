"""Tensors of engines (language models that continue token ids): reading requests, and packing answers.

A request has one row of the inputs ``input_ids`` INT32 [-1], ``input_lengths`` and ``request_output_len`` INT32 [1].
Optional are ``end_id`` and ``pad_id`` INT32 [1], the settings in ``sampling.NUMBERS`` [1], ``guide`` STRING [1] (what
the answer follows: ``guides.read_guide``), ``stop_words_list`` and
``bad_words_list`` INT32 [2, -1], ``embedding_bias`` FP32 [-1] (what is added to the logits of tokens 0, 1, ..., before
penalties), ``carry`` STRING [1], ``streaming`` BOOL [1]. The engine returns ``carry`` with its first answer.
``answers.pack_answer`` describes the outputs.

The inputs in ``LOG_PROBS`` ask for log probabilities, which ``answers.pack_log_probs`` describes. They are those of the
model's own distribution (log softmax of its logits), before penalties, temperature, ``top_k`` and ``top_p``, as in
vLLM.

Models that other clients ask may declare more inputs of FasterTransformer and TensorRT-LLM: those in ``ALIASES`` are
settings by another name, those in ``NEUTRAL`` are taken at the values that change nothing, and a request with one of
those in ``REFUSED`` gets the reason. Engines do not declare the tensors in ``FOREIGN``, which are other models'.

Word lists are in TensorRT-LLM's layout, INT32 ``[2, n]``. Row 0 has the ids of all words, one word after the other. Row
1 has the end of each word in row 0, padded with -1. The words (5, 6) and (7,) are ``[[5, 6, 7], [2, 3, -1]]``.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from shoal.errors import InputError
from shoal.kit.component.spec import Arrays
from shoal.kit.generation.guides import GUIDE, Follower, Guide, read_guide
from shoal.kit.generation.sampling import MOST_TOP, NUMBERS, Sampling

MOST_PASSTHROUGH = 4096  # bytes
MAX_WORDS = 64  # of a word list

ALIASES = {"random_seed": "seed", "min_length": "min_tokens"}  # TensorRT-LLM's names, and ours
_NO_BEAMS, _NO_DRAFT = "answers have one beam", "draft tokens are not taken"
_NO_DECAY, _NO_METRICS = "top_p is the same for all tokens", "measurements are on the server's metrics"
_NO_LOGITS = "logits are not returned"
NEUTRAL: dict[str, tuple[tuple[float, ...], str]] = {  # values that change nothing, and why others are refused
    "beam_width": ((1,), _NO_BEAMS),
    "num_return_sequences": ((1,), _NO_BEAMS),
    "beam_search_diversity_rate": ((0,), _NO_BEAMS),
    "len_penalty": ((0, 1), _NO_BEAMS),
    "early_stopping": ((0, 1), _NO_BEAMS),
    "num_draft_tokens": ((0,), _NO_DRAFT),
    "return_context_logits": ((0,), _NO_LOGITS),
    "return_generation_logits": ((0,), _NO_LOGITS),
    "return_perf_metrics": ((0,), _NO_METRICS),
    "is_return_context_embeddings": ((0,), _NO_LOGITS),
    "top_p_decay": ((1,), _NO_DECAY),
    "runtime_top_p_decay": ((1,), _NO_DECAY),
}
# Change nothing: the first needs an empty prompt, the others a decay of top_p.
_IDLE = "start_id top_p_min top_p_reset_ids runtime_top_p_min runtime_top_p_reset_ids".split()


def _by_name(reasons: dict[str, str]) -> dict[str, str]:
    return {name: why for why, names in reasons.items() for name in names.split()}


_NO_ENCODER = "models are decoders, without encoders"
# Inputs that a model may declare, and why a request may not have them.
_WHY_REFUSED = {
    _NO_DRAFT: """draft_input_ids draft_logits draft_acceptance_threshold
        lookahead_window_size lookahead_ngram_size lookahead_verification_set_size""",
    "prompts are token ids, without embeddings": """prompt_learning_task_name_ids request_prompt_embedding
        request_prompt_lengths request_prompt_type prompt_embedding_table prompt_table_extra_ids prompt_vocab_size
        mrope_rotary_cos_sin mrope_position_deltas""",
    _NO_ENCODER: """encoder_input_features encoder_output_lengths decoder_input_ids decoder_input_lengths
        cross_attention_mask skip_cross_attn_blocks""",
    "the weights are those of the model's folder, without LoRA": "lora_task_id lora_weights lora_config",
    "no cache is kept for later requests": """session_len memory_len context_phase_params
        retention_token_range_starts retention_token_range_ends retention_token_range_priorities
        retention_token_range_durations_ms retention_decode_priority retention_decode_duration_ms""",
    "answers follow no grammar": "guided_decoding_guide_type guided_decoding_guide",
}
REFUSED = _by_name(_WHY_REFUSED)
# Inputs and outputs of other models, and why engines do not declare them.
_WHY_FOREIGN = {
    "engines take and return token ids; llm and llm_bls have texts": """text_input max_tokens bad_words stop_words top_k
        top_p length_penalty stream sampling_parameters embedding_bias_words embedding_bias_weights
        prompt_table_extra_id image image_input image_bytes_input image_url_input video_bytes_input embedding_request
        use_draft_logits return_finish_reason return_num_input_tokens return_num_output_tokens
        return_cumulative_logprob return_logprobs
        text_output num_input_tokens num_output_tokens cumulative_logprob logprobs QUERY DECODER_QUERY IMAGE_BYTES
        IMAGE_URL VIDEO_BYTES REQUEST_OUTPUT_LEN BAD_WORDS_DICT STOP_WORDS_DICT EMBEDDING_BIAS_WORDS
        EMBEDDING_BIAS_WEIGHTS END_ID PAD_ID PROMPT_TABLE_EXTRA_ID TOKENS_BATCH SEQUENCE_LENGTH OUTPUT INPUT_ID
        REQUEST_INPUT_LEN DECODER_INPUT_ID REQUEST_DECODER_INPUT_LEN BAD_WORDS_IDS STOP_WORDS_IDS EMBEDDING_BIAS
        OUT_END_ID OUT_PAD_ID OUT_PROMPT_TABLE_EXTRA_IDS PIXEL_VALUES ASPECT_RATIO_IDS ASPECT_RATIO_MASK
        CROSS_ATTENTION_MASK IMAGE_SIZES IS_VIDEO_INPUT ATTENTION_MASK IMAGE_GRID_THW VISION_INPUT_ID""",
    _NO_ENCODER: """decoder_text_input input_hidden_state sequence_length sequence_lengths max_output_len ia3_tasks
        is_return_attentions output_hidden_state output_attentions""",
    _NO_LOGITS: "context_logits generation_logits context_embeddings",
    _NO_METRICS: """kv_cache_alloc_new_blocks kv_cache_reused_blocks kv_cache_alloc_total_blocks arrival_time_ns
        first_scheduled_time_ns first_token_time_ns last_token_time_ns acceptance_rate total_accepted_draft_tokens
        total_draft_tokens""",
    "sequence_length says where an answer ends": "response_input_lengths",
    "no cache leaves an engine": "context_phase_params",
    "each answer is one beam of the only row, or of all rows in their order": "sequence_index",
}
FOREIGN = _by_name(_WHY_FOREIGN)
_CHOSEN, _TOP = ("output_log_probs", "cum_log_probs"), ("top_log_probs", "top_token_ids")
LOG_PROBS = {"return_log_probs": _CHOSEN, "is_return_log_probs": _CHOSEN, "top_logprobs": _TOP}  # inputs, and outputs
LOG_PROB_OUTPUTS = frozenset({*_CHOSEN, *_TOP})
PROMPT_PLACES = "log probabilities of prompts"  # what engines apply, beside settings
_OWN = """input_ids input_lengths request_output_len end_id pad_id stop_words_list bad_words_list embedding_bias carry
    streaming stop exclude_input_in_output guide"""
# Inputs that a model may declare.
INPUTS = frozenset(_OWN.split()).union(_IDLE, ALIASES, NEUTRAL, REFUSED, LOG_PROBS, (row.tensor for row in NUMBERS))


class LogProbs(NamedTuple):
    """Log probabilities at one place: of the token there, and of the most probable ones in order.

    Those of a prompt's first token, which follows nothing, are not numbers, and its most probable tokens are -1.
    """

    chosen: float
    top_ids: Sequence[int] = ()
    top: Sequence[float] = ()

    @classmethod
    def make_first(cls, number: int) -> LogProbs:
        """Return those of a prompt's first token, with ``number`` most probable ones."""
        return cls(math.nan, [-1] * number, [math.nan] * number)


@dataclass(frozen=True)
class Limits:
    """Limits of an engine.

    Token ids are below ``vocabulary``. A prompt and its new tokens are together at most ``context`` tokens. ``slots``
    requests are computed at the same time. Each of ``end_ids`` ends the answer to a request without ``end_id``.
    Log probabilities are given of at most ``top_logprobs`` tokens at each place.
    """

    vocabulary: int
    context: int
    slots: int
    end_ids: tuple[int, ...] = ()
    top_logprobs: int = MOST_TOP


@dataclass(frozen=True)
class TokenRequest:
    """One checked request: the prompt's token ids, and how to continue them.

    ``stops`` and ``bans`` are sequences of token ids. A stop sequence ends the answer, unless it is complete within the
    first ``min_tokens`` tokens; a banned sequence does not occur in the answer. ``returns`` are the outputs of log
    probabilities that the answers have. ``bias`` has tokens, and what is added to their logits. Engines that choose
    tokens with ``Sampler`` have, beside the ``guide``, its ``follower``. ``prompt_places`` are the log probabilities
    of the prompt's tokens, if the answers begin with them.
    """

    ids: tuple[int, ...]
    max_tokens: int
    end_ids: tuple[int, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    stops: tuple[tuple[int, ...], ...] = ()
    bans: tuple[tuple[int, ...], ...] = ()
    passthrough: str = ""
    is_streaming: bool = True
    dtype: Any = np.int32  # of the ids, in requests and answers
    returns: tuple[str, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    guide: Guide | None = None
    follower: Follower | None = None
    prompt_places: tuple[LogProbs, ...] = ()

    @property
    def is_scored(self) -> bool:
        """Whether the request asks for log probabilities of the prompt."""
        return self.sampling.echo and bool(self.returns)

    def check_applied(self, applied: Container[str]) -> None:
        """Check that an engine that applies the settings ``applied`` applies all that the request has.

        Raises:
            InputError: the engine does not apply a setting; the message has the engine's name of the setting.
        """
        self.sampling.check_applied(applied)
        words = (
            ("bad_words", "bad_words_list", self.bans),
            ("embedding_bias", "embedding_bias", self.bias),
            (GUIDE, GUIDE, self.guide is not None and not self.guide.is_optional),
            (PROMPT_PLACES, "log probabilities with echo", self.is_scored),
        )
        for name, tensor, given in words:
            if given and name not in applied:
                raise InputError(f"The request has {tensor}; this model's engine does not apply it.", "Leave it out.")

    @classmethod
    def read(cls, inputs: Arrays, limits: Limits, outputs: Container[str] = ()) -> TokenRequest:
        """Read a request's tensors, each ``[1, *dims]``.

        Only the first ``input_lengths`` ids are used, because rows of a joined batch are padded. With an ``end_id`` of
        -1, no token ends the answer. ``pad_id``, the filling of answers that are shorter than their neighbours, may
        have any value, since an answer here has only its own tokens. ``outputs`` are those that the model declares.

        Raises:
            InputError: a value is out of range, or the model does not declare the outputs of the log probabilities that
                are asked for; the message has the value and the limit.
        """
        ids = _prompt(inputs)
        max_tokens = int(_single(inputs, "request_output_len", 0))
        if max_tokens < 1:
            raise InputError(f"request_output_len is {max_tokens}.", "Ask for 1 new token or more.")
        if len(ids) + max_tokens > limits.context:
            room = limits.context - len(ids)
            raise InputError(
                f"The prompt has {len(ids)} tokens and request_output_len is {max_tokens}: {len(ids) + max_tokens} "
                f"together, and the context has {limits.context}.",
                f"Ask for at most {room} new tokens." if room > 0 else "Shorten the prompt.",
            )
        _check_ids("input_ids has", ids, limits.vocabulary)
        if refused := sorted(inputs.keys() & REFUSED.keys()):
            raise InputError(f"The request has {refused[0]}, and {REFUSED[refused[0]]}.", "Leave it out.")
        for name, (neutral, why) in NEUTRAL.items():
            if (value := _single(inputs, name, neutral[0])) not in neutral:
                raise InputError(f"{name} is {value}, and {why}.", f"Send {' or '.join(map(str, neutral))}.")
        return cls(
            ids=ids,
            max_tokens=max_tokens,
            end_ids=_end_ids(inputs, limits),
            sampling=_sampling(inputs).check(max_tokens, by_tensor=True),
            stops=_words(inputs, "stop_words_list", limits.vocabulary),
            bans=_words(inputs, "bad_words_list", limits.vocabulary),
            passthrough=_read_passthrough(inputs),
            is_streaming=bool(_single(inputs, "streaming", True)),
            dtype=np.asarray(inputs["input_ids"]).dtype,
            returns=_returns(inputs, limits, outputs),
            bias=_bias(inputs, limits.vocabulary),
            guide=read_guide(_single(inputs, GUIDE, b"")),
        )


def pack_words(words: Sequence[Sequence[int]]) -> np.ndarray[Any, Any]:
    """Pack words, each a sequence of token ids, into a word list, INT32 ``[2, n]``; n is 1 if there are no words."""
    ids = [int(token) for word in words for token in word]
    packed = np.full((2, max(1, len(ids))), -1, np.int32)
    packed[0] = ids or 0
    packed[1, : len(words)] = np.cumsum([len(word) for word in words])
    return packed


def unpack_words(array: np.ndarray[Any, Any], name: str) -> list[tuple[int, ...]]:
    """Return the words of a word list, INT32 ``[2, n]``; ids after the last word's end are padding.

    ``name`` is the tensor's name, for error messages.

    Raises:
        InputError: there are more than 64 words, or a word is empty, or a word's end is outside row 0.
    """
    ids, ends = array.tolist()
    while ends and ends[-1] == -1:
        ends.pop()
    if len(ends) > MAX_WORDS:
        raise InputError(f"{name} has {len(ends)} words; at most {MAX_WORDS} are allowed.", "Shorten the list.")
    words = []
    for index, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if not start < end <= len(ids):
            raise InputError(
                f"{name} has the end {end} for word {index}, which begins at {start} of {len(ids)} ids.",
                f"Send ends that increase, up to {len(ids)}, then -1. Leave empty words out.",
            )
        words.append(tuple(ids[start:end]))
    return words


def as_python(value: Any) -> Any:
    """Return an array's element as a Python value. FP32 becomes its shortest decimal number: 0.7, not 0.699999988."""
    if isinstance(value, np.floating):
        return float(str(value))
    return value.item() if isinstance(value, np.generic) else value


def read_streaming(array: Any, name: str = "streaming") -> bool:
    """Read the BOOL ``[rows, 1]`` input ``name``: whether answers come in pieces.

    Raises:
        InputError: it differs between rows.
    """
    if (is_streaming := bool(np.all(array))) != bool(np.any(array)):
        raise InputError(f"{name} is true for some rows and false for others.", "Send the same for all rows.")
    return is_streaming


@contextmanager
def naming_row(number: int, count: int) -> Iterator[None]:
    """Begin the message of an ``InputError`` with the row ``number``, if the request has several, ``count``."""
    try:
        yield
    except InputError as error:
        raise InputError(f"Row {number}: {error.what}" if count > 1 else error.what, error.fix) from None


def _single(inputs: Arrays, name: str, default: Any) -> Any:
    """Return the only element of an input as a Python value; ``default`` if the request does not have the input."""
    return as_python(np.asarray(inputs[name]).reshape(-1)[0]) if name in inputs else default


def _prompt(inputs: Arrays) -> tuple[int, ...]:
    ids = np.asarray(inputs["input_ids"])
    length = int(_single(inputs, "input_lengths", ids.shape[1]))
    if length < 1:
        raise InputError(f"The prompt has no tokens: input_lengths is {length}.", "Send at least one token.")
    if length > ids.shape[1]:
        raise InputError(
            f"input_lengths is {length}, and input_ids has {ids.shape[1]} tokens.", "Send the number of input_ids."
        )
    return tuple(ids[0, :length].tolist())


def _check_ids(begin: str, ids: Sequence[int], vocabulary: int) -> None:
    for place, token in enumerate(ids):
        if not 0 <= token < vocabulary:
            raise InputError(
                f"{begin} {token} at place {place}, and the model's vocabulary has {vocabulary} tokens.",
                f"Send ids from 0 to {vocabulary - 1}: use the model's own tokenizer.",
            )


def _end_ids(inputs: Arrays, limits: Limits) -> tuple[int, ...]:
    if "end_id" not in inputs:
        return limits.end_ids
    end = int(_single(inputs, "end_id", -1))
    if end == -1:
        return ()
    _check_ids("end_id has", (end,), limits.vocabulary)
    return (end,)


def _sampling(inputs: Arrays) -> Sampling:
    given = {row.name: _single(inputs, row.tensor, row.default) for row in NUMBERS}
    for name, own in ALIASES.items():
        if name in inputs and own in inputs:
            raise InputError(f"The request has {own} and {name}, which are the same setting.", "Send one of them.")
        given |= {own: _single(inputs, name, None)} if name in inputs else {}
    top_k, top_p = (_single(inputs, name, 0) for name in ("runtime_top_k", "runtime_top_p"))
    # 0: off; and with both off greedy, whatever the temperature, as in FasterTransformer and TensorRT-LLM
    given |= {"top_k": top_k if top_k or top_p else 1, "top_p": top_p or 1.0}
    return Sampling(**given)


def _returns(inputs: Arrays, limits: Limits, outputs: Container[str]) -> tuple[str, ...]:
    found: list[str] = []
    for name, wanted in LOG_PROBS.items():
        if not (value := _single(inputs, name, 0)):
            continue
        most = min(limits.top_logprobs, limits.vocabulary)
        if name == "top_logprobs" and value > most:
            raise InputError(f"top_logprobs is {value}, and this model gives at most {most}.", f"Send 0 to {most}.")
        given = [each for each in wanted if each in outputs]
        if not given:
            raise InputError(
                f"{name} is {value}, and the model declares no output {' or '.join(wanted)}.",
                f"Leave {name} out, or declare them in the model's config.pbtxt.",
            )
        found += given
    return tuple(dict.fromkeys(found))


def _words(inputs: Arrays, name: str, vocabulary: int) -> tuple[tuple[int, ...], ...]:
    if name not in inputs:
        return ()
    words = unpack_words(np.asarray(inputs[name])[0], name)
    for word in words:
        _check_ids(f"{name} has", word, vocabulary)
    return tuple(words)


def _bias(inputs: Arrays, vocabulary: int) -> tuple[tuple[int, float], ...]:
    weights = np.asarray(inputs["embedding_bias"])[0] if "embedding_bias" in inputs else np.zeros(0, np.float32)
    if len(weights) > vocabulary:
        raise InputError(
            f"embedding_bias has {len(weights)} numbers, and the model's vocabulary has {vocabulary} tokens.",
            "Send one for each token.",
        )
    tokens = np.flatnonzero(weights)
    if wrong := [token for token in tokens if not np.isfinite(weights[token])]:
        raise InputError(f"embedding_bias is {weights[wrong[0]]} for the token {wrong[0]}.", "Send finite numbers.")
    return tuple(zip(tokens.tolist(), weights[tokens].tolist(), strict=True))


def _read_passthrough(inputs: Arrays) -> str:
    value = _single(inputs, "carry", b"")
    if len(value) > MOST_PASSTHROUGH:
        raise InputError(f"carry has {len(value)} bytes.", f"Send at most {MOST_PASSTHROUGH}.")
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError:
        raise InputError("carry is not UTF-8.", "Send the text that the prompt step made.") from None
