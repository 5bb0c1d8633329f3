"""What a model serves in APIs whose requests are texts: OpenAI's, and those of its neighbours.

The parameter ``api`` says it; without the parameter, it is found from the model's tensors.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from shoal.client.calls import find_text_input
from shoal.component.spec import STRING, TensorSpec
from shoal.errors import ArtifactError, suggest
from shoal.files import read_text
from shoal.repository.config import ModelConfig

_MOST_LABELS = 2**20  # bytes of the file
_LANGUAGE = (  # inputs and outputs of models that write text
    ({"text_input"}, {"text_output", "finish_reason"}),  # llm, llm_bls
    ({"text_input", "sampling_parameters"}, {"text_output"}),  # NVIDIA's vLLM backend
    ({"prompt"}, {"generated_text"}),  # llamav2
)
_CHATS = {"messages", "prompt"}  # inputs of those that take chats


class Api(Enum):
    """Kind of answers; the value is that of the parameter ``api``."""

    LANGUAGE = "language"
    EMBEDDINGS = "embeddings"
    CLASSIFY = "classify"
    RERANK = "rerank"
    NONE = "none"


_NUMBERS = (Api.EMBEDDINGS, Api.CLASSIFY, Api.RERANK)


class Served(NamedTuple):
    """What a model serves: the input ``text`` takes texts, and the answers are from the FP32 output ``output``.

    For pairs of texts, the input ``second`` takes the second ones, which are documents if the first one is a query.

    ``labels`` are the names of the classes, if the output has any. A language model has neither; ``takes_chats`` says
    whether it takes chats besides texts.
    """

    api: Api
    text: str = ""
    output: str = ""
    labels: tuple[str, ...] = ()
    takes_chats: bool = False
    second: str = ""


def find_served(config: ModelConfig) -> Served:
    """Return what a model serves.

    The rule for classes is NVIDIA Dynamo's: one input of TYPE_STRING that must be given, and one output of TYPE_FP32,
    of ``[classes]``; ``[1]`` is a score. An output with "embed" in its name is an embedding, and a score of two inputs
    of TYPE_STRING is that of a query and a document. The parameter ``api`` may name one of several outputs:
    ``classify=SCORE``.

    Raises:
        ArtifactError: the parameter ``api`` is not a kind, or the model's tensors do not fit it; or its labels cannot
            be read.
    """
    kind, _, output = config.api.partition("=")
    kinds = {api.value: api for api in Api}
    if kind and kind not in kinds:
        raise _refuse(config, f"which is none of {', '.join(kinds)}", suggest(kind, kinds))
    wanted = kinds.get(kind)
    if output and wanted not in _NUMBERS:
        raise _refuse(config, "which names an output that its kind does not have", f"Write {kind}.")
    served = _find_language(config) if wanted in (None, Api.LANGUAGE) else None
    if served is None and wanted in (None, *_NUMBERS):
        served = _find_numbers(config, wanted, output)
    if served is None and wanted not in (None, Api.NONE):
        fix = "Give it the tensors of llm." if wanted is Api.LANGUAGE else "Name an output: classify=OUTPUT."
        raise _refuse(config, "which its inputs and outputs do not fit", fix)
    return served or Served(Api.NONE)


def _find_language(config: ModelConfig) -> Served | None:
    inputs = {tensor.name for tensor in config.spec.inputs}
    outputs = {tensor.name for tensor in config.spec.outputs}
    if not any(needed <= inputs and made <= outputs for needed, made in _LANGUAGE):
        return None
    return Served(Api.LANGUAGE, takes_chats=bool(inputs & _CHATS))


def _find_numbers(config: ModelConfig, wanted: Api | None, name: str) -> Served | None:
    spec = config.spec
    required = [tensor for tensor in spec.inputs if not tensor.is_optional]
    found = [tensor for tensor in spec.outputs if _is_row(tensor) and name in ("", tensor.name)]
    if len(found) != 1 or spec.is_decoupled or not spec.is_batched:
        return None
    (output,) = found
    if wanted in (None, Api.RERANK) and output.dims == (1,) and len(required) == 2 and all(map(_is_text, required)):
        return Served(Api.RERANK, required[0].name, output.name, second=required[1].name)
    text = find_text_input(spec)
    if wanted is Api.RERANK or not text or [tensor.name for tensor in required] not in ([], [text]):
        return None
    guessed = Api.EMBEDDINGS if "embed" in output.name.lower() else Api.CLASSIFY
    labels = _read_labels(config, output)
    if labels and output.dims[0] not in (-1, len(labels)):
        raise ArtifactError(
            f"{config.folder}: {output.name} has {output.dims[0]} classes, and its label_filename {len(labels)} lines.",
            "Write one label per line.",
        )
    return Served(wanted or guessed, text, output.name, labels)


def _is_text(tensor: TensorSpec) -> bool:
    return tensor.dtype == STRING and tensor.dims == (1,)


def _is_row(tensor: TensorSpec) -> bool:
    return tensor.dtype == "TYPE_FP32" and len(tensor.dims) == 1


def _read_labels(config: ModelConfig, output: TensorSpec) -> tuple[str, ...]:
    name = next((each.label_filename for each in config.message.output if each.name == output.name), "")
    if not name:
        return ()
    if "/" in name:
        raise ArtifactError(f"{config.folder}: label_filename is {name!r:.60}.", "Put the file beside config.pbtxt.")
    try:
        return tuple(read_text(config.folder / name, _MOST_LABELS).splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(
            f"{config.folder / name} cannot be read: {getattr(error, 'strerror', error)}.",
            "Write one label per line, as UTF-8.",
        ) from None


def _refuse(config: ModelConfig, what: str, fix: str) -> ArtifactError:
    return ArtifactError(f"{config.folder}: the parameter api is {config.api!r}, {what}.", fix)
