"""Where a repository's models run, and for which server its configurations are written."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from shoal.errors import InputError
from shoal.repository.pbtxt import ModelConfig

PLACEMENTS = ("cpu",)
DTYPES = ("fp32", "bf16")
EMBEDDED = "embedded"
PYTHON_BASED_BACKENDS = ("fil", "pytorch")  # those of shoal.serving.backends


@dataclass(frozen=True)
class Plan:
    """One switch for a whole repository.

    ``target`` is ``embedded`` (Triton 24.10 of the PyPI wheel, with shoal's python-based backends) or a release of
    NVIDIA's container such as ``26.06`` (with its native backends). ``dtype`` is the encoder's.
    """

    placement: str = "cpu"
    target: str = EMBEDDED
    dtype: str = "fp32"

    def __post_init__(self) -> None:
        for name, value, known in (("placement", self.placement, PLACEMENTS), ("dtype", self.dtype, DTYPES)):
            if value not in known:
                raise InputError(f"There is no {name} {value!r}.", f"Known: {', '.join(known)}.")
        if self.target != EMBEDDED and not re.fullmatch(r"\d\d\.\d\d", self.target):
            raise InputError(f"There is no target {self.target!r}.", f"Known: {EMBEDDED}, or a release such as 26.06.")
        if self.target != EMBEDDED and self.dtype != "fp32":
            raise InputError(
                f"The native backends of {self.target} run model.pt in the dtype of its file, not in {self.dtype}.",
                f"Leave the dtype out, or use --target {EMBEDDED}.",
            )


def place(config: ModelConfig, plan: Plan) -> Any:
    """The configuration message of one model under ``plan``; the leaf's own is left alone.

    Between two targets only lines of the python-based backends differ: ``runtime``, and ``allow_ragged_batch``, since
    shoal's backend pads requests of different widths to one batch, which the native one does not.
    """
    message = type(config.message)()
    message.CopyFrom(config.message)
    if config.is_ensemble:
        return message
    for group in message.instance_group or [message.instance_group.add()]:
        group.kind = group.KIND_CPU
        group.ClearField("gpus")
    if plan.target == EMBEDDED and config.backend in PYTHON_BASED_BACKENDS:
        message.runtime = "model.py"
        for tensor in message.input:
            tensor.allow_ragged_batch = -1 in tensor.dims
    if config.backend == "pytorch" and plan.dtype != "fp32":
        message.parameters["dtype"].string_value = plan.dtype
    return message
