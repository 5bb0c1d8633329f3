"""Plan files of ``shoal tune``: the precision it chose for a repository's encoders, and the encoders it quantised.

``FILE`` is JSON; the quantised encoder of model M is ``M/1/model.onnx`` beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.authoring.composition.artifacts import find_scripts
from shoal.authoring.environment.targets import EMBEDDED
from shoal.authoring.repository.config import ModelConfig, as_config
from shoal.authoring.repository.plan import AUTO, INT8, Plan, Precision
from shoal.authoring.repository.versions import list_made
from shoal.errors import ArtifactError, InputError
from shoal.kit.component.files import read_json, refusal, sha256
from shoal.kit.encoders.quantize import FILE, INT8_FLAGS, read_record
from shoal.system.machine import computes_bf16, describe_machine

MOST_ERROR = 0.003  # added to FP32's RMSE
_KIND = "plan of `shoal tune`"
_TORCH = ("dtype", "INTRA_OP_THREAD_COUNT")  # parameters of the backend that is replaced


@dataclass(frozen=True)
class Tuned:
    """Plan file at ``path``: the ``dtype`` that was chosen, with the ``reason``, on the processor ``cpu``.

    ``models`` are the SHA-256 of the encoders' TorchScript files, by model name.
    """

    path: Path
    dtype: str
    reason: str
    cpu: str
    models: dict[str, str]


def read_tuned(path: Path) -> Tuned:
    """Read a plan file.

    Raises:
        ArtifactError: it is missing, or not a plan file.
    """
    found = read_json(path, _KIND)
    try:
        machine, models = found["machine"]["cpu"], dict(found["models"])
        texts = [found["dtype"], found["reason"], machine, *models, *models.values()]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError
    except (KeyError, TypeError, ValueError):
        raise refusal(path, _KIND, "it lacks the choice, the machine or the models") from None
    return Tuned(path.resolve(), found["dtype"], found["reason"], machine, models)


def decide(
    models: Sequence[ModelConfig], artifacts: Path | None, plan: Plan, tuned: Tuned | None
) -> tuple[Plan, list[str]]:
    """Return the plan with the precision that a plan file decides, and notes.

    The precision is the plan's ``dtype``, or for ``auto`` the one in ``tuned``.

    Raises:
        InputError: INT8 is asked for without ``tuned``, or ``tuned`` is for other models.
    """
    if tuned is None:
        if plan.dtype == INT8:
            takes_weights = any("model" in model.spec.parameters for model in models)  # of a language model
            raise InputError(
                "INT8 needs an encoder that was quantised, and no plan file is given.",
                "A language model's weights are quantised by another option: --quantize int8"
                if takes_weights
                else "Make one: shoal tune REPOSITORY --data FILE; then add --tuned build/tuned/tuned.json",
            )
        return plan, []
    scripts = {model.name: found for model in models if (found := find_scripts(model, artifacts))}
    for name, digest in tuned.models.items():
        if [sha256(path) for path in scripts.get(name, ())] != [digest]:
            raise InputError(
                f"{tuned.path} was made for another encoder than this {name}.", "Tune again: shoal tune REPOSITORY"
            )
    notes = []
    machine = describe_machine()
    if tuned.cpu != machine["cpu"]:
        notes.append(
            f"The precision was chosen on another processor ({tuned.cpu}); this one is {machine['cpu']}. To choose it"
            " here: shoal tune"
        )
    dtype = tuned.dtype if plan.dtype == AUTO else plan.dtype
    if plan.dtype == AUTO and dtype == "bf16" and plan.target != EMBEDDED:
        notes.append(f"The plan has bf16; the native backend of {plan.target} runs model.pt in the dtype of its file.")
        return plan, notes
    if dtype == INT8 and set(INT8_FLAGS).isdisjoint(machine["flags"].split()):
        notes.append(f"This processor has no INT8 instructions ({', '.join(INT8_FLAGS)}): fp32 is likely as fast.")
    chosen = Precision(dtype, tuned.reason if plan.dtype == AUTO else f"--dtype {dtype}")
    decided = {name: replace(plan.tuning_of(name), precision=chosen) for name in tuned.models}
    return replace(plan, dtype=dtype, tuning={**plan.tuning, **decided}), notes


def take_quantised(
    models: Sequence[ModelConfig], plan: Plan, tuned: Tuned | None, *, accepts_error: bool
) -> list[ModelConfig]:
    """Return the models; for INT8, each in ``tuned`` has the backend ``openvino`` and its quantised encoder's folder.

    Raises:
        InputError: the error that was measured is too large or unknown, and ``accepts_error`` is false.
        ArtifactError: a quantised encoder is missing, has no record, or was made from another encoder.
    """
    made = []
    for model in models:
        if tuned is not None and plan.dtype == INT8 and model.name in tuned.models:
            folder = tuned.path.parent / model.name
            _check_error(folder / "1" / FILE, tuned.models[model.name], accepts_error=accepts_error)
            model = quantized(model, folder)
        made.append(model)
    return made


def _check_error(path: Path, parent: str, *, accepts_error: bool) -> None:
    record = read_record(path)
    if record.parent != parent:
        raise ArtifactError(f"{path} was quantised from another encoder.", "Tune again: shoal tune REPOSITORY")
    if not accepts_error and (record.error is None or not record.error <= MOST_ERROR):
        known = "unknown" if record.error is None else f"{record.error:+.4f}, and at most {MOST_ERROR} is allowed"
        raise InputError(
            f"What INT8 adds to the RMSE of {path} is {known}.",
            "Use --dtype bf16 or fp32, tune with labelled texts, or add --accept-error.",
        )


def quantized(model: ModelConfig, folder: Path) -> ModelConfig:
    """Return the configuration of an encoder whose quantised form is in ``folder``, for the backend ``openvino``.

    Raises:
        InputError: the model has other versions than 1.
    """
    if [path.name for path in list_made(model)] != ["1"]:
        raise InputError(f"{model.name} has other versions than 1; only that one can be quantised.")
    message: Any = type(model.message)()
    message.CopyFrom(model.message)
    message.backend, message.platform, message.default_model_filename = "openvino", "", FILE
    for name in _TORCH:
        message.parameters.pop(name, None)
    if "artifacts" in message.parameters:
        message.parameters["artifacts"].string_value = FILE
    if computes_bf16():
        message.parameters["HINT_BF16"].string_value = "YES"
    return as_config(message, folder)
