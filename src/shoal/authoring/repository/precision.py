"""Precision in which encoders and engines compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.authoring.environment.targets import EMBEDDED
from shoal.authoring.repository.config import ModelConfig
from shoal.authoring.repository.plan import AUTO, INT8, Plan, Precision
from shoal.errors import InputError
from shoal.system.machine import computes_bf16

_ENGINES_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def choose_precision(
    plan: Plan, *, is_imported: bool, has_trunk: Callable[[], bool], gpus: tuple[int, ...] | None = None
) -> Precision:
    """Choose the dtype of a TorchScript encoder: the plan's dtype or, for ``auto``, BF16 where possible, else FP32.

    ``auto`` gives BF16 only on the embedded server, without a GPU, on a processor that computes in BF16.
    ``is_imported`` is True if the file comes from the model folder: for ``auto``, such a model stays in FP32, in which
    it was verified. ``has_trunk`` returns whether the file has a submodule ``trunk``; only that submodule can be
    converted. ``gpus`` are the encoder's GPUs, by default the plan's.

    Raises:
        InputError: the plan asks for another dtype than FP32, and the target's backend is the native one.
    """
    if plan.dtype == INT8:
        raise InputError(
            "The plan file has no INT8 form of every encoder in this repository.", "Tune the repository as a whole."
        )
    if plan.target != EMBEDDED and plan.dtype not in (AUTO, "fp32"):
        raise InputError(
            f"The native backends of {plan.target} run model.pt in the dtype of its file, not in {plan.dtype}.",
            f"Leave the dtype out, or use --target {EMBEDDED}.",
        )
    if plan.dtype != AUTO:
        return Precision(plan.dtype, f"--dtype {plan.dtype}")
    if plan.target != EMBEDDED:
        return Precision("fp32", f"the native backend of {plan.target} runs the file as it is")
    if is_imported:
        return Precision("fp32", "an imported model is served as it was verified; --dtype bf16 converts it")
    if plan.gpus if gpus is None else gpus:
        return Precision("fp32", "it runs on a GPU; --dtype bf16 or fp16 converts it")
    if not computes_bf16():
        return Precision("fp32", "this processor has no BF16 instructions")
    if not has_trunk():
        return Precision("fp32", "its file has no submodule `trunk` that could be converted")
    return Precision("bf16", "this processor computes in BF16; scores differ by up to 0.02 from --dtype fp32")


def write_dtype(message: Any, config: ModelConfig, dtype: str) -> None:
    """Write the dtype, ``fp32``, ``bf16`` or ``fp16``, in which an encoder or an engine computes, into its message."""
    if dtype == INT8:
        return  # its file is another
    if is_dtype_chosen(config):
        message.parameters["dtype"].string_value = _ENGINES_DTYPES[dtype]
    elif dtype != "fp32":
        message.parameters["dtype"].string_value = dtype


def is_dtype_chosen(config: ModelConfig) -> bool:
    """Whether the parameter ``dtype`` of a Python model is one that an engine computes in, by its name in PyTorch."""
    return config.backend == "python" and config.spec.parameters.get("dtype") in (AUTO, *_ENGINES_DTYPES.values())
