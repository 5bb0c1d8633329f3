"""Weights of language models. They are not copied: a model gets the path of the weights folder in a parameter."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.authoring.check.config.engines import FILE
from shoal.authoring.composition.gguf import GGUF, convert
from shoal.authoring.repository.config import ModelConfig, as_config
from shoal.authoring.repository.model_code import read_code
from shoal.authoring.repository.versions import list_made
from shoal.errors import ArtifactError, InputError, SetupError
from shoal.kit.component.files import read_json, sha256
from shoal.kit.encoders.hub import check_hub
from shoal.kit.generation.tokenizer import TOKENIZER
from shoal.kit.generation.weights import DECODER, find_weights

PARAMETER = "model"  # of models that need weights: the absolute path of their folder; empty before composing
_QUANTIZE = "quantize"  # of llm-hf: see shoal.kit.generation.engines.quantising
_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]  # files to download from a repository of the hub
_ONNX_ENGINE = "shoal.kit.generation.engines.onnx"  # in the code of a model that runs a decoder
OPENVINO_ENGINE = "shoal.kit.generation.engines.openvino"  # in that of a model that runs weights in OpenVINO's format
_LLMAPI_FILE = "model.yaml"  # of TensorRT-LLM's LLM API
_SMALL = ("*.json", "*.jinja")  # hashed; weights are too large for that at each start


@dataclass(frozen=True)
class Found:
    """Weights of a language model: their absolute ``folder``, their ``revision``, and digests of their small ``files``.

    ``revision`` is the commit on the Hugging Face hub, empty for weights in a local folder. ``export`` has, for weights
    that were exported here, their form and how far they are from what they were made of.
    """

    folder: Path
    revision: str
    files: dict[str, str]
    export: dict[str, Any] = field(default_factory=dict)


def find(weights: str, repository: Path | None = None) -> Found:
    """Find weights in a folder, or download ``OWNER/NAME[@REVISION]`` from the Hugging Face hub.

    A GGUF file is converted to a folder beside the ``repository``, which is called ``REPOSITORY-weights``.

    Raises:
        ArtifactError: the weights are incomplete, damaged or pickled, or are not found.
        InputError: the hub does not answer; or a GGUF file is given, and no repository.
        SetupError: huggingface_hub is not installed, or what reads a GGUF file.
    """
    folder, revision = Path(weights), ""
    if folder.suffix.lower() == GGUF and folder.is_file():
        if repository is None:
            raise InputError(f"{folder} has to be converted first.", f"Compose it: --weights {folder}")
        folder = convert(folder, repository.with_name(f"{repository.name}-weights"))
    if not folder.exists() and weights.count("/") == 1 and not weights.startswith((".", "/")):
        folder = _download(weights)
        revision = folder.name  # the hub's cache names its folders by commit
    folder = find_weights(folder.resolve()).folder
    small = sorted(path for pattern in _SMALL for path in folder.glob(pattern))
    return Found(folder, revision, {path.name: sha256(path) for path in small})


def _download(weights: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ModuleNotFoundError:
        raise SetupError("huggingface_hub is not installed.", "Type: pip install 'shoal[llm]'") from None
    name, _, revision = weights.partition("@")
    check_hub(name)
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=_PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ArtifactError(
            f"The weights {weights} are neither a folder nor on the hub: {reason[:300]}",
            "Check the name and the network; for a gated model, log in: hf auth login. Or download them, and name the"
            " folder.",
        ) from None


def wants(model: ModelConfig) -> bool:
    """Whether a model needs the path of a weights folder: it has the parameter ``model``, without a value."""
    return model.backend in ("python", "vllm") and model.weights == ""


def give(models: Iterable[ModelConfig], found: Found | None) -> list[ModelConfig]:
    """Return the models; each model that needs weights gets the path of the weights folder.

    Raises:
        InputError: there are weights, and no model that takes them.
        ArtifactError: a model needs weights, and ``found`` is None; or a model has its own decoder, with another
            tokenizer than that of the weights; or it runs a decoder, and there is none.
    """
    given, is_taken = [], False
    for model in models:
        decoders = [version for version in list_made(model) if (version / DECODER).is_file()]
        is_taken = is_taken or bool(decoders) or wants(model)
        for own in decoders:
            if found is not None and sha256(own / TOKENIZER) != found.files[TOKENIZER]:
                raise ArtifactError(
                    f"Model {model.name} has a decoder with another {TOKENIZER} than {found.folder}.",
                    f"Name the decoder's own weights: --weights {own}",
                )
        if wants(model):
            if found is None:
                raise ArtifactError(
                    f"Model {model.name} needs the weights of a language model.",
                    "Name them: --weights FOLDER, or --weights OWNER/NAME of the Hugging Face hub.",
                )
            if _ONNX_ENGINE in read_code(model) and not decoders and not (found.folder / DECODER).is_file():
                raise ArtifactError(
                    f"Model {model.name} runs {DECODER}, and {found.folder} has none.",
                    f"Make it: shoal add-model {found.folder} NAME --task generate; then --weights models/NAME/1",
                )
            message = type(model.message)()
            message.CopyFrom(model.message)
            message.parameters[PARAMETER].string_value = str(found.folder)
            model = as_config(message, model.folder)
        given.append(model)
    if found is not None and not is_taken:
        raise InputError(
            f"The weights {found.folder} have no effect: no model has an empty parameter {PARAMETER}.",
            "Leave --weights out.",
        )
    return given


def quantize(models: Iterable[ModelConfig], kind: str) -> list[ModelConfig]:
    """Return the models; each one that can have such weights gets the parameter ``quantize``: ``int8`` or ``int4``.

    Raises:
        InputError: no model has the parameter.
    """
    given, is_taken = [], False
    for model in models:
        on_openvino = OPENVINO_ENGINE in read_code(model)  # whose weights are exported so
        if _QUANTIZE in model.spec.parameters or on_openvino:
            is_taken = True
            message = type(model.message)()
            message.CopyFrom(model.message)
            message.parameters[_QUANTIZE].string_value = kind
            if not on_openvino:
                message.parameters["requires"].string_value = " ".join([*model.requires, "torchao"])
            model = as_config(message, model.folder)
        given.append(model)
    if not is_taken:
        raise InputError(
            f"--quantize {kind} has no effect: none of these models has the parameter {_QUANTIZE}.",
            "Leave it out. An encoder is quantised by shoal tune, llm-vllm by quantization in its engine_args.",
        )
    return given


def write_engine_args(model: ModelConfig, version: Path) -> None:
    """Write the path of the weights folder into the engine arguments of NVIDIA's code, which reads no parameters."""
    path = version / _LLMAPI_FILE
    if path.is_file() and model.weights:
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(r"(?m)^model:.*$", lambda _: f"model: {json.dumps(model.weights)}", text), "utf-8")
    path = version / FILE
    if model.backend == "vllm" and path.is_file() and model.weights:
        arguments = {**read_json(path, "object of vLLM's arguments"), PARAMETER: model.weights}
        path.write_text(json.dumps(arguments, indent=2) + "\n", encoding="utf-8")
