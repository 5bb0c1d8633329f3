"""The tensors of TensorRT-LLM's repository: those of its text steps, converted to ours and back.

NVIDIA's clients read texts in the shape ``[rows]``, although the models declare a row dimension and ``[-1]``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.errors import ArtifactError, InputError
from shoal.kit.component.parameters import Parameters
from shoal.kit.component.spec import BATCH_INDEX, Array, Arrays
from shoal.kit.generation.completions import Completions, TextStream
from shoal.kit.generation.contract import ALIASES, MAX_WORDS, pack_words, unpack_words
from shoal.kit.generation.pieces import Piece
from shoal.kit.generation.prompts import Prompts, stack_words
from shoal.kit.generation.weights import find_weights, read_folder


def _read_pairs(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in text.split())


LOG_PROBS = ("cum_log_probs", "output_log_probs")
# Inputs of preprocessing whose names, in lower case, are not those of ensemble.
_QUERY = _read_pairs("""QUERY=text_input DECODER_QUERY=decoder_text_input REQUEST_OUTPUT_LEN=max_tokens
    BAD_WORDS_DICT=bad_words STOP_WORDS_DICT=stop_words""")
_PROMPT = """text_input max_tokens bad_words stop_words min_tokens return_num_output_tokens embedding_bias_words
    embedding_bias_weights""".split()  # inputs of the component prompt
# Inputs of NVIDIA's ensemble and tensorrt_llm_bls that requests may not have; of flags, false is taken.
_WHY_REFUSED = {
    "prompts are texts, without embeddings": "prompt_embedding_table prompt_table_extra_id prompt_vocab_size",
    "the model is a decoder, without an encoder": "decoder_text_input image_url_input",
    "logits are not returned": "return_context_logits return_generation_logits",
    "measurements are on the server's metrics": "return_perf_metrics return_kv_cache_reuse_stats",
    "there is no draft model": "use_draft_logits",
}
REFUSED = {name: why for why, names in _WHY_REFUSED.items() for name in names.split()}
_IDS = _read_pairs("""INPUT_ID=input_ids REQUEST_INPUT_LEN=input_lengths REQUEST_OUTPUT_LEN=request_output_len
    BAD_WORDS_IDS=bad_words_list""")
COUNTS = ("num_input_tokens", "num_output_tokens")
_TOKENS = {"TOKENS_BATCH": "output_ids", "SEQUENCE_LENGTH": "sequence_length"}
_NO_TOKENS = np.zeros((1, 1, 0), np.float32)
_TRUE = ("true", "yes", "1", "t")  # of a parameter, in NVIDIA's code


def accept(inputs: Arrays) -> dict[str, Array]:
    """Return the inputs of a request to ``ensemble`` or ``tensorrt_llm_bls``, under the names of the last releases.

    Raises:
        InputError: the request has an input that is refused, or a setting under both of its names.
    """
    for name, why in REFUSED.items():
        if name in inputs and (inputs[name].dtype != np.bool_ or np.any(inputs[name])):
            raise InputError(f"The request has {name}, and {why}.", "Leave it out.")
    for name, own in ALIASES.items():
        if name in inputs and own in inputs:
            raise InputError(f"The request has {own} and {name}, which are the same setting.", "Send one of them.")
    return {ALIASES.get(name, name): array for name, array in inputs.items() if name not in REFUSED}


def read_filled(parameters: Parameters, name: str) -> str:
    """Return a parameter; empty if NVIDIA's template was not filled in: ``${name}``."""
    text = parameters.text(name)
    return "" if text.startswith("${") else text


