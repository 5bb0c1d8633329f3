"""A served model, as its server describes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from shoal.client.calls import dtype_name
from shoal.component.spec import ModelSpec, TensorSpec


class Description(NamedTuple):
    """The tensors of a model, and how many rows a request may have.

    ``is_batched``: the first dimension of every tensor counts rows, and is not among the ``dims``. ``max_rows`` is None
    where the server keeps configurations to itself. ``calls`` are the models that an ensemble asks.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    is_batched: bool
    max_rows: int | None = None
    calls: tuple[str, ...] | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Description:
        """Read a model's configuration in its JSON form."""
        spec = ModelSpec.from_config(config)
        graph = config.get("ensemble_scheduling")
        calls = None if graph is None else tuple(step["model_name"] for step in graph.get("step", ()))
        return cls(spec.name, spec.inputs, spec.outputs, spec.is_batched, spec.max_batch_size, calls)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Description:
        """Read a model's metadata in its JSON form, which say neither which inputs are optional nor how many rows fit.

        Where the first dimension of every input is free, it may count rows.
        """
        shapes = {int(entry["shape"][0]) if entry.get("shape") else 0 for entry in metadata["inputs"]}
        is_batched = shapes == {-1}

        def read(entry: Mapping[str, Any], is_optional: bool) -> TensorSpec:
            dims = tuple(map(int, entry.get("shape", ())))[1 if is_batched else 0 :]
            return TensorSpec(entry["name"], dtype_name(entry["datatype"]), dims, is_optional=is_optional)

        inputs = tuple(read(entry, True) for entry in metadata["inputs"])
        outputs = tuple(read(entry, False) for entry in metadata["outputs"])
        return cls(metadata["name"], inputs, outputs, is_batched, None if is_batched else 0)

    @property
    def output_names(self) -> tuple[str, ...]:
        """In the model's own order."""
        return tuple(spec.name for spec in self.outputs)
