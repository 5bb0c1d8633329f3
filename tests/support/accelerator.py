"""A pretended accelerator for PyTorch, device "pretend", on a machine without one.

Its tensors hold tensors of the host, on which every operation runs, so values are right. It refuses what a real one
refuses: ``numpy()``, ``np.asarray``, and operations that mix its tensors with the host's. It counts what makes a real
one wait: ``copies``. Threads need no preparation. Written for torch 2.13, whose registration of backends in Python is
experimental.
"""

from __future__ import annotations

import types
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as tree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from shoal.kit.component.tensors import Device

copies: Counter[str] = Counter()  # to_host, to_device, reads (item, tolist, bool), operations
largest = Counter[str]()  # elements of the largest copy to_host
_MOVES = {"aten::copy_", "aten::_to_copy", "aten::_copy_from", "aten::_copy_from_and_resize"}


@dataclass(frozen=True)
class PretendedDevice(Device):
    """Device of an instance on the pretended accelerator, with arrays on the host as an engine has them."""

    kind: str = "gpu"
    library: str = "engine"

    @property
    def torch_name(self) -> str:
        return "pretend:0"

    def prepare(self) -> None:
        """There is nothing to claim."""


def _register() -> None:
    module: Any = types.ModuleType("torch.pretend")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count, module.current_device = lambda: 1, lambda: 0
    for name in ("manual_seed", "manual_seed_all", "synchronize", "empty_cache", "set_device"):
        setattr(module, name, lambda *_: None)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]
    module.mem_get_info = lambda *_: (8 << 30, 8 << 30)
    _setup_privateuseone_for_python_backend("pretend", backend_module=module)


_register()
DEVICE = torch.device("pretend", 0)


def _is_pretended(device: Any) -> bool:
    return device is not None and torch.device(device).type == "pretend"


def _count(direction: str, size: int) -> None:
    copies[direction] += 1
    largest[direction] = max(largest[direction], size)


class DeviceTensor(torch.Tensor):
    """Tensor on the pretended device; ``raw`` is the host's tensor with its values."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: Any, raw: torch.Tensor) -> Any:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype,
            layout=raw.layout, device=DEVICE, requires_grad=raw.requires_grad,
        )  # fmt: skip
        tensor.raw = raw
        return tensor

    def tolist(self) -> Any:
        copies["reads"] += 1
        return self.raw.tolist()  # type: ignore[attr-defined]

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert a tensor of the pretended device to numpy: use Tensor.cpu() first")

    __array__ = numpy

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.raw!r})"  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        name = op._schema.name
        if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):  # in inference mode
            done = op.decompose(*args, **kwargs)
            if done is not NotImplemented:
                return done
        copies["operations"] += 1
        tensors = [leaf for leaf in tree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name not in _MOVES:
            host = [each for each in tensors if not isinstance(each, DeviceTensor) and each.dim() > 0]
            if host and len(host) < len(tensors):
                raise RuntimeError(f"{name}: a host tensor {tuple(host[0].shape)} meets one on {DEVICE}")
        device = kwargs.get("device")
        is_leaving = name == "aten::_to_copy" and device is not None and not _is_pretended(device)
        if name == "aten::_local_scalar_dense":
            copies["reads"] += 1
        elif is_leaving:
            _count("to_host", tensors[0].numel())
        elif name == "aten::copy_" and isinstance(args[0], DeviceTensor) != isinstance(args[1], DeviceTensor):
            _count("to_device" if isinstance(args[0], DeviceTensor) else "to_host", args[0].numel())
        plain, named = tree.tree_map(_unwrap, (args, kwargs))
        out = op(*plain, **named)
        known = {id(_unwrap(each)): each for each in tensors}  # operations in place return their argument

        def wrap(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or is_leaving:
                return value
            return known[id(value)] if id(value) in known else DeviceTensor(value)

        return tree.tree_map(wrap, out)


def _unwrap(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value.raw  # type: ignore[attr-defined]
    return torch.device("cpu") if isinstance(value, torch.device) and _is_pretended(value) else value


def _copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:  # noqa: ARG001
    if isinstance(target, DeviceTensor):
        if not isinstance(source, DeviceTensor):
            _count("to_device", source.numel())
        target.raw.copy_(_unwrap(source))  # type: ignore[attr-defined]
    else:
        _count("to_host", source.numel())
        target.copy_(source.raw)
    return target


_aten = torch.library.Library("aten", "IMPL")
_aten.impl(
    "empty.memory_format", lambda size, dtype=None, **_: DeviceTensor(torch.empty(size, dtype=dtype)), "PrivateUse1"
)
_aten.impl(
    "empty_strided",
    lambda size, stride, dtype=None, **_: DeviceTensor(torch.empty_strided(size, stride, dtype=dtype)),
    "PrivateUse1",
)
_aten.impl("_copy_from", _copy_from, "PrivateUse1")
for _name in ("arange", "arange.start", "arange.start_step"):
    _aten.impl(_name, lambda *a, dtype=None, **_: DeviceTensor(torch.arange(*a, dtype=dtype)), "PrivateUse1")
torch.__future__.set_overwrite_module_params_on_conversion(True)  # so that module.to("pretend") makes new parameters
