"""Plan of a repository: placement, target server, precision, GPUs, and the settings of single models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shoal.authoring.environment.targets import EMBEDDED, parse_release
from shoal.errors import InputError

CPU, HYBRID, GPU = PLACEMENTS = ("cpu", "hybrid", "gpu")
AUTO = "auto"
INT8 = "int8"
DTYPES = (AUTO, "fp32", "bf16", "fp16", INT8)


@dataclass(frozen=True)
class Precision:
    """Dtype in which an encoder computes, and the reason for it."""

    dtype: str
    reason: str


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
    ``precision`` is the one that a plan file of ``shoal tune`` decides; without it, see ``choose_precision``.
    """

    instances: tuple[Instances, ...] = ()
    gpus: tuple[int, ...] | None = None
    preferred_batch_sizes: tuple[int, ...] = ()
    queue_delay: int | None = None
    precision: Precision | None = None


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
    sized for. ``tuning`` has the settings of single models, by name.
    """

    placement: str = ""
    target: str = EMBEDDED
    dtype: str = AUTO
    gpus: tuple[int, ...] | None = None
    concurrency: int = 16
    is_placed: bool = True
    tuning: Mapping[str, Tuning] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_placed", self.is_placed and bool(self.placement))
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

    def describe(self) -> dict[str, Any]:
        """Return the plan as the manifest has it: what holds for all models."""
        return {name: value for name, value in asdict(self).items() if name != "tuning"}

    def tuning_of(self, name: str) -> Tuning:
        """Return the settings of one model."""
        return self.tuning.get(name, Tuning())

    def _check_gpus(self, gpus: tuple[int, ...]) -> None:
        if len(set(gpus)) != len(gpus) or any(gpu < 0 for gpu in gpus):
            raise InputError(f"GPUs {list(gpus)} are not different indices from 0 up.", "For example: --gpu 0,1")
        if gpus and self.placement == CPU:
            raise InputError("Placement cpu uses no GPU.", "Leave --gpu out, or say --placement gpu.")
        if not gpus and self.placement == GPU:
            raise InputError("Placement gpu needs a GPU.", "Name one, --gpu 0, or say --placement cpu.")
