"""Context of a component: everything that it gets at start-up."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from shoal.component.artifact_files import describe_place
from shoal.component.callees import Callees
from shoal.component.spec import ModelSpec
from shoal.component.tensors import Device
from shoal.errors import ArtifactError


@dataclass(frozen=True)
class Context:
    """Everything that a component gets at start-up: declaration, artifacts, device and threads.

    ``spec`` is the model's ``config.pbtxt``. ``folder`` is the model's version folder, which contains its artifacts.
    ``num_threads`` is the number of compute threads this instance may use; None keeps the process's own setting.
    ``models`` calls the other models that the configuration's parameter ``calls`` lists.
    """

    spec: ModelSpec
    folder: Path
    device: Device = field(default_factory=Device)
    num_threads: int | None = None
    models: Callees = field(default_factory=Callees)

    def artifact(self, name: str) -> Path:
        """Return the path of a required artifact of this model.

        Raises:
            ArtifactError: the artifact is missing, or is not a file.
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
        """Return the path of an optional artifact, or None if it is missing.

        Raises:
            ArtifactError: the artifact exists, but is not a file.
        """
        return self.artifact(name) if os.path.lexists(self.folder / name) else None