class Preprocessing:
    """Converts the inputs of TensorRT-LLM's ``preprocessing`` to its outputs."""

    def __init__(
        self, prompts: Prompts, end_ids: Sequence[int], pad_id: int, vocabulary: int, *, excludes_input: bool
    ) -> None:
        self.prompts, self._end_ids, self._pad_id, self._excludes_input = prompts, end_ids, pad_id, excludes_input
        self._vocabulary = vocabulary

    @classmethod
    def read(cls, parameters: Parameters) -> Preprocessing:
        """Read the folder ``model``.

        Raises:
            ArtifactError, SetupError: as ``Prompts.read``.
        """
        weights = find_weights(read_folder(parameters))
        pad, ends = weights.config.get("pad_token_id"), weights.end_ids
        pad_id = pad if type(pad) is int else ends[0] if ends else 0
        excludes_input = parameters.flag("exclude_input_in_output", default=True)
        return cls(Prompts.read(parameters), ends, pad_id, weights.vocabulary, excludes_input=excludes_input)

    def convert(self, inputs: Arrays) -> dict[str, Array]:
        """Return an engine's inputs for the rows of a request.

        Models may have several end tokens, and requests of TensorRT-LLM have one: the others become stop words.
        ``EMBEDDING_BIAS`` is empty or has a number for each token, as TensorRT-LLM expects it.
        ``CARRY`` is as long in all rows, since NVIDIA's backend divides the bytes of texts by the number of rows.

        Raises:
            InputError: an input is refused, or a value cannot be used; the message has the row, if there are several.
        """
        given = accept({_QUERY.get(name, name.lower()): array for name, array in inputs.items()})
        found = self.prompts.requests({name: given[name] for name in _PROMPT if name in given})
        rows = len(given["text_input"])
        is_one = "end_id" in given or not self._end_ids
        ends = given.get("end_id", np.full((rows, 1), self._end_ids[0] if self._end_ids else -1, np.int32))
        stops = found["stop_words_list"]
        if further := [] if is_one else self._end_ids[1:]:
            words = [[*unpack_words(each, "stop_words"), *([end] for end in further)] for each in stops]
            stops = stack_words([pack_words(each[-MAX_WORDS:]) for each in words])  # postprocessing has all texts
        excludes = given.get("exclude_input_in_output", np.full((rows, 1), self._excludes_input))
        begins = ~excludes & ~given.get("stream", np.zeros((rows, 1), np.bool_))  # with the prompt
        passthroughs = [
            _read_passthrough(found["carry"][row, 0], begins_with_prompt=bool(begins[row, 0])) for row in range(rows)
        ]
        width = max(map(len, passthroughs))
        bias = found["embedding_bias"]
        missing = self._vocabulary - bias.shape[1] if bias.size else 0
        return {
            **{name: found[own] for name, own in _IDS.items()},
            "STOP_WORDS_IDS": stops,
            "EMBEDDING_BIAS": np.pad(bias, ((0, 0), (0, missing))),
            "OUT_END_ID": ends,
            "OUT_PAD_ID": given.get("pad_id", np.full((rows, 1), self._pad_id, np.int32)),
            "OUT_EXCLUDE_INPUT_IN_OUTPUT": excludes,
            **{f"OUT_{name.upper()}": given[name] for name in ("min_tokens", "seed") if name in given},
            "CARRY": np.array([[text.ljust(width)] for text in passthroughs], np.object_),
        }


def _read_passthrough(text: bytes, *, begins_with_prompt: bool) -> bytes:
    """Return the text in ``CARRY`` of a row, which says whether its answer begins with the prompt."""
    if not begins_with_prompt:
        return text
    given = json.loads(text)
    return json.dumps({**given, "num_echoed": given["num_input_tokens"]}, ensure_ascii=False).encode()


class Postprocessing:
    """Converts the inputs of TensorRT-LLM's ``postprocessing`` to its outputs."""

    def __init__(self, completions: Completions) -> None:
        self._completions = completions

    @classmethod
    def read(cls, parameters: Parameters) -> Postprocessing:
        """Read the folder ``model``; raises ``ArtifactError`` as ``Completions.read``."""
        return cls(Completions.read(parameters))

    def convert(self, inputs: Arrays) -> dict[str, Array]:
        """Return texts as ``OUTPUT``, STRING ``[rows, 1]``, with counts of tokens, and the inputs that are passed on.

        Without ``stream_id`` and ``is_last``, each answer is converted by itself.

        Raises:
            InputError: a shape or value cannot be used; there is one beam.
        """
        given = {_TOKENS.get(name, name): array for name, array in inputs.items() if name not in LOG_PROBS}
        found = self._completions.answer(given)
        return {
            "OUTPUT": found["text_output"],
            **{name: found[name] for name in COUNTS},
            **{name: inputs[name] for name in (BATCH_INDEX, *LOG_PROBS) if name in inputs},
        }


class RowAnswer:
    """Text of one row of a request, from the answers of an engine, with their log probabilities."""

    def __init__(self, stream: TextStream, number: int, *, accumulates: bool) -> None:
        self._stream, self._number, self._accumulates = stream, number, accumulates
        self._text, self._new, self._log_probs = "", "", list[Array]()
        self._last: Piece | None = None
        self._total: Array | None = None
        self.is_complete = False

    @property
    def has_news(self) -> bool:
        """Whether there is text that was not packed, or the end."""
        return bool(self._new or self.is_complete)

    def take(self, answer: Arrays | None) -> None:
        """Take an engine's answer of one row, or the end, which NVIDIA's engine does not announce."""
        if answer is None or "is_last" not in answer:
            ids = [] if answer is None else answer["output_ids"][0, 0, : int(answer["sequence_length"][0, 0])].tolist()
            piece = self._stream.step(ids, last=answer is None, reason="length" if answer is None else "")
        else:
            piece = self._stream.take({name: array for name, array in answer.items() if name not in LOG_PROBS})
        self._last, self._new, self._text = piece, self._new + piece.text, self._text + piece.text
        self.is_complete = bool(piece.finish_reason)
        if answer is not None and LOG_PROBS[0] in answer:
            self._total = answer[LOG_PROBS[0]]
            self._log_probs.append(answer[LOG_PROBS[1]])

    def pack(self) -> dict[str, Array]:
        """Return the outputs of ``tensorrt_llm_bls`` for what came since the last call; each has one row."""
        assert self._last is not None
        text, self._new = self._text if self._accumulates else self._new, ""
        packed = self._stream.pack(self._last._replace(text=text))
        outputs: dict[str, Any] = {
            **{name: packed[name] for name in ("text_output", *COUNTS)},
            BATCH_INDEX: np.array([[self._number]], np.int32),
        }
        if self._total is not None:
            outputs |= {LOG_PROBS[0]: self._total, LOG_PROBS[1]: np.concatenate([*self._log_probs, _NO_TOKENS], axis=2)}
            self._log_probs = []
        return outputs


