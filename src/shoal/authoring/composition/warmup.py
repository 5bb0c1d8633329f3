"""Warm-up requests, derived from one text, so that one-time work is done before the first user's request.

Triton accepts warm-up requests only for single models, not for an ensemble. So the text goes through the pipeline here,
as far as Python components can run it. The outputs of each component become the warm-up inputs of the models that
follow.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from shoal.authoring.repository.config import ModelConfig
from shoal.authoring.repository.graph import Graph
from shoal.authoring.repository.loading import component_class
from shoal.authoring.repository.versions import find_version
from shoal.authoring.repository.warmup_request import FOLDER, make_zeros, requested
from shoal.errors import ShoalError
from shoal.kit.component.base import check_outputs, join
from shoal.kit.component.context import Context
from shoal.kit.component.spec import Arrays
from shoal.kit.component.tensors import to_inside

FAILED = "it does not run here"  # beginning of the reason why a component has no warm-up request
NUM_CALLS = 2  # TorchScript optimizes a model during its first two calls


@dataclass
class WarmUps:
    """Warm-up ``requests``: the inputs of one row, by model name; and ``reasons`` why other models have no request.

    A model that several steps call gets the inputs of the first step for which a request could be made.
    """

    requests: dict[str, Arrays] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


def derive(graphs: Iterable[Graph], repository: Path) -> WarmUps:
    """Make warm-up requests: run one text through the components of each graph, from their files in ``repository``.

    A component that fails here gets no warm-up request. A tensor that no component writes, such as the score of a
    model, is all zeros in its declared shape. The steps of a nested ensemble are run in the same way.
    """
    found = WarmUps()
    for graph in graphs:
        _walk(graph, repository, requested(graph.config.spec), found)
    return WarmUps(found.requests, {name: why for name, why in found.reasons.items() if name not in found.requests})


def _walk(graph: Graph, repository: Path, tensors: dict[str, Any], found: WarmUps) -> None:
    """Run the steps of a graph; add warm-up requests to ``found`` and the graph's tensors, by name, to ``tensors``."""
    levels = graph.levels()
    for index in sorted(range(len(levels)), key=levels.__getitem__):
        _warm(graph, index, repository, tensors, found)


def _warm(graph: Graph, index: int, repository: Path, tensors: dict[str, Any], found: WarmUps) -> None:
    step = graph.steps[index]
    config = graph.members[step.model]
    inputs = {name: tensors[tensor] for name, tensor in step.inputs.items() if tensor in tensors}
    missing = [t.name for t in config.spec.inputs if t.name not in inputs and not t.is_optional]
    outputs: Mapping[str, Any] = {}
    if config.is_ensemble:
        outputs = dict(inputs)
        _walk(Graph.build(config, graph.members), repository, outputs, found)
    elif config.spec.is_decoupled:  # otherwise a language model would load its weights here
        found.reasons.setdefault(step.model, "it is decoupled, and is not started here; it can warm up in its setup")
    elif graph.repeats(index):  # it may keep state between the answers of a request
        found.reasons.setdefault(step.model, "it follows a decoupled model, whose answers are not known here")
    elif config.calls:
        found.reasons.setdefault(step.model, f"it calls {', '.join(config.calls)}, which may load after it")
    elif missing:
        found.reasons.setdefault(step.model, f"no value is known for its input {', '.join(missing)}")
    else:
        try:
            outputs = _run(config, repository, inputs) if config.backend == "python" else {}
            found.requests.setdefault(step.model, inputs)
        except Exception as error:  # a user's component, whose libraries may be in another environment
            found.reasons.setdefault(step.model, f"{FAILED}: {_describe(error, repository)}")
    shapes = {t.name: t for t in config.spec.outputs}
    for name, tensor in step.outputs.items():
        value = outputs[name] if name in outputs else make_zeros(shapes[name], config.spec)
        if value is not None:
            tensors[tensor] = value


def _describe(error: Exception, repository: Path) -> str:
    """Return an error's class and first line, with paths made relative to ``repository``, a temporary folder."""
    first = next(iter(str(error).splitlines()), "").replace(f"{repository}/", "")
    return first if type(error) is ShoalError else f"{type(error).__name__}: {first}".removesuffix(": ")


def _run(config: ModelConfig, repository: Path, inputs: Arrays) -> Arrays:
    """Run a component on one request; raises the component's errors, which ``Component.process`` would log and hide."""
    folder, spec = find_version(replace(config, folder=repository / config.name)), config.spec
    with no_bytecode():
        component = component_class(folder / "model.py")(Context(spec=spec, folder=folder))
        try:
            inputs = to_inside(spec.inputs, inputs, is_batched=spec.is_batched)
            component.check(inputs)
            batch, (num_rows,) = join(spec, [inputs], component.context.device)
            outputs = component.run(batch)
        finally:
            component.close()
    return check_outputs(spec, outputs, num_rows, component.optional_outputs)


@contextmanager
def no_bytecode() -> Iterator[None]:
    """Prevent Python from writing bytecode caches into a model's folder."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


def write(message: Any, folder: Path, inputs: Arrays) -> None:
    """Add a warm-up request to the configuration ``message``, and its data to the model's ``folder``.

    A configuration that already has a warm-up request is not changed.
    """
    if message.model_warmup:
        return
    is_batched = message.max_batch_size > 0
    entry = message.model_warmup.add(name="one", batch_size=1 if is_batched else 0, count=NUM_CALLS)
    types = {tensor.name: tensor.data_type for tensor in message.input}
    (folder / FOLDER).mkdir(exist_ok=True)
    for name, array in sorted(inputs.items()):
        dims = array.shape[1:] if is_batched else array.shape
        entry.inputs[name].data_type = types[name]
        entry.inputs[name].dims.extend(dims)
        entry.inputs[name].input_data_file = name
        (folder / FOLDER / name).write_bytes(serialize(array))


def serialize(array: Any) -> bytes:
    """Serialize a tensor in Triton's binary format: a text is its length in four bytes, then its bytes."""
    from tritonclient.utils import serialize_byte_tensor

    if array.dtype == object:
        return bytes(serialize_byte_tensor(array).item())
    return bytes(np.ascontiguousarray(array).tobytes())
