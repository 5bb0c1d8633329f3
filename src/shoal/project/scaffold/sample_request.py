"""Search for a request that a component answers, run in this process, for its generated test."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from shoal.component.base import Component, Context
from shoal.component.spec import STRING, ModelSpec
from shoal.composition.warmup import no_bytecode
from shoal.errors import ShoalError
from shoal.project.scaffold.text import ROWS, WIDTH
from shoal.repository.config import ModelConfig
from shoal.repository.loading import component_class

_MAX_BYTES = 2**20  # of a JSON file that is read for its lists


def find_width(config: ModelConfig) -> int:
    """Find a size for variable dimensions that the component in ``config.folder`` accepts.

    Tries 4, then the lengths of lists in parameters (such as labels) and artifacts (such as means). Falls back to 4 if
    none is accepted, or the component cannot run here.

    Raises:
        Exception: the component does not start; shoal's own raise an ArtifactError.
    """
    path = config.folder / "1" / "model.py"
    if config.backend != "python" or not path.is_file():
        return WIDTH
    with no_bytecode():
        try:
            found = component_class(path)
        except ShoalError:  # its libraries are in another environment
            return WIDTH
        component = found(Context(spec=config.spec, folder=path.parent))
    try:
        return next((width for width in (WIDTH, *_lengths(config)) if _answers(component, width)), WIDTH)
    finally:
        component.close()


def _lengths(config: ModelConfig) -> Iterator[int]:
    files = (path for path in sorted((config.folder / "1").glob("*.json")) if path.stat().st_size < _MAX_BYTES)
    texts = [*config.spec.parameters.values(), *(path.read_text(encoding="utf-8", errors="replace") for path in files)]
    for text in texts:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue
        values = value.values() if isinstance(value, dict) else [value]
        yield from (len(each) for each in values if isinstance(each, list) and each)


def _answers(component: Component, width: int) -> bool:
    request = _make_request(component.context.spec, width)
    try:
        component.check(request)
        component.run(request)
    except Exception:
        return False
    return True


def _make_request(spec: ModelSpec, width: int) -> dict[str, Any]:
    """Build a request of texts and ones, of the shapes that the test has."""
    rows, request = [ROWS] if spec.is_batched else [], {}
    for tensor in spec.inputs:
        if not tensor.is_optional:
            shape = [*rows, *(width if size == -1 else size for size in tensor.dims)]
            request[tensor.name] = np.full(shape, b"A cat sat." if tensor.dtype == STRING else 1, tensor.numpy_dtype)
    return request
