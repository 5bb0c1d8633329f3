"""A device that is none: its memory is torch's on the host, kept apart from NumPy's as a GPU's is.

What crosses is copied and written down, what is mixed up fails, so that a component's whole GPU path runs without one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from array_api_compat import torch as xp

from shoal.kit.component.spec import Array
from shoal.kit.component.tensors import Device


@dataclass(frozen=True)
class PretendGpu(Device):
    """GPU ``index``, made of torch's CPU tensors."""

    kind: str = "gpu"
    library: str = "torch"

    @property
    def xp(self) -> Any:
        return xp

    @property
    def torch_name(self) -> str:
        return "cpu"

    @contextmanager
    def active(self) -> Iterator[None]:
        yield

    def prepare(self) -> None:
        """There is nothing to claim."""

    def owns(self, array: Array) -> bool:
        return isinstance(array, torch.Tensor)

    def _upload(self, array: np.ndarray[Any, Any]) -> Array:
        return torch.from_numpy(array.copy())

    def _adopt(self, array: Any) -> tuple[Array, str]:
        return torch.utils.dlpack.from_dlpack(array.to_dlpack()), ""

    def _download(self, array: Any) -> np.ndarray[Any, Any]:
        return np.array(array)
