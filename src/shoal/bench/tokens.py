"""Tokens per row, which put the rows per second of an encoder into context."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from shoal.bench.inputs import Inputs
from shoal.component.tensors import Arrays
from shoal.errors import ShoalError
from shoal.local import Pipeline, load
from shoal.repository.graph import Graph

ROWS = 512  # more would not change a mean
ROWS_A_CALL = 32
_TOKENS = ("TYPE_INT32", "TYPE_INT64")


def count_tokens(graph: Graph, inputs: Inputs) -> dict[str, float]:
    """Return the mean number of non-zero values per row in each inner integer tensor of variable length.

    For an attention mask these are the tokens, for token ids those that are not padding. Only the steps that write such
    tensors, and those before them, run in this process.

    Raises:
        ShoalError: one of these steps cannot run.
    """
    wanted = _find(graph)
    counts: dict[str, int] = defaultdict(int)
    number = min(ROWS, inputs.num_rows)
    pipelines = {index: load(graph.members[graph.steps[index].model].folder) for index in _needed(graph, wanted)}
    try:
        for start in range(0, number, size := min(ROWS_A_CALL, max(1, graph.config.spec.max_batch_size))):
            tensors = inputs.take(start, min(size, number - start))
            _run(graph, pipelines, tensors)
            for name in wanted:
                counts[name] += int(np.count_nonzero(tensors[name]))
    finally:
        for pipeline in pipelines.values():
            pipeline.close()
    return {name: round(counts[name] / number, 1) for name in wanted}


def try_to_count(graph: Graph, inputs: Inputs) -> dict[str, Any]:
    """Return ``per_row`` from ``count_tokens``, or the ``reason`` why it is not available."""
    try:
        per_row = count_tokens(graph, inputs)
    except ShoalError as error:
        return {"per_row": {}, "reason": f"the steps before the encoder cannot run in this process: {error.what}"}
    return {"per_row": per_row, "reason": "" if per_row else "no inner tensor of integers is as long as its text"}


def _run(graph: Graph, pipelines: dict[int, Pipeline], tensors: Arrays) -> None:
    """Run the steps in topological order, and add their outputs to ``tensors``."""
    levels = graph.levels()
    for index in sorted(pipelines, key=levels.__getitem__):
        step = graph.steps[index]
        outputs = pipelines[index](**{name: tensors[t] for name, t in step.inputs.items() if t in tensors})
        tensors.update({tensor: outputs[name] for name, tensor in step.outputs.items()})  # type: ignore[attr-defined]


def _find(graph: Graph) -> list[str]:
    """Find the inner integer tensors with a dimension of variable size."""
    inner = [edge for edge in graph.edges() if edge.source is not None and edge.target is not None]
    return list(dict.fromkeys(edge.name for edge in inner if edge.tensor.dtype in _TOKENS and -1 in edge.tensor.dims))


def _needed(graph: Graph, tensors: list[str]) -> set[int]:
    """Return the steps that write these tensors, and all steps upstream of them."""
    found: set[int] = set()
    left = list(tensors)
    while left:
        index = graph.producer(left.pop())
        if index is not None and index not in found:
            found.add(index)
            left += graph.steps[index].inputs.values()
    return found
