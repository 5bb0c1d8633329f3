"""Parameters of a ``config.pbtxt`` that shoal reads: one table, and typed properties for the repository's side.

Components read their own parameters by themselves (``shoal.Parameters``); the table has them too. To add a
parameter, add a row, and run the test of the table, which compares it with the code and with ``docs/parameters.md``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, NamedTuple

from shoal.kit.component.parameters import Parameters
from shoal.kit.component.spec import TOGETHER, ModelSpec

HOST_INPUTS = "FORCE_CPU_ONLY_INPUT_TENSORS"
ANY, COMPONENT = "", "component"  # scopes: every model, and models whose code is a component; others are backends
_CLOSE = 0.8  # least difflib ratio of a misspelt name and the right one


class Parameter(NamedTuple):
    """Row of the table. ``scope`` is ``ANY``, ``COMPONENT``, or the backend whose models have the parameter.

    ``default`` is the value of a model without the parameter; empty means none. ``readers`` name what reads it.
    """

    name: str
    kind: str
    default: str
    scope: str
    readers: str
    meaning: str


_FLAG, _NAMES, WHOLE, _SECONDS = "true or false", "names, separated by spaces", "whole number", "seconds"
_TEXTS, _JSON, _PATH, _NUMBER = "JSON list of texts", "JSON object", "absolute path", "number"
_ENGINES = "llm-hf, llm-onnx, llm-openvino, llm-vllm"
TABLE = tuple(Parameter(*row) for row in (
    # Of every model.
    ("api", "kind, or kind=OUTPUT", "", ANY, "shoal serve, shoal check, shoal describe",
     "What OpenAI's clients get: language, embeddings, classify, rerank or none; if empty, found from the tensors."),
    ("artifacts", _NAMES, "", ANY, "shoal compose, shoal check",
     "Files that must be beside the code. `?` after a name marks an optional file, `|` separates alternatives."),
    ("attention_mask", "input", "", ANY, "shoal compose, backend pytorch", "Mask: rows of like length run together."),
    ("calls", _NAMES, "", ANY, "shoal compose, shoal serve, shoal graph", "Models that this model's code calls."),
    ("canary", _JSON, "", ANY, "shoal serve, shoal check",
     "Inputs of a test request; without it, shoal serve does not test a model that answers in pieces."),
    ("content", "text", "", ANY, "shoal describe, shoal graph", "What the model computes; shoal compose writes it."),
    ("dimensions", "whole numbers, separated by spaces", "", ANY, "shoal serve",
     "Sizes to which clients may cut embeddings, of a model trained for it (Matryoshka); shoal add-model writes it."),
    ("EXECUTION_ENV_PATH", "path", "", ANY, "Triton, shoal check", "Python environment; compose --env writes it."),
    (HOST_INPUTS, "yes or no", "yes", ANY, "Triton, shoal graph", "Whether inputs go to the host."),
    ("hang_seconds", _SECONDS, "1.5; 60 if decoupled", ANY, "shoal serve", "Longest wait without processor time."),
    ("load_seconds", _SECONDS, "0", ANY, "shoal compose, shoal serve", "How long the model may take to load."),
    ("public", _FLAG, "false", ANY, "shoal serve", "Whether clients may call the model although it is no ensemble."),
    ("shoal_files", "digest", "", ANY, "backends of shoal", "Digest of the model's files; shoal compose writes it."),
    ("shoal_repository", "digest", "", ANY, "every component", "Identity of the repository; shoal compose writes it."),
    ("slots", WHOLE, "", ANY, "shoal serve", "How many requests run at once; four times as many are accepted."),
    ("together", _NAMES, "", ANY, "shoal compose, shoal graph",
     "Those of `calls` that run in this model's process; shoal compose --together writes it."),
    # Of a backend's models.
    ("dtype", "fp32 or bf16", "fp32", "pytorch", "backend pytorch of shoal", "Dtype in which an encoder computes."),
    ("exclude_input_in_output", _FLAG, "false", "tensorrtllm", "backend tensorrtllm",
     "Whether whole answers are new tokens alone; otherwise the prompt comes first."),
    ("INTRA_OP_THREAD_COUNT", WHOLE, "0", "pytorch", "backend pytorch", "Threads of each instance; see `threads`."),
    ("intra_op_thread_count", WHOLE, "0", "onnxruntime", "backend onnxruntime", "The same, for ONNX Runtime."),
    ("HINT_BF16", "YES", "", "openvino", "backend openvino", "Computes in BF16 what is not quantised."),
    ("INFERENCE_NUM_THREADS", WHOLE, "0", "openvino", "backend openvino", "Threads of each instance; see `threads`."),
    ("is_classifier", _FLAG, "false", "fil", "backend fil", "Whether the answer is the class; from 25.09 on."),
    ("model", _PATH, "", "llmapi", "shoal compose, trtllm-llmapi", "Weights; shoal compose --weights writes it."),
    ("model", _PATH, "", "vllm", "shoal compose", "Weights; empty until shoal compose --weights writes it."),
    ("model_type", "format", "xgboost", "fil", "backend fil, shoal check", "Format of the forest's file."),
    ("output_class", _FLAG, "false", "fil", "backend fil", "Whether the answer is the class of a row."),
    ("predict_proba", _FLAG, "false", "fil", "backend fil", "Whether the answer is the probabilities of the classes."),
    ("requires", _NAMES, "", "python", "shoal check, shoal serve --print", "Modules that the code imports only later."),
    ("executor_worker_path", _PATH, "", "tensorrtllm", "backend tensorrtllm of NVIDIA",
     "Program of its processes in the image."),
    ("gpt_model_path", _PATH, "", "tensorrtllm", "backend tensorrtllm, shoal serve --print", "Folder of the engine."),
    ("gpt_model_type", "text", "", "tensorrtllm", "backend tensorrtllm", "How requests are batched."),
    ("storage_type", "text", "AUTO", "fil", "backend fil of NVIDIA", "Layout of the trees in memory."),
    ("threshold", _NUMBER, "0.5", "fil", "backend fil", "Least score of the second of two classes."),
    ("xgboost_allow_unknown_field", _FLAG, "false", "fil", "backend fil of NVIDIA", "Whether unknown fields are read."),
    # Of a component.
    ("accumulate_tokens", _FLAG, "false", COMPONENT, "tensorrt_llm_bls", "Whether pieces have the whole text so far."),
    ("batching", "auto, or a way", "auto", COMPONENT, "llm-hf",
     "continuous, static or single, without a comparison with generate; auto: the first that equals it."),
    ("cache_tokens", WHOLE, "", COMPONENT, "llm-hf, llm-openvino",
     "Most tokens of all requests; slots x context, at most 32768."),
    ("chat_template_kwargs", _JSON, "", COMPONENT, "prompt", "Variables of the chat template."),
    ("context", WHOLE, "", COMPONENT, _ENGINES, "Most tokens of prompt and answer; if empty, the model's own."),
    ("context", WHOLE, "0", COMPONENT, "prompt, preprocessing", "Most tokens; 0 is the model's own number."),
    ("dtype", "float32, bfloat16 or float16", "float32", COMPONENT, "llamav2", "Dtype of the weights."),
    ("dtype", "auto or a dtype", "auto", COMPONENT, "llm-hf, llm-openvino, llm-vllm",
     "Dtype of the weights; auto is their own, but, except on vLLM, float32 on a host without it."),
    ("engine_args", _JSON, "{}", COMPONENT, "llm-vllm", "vLLM's own arguments."),
    ("exclude_input_in_output", _FLAG, "true", COMPONENT, f"preprocessing, {_ENGINES}",
     "Whether whole answers are new tokens alone; otherwise the prompt comes first."),
    ("interpolation", "bilinear or bicubic", "bilinear", COMPONENT, "image", "How a picture is resized."),
    ("k", WHOLE, "", COMPONENT, "top_k", "How many classes are returned; if empty, all."),
    ("labels", _TEXTS, "", COMPONENT, "label, top_k", "Names of the classes; if empty, their numbers from 0."),
    ("least", _NUMBER, "", COMPONENT, "label", "Least best score; below it, the label is `otherwise`."),
    ("like_tensorrt_llm", _FLAG, "false", COMPONENT, _ENGINES,
     "Whether requests are read and answered as by NVIDIA's backend tensorrtllm; shoal compose writes it."),
    ("lowercase", _FLAG, "true", COMPONENT, "tokenizer", "Whether vocab.txt is for text in lower case."),
    ("max_length", WHOLE, "256", COMPONENT, "tokenizer, pair_tokenizer", "Most tokens of a row; the rest is cut."),
    ("max_pixels", WHOLE, "25000000", COMPONENT, "image", "Largest picture, in pixels."),
    ("max_text_bytes", WHOLE, "65536", COMPONENT,
     "checked_text, pair_tokenizer, preprocess, tokenizer, word_counts", "Longest text."),
    ("max_text_bytes", WHOLE, "1048576", COMPONENT, "prompt, preprocessing", "Longest text or chat."),
    ("max_tokens", WHOLE, "256", COMPONENT, "prompt, llamav2", "Most tokens of an answer, by default."),
    ("mean", "JSON list of numbers", "ImageNet's", COMPONENT, "image", "Mean of red, green and blue, from 0 to 1."),
    ("model", _PATH, "", COMPONENT,
     f"completion, llamav2, llm_bls, postprocessing, preprocessing, prompt, tensorrt_llm_bls, {_ENGINES}",
     "Weights and tokenizer; empty until shoal compose --weights writes it."),
    ("multimodal_encoders_name", "nothing", "", COMPONENT, "tensorrt_llm_bls", "Of NVIDIA's own model: refused here."),
    ("otherwise", "text", "", COMPONENT, "label", "Label of a row whose scores are all below `least`."),
    ("quantize", "none, int8 or int4", "none", COMPONENT, "llamav2, llm-hf",
     "Bits of a weight, by torchao; int4 needs a GPU; shoal compose --quantize writes it."),
    ("repetition_penalty", _NUMBER, "1.1", COMPONENT, "llamav2", "Penalty of tokens that were generated before."),
    ("resize", WHOLE, "256", COMPONENT, "image", "Shorter side before the centre is cut out; 0: it is not."),
    ("seed", WHOLE, "0", COMPONENT, "llamav2", "Seed of the random choices."),
    ("slots", WHOLE, "16", COMPONENT, _ENGINES, "How many requests are computed at once."),
    ("statistics", _FLAG, "false", COMPONENT, "word_counts", "Whether seven statistics of the text come first."),
    ("std", "JSON list of numbers", "ImageNet's", COMPONENT, "image", "Standard deviation of red, green and blue."),
    ("system_prompt", "text", "", COMPONENT, "llamav2", "Text before each chat."),
    ("temperature", _NUMBER, "0.01", COMPONENT, "llamav2", "Temperature of the random choices."),
    ("template", "name, or llama2", "", COMPONENT, "prompt", "Chat template of the model; if empty, its default."),
    ("threshold", _NUMBER, "0.5", COMPONENT, "threshold", "Least score that counts."),
    ("tensorrt_llm_draft_model_name", "nothing", "", COMPONENT, "tensorrt_llm_bls",
     "Of NVIDIA's own model: refused here."),
    ("tensorrt_llm_model_name", "name", "tensorrt_llm", COMPONENT, "tensorrt_llm_bls", "Engine, one of `calls`."),
    ("threads", WHOLE, "cores / instances; vLLM's own", COMPONENT, "every component", "Threads of each instance."),
    ("tool_form", "hermes, llama3, mistral, mistral_args or pythonic", "", COMPONENT, "prompt",
     "Form of calls of tools; if empty, the chat template's."),
    ("top_k", WHOLE, "20", COMPONENT, "llamav2", "Number of the most probable tokens to choose from."),
    ("top_p", _NUMBER, "1.0", COMPONENT, "llamav2", "Joint probability of the tokens to choose from."),
    ("value", "count, share or presence", "count", COMPONENT, "word_counts", "What is returned of each word."),
    ("weights", "JSON list of numbers", "", COMPONENT, "blend", "Weight of each input; if empty, all are equal."),
))  # fmt: skip
# Parameters of every model whose values have a form, and the properties that read them.
TYPED = {each: each for each in ("canary", "dimensions", "hang_seconds", "load_seconds", "slots")} | {
    "public": "is_public"
}
NAMES = frozenset(parameter.name for parameter in TABLE)


def find_right_name(name: str, scopes: Iterable[str], given: Iterable[str]) -> str:
    """Return the parameter that ``name`` misspells, of those with one of the ``scopes``; empty if there is none.

    Parameters that are ``given`` too are left out, since then ``name`` is another one.
    """
    scopes = {*scopes}
    known = {_fold(each.name): each.name for each in TABLE if each.scope in scopes and each.name not in given}
    folded = _fold(name)
    same = [right for right in known if sorted(right) == sorted(folded)]
    close = () if name in NAMES else same or get_close_matches(folded, known, 1, _CLOSE)
    return next((known[right] for right in close), "")


def _fold(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def read_alone(spec: ModelSpec, name: str) -> Parameters:
    """Return a reader of one parameter, which does not take one of a similar name for it."""
    return Parameters(replace(spec, parameters={key: text for key, text in spec.parameters.items() if key == name}))


class ParameterProperties:
    """Parameters that are not a component's own, as typed properties of a configuration with a ``spec``.

    Each raises an ``ArtifactError`` with the value and a valid example if the value cannot be used.
    """

    spec: ModelSpec

    @property
    def api(self) -> str:
        """Kind of answers for OpenAI's clients, as ``shoal.authoring.repository.apis`` reads it; empty without it."""
        return self.spec.parameters.get("api", "")

    @property
    def dimensions(self) -> tuple[int, ...]:
        """Sizes to which embeddings may be cut: the first numbers of one are an embedding themselves (Matryoshka)."""
        parameters = read_alone(self.spec, "dimensions")
        words = parameters.text("dimensions").split()
        if not all(word.isdecimal() and int(word) for word in words):
            raise parameters.refusal("dimensions", "expected numbers of 1 or more", "64 128 256")
        return tuple(map(int, words))

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of those of the called models that run in this model's process, from the folder ``together``."""
        return tuple(self.spec.parameters.get(TOGETHER, "").split())

    @property
    def calls(self) -> tuple[str, ...]:
        """Names of the models that this model's code calls (BLS)."""
        return tuple(self.spec.parameters.get("calls", "").split())

    @property
    def canary(self) -> dict[str, Any] | None:
        """Inputs of the model's canary request; None without the parameter."""
        parameters = read_alone(self.spec, "canary")
        try:
            found = json.loads(parameters.text("canary", "null"))
        except (ValueError, RecursionError):
            found = ()
        if not isinstance(found, dict | None):
            raise parameters.refusal("canary", "expected a JSON object of inputs", '{"COUNT": [[2]]}')
        return found

    @property
    def content(self) -> str:
        """Description of what the model computes, for people."""
        return self.spec.parameters.get("content", "")

    @property
    def gets_host_inputs(self) -> bool:
        """Whether Triton copies all inputs of a Python model to the host."""
        return self.spec.parameters.get(HOST_INPUTS, "yes") != "no"

    @property
    def hang_seconds(self) -> float | None:
        """Longest time that a batch may run without using the processor; None without the parameter."""
        return self._seconds("hang_seconds")

    @property
    def is_public(self) -> bool:
        """Whether clients may call the model even if it is not an ensemble."""
        return read_alone(self.spec, "public").flag("public", default=False)

    @property
    def load_seconds(self) -> float:
        """Longest time that the model may take to load; 0 without the parameter."""
        return self._seconds("load_seconds") or 0.0

    @property
    def mask(self) -> str:
        """Name of the attention-mask input; empty without the parameter."""
        return self.spec.parameters.get("attention_mask", "")

    @property
    def requires(self) -> tuple[str, ...]:
        """Names of the modules that the model's code imports later."""
        return tuple(self.spec.parameters.get("requires", "").split())

    @property
    def slots(self) -> int | None:
        """Number of requests that the model computes at once; None without the parameter."""
        return read_alone(self.spec, "slots").whole("slots", 0) or None

    @property
    def threads(self) -> int | None:
        """Number of a component's threads; None without the parameter."""
        unset = 0  # stands for a share of the cores
        return read_alone(self.spec, "threads").whole("threads", unset) or None

    @property
    def weights(self) -> str | None:
        """Path of the folder with a language model's weights; empty before composing, None without the parameter."""
        return self.spec.parameters.get("model")

    def _seconds(self, name: str) -> float | None:
        parameters = read_alone(self.spec, name)
        text = parameters.text(name)
        if text and not re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", text):
            raise parameters.refusal(name, "expected a number of seconds", "10")
        return float(text) if text else None
