"""Small modules that torch can save, of the forms that the check of TorchScript must distinguish."""

from __future__ import annotations

from typing import Dict, Optional, Tuple  # noqa: UP035  # torch.jit.script reads these

import torch
from torch import Tensor, nn


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden: Tensor = self.layers(self.table(ids))
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        score: Tensor = (hidden * weights).sum(1).mean(1, keepdim=True)
        return score


class Pair(Encoder):
    def forward(  # type: ignore[override]
        self, ids: Tensor, mask: Tensor
    ) -> Tuple[Tensor, Tensor]:  # noqa: UP006
        hidden = self.table(ids)
        return hidden.sum(1), mask.to(hidden.dtype)


class Optioned(Encoder):
    def forward(self, ids: Tensor, mask: Tensor, bias: Optional[Tensor] = None) -> Tensor:  # noqa: UP045
        hidden: Tensor = self.table(ids).sum(1) + mask.sum()
        return hidden if bias is None else hidden + bias


class AsDict(Encoder):
    def forward(  # type: ignore[override]
        self, ids: Tensor, mask: Tensor
    ) -> Dict[str, Tensor]:  # noqa: UP006
        return {"score": self.table(ids).sum(1) + mask.sum()}


class Placed(Encoder):
    """Makes a tensor where its ids are: scripted, on any device; traced, on that of the example."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        hidden: Tensor = self.table(positions).sum(0) + self.table(ids).sum(1) + mask.sum()
        return hidden


class OnHost(Encoder):
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=torch.device("cpu"))
        hidden: Tensor = self.table(positions).sum(0) + self.table(ids).sum(1) + mask.sum()
        return hidden


class OnGpu(Encoder):
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden: Tensor = self.table(ids).sum(1) + torch.zeros([4], device=torch.device("cuda:1")) + mask.sum()
        return hidden


class Held(Encoder):
    """Its device is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.place = torch.device("cpu")

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden: Tensor = self.table(ids).sum(1) + torch.zeros([4], device=self.place) + mask.sum()
        return hidden


class Listed(Encoder):
    """Traced, its numbers are a constant tensor, and where it is put a constant device."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden: Tensor = self.table(ids).sum(1) * torch.tensor([1.0, 2.0, 3.0, 4.0]) + mask.sum()
        return hidden


class Buffered(Encoder):
    """The same numbers in a buffer, which goes where the module goes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("numbers", torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden: Tensor = self.table(ids).sum(1) * self.numbers + mask.sum()
        return hidden


class FromDict(nn.Module):
    def forward(self, tensors: Dict[str, Tensor]) -> Tensor:  # noqa: UP006
        return tensors["a"] + tensors["b"]


KINDS: dict[str, type[nn.Module]] = {
    "encoder": Encoder,
    "pair": Pair,
    "optional": Optioned,
    "dict": AsDict,
    "from dict": FromDict,
    "placed": Placed,
    "on host": OnHost,
    "on gpu": OnGpu,
    "held": Held,
    "listed": Listed,
    "buffered": Buffered,
}
TRACEABLE = ("encoder", "pair", "optional")


def make(kind: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A module, and what it may be traced with."""
    torch.manual_seed(0)
    ids = torch.tensor([[1, 2], [3, 0]])
    return KINDS[kind]().eval(), (ids, torch.ones_like(ids))
