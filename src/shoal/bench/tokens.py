"""How many tokens a row is: without them, rows a second say nothing of an encoder."""

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
    """The mean number of values other than 0 a row in each of the pipeline's inner tensors of integers that are as long
    as the text: of an attention mask, the tokens; of token ids, those that are no padding.

    The steps that write such tensors, and those before them, run in this process; no other does.

    Raises:
        ShoalError: one of them cannot.
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
    """``per_row``, as ``count_tokens`` gives it, or ``reason`` why there is none."""
    try:
        per_row = count_tokens(graph, inputs)
    except ShoalError as error:
        return {"per_row": {}, "reason": f"the steps before the encoder cannot run in this process: {error.what}"}
    return {"per_row": per_row, "reason": "" if per_row else "no inner tensor of integers is as long as its text"}


def _run(graph: Graph, pipelines: dict[int, Pipeline], tensors: Arrays) -> None:
    """Run the steps in an order in which each finds its inputs, and keep what they write."""
    levels = graph.levels()
    for index in sorted(pipelines, key=levels.__getitem__):
        step = graph.steps[index]
        outputs = pipelines[index](**{name: tensors[t] for name, t in step.inputs.items() if t in tensors})
        tensors.update({tensor: outputs[name] for name, tensor in step.outputs.items()})  # type: ignore[attr-defined]


def _find(graph: Graph) -> list[str]:
    """Inner tensors of integers with a size that is the row's own."""
    inner = [edge for edge in graph.edges() if edge.source is not None and edge.target is not None]
    return list(dict.fromkeys(edge.name for edge in inner if edge.tensor.dtype in _TOKENS and -1 in edge.tensor.dims))


def _needed(graph: Graph, tensors: list[str]) -> set[int]:
    """The steps that write these tensors, and all before them."""
    found: set[int] = set()
    left = list(tensors)
    while left:
        index = graph.producer(left.pop())
        if index is not None and index not in found:
            found.add(index)
            left += graph.steps[index].inputs.values()
    return found
