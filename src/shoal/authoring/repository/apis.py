"""Services of models in APIs whose requests are texts: OpenAI's, and those of its neighbours.

The parameter ``api`` says it; without the parameter, it is found from the model's tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from shoal.authoring.repository.call_graph import MAX_NESTED
from shoal.authoring.repository.config import ModelConfig
from shoal.errors import ArtifactError, suggest
from shoal.kit.component.spec import STRING, ModelSpec, TensorSpec
from shoal.system.files import read_text

_MOST_LABELS = 2**20  # bytes of the file
_LANGUAGE = (  # inputs and outputs of models that write text
    ({"text_input", "stream"}, {"text_output", "finish_reason"}),  # llm, llm_bls
    ({"text_input", "sampling_parameters"}, {"text_output"}),  # NVIDIA's vLLM backend
    ({"text_input", "max_tokens", "beam_width"}, {"text_output"}),  # TensorRT-LLM's ensemble and tensorrt_llm_bls
    ({"prompt"}, {"generated_text"}),  # llamav2
)
_CHATS = {"messages", "prompt"}  # inputs of those that take chats
_PROMPT = {"text_input", "messages"}, {"input_ids", "input_lengths"}  # tensors of the step that makes token ids


class Api(Enum):
    """Kind of answers; the value is that of the parameter ``api``."""

    LANGUAGE = "language"
    EMBEDDINGS = "embeddings"
    CLASSIFY = "classify"
    RERANK = "rerank"
    NONE = "none"


_NUMBERS = (Api.EMBEDDINGS, Api.CLASSIFY, Api.RERANK)
_PATHS: dict[Api, tuple[str, ...]] = {
    Api.LANGUAGE: ("/v1/completions",),
    Api.EMBEDDINGS: ("/v1/embeddings",),
    Api.CLASSIFY: ("/v1/classify",),
    Api.RERANK: ("/v1/rerank", "/v1/score", "/v2/rerank", "/rerank"),
    Api.NONE: (),
}
BODIES: dict[str, dict[str, Any]] = {  # of example requests by path, without the model
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello!"}]},
    "/v1/completions": {"prompt": "Once upon a time"},
    "/v1/embeddings": {"input": "A text."},
    "/v1/classify": {"input": "A text."},
    "/v1/rerank": {"query": "A question?", "documents": ["A text.", "Another one."]},
    "/v2/rerank": {"query": "A question?", "documents": ["A text.", "Another one."]},
    "/rerank": {"query": "A question?", "documents": ["A text.", "Another one."]},
    "/v1/score": {"text_1": "A text.", "text_2": "Another one."},
}
_CHAT_PATHS = "/v1/chat/completions", "/v1/responses", "/v1/messages"


class Served(NamedTuple):
    """Service of a model: the input ``text`` takes texts, and the answers are from the FP32 output ``output``.

    For pairs of texts, the input ``second`` takes the second ones, which are documents if the first one is a query. A
    language model has neither; ``takes_chats`` says whether it takes chats besides texts.
    """

    api: Api
    text: str = ""
    output: str = ""
    takes_chats: bool = False
    second: str = ""

    def __str__(self) -> str:
        """The value of the parameter ``api`` that says the same."""
        return f"{self.api.value}={self.output}" if self.output else self.api.value

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the requests that the model answers, besides those for models of any kind."""
        return (*(_CHAT_PATHS if self.takes_chats else ()), *_PATHS[self.api])


