"""What a component is told at its start: its declaration, its folder, its device."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from shoal.component.artifact_files import describe_place
from shoal.component.spec import ModelSpec
from shoal.component.tensors import Device
from shoal.errors import ArtifactError


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
            ArtifactError: it is not there, or is no file.
        """
        path = self.folder / name
        if path.is_file():
            return path
        found = describe_place(path)
        missed = f"misses its artifact {name} in {self.folder}"
        raise ArtifactError(
            f"Model {self.spec.name} {missed if found == 'missing' else f'needs the file {path}, which is {found}'}.",
            "Copy it there from the artifact folder that `shoal train` wrote, or use `shoal compose`.",
        )

    def optional_artifact(self, name: str) -> Path | None:
        """The path of an artifact that may be missing; None where nothing stands there.

        Raises:
            ArtifactError: what stands there is no file.
        """
        return self.artifact(name) if os.path.lexists(self.folder / name) else None
