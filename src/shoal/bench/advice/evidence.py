"""What advice is drawn from, and what it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shoal.bench.figures import Cell, Figures
from shoal.repository.config import ModelConfig

IDLE = 0.5  # of the time: an instance that runs less holds nobody up
ALONE = 1.2  # requests an execution: no more than this is one by one
LARGE_SHARE = 0.3  # of a request's time


@dataclass(frozen=True)
class Advice:
    """One proposal: ``what`` to do, ``why``, and the ``lines`` of the model's config.pbtxt in place of its own.

    Where it ``helps`` not, ``what`` says what is not worth trying. ``kind`` is stable, for machines.
    """

    kind: str
    model: str
    what: str
    why: str
    lines: str = ""
    helps: bool = True

    def as_dict(self) -> dict[str, Any]:
        """For the record."""
        return asdict(self)


@dataclass(frozen=True)
class Evidence:
    """What advice is drawn from: the medians by load, and the models' configurations.

    ``levels`` are the steps' places in the ensemble (those of one level run side by side); there are none where a model
    is several steps, or a step is several models. ``cores`` those that the
    server may use, and ``flags`` the processor's, as ``describe_machine`` gives them.
    """

    cells: Mapping[Cell, Figures]
    configs: Mapping[str, ModelConfig]
    cores: int
    levels: Mapping[str, int]
    flags: str = ""
