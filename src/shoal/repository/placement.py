"""Placement of models on CPU and GPUs, configurations for a target server, and tuning of single models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.environment.targets import EMBEDDED, parse_release
from shoal.errors import InputError, suggest
from shoal.machine import computes_bf16
from shoal.repository.config import ModelConfig, as_config

CPU, HYBRID, GPU = PLACEMENTS = ("cpu", "hybrid", "gpu")
AUTO = "auto"
DTYPES = (AUTO, "fp32", "bf16", "fp16")
_ENGINES_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
PYTHON_BASED_BACKENDS = ("fil", "onnxruntime", "pytorch")  # the backends in shoal.server.backends


@dataclass(frozen=True)
class Plan:
    """Settings for a whole repository: placement, target server, dtype, GPUs and concurrency.

    ``placement`` is ``gpu`` (every model runs on a GPU), ``hybrid`` (the models run on a GPU, pre- and post-processing
    in the client) or ``cpu``. ``gpus`` are the indices of the GPUs to use. Each model has its instances, by default
    one, on each of them. None means GPU 0; with an empty tuple, ``hybrid`` keeps its models on the host. ``target`` is
    ``embedded`` (Triton 24.10 of the PyPI wheel, with shoal's python-based backends) or a release of NVIDIA's container
    such as ``26.06`` (with its native backends). ``dtype`` is the dtype in which encoders compute; for ``auto`` see
    ``choose_precision``. ``concurrency`` is the number of requests in flight that memory is sized for.
    """

    placement: str = CPU
    target: str = EMBEDDED
    dtype: str = AUTO
    gpus: tuple[int, ...] | None = None
    concurrency: int = 16

    def __post_init__(self) -> None:
        for name, value, known in (("placement", self.placement, PLACEMENTS), ("dtype", self.dtype, DTYPES)):
            if value not in known:
                raise InputError(f"Unknown {name} {value!r}.", f"Known: {', '.join(known)}.")
        parse_release(self.target)
        if self.target != EMBEDDED and self.dtype not in (AUTO, "fp32"):
            raise InputError(
                f"The native backends of {self.target} run model.pt in the dtype of its file, not in {self.dtype}.",
                f"Leave the dtype out, or use --target {EMBEDDED}.",
            )
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

    def gpus_of(self, config: ModelConfig) -> tuple[int, ...]:
        """Return the GPUs that a model has instances on; empty if it runs on the host or is an ensemble."""
        is_elsewhere = config.is_ensemble or (self.placement == HYBRID and config.backend == "python")
        return () if is_elsewhere else self.gpus or ()


@dataclass(frozen=True)
class Precision:
    """Dtype in which an encoder computes, and the reason for it."""

    dtype: str
    reason: str


def choose_precision(plan: Plan, *, is_imported: bool, has_trunk: Callable[[], bool]) -> Precision:
    """Choose the dtype of a TorchScript encoder: the plan's dtype or, for ``auto``, BF16 where possible, else FP32.

    ``auto`` gives BF16 only on the embedded server, without a GPU, on a processor that computes in BF16.
    ``is_imported`` is True if the file comes from the model folder: for ``auto``, such a model stays in FP32, in which
    it was verified. ``has_trunk`` returns whether the file has a submodule ``trunk``; only that submodule can be
    converted.
    """
    if plan.dtype != AUTO:
        return Precision(plan.dtype, f"--dtype {plan.dtype}")
    if plan.target != EMBEDDED:
        return Precision("fp32", f"the native backend of {plan.target} runs the file as it is")
    if is_imported:
        return Precision("fp32", "an imported model is served as it was verified; --dtype bf16 converts it")
    if plan.gpus:
        return Precision("fp32", "it runs on a GPU; --dtype bf16 or fp16 converts it")
    if not computes_bf16():
        return Precision("fp32", "this processor has no BF16 instructions")
    if not has_trunk():
        return Precision("fp32", "its file has no submodule `trunk` that could be converted")
    return Precision("bf16", "this processor computes in BF16; scores differ by up to 0.02 from --dtype fp32")


def place(config: ModelConfig, plan: Plan, dtype: str = "", *, keeps_gpus: bool = False) -> Any:
    """Make the configuration message of one model under ``plan``; the model folder's configuration is not changed.

    ``dtype`` is the dtype of a TorchScript encoder, by default the plan's. With ``keeps_gpus``, instance groups that
    list GPUs keep these GPUs; otherwise every group gets the plan's GPUs.

    Configurations for different targets differ only for models of python-based backends, in ``runtime`` and
    ``allow_ragged_batch``. shoal's backend pads requests of different widths to one batch, and the native backend does
    not. A model without an attention mask could not tell padding from data, so that its answer would depend on the
    other requests in the batch: for such a model, ``allow_ragged_batch`` is not changed.
    """
    message = type(config.message)()
    message.CopyFrom(config.message)
    if config.is_ensemble:
        return message
    gpus = plan.gpus_of(config)
    for group in message.instance_group or [message.instance_group.add()]:
        if group.kind == group.KIND_MODEL:
            continue  # its backend chooses the devices
        group.kind = group.KIND_GPU if gpus else group.KIND_CPU
        if not (keeps_gpus and group.gpus):
            group.gpus[:] = gpus
    if plan.target == EMBEDDED and config.backend in PYTHON_BASED_BACKENDS:
        message.runtime = "model.py"
        for tensor in message.input if config.mask else ():
            tensor.allow_ragged_batch = tensor.allow_ragged_batch or -1 in tensor.dims
    if config.backend in ("python", *PYTHON_BASED_BACKENDS):  # otherwise Triton would copy their inputs to the host
        message.parameters["FORCE_CPU_ONLY_INPUT_TENSORS"].string_value = "no"
    if config.backend == "pytorch" and (dtype or plan.dtype) not in (AUTO, "fp32"):
        message.parameters["dtype"].string_value = dtype or plan.dtype
    if dtype and is_dtype_chosen(config):
        message.parameters["dtype"].string_value = _ENGINES_DTYPES[dtype]
    return message


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

    ``instances`` are groups of instances. With dynamic batching, Triton runs a batch of one of the
    ``preferred_batch_sizes`` (in rows) at once, and waits up to ``queue_delay`` microseconds for such a batch.
    """

    instances: tuple[Instances, ...] = ()
    preferred_batch_sizes: tuple[int, ...] = ()
    queue_delay: int | None = None


def tune(models: Iterable[ModelConfig], tuning: Mapping[str, Tuning], plan: Plan) -> list[ModelConfig]:
    """Return the models, changed by the settings that ``tuning`` has for their names.

    Raises:
        InputError: there is no model of a name, it is an ensemble, or a setting does not fit the model or the plan.
    """
    tuned = {model.name: model for model in models}
    for name, wanted in tuning.items():
        if name not in tuned:
            raise InputError(f"There is no model {name} in this repository.", suggest(name, sorted(tuned)))
        tuned[name] = _tune(tuned[name], wanted, plan)
    return list(tuned.values())


def _tune(model: ModelConfig, wanted: Tuning, plan: Plan) -> ModelConfig:
    if model.is_ensemble:
        raise InputError(
            f"{model.name} is an ensemble: it has neither instances nor batches.", "Name one of its steps."
        )
    message = type(model.message)()
    message.CopyFrom(model.message)
    if wanted.instances:
        kind = message.instance_group[0].kind if message.instance_group else 0
        del message.instance_group[:]
        for group in wanted.instances:
            _check_instances(model, group, plan)
            message.instance_group.add(count=group.count, kind=kind, gpus=group.gpus)
    if wanted.preferred_batch_sizes or wanted.queue_delay is not None:
        if message.max_batch_size < 2:
            raise InputError(
                f"{model.name} gets each request alone (max_batch_size: {message.max_batch_size}): there are no batches"
                " to tune.",
                "An engine has the parameter slots for requests that are computed at once."
                if "slots" in message.parameters
                else "Increase max_batch_size in its config.pbtxt.",
            )
        batching = message.dynamic_batching
        if wanted.preferred_batch_sizes:
            batching.preferred_batch_size[:] = wanted.preferred_batch_sizes
        if wanted.queue_delay is not None:
            batching.max_queue_delay_microseconds = wanted.queue_delay
    return as_config(message, model.folder)


def _check_instances(model: ModelConfig, group: Instances, plan: Plan) -> None:
    if group.count < 1:
        raise InputError(f"{model.name} is to have {group.count} instances; it needs at least 1.")
    gpus = plan.gpus_of(model)
    if group.gpus and not gpus:
        raise InputError(
            f"{model.name} runs on the host with placement {plan.placement}, and GPU {group.gpus[0]} is listed for it.",
            f"Leave the GPUs out (--instances {model.name}={group.count}), or say --placement gpu.",
        )
    for gpu in set(group.gpus) - set(gpus):  # memory is sized only for the GPUs of the plan
        listed = ",".join(map(str, sorted({*gpus, *group.gpus})))
        raise InputError(f"GPU {gpu} is listed for {model.name}, and is not a GPU of the plan.", f"Say --gpu {listed}")