class BlsSettings:
    """Parameters of ``tensorrt_llm_bls``, with NVIDIA's defaults for those that are empty or not filled in."""

    def __init__(self, parameters: Parameters) -> None:
        self.prompt, *engines = parameters.words("calls", least=2, most=99)
        self.accumulates = read_filled(parameters, "accumulate_tokens").lower() in _TRUE
        self.engine = read_filled(parameters, "tensorrt_llm_model_name") or "tensorrt_llm"
        if self.engine not in engines:
            raise parameters.refusal("tensorrt_llm_model_name", "expected a model that calls names", engines[0])
        for name in ("tensorrt_llm_draft_model_name", "multimodal_encoders_name"):
            if read_filled(parameters, name):
                raise ArtifactError(
                    f"{name} is {parameters.text(name)}, and this tensorrt_llm_bls has one engine, for texts.",
                    "Leave it empty, or serve NVIDIA's own tensorrt_llm_bls.",
                )

    def open_rows(self, completions: Completions, preprocessed: Arrays) -> list[RowAnswer]:
        """Begin the text of each row of a request that ``preprocessing`` answered."""
        rows = [{"carry": preprocessed["CARRY"][at : at + 1]} for at in range(len(preprocessed["CARRY"]))]
        return [RowAnswer(completions.open(row), at, accumulates=self.accumulates) for at, row in enumerate(rows)]

    @staticmethod
    def check(inputs: Arrays) -> None:
        """Check that a request needs neither a draft model nor an encoder, and has no other input that is refused.

        Raises:
            InputError: it does.
        """
        accept(inputs)
        is_speculative = "num_draft_tokens" in inputs and bool((np.asarray(inputs["num_draft_tokens"]) > 0).any())
        if is_speculative and "image_input" in inputs:
            raise InputError("Multimodal and speculative decoding is not currently supported.", "Send one of them.")
        if is_speculative:
            raise InputError("cannot perform speculative decoding without draft model.", "Leave num_draft_tokens out.")
        if "image_input" in inputs:
            raise InputError("There is no multimodal encoder.", "Leave image_input out.")


_TO_PREPROCESSING = _read_pairs("""text_input=QUERY max_tokens=REQUEST_OUTPUT_LEN bad_words=BAD_WORDS_DICT
    stop_words=STOP_WORDS_DICT embedding_bias_words=EMBEDDING_BIAS_WORDS
    embedding_bias_weights=EMBEDDING_BIAS_WEIGHTS end_id=END_ID pad_id=PAD_ID min_tokens=MIN_TOKENS
    exclude_input_in_output=EXCLUDE_INPUT_IN_OUTPUT stream=STREAM return_num_output_tokens=RETURN_NUM_OUTPUT_TOKENS""")
_FROM_PREPROCESSING = _read_pairs("""INPUT_ID=input_ids REQUEST_INPUT_LEN=input_lengths
    REQUEST_OUTPUT_LEN=request_output_len BAD_WORDS_IDS=bad_words_list STOP_WORDS_IDS=stop_words_list
    EMBEDDING_BIAS=embedding_bias OUT_END_ID=end_id OUT_PAD_ID=pad_id
    OUT_EXCLUDE_INPUT_IN_OUTPUT=exclude_input_in_output""")
_SETTINGS = _read_pairs("top_k=runtime_top_k top_p=runtime_top_p length_penalty=len_penalty stream=streaming")
_OWN = """text_input max_tokens bad_words stop_words end_id pad_id num_draft_tokens return_num_input_tokens
    return_num_output_tokens embedding_bias_words embedding_bias_weights""".split()


def query(inputs: Arrays) -> dict[str, Array]:
    """Return the request to ``preprocessing`` for a request to ``tensorrt_llm_bls``."""
    return {name: inputs[own] for own, name in _TO_PREPROCESSING.items() if own in inputs}


def engine_request(inputs: Arrays, preprocessed: Arrays) -> dict[str, Array]:
    """Return the request to the engine: what ``preprocessing`` answered, and the settings."""
    given = {_SETTINGS.get(name, name): array for name, array in inputs.items() if name not in _OWN}
    return {**given, **{name: preprocessed[theirs] for theirs, name in _FROM_PREPROCESSING.items()}}
