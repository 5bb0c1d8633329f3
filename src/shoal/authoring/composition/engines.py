"""Choose the engine of a language model: the model folder that is exchanged for ``llm-hf``, and its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from shoal.authoring.composition.openvino_weights import is_wanted, make_openvino
from shoal.authoring.composition.transforms import Models, gather
from shoal.authoring.composition.weights import Found
from shoal.authoring.environment.targets import EMBEDDED
from shoal.authoring.repository.config import ModelConfig
from shoal.authoring.repository.plan import AUTO, Plan
from shoal.errors import InputError, ShoalError
from shoal.kit.generation.weights import DECODER, NONE, OPENVINO

HF, _OPENVINO, _ONNX = "hf", "openvino", "onnx"
ENGINES = (AUTO, HF, _OPENVINO, "vllm", _ONNX)
_DEFAULT = "llm-hf"  # in the pipelines that are shipped


@dataclass(frozen=True)
class Chosen:
    """Models with their engine, the weights and the form ``quantize`` that the engine itself gives them."""

    models: Models
    swap: Mapping[str, str]
    weights: Found | None
    quantize: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wanted:
    """Arguments of ``compose`` that decide the engine; ``repository`` is where it is written."""

    names: Sequence[str]
    folders: Mapping[str, ModelConfig]
    swap: Mapping[str, str]
    weights: Found | None
    quantize: str
    repository: Path

    def choose(self, engine: str, plan: Plan, *, has_environments: bool = False) -> Chosen:
        """Return the models with ``engine``: one of ``ENGINES``, or as ``swap`` says if it is empty.

        ``auto`` takes weights in OpenVINO's format or in ONNX as they are. Others get OpenVINO if all its models run on
        the host and it is installed, knows their family and computes what transformers does; if not, transformers.

        Raises:
            InputError: the engine is unknown or exchanged by ``swap``, or nothing uses one; see also ``make_openvino``.
        """
        if not engine:
            return self._take()
        if engine not in ENGINES:
            raise InputError(f"Unknown engine {engine!r}.", f"Known: {', '.join(ENGINES)}.")
        if _DEFAULT in self.swap:
            given = f"--swap {_DEFAULT}={self.swap[_DEFAULT]}"
            raise InputError(f"--engine {engine} and {given} both name the engine.", "Give one of them.")
        if _DEFAULT not in {model.name for model in gather(self.names, self.folders, self.swap)}:
            raise InputError(f"--engine {engine} has no effect: no model uses {_DEFAULT}.", "Leave it out.")
        if engine != AUTO:
            return self._with(engine)
        folder = self.weights.folder if self.weights else Path()
        if (folder / DECODER).is_file() or (folder / OPENVINO).is_file():
            return self._with(_ONNX if (folder / DECODER).is_file() else _OPENVINO)
        reason = _find_reason(plan, has_environments)
        if not reason and self.weights:
            try:
                return self._with(_OPENVINO, "it is installed, and computes what transformers does")
            except ShoalError as error:
                reason = error.what
        return self._with(HF, reason)

    def _with(self, engine: str, why: str = "") -> Chosen:
        name = f"llm-{engine}"
        swap = dict(self.swap) if name == _DEFAULT else {**self.swap, _DEFAULT: name}
        chosen = replace(self, swap=swap)._take()
        return replace(chosen, notes=(f"The engine is {name}: {why}",)) if why else chosen

    def _take(self) -> Chosen:
        models, found, quantize = gather(self.names, self.folders, self.swap), self.weights, self.quantize
        if found is not None and is_wanted(models):
            folder = self.repository.with_name(f"{self.repository.name}-openvino")
            found, quantize = make_openvino(found, folder, quantize or NONE), ""
        return Chosen(models, self.swap, found, quantize)


def _find_reason(plan: Plan, has_environments: bool) -> str:
    """Why a repository does not get OpenVINO where it is free to choose; empty if it may."""
    if plan.target != EMBEDDED:
        return f"the server of {plan.target} has no OpenVINO GenAI."
    if plan.gpus or plan.tuning_of(_DEFAULT).gpus:
        return "it computes on a GPU."
    if has_environments:
        return "--env names the environment. Say --engine openvino if it has OpenVINO GenAI."
    return "" if find_spec("openvino_genai") else "OpenVINO is not installed: pip install 'shoal[openvino]'."
