"""Devices that models can compute on, and those that placed models take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from shoal.authoring.environment.targets import EMBEDDED
from shoal.authoring.repository.config import ModelConfig
from shoal.authoring.repository.model_code import find_constants, find_library, is_component, read_code
from shoal.authoring.repository.plan import Plan
from shoal.kit.component.spec import ENGINE_LIBRARY, HOST_LIBRARY
from shoal.system.files import parse_json, read_json

PARALLEL_SIZES = tuple(f"{kind}_parallel_size" for kind in ("tensor", "pipeline", "data"))  # arguments of vLLM
PYTHON_BASED_BACKENDS = ("fil", "onnxruntime", "openvino", "pytorch")  # the backends in shoal.kit.backends
_MAX_GPUS = 1024  # of an instance


def find_host_reason(config: ModelConfig, target: str) -> str:
    """Return the reason, as a clause, why a model computes on the host only; empty if it can compute on a GPU."""
    if config.backend == "python":
        return "its code computes on the host only" if find_library(read_code(config)) == HOST_LIBRARY else ""
    names = {"onnxruntime": "ONNX", "openvino": "OpenVINO"}
    name = names.get(config.backend or config.platform.removesuffix("_onnx"), "")
    return f"shoal's own {name} backend computes on the host only" if name and target == EMBEDDED else ""


def is_in_client(config: ModelConfig) -> bool:
    """Whether a model runs in the client with placement ``hybrid``: Python code, but not an engine."""
    return config.backend == "python" and find_library(read_code(config)) != ENGINE_LIBRARY


def is_single(config: ModelConfig) -> bool:
    """Whether a model is not repeated on each GPU of a plan: an engine, or a component with state."""
    code = read_code(config)
    return (
        config.backend == "vllm"
        or find_library(code) == ENGINE_LIBRARY
        or (config.spec.is_decoupled and "slots" in config.spec.parameters)
        or (is_component(code) and True in find_constants(code, "is_stateful"))
    )


def count_devices(config: ModelConfig) -> int:
    """Return the number of GPUs that each instance of a model on vLLM takes, by its engine arguments; 1 for others."""
    try:
        if config.backend == "vllm":
            arguments = read_json(config.folder / "1" / "model.json")
        else:
            arguments = parse_json(config.spec.parameters.get("engine_args") or "{}")
    except (OSError, ValueError):  # the rules for engine arguments report it
        return 1
    return count_parallel(arguments) if isinstance(arguments, dict) else 1


def count_parallel(arguments: Mapping[str, Any]) -> int:
    """Return the number of GPUs that an engine with these arguments of vLLM takes, as far as they are valid."""
    sizes = [arguments.get(name) for name in PARALLEL_SIZES]
    return min(prod(size for size in sizes if type(size) is int and size > 0), _MAX_GPUS)


def gpus_of(config: ModelConfig) -> tuple[int, ...]:
    """Return the GPUs that a model's instance groups name, with those that an engine takes beside them.

    A group on every GPU counts as one on GPU 0; KIND_MODEL, which leaves the choice to the backend, as none.
    """
    groups = [group for group in config.message.instance_group if group.kind == group.KIND_GPU]
    firsts = {int(gpu) for group in groups for gpu in group.gpus or (0,)}
    return tuple(sorted({first + more for first in firsts for more in range(count_devices(config))}))


def find_gpus(models: Iterable[ModelConfig], plan: Plan) -> tuple[int, ...]:
    """Return the GPUs that placed models compute on."""
    models = list(models)
    groups = [group for model in models for group in model.message.instance_group]
    chosen = plan.gpus or () if any(group.kind == group.KIND_MODEL for group in groups) else ()
    return tuple(sorted({*chosen, *(gpu for model in models for gpu in gpus_of(model))}))


def show_groups(message: Any) -> str:
    """Return a model's instance groups in one line, such as ``2 on GPU 1, 1 on the host``."""
    shown = []
    for group in message.instance_group:
        known = {group.KIND_CPU: "the host", group.KIND_MODEL: "devices that its backend chooses"}
        where = known.get(group.kind, "a device that Triton chooses")
        if group.gpus or group.kind == group.KIND_GPU:
            where = f"GPU {' and '.join(map(str, group.gpus))}" if group.gpus else "every GPU"
        shown.append(f"{max(1, group.count)} on {where}")
    return ", ".join(shown) or "none"
