"""Advice, and the measurements it is derived from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.bench.figures import Cell, Figures
from shoal.repository.config import ModelConfig


@dataclass(frozen=True)
class Advice:
    """One proposal: ``what`` to do, ``why``, and the ``lines`` that replace those in config.pbtxt.

    Unless it ``helps``, ``what`` says what is not worth trying. ``kind`` is stable, for machines.
    """

    kind: str
    model: str
    what: str
    why: str
    lines: str = ""
    helps: bool = True


@dataclass(frozen=True)
class Evidence:
    """Input of the advice rules: the medians by load, and the models' configurations.

    ``levels`` are the depths of the steps in the ensemble (steps of one level run in parallel); empty if a model is
    several steps, or a step several models. ``cores`` is the number of cores that the server may use, and ``flags``
    are the processor's, as ``describe_machine`` returns them.
    """

    cells: Mapping[Cell, Figures]
    configs: Mapping[str, ModelConfig]
    cores: int
    levels: Mapping[str, int]
    flags: str = ""
