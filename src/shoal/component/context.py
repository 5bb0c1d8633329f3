"""What a component is told at its start: its declaration, its folder, its device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.component.tensors import Device, TensorSpec
from shoal.errors import ArtifactError


@dataclass(frozen=True)
class ModelSpec:
    """What ``config.pbtxt`` says of one model, as far as running it needs.

    ``max_batch_size`` 0 means that tensors carry no batch dimension of Triton's.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int = 0
    num_instances: int = 1
    parameters: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Read a model configuration in its JSON form, as Triton hands it to a stub."""
        groups = config.get("instance_group", [])
        return cls(
            name=config["name"],
            inputs=tuple(map(TensorSpec.from_config, config.get("input", []))),
            outputs=tuple(map(TensorSpec.from_config, config.get("output", []))),
            max_batch_size=int(config.get("max_batch_size", 0)),
            num_instances=max(1, sum(int(group.get("count", 1)) for group in groups)),
            parameters={key: entry.get("string_value", "") for key, entry in config.get("parameters", {}).items()},
        )

    @property
    def is_batched(self) -> bool:
        """Whether the first dimension of every tensor counts rows."""
        return self.max_batch_size > 0


@dataclass(frozen=True)
class Context:
    """What a component is given when it starts.

    ``folder`` is the model's version folder, where its artifacts lie. ``num_threads`` is how many threads of
    computation this instance may use; None leaves the process's own setting alone.
    """

    spec: ModelSpec
    folder: Path
    device: Device = field(default_factory=Device)
    num_threads: int | None = None

    def artifact(self, name: str) -> Path:
        """The path of an artifact of this model.

        Raises:
            ArtifactError: it is not there.
        """
        path = self.folder / name
        if path.is_file():
            return path
        raise ArtifactError(
            f"Model {self.spec.name} misses its artifact {name} in {self.folder}.",
            "Copy it there from the artifact folder that `shoal train` wrote, or use `shoal compose`.",
        )
