"""Weights of language models, by reference: composing finds their folder, and models get its path as a parameter."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shoal.check.config.engines import FILE
from shoal.component.artifact_files import sha256
from shoal.errors import ArtifactError, SetupError
from shoal.generation.weights import DECODER, TOKENIZER, find_weights
from shoal.repository.config import ModelConfig, as_config

PARAMETER = "model"  # of the models that need weights: the folder's absolute path; empty until it is composed
_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]  # of a hub's repository
_SMALL = ("*.json", "*.jinja")  # hashed; weights are too large for that at each start


@dataclass(frozen=True)
class Found:
    """Weights: their absolute ``folder``, the ``revision`` that the hub gave, and digests of their small files."""

    folder: Path
    revision: str
    files: dict[str, str]


def find(weights: str) -> Found:
    """Return a folder's weights, or those of ``OWNER/NAME[@REVISION]`` on the Hugging Face hub, downloaded.

    Raises:
        ArtifactError: they are incomplete, damaged or pickled, or there are none of this name.
        SetupError: huggingface_hub is not installed.
    """
    folder, revision = Path(weights), ""
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
    """Whether a model has the parameter for a weights folder, and no value for it."""
    return model.backend in ("python", "vllm") and model.spec.parameters.get(PARAMETER) == ""


def give(models: Iterable[ModelConfig], found: Found | None) -> list[ModelConfig]:
    """Return the models, with the folder in those that want one.

    Raises:
        ArtifactError: there is no ``found``, and a model wants one; or a model has a decoder of its own, whose
            tokenizer is another one.
    """
    given = []
    for model in models:
        own = model.folder / "1" / TOKENIZER
        if found is not None and (own.parent / DECODER).is_file() and sha256(own) != found.files[TOKENIZER]:
            raise ArtifactError(
                f"Model {model.name} has a decoder with another {TOKENIZER} than {found.folder}.",
                f"Name its own: --weights {own.parent}",
            )
        if wants(model):
            if found is None:
                raise ArtifactError(
                    f"Model {model.name} needs the weights of a language model.",
                    "Name them: --weights FOLDER, or --weights OWNER/NAME of the Hugging Face hub.",
                )
            message = type(model.message)()
            message.CopyFrom(model.message)
            message.parameters[PARAMETER].string_value = str(found.folder)
            model = as_config(message, model.folder)
        given.append(model)
    return given


def write_engine_args(model: ModelConfig, version: Path) -> None:
    """Write the weights' folder into the engine arguments of the vLLM backend, which reads no parameter."""
    path = version / FILE
    if model.backend == "vllm" and path.is_file() and model.spec.parameters.get(PARAMETER):
        arguments = {**json.loads(path.read_bytes()), PARAMETER: model.spec.parameters[PARAMETER]}
        path.write_text(json.dumps(arguments, indent=2) + "\n", encoding="utf-8")