def find_served(config: ModelConfig, members: Mapping[str, ModelConfig] | None = None) -> Served:
    """Return what a model serves. An ensemble with a decoupled model must be marked as decoupled.

    The output of an ensemble is what the parameter ``api`` of the step that makes it says; ``members`` are the steps'
    models, by name. A model without texts is such a step: its own ``api`` serves nothing.

    The rule for classes is NVIDIA Dynamo's: one input of TYPE_STRING that must be given, and one output of TYPE_FP32,
    of ``[classes]``; ``[1]`` is a score. An output with "embed" in its name is an embedding, and a score of two inputs
    of TYPE_STRING is that of a query and a document. An output of kind ``none``, such as sorted scores, is not
    considered, nor is one with "logit" in its name. The parameter ``api`` may name one of several outputs:
    ``classify=SCORE``.

    Raises:
        ArtifactError: the parameter ``api`` is not a kind, or the model's tensors do not fit it.
    """
    kind, _, output = config.api.partition("=")
    kinds = {api.value: api for api in Api}
    if kind and kind not in kinds:
        raise _refuse(config, f"which is none of {', '.join(kinds)}", suggest(kind, kinds))
    wanted = kinds.get(kind)
    if "=" in config.api and wanted not in _NUMBERS:
        raise _refuse(config, "whose kind has no output to name", f"Write {kind or 'classify'}.")
    names = [tensor.name for tensor in config.spec.outputs]
    if output and output not in names:
        raise _refuse(config, f"and no output {output}", suggest(output, names))
    served = _find_language(config) if wanted in (None, Api.LANGUAGE) else None
    if wanted is Api.LANGUAGE and served is None:
        forms = (f"{' and '.join(sorted(needed))} -> {' and '.join(sorted(made))}" for needed, made in _LANGUAGE)
        raise _refuse(config, "and not the tensors of a language model", f"Give it those of one: {'; '.join(forms)}.")
    if served is None and wanted in (None, *_NUMBERS):
        found = _find_numbers(config, wanted, output, members or {})
        if isinstance(found, Served):
            served = found
        elif wanted and any(tensor.dtype == STRING for tensor in config.spec.inputs):
            raise _refuse(config, *found)
    return served or Served(Api.NONE)


def _find_language(config: ModelConfig) -> Served | None:
    inputs = {tensor.name for tensor in config.spec.inputs}
    outputs = {tensor.name for tensor in config.spec.outputs}
    if not any(needed <= inputs and made <= outputs for needed, made in _LANGUAGE):
        return None
    return Served(Api.LANGUAGE, takes_chats=bool(inputs & _CHATS))


def _find_numbers(
    config: ModelConfig, wanted: Api | None, name: str, members: Mapping[str, ModelConfig]
) -> Served | tuple[str, str]:
    """Return what a model that turns texts into numbers serves; or why it serves nothing, and what to do."""
    spec = config.spec
    rows = [tensor for tensor in spec.outputs if _is_row(tensor) and name in ("", tensor.name)]
    kinds = {tensor.name: _find_kind(config, tensor.name, members) for tensor in rows}
    if not wanted:  # logits are no probabilities, unless the model that makes them says so
        known = {name: kind or ("none" if "logit" in name.lower() else "") for name, kind in kinds.items()}
        rows = [tensor for tensor in rows if known[tensor.name] != Api.NONE.value]
    if len(rows) > 1:
        value = f"{wanted.value if wanted else ''}={rows[0].name}"
        return f"and several outputs of TYPE_FP32: {', '.join(tensor.name for tensor in rows)}", f"Name one: {value}"
    if not rows:
        which = f"and {name} is not an output" if name else "and no output"
        return f"{which} of TYPE_FP32 with one dimension, the numbers of a row", "Give it one, or leave api out."
    if spec.is_decoupled or not spec.is_batched:
        what = "it answers in pieces" if spec.is_decoupled else "its max_batch_size is 0"
        return f"and {what}", "Models with one answer for each row serve numbers: leave api out."
    (output,) = rows
    required = [tensor for tensor in spec.inputs if not tensor.is_optional]
    if wanted in (None, Api.RERANK) and output.dims == (1,) and len(required) == 2 and all(map(_is_text, required)):
        return Served(Api.RERANK, required[0].name, output.name, second=required[1].name)
    if wanted is Api.RERANK:
        return "but not two inputs of TYPE_STRING [1] for an output of [1]", "Give it a query and a document."
    texts = [tensor for tensor in required or spec.inputs if _is_text(tensor)]
    if len(texts) != 1 or len(required) > 1:
        needed = ", ".join(tensor.name for tensor in required) or "none"
        return f"and needs the inputs {needed}", "Let it need one input of TYPE_STRING [1]; others are optional: true."
    guessed = Api.EMBEDDINGS if "embed" in (kinds[output.name] or output.name.lower()) else Api.CLASSIFY
    return Served(wanted or guessed, texts[0].name, output.name)


