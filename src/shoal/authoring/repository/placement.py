"""Placement of models on CPU and GPUs, configurations for a target server, and tuning of single models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from math import prod
from typing import Any

from shoal.authoring.environment.targets import EMBEDDED, parse_release
from shoal.authoring.repository.config import ModelConfig, as_config
from shoal.authoring.repository.model_code import find_constants, find_library, is_component, read_code
from shoal.authoring.repository.parameters import HOST_INPUTS
from shoal.errors import InputError, suggest
from shoal.kit.component.spec import ENGINE_LIBRARY, HOST_LIBRARY
from shoal.system.files import parse_json, read_json
from shoal.system.machine import computes_bf16

CPU, HYBRID, GPU = PLACEMENTS = ("cpu", "hybrid", "gpu")
AUTO = "auto"
INT8 = "int8"
DTYPES = (AUTO, "fp32", "bf16", "fp16", INT8)
PARALLEL_SIZES = tuple(f"{kind}_parallel_size" for kind in ("tensor", "pipeline", "data"))  # arguments of vLLM
_ENGINES_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
PYTHON_BASED_BACKENDS = ("fil", "onnxruntime", "openvino", "pytorch")  # the backends in shoal.kit.backends
_MAX_GPUS = 1024  # of an instance


@dataclass(frozen=True)
class Plan:
    """Settings for a whole repository: placement, target server, dtype, GPUs and concurrency.

    ``placement`` is ``gpu`` (every model that can runs on a GPU), ``hybrid`` (so do the models, and pre- and
    post-processing run in the client) or ``cpu``. It replaces the models' own instance groups. If it is empty,
    ``is_placed`` is False: models keep their own groups, and those without one run on the host. ``gpus`` are the
    indices of the GPUs to use. Each model has its instances, by default one, on each of them; an engine or a stateful
    component has them on the first one only. None means GPU 0; with an empty tuple, ``hybrid`` keeps its models on the
    host. ``target`` is ``embedded`` (Triton 24.10 of the PyPI wheel, with shoal's python-based backends) or a release
    of NVIDIA's container such as ``26.06`` (with its native backends). ``dtype`` is the dtype in which encoders
    compute; for ``auto`` see ``choose_precision``. ``concurrency`` is the number of requests in flight that memory is
    sized for.
    """

    placement: str = ""
    target: str = EMBEDDED
    dtype: str = AUTO
    gpus: tuple[int, ...] | None = None
    concurrency: int = 16
    is_placed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_placed", bool(self.placement))
        object.__setattr__(self, "placement", self.placement or CPU)
        for name, value, known in (("placement", self.placement, PLACEMENTS), ("dtype", self.dtype, DTYPES)):
            if value not in known:
                raise InputError(f"Unknown {name} {value!r}.", f"Known: {', '.join(known)}.")
        parse_release(self.target)
        if self.concurrency < 1:
            raise InputError(f"The concurrency is {self.concurrency}; it must be at least 1.")
        if self.gpus is None:
            object.__setattr__(self, "gpus", () if self.placement == CPU else (0,))
        self._check_gpus(self.gpus or ())

    def _check_gpus(self, gpus: tuple[int, ...]) -> None:
        if len(set(gpus)) != len(gpus) or any(gpu < 0 for gpu in gpus):
            raise InputError(f"GPUs {list(gpus)} are not different indices from 0 up.", "For example: --gpu 0,1")
        if gpus and self.placement == CPU:
            raise InputError("Placement cpu uses no GPU.", "Leave --gpu out, or say --placement gpu.")
        if not gpus and self.placement == GPU:
            raise InputError("Placement gpu needs a GPU.", "Name one, --gpu 0, or say --placement cpu.")


@dataclass(frozen=True)
class Precision:
    """Dtype in which an encoder computes, and the reason for it."""

    dtype: str
    reason: str


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


def place(config: ModelConfig, plan: Plan, *, tuning: Tuning | None = None, why_host: str = "") -> Any:
    """Make the configuration message of one model under ``plan``; the model folder's configuration is not changed.

    ``tuning`` are the model's settings; those of batches are applied by ``tune``. ``why_host`` is the reason why the
    model computes on the host only, if its artifacts give one; other reasons are found here.

    Configurations for different targets differ only for models of python-based backends, in ``runtime`` and
    ``allow_ragged_batch``. shoal's backend pads requests of different widths to one batch, and the native backend does
    not. A model without an attention mask could not tell padding from data, so that its answer would depend on the
    other requests in the batch: for such a model, ``allow_ragged_batch`` is not changed.

    Raises:
        InputError: the plan or ``tuning`` places the model where it cannot compute.
    """
    message = type(config.message)()
    message.CopyFrom(config.message)
    if config.is_ensemble:
        return message
    _place_groups(message, config, plan, tuning or Tuning(), why_host or find_host_reason(config, plan.target))
    if plan.target == EMBEDDED and config.backend in PYTHON_BASED_BACKENDS:
        message.runtime = "model.py"
        for tensor in message.input if config.mask else ():
            tensor.allow_ragged_batch = tensor.allow_ragged_batch or -1 in tensor.dims
    is_ours = config.backend in PYTHON_BASED_BACKENDS or is_component(read_code(config))
    if is_ours and HOST_INPUTS not in message.parameters:  # otherwise Triton would copy their inputs to the host
        message.parameters[HOST_INPUTS].string_value = "no"
    if config.backend == "pytorch" and plan.dtype not in (AUTO, "fp32"):
        message.parameters["dtype"].string_value = plan.dtype
    return message


def write_dtype(message: Any, config: ModelConfig, dtype: str) -> None:
    """Write the dtype, ``fp32``, ``bf16`` or ``fp16``, in which an encoder or an engine computes, into its message."""
    if dtype == INT8:
        return  # its file is another
    if is_dtype_chosen(config):
        message.parameters["dtype"].string_value = _ENGINES_DTYPES[dtype]
    elif dtype != "fp32":
        message.parameters["dtype"].string_value = dtype


def place_all(
    models: Iterable[ModelConfig],
    plan: Plan,
    tuning: Mapping[str, Tuning] | None = None,
    why_host: Mapping[str, str] | None = None,
) -> list[ModelConfig]:
    """Return the models, placed as by ``place``; ``tuning`` and ``why_host`` are by model name.

    Raises:
        InputError: as in ``place``; or the plan has GPUs, and no model computes on any.
    """
    models, reasons = list(models), dict(why_host or {})
    placed = []
    for model in models:
        reasons[model.name] = reasons.get(model.name) or find_host_reason(model, plan.target)
        message = place(model, plan, tuning=(tuning or {}).get(model.name), why_host=reasons[model.name])
        placed.append(as_config(message, model.folder))
    if plan.gpus and not find_gpus(placed, plan):
        named = [model.name for model in models if not model.is_ensemble]
        shown = "; ".join(f"{name}: {reasons[name] or 'placed there'}" for name in named)
        other = "--gpu none" if plan.placement == HYBRID else "--placement cpu"
        raise InputError(
            f"Placement {plan.placement}: none of the models computes on a GPU ({shown}).",
            f"Say {other}, or exchange a model for one that can (--swap).",
        )
    return placed


def find_host_reason(config: ModelConfig, target: str) -> str:
    """Return the reason, as a clause, why a model computes on the host only; empty if it can compute on a GPU."""
    if config.backend == "python":
        return "its code computes on the host only" if find_library(read_code(config)) == HOST_LIBRARY else ""
    names = {"onnxruntime": "ONNX", "openvino": "OpenVINO"}
    name = names.get(config.backend or config.platform.removesuffix("_onnx"), "")
    return f"shoal's own {name} backend computes on the host only" if name and target == EMBEDDED else ""


def _place_groups(message: Any, config: ModelConfig, plan: Plan, tuning: Tuning, why_host: str) -> None:
    groups = message.instance_group
    first = groups[0] if groups else groups.add()
    if tuning.instances:
        given = [type(first)() for _ in tuning.instances]
        for group, wanted in zip(given, tuning.instances, strict=True):
            if wanted.count < 1:
                raise InputError(f"{config.name} is to have {wanted.count} instances; it needs at least 1.")
            group.CopyFrom(first)
            group.name, group.count = "", wanted.count
        del groups[:]
        groups.extend(given)
    if tuning.gpus is not None:
        _check_place(config, plan, tuning, why_host)
        del groups[1:]
        _put(groups[0], tuning.gpus)
        return
    gpus = _choose_gpus(config, plan, why_host)
    for wanted in tuning.instances:
        _check_instances(config, wanted, plan, gpus, why_host)
    for group, listed in zip_longest(groups, [wanted.gpus for wanted in tuning.instances]):
        is_open = group.kind == group.KIND_AUTO and not group.gpus
        if listed:
            _put(group, listed)
        elif group.kind == group.KIND_MODEL:  # its backend chooses the devices, from the first GPU on
            if config.backend == "vllm" and plan.is_placed and gpus and gpus[0]:
                _put(group, gpus)
        elif plan.is_placed or is_open:
            _put(group, gpus)


def _put(group: Any, gpus: Iterable[int]) -> None:
    group.gpus[:] = gpus
    group.kind = group.KIND_GPU if group.gpus else group.KIND_CPU


def is_in_client(config: ModelConfig) -> bool:
    """Whether a model runs in the client with placement ``hybrid``: Python code, but not an engine."""
    return config.backend == "python" and find_library(read_code(config)) != ENGINE_LIBRARY


def _choose_gpus(config: ModelConfig, plan: Plan, why_host: str) -> tuple[int, ...]:
    """Return the GPUs on which ``plan`` puts instances of a model; empty for the host."""
    gpus = plan.gpus or ()
    if why_host or not gpus or (plan.placement == HYBRID and is_in_client(config)):
        return ()
    if not is_single(config):
        return gpus
    width = count_devices(config)
    first = gpus[0] if config.backend != "vllm" or width == 1 else 0
    if gpus[:width] != (wanted := tuple(range(first, first + width))):
        raise InputError(
            f"{config.name} computes on {width} GPUs at once (tensor_parallel_size), {', '.join(map(str, wanted))},"
            f" and the plan has {', '.join(map(str, gpus))}.",
            f"Say --gpu {','.join(map(str, wanted))}",
        )
    return gpus[:1]


# --- devices of placed models ----------------------------------------------------------------------------------------


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


def is_dtype_chosen(config: ModelConfig) -> bool:
    """Whether the parameter ``dtype`` of a Python model is one that an engine computes in, by its name in PyTorch."""
    return config.backend == "python" and config.spec.parameters.get("dtype") in (AUTO, *_ENGINES_DTYPES.values())


# --- instances and dynamic batching of single models -----------------------------------------------------------------


@dataclass(frozen=True)
class Instances:
    """``count`` instances of a model on each of ``gpus``; if that is empty, on each GPU of the plan or on the host."""

    count: int
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class Tuning:
    """Settings of one model; a setting that is left out stays as in the model's folder.

    ``instances`` are groups of instances. ``gpus`` places the model, whatever the plan says: one group of instances on
    each of these GPUs, or on the host if it is empty. With dynamic batching, Triton runs a batch of one of the
    ``preferred_batch_sizes`` (in rows) at once, and waits up to ``queue_delay`` microseconds for such a batch.
    """

    instances: tuple[Instances, ...] = ()
    gpus: tuple[int, ...] | None = None
    preferred_batch_sizes: tuple[int, ...] = ()
    queue_delay: int | None = None


def tune(models: Iterable[ModelConfig], tuning: Mapping[str, Tuning]) -> list[ModelConfig]:
    """Return the models with the batches that ``tuning`` has for their names; ``place`` does the rest of it.

    Raises:
        InputError: there is no model of a name, it is an ensemble, or it has no batches.
    """
    tuned = {model.name: model for model in models}
    for name, wanted in tuning.items():
        if name not in tuned:
            raise InputError(f"There is no model {name} in this repository.", suggest(name, sorted(tuned)))
        tuned[name] = _tune(tuned[name], wanted)
    return list(tuned.values())


def _tune(model: ModelConfig, wanted: Tuning) -> ModelConfig:
    if model.is_ensemble:
        raise InputError(
            f"{model.name} is an ensemble: it has neither instances nor batches.", "Name one of its steps."
        )
    message = type(model.message)()
    message.CopyFrom(model.message)
    if wanted.preferred_batch_sizes or wanted.queue_delay is not None:
        if "slots" in message.parameters:
            raise InputError(
                f"{model.name} is an engine, which makes its own batches of the requests that it has.",
                "Set its parameter slots, the number of requests that are computed at once.",
            )
        if message.max_batch_size < 2:
            raise InputError(
                f"{model.name} gets each request alone (max_batch_size: {message.max_batch_size}): there are no batches"
                " to tune.",
                "Increase max_batch_size in its config.pbtxt.",
            )
        batching = message.dynamic_batching
        if wanted.preferred_batch_sizes:
            batching.preferred_batch_size[:] = wanted.preferred_batch_sizes
        if wanted.queue_delay is not None:
            batching.max_queue_delay_microseconds = wanted.queue_delay
    return as_config(message, model.folder)


def _check_instances(model: ModelConfig, group: Instances, plan: Plan, gpus: tuple[int, ...], why_host: str) -> None:
    """Check instances against the GPUs on which the plan puts the model."""
    if group.gpus and not gpus:
        why, other = (f" ({why_host})", "") if why_host else ("", ", or say --placement gpu")
        raise InputError(
            f"{model.name} runs on the host{why} with placement {plan.placement}, and GPU {group.gpus[0]} is listed for"
            " it.",
            f"Leave the GPUs out (--instances {model.name}={group.count}){other}.",
        )
    for gpu in set(group.gpus) - set(plan.gpus or ()):  # memory is sized only for the GPUs of the plan
        listed = ",".join(map(str, sorted({*(plan.gpus or ()), *group.gpus})))
        raise InputError(f"GPU {gpu} is listed for {model.name}, and is not a GPU of the plan.", f"Say --gpu {listed}")


def _check_place(model: ModelConfig, plan: Plan, tuning: Tuning, why_host: str) -> None:
    gpus = tuning.gpus or ()
    if len(tuning.instances) > 1 or any(group.gpus for group in tuning.instances):
        raise InputError(
            f"{model.name} is placed by --place and by --instances.",
            f"Give one of the two, or only a number: --instances {model.name}=2",
        )
    if plan.placement == HYBRID and is_in_client(model):
        why_host = why_host or "with placement hybrid it runs in the client"
    if gpus and why_host:
        raise InputError(
            f"{model.name} cannot be placed on GPU {gpus[0]}: {why_host}.", f"Say --place {model.name}=cpu."
        )
    if len(set(gpus)) != len(gpus):
        raise InputError(f"--place lists a GPU twice for {model.name}.", f"For example: --place {model.name}=gpu:0")
