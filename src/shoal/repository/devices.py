"""Device placement of a model's tensors, and copies between devices on the edges of a graph."""

from __future__ import annotations

from shoal.component.spec import STRING, TensorSpec
from shoal.repository.config import ModelConfig

ROUND_TRIP, TO_HOST, TO_GPU, TO_OTHER_GPU = "host round trip", "to host", "to GPU", "to another GPU"
HOST, GPU, ENSEMBLE, AUTO = "CPU", "GPU", "ensemble", "auto"


def name_device(config: ModelConfig) -> str:
    """Name the devices of a model's instances: ``CPU``, ``GPU 0, 1``, ``GPU`` (each one), ``ensemble``, or ``auto``.

    ``auto`` is Triton's own choice when it starts. Groups that differ are joined: ``GPU 0 + CPU``.
    """
    if config.is_ensemble:
        return ENSEMBLE
    groups = config.message.instance_group
    names = [_name_gpus(config)] if any(group.kind == group.KIND_GPU for group in groups) else []
    for kind, name in (("KIND_CPU", HOST), ("KIND_AUTO", AUTO), ("KIND_MODEL", "by model")):
        names += [name] if any(group.kind == getattr(group, kind) for group in groups) else []
    return " + ".join(names) or AUTO


def _name_gpus(config: ModelConfig) -> str:
    listed = _gpus(config)
    return f"{GPU} {', '.join(map(str, sorted(listed)))}" if listed else GPU


def _gpus(config: ModelConfig) -> set[int]:
    """Return the GPUs that a model is pinned to; none where a group of its instances is on each."""
    groups = [group for group in config.message.instance_group if group.kind == group.KIND_GPU]
    return set() if any(not group.gpus for group in groups) else {int(gpu) for group in groups for gpu in group.gpus}


def is_on_gpu(config: ModelConfig) -> bool:
    """Whether every instance is on a GPU, as far as the configuration alone shows."""
    groups = config.message.instance_group
    return not config.is_ensemble and bool(groups) and all(group.kind == group.KIND_GPU for group in groups)


def is_on_host(config: ModelConfig) -> bool:
    """Whether every instance is on the CPU, as far as the configuration alone shows."""
    return name_device(config) == HOST


def gets_host_copies(config: ModelConfig) -> bool:
    """Whether Triton gives the model its inputs on the host, wherever they are.

    It is the Python backend's default, and that of the backends written in Python (python_be.cc:
    ``FORCE_CPU_ONLY_INPUT_TENSORS``).
    """
    is_python = config.backend == "python" or config.message.runtime.endswith(".py")
    return is_python and config.spec.parameters.get("FORCE_CPU_ONLY_INPUT_TENSORS", "yes") != "no"


def find_crossing(source: ModelConfig | None, target: ModelConfig | None, tensor: TensorSpec) -> str:
    """Name the device copy of a tensor between two models; None is the request or the answer, which are on the host.

    Texts never leave the host. The result is empty where a configuration leaves the device open, and from one of
    several GPUs to one of the same.
    """
    if tensor.dtype == STRING:
        return ""
    comes_from_gpu = source is not None and is_on_gpu(source)
    comes_from_host = source is None or is_on_host(source)
    goes_to_gpu = target is not None and is_on_gpu(target)
    goes_to_host = target is None or is_on_host(target)
    if comes_from_gpu and goes_to_gpu and source is not None and target is not None:
        if gets_host_copies(target):
            return ROUND_TRIP
        first, then = _gpus(source), _gpus(target)
        return TO_OTHER_GPU if first and then and not first & then else ""
    if comes_from_gpu and goes_to_host:
        return TO_HOST
    return TO_GPU if comes_from_host and goes_to_gpu else ""