def _find_kind(config: ModelConfig, name: str, members: Mapping[str, ModelConfig], level: int = 0) -> str:
    """Return the kind that the parameter ``api`` of a step says of an ensemble's output; empty if none does."""
    makers = [(step, own) for step in config.steps for own, made in step.outputs.items() if made == name]
    if not makers or level > MAX_NESTED or makers[0][0].model not in members:
        return ""
    (step, own), *_ = makers
    maker = members[step.model]
    kind, _, output = maker.api.partition("=")
    return kind if kind and output in ("", own) else _find_kind(maker, own, members, level + 1)


def _is_text(tensor: TensorSpec) -> bool:
    return tensor.dtype == STRING and tensor.dims == (1,)


def _is_row(tensor: TensorSpec) -> bool:
    return tensor.dtype == "TYPE_FP32" and len(tensor.dims) == 1


def make_body(path: str, name: str, spec: ModelSpec | None) -> dict[str, Any]:
    """Return the body of an example request for ``path`` to a model; ``spec`` is None if it is not known."""
    needed = [tensor.name for tensor in (spec.inputs if spec else ()) if not tensor.is_optional]
    return {"model": name, **BODIES[path], **({"max_tokens": 20} if "max_tokens" in needed else {})}


def makes_token_ids(config: ModelConfig) -> bool:
    """Whether a model is the step of a language model that turns prompts into token ids.

    The service asks it by itself, for ``/tokenize`` and the count of a chat's tokens.
    """
    return has_tensors(config, *_PROMPT) and not config.spec.is_decoupled


def has_tensors(config: ModelConfig, inputs: set[str], outputs: set[str]) -> bool:
    """Whether a model has these inputs and outputs, and perhaps others."""
    spec = config.spec
    return inputs <= {each.name for each in spec.inputs} and outputs <= {each.name for each in spec.outputs}


def read_labels(config: ModelConfig, served: Served) -> tuple[str, ...]:
    """Return the names of the classes, from the ``label_filename`` of the output; empty if there are none.

    Raises:
        ArtifactError: the file cannot be read, or has another number of labels than the output has classes.
    """
    tensor = next((each for each in config.message.output if each.name == served.output), None)
    if served.api is not Api.CLASSIFY or tensor is None or not tensor.label_filename:
        return ()
    path, fix = PurePosixPath(tensor.label_filename), "Write one label per line, as UTF-8."
    if path.is_absolute() or ".." in path.parts:
        what = f"{config.name} has the label_filename {str(path)!r:.80}, which is outside of its folder."
        raise ArtifactError(what, "Put the file beside config.pbtxt.")
    try:
        labels = read_text(config.folder / path, _MOST_LABELS).removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ArtifactError(f"{config.name}: its label_filename {path} cannot be read: {reason}.", fix) from None
    while labels and not labels[-1].strip() and len(labels) > tensor.dims[0]:
        labels.pop()  # blank lines at the end
    if tensor.dims[0] not in (-1, len(labels)):
        what = f"{config.name}: {served.output} has {tensor.dims[0]} classes, and {path} {len(labels)} labels."
        raise ArtifactError(what, fix)
    return tuple(labels)


def _refuse(config: ModelConfig, what: str, fix: str) -> ArtifactError:
    return ArtifactError(f"{config.name} has the parameter api {config.api!r}, {what}.", fix)
