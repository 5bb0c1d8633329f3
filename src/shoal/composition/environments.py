"""Check execution environments and stubs, and put them where Triton looks for them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.environment.building import ARCHIVE, locate
from shoal.environment.fit import check_fit
from shoal.environment.inspection import inspect
from shoal.environment.stub import STUB, read_stub
from shoal.environment.targets import find_target
from shoal.errors import InputError
from shoal.paths import check_path_supported
from shoal.repository.config import ModelConfig

ALL = ""  # the name under which an environment is given to every Python model
PARAMETER = "EXECUTION_ENV_PATH"
_IN_MODEL = f"$$TRITON_MODEL_DIRECTORY/{ARCHIVE}"  # Triton puts the model's folder in


@dataclass(frozen=True)
class Placed:
    """An environment for a model: an archive or a folder, and the stub that goes with it."""

    environment: Path
    stub: Path | None

    @property
    def path(self) -> str:
        """Value of EXECUTION_ENV_PATH: a folder's path, or the archive in the model's own folder."""
        return str(self.environment) if self.environment.is_dir() else _IN_MODEL

    def write(self, folder: Path, message: Any, copies: dict[Path, Path]) -> None:
        """Put it into a model's ``folder`` and its configuration.

        An archive is copied once and linked into the others: ``copies`` says where the first copy of each is. A folder
        stays where it is.
        """
        message.parameters[PARAMETER].string_value = self.path
        if not self.environment.is_dir():
            first = copies.setdefault(self.environment, folder / ARCHIVE)
            if first == folder / ARCHIVE:
                shutil.copyfile(self.environment, first)
            else:
                try:
                    os.link(first, folder / ARCHIVE)
                except OSError:  # some file systems have no hard links
                    shutil.copyfile(first, folder / ARCHIVE)
        if self.stub:
            shutil.copyfile(self.stub, folder / STUB)
            (folder / STUB).chmod(0o755)


def find_environments(
    models: Sequence[ModelConfig], environments: Mapping[str, Path], stubs: Mapping[str, Path], target: str
) -> dict[str, Placed]:
    """Return the environment of each Python model that is given one, checked against its stub and the server.

    Keys of ``environments`` and ``stubs`` are names of models, or ``ALL``; an environment is an archive, a folder, or
    what `shoal env build` wrote, stub included.

    Raises:
        InputError: a name is not a Python model's, a stub has no environment, or Triton does not support a path.
        ArtifactError: environment, stub and server do not fit.
    """
    python_models = [model.name for model in models if model.backend == "python"]
    for name in [*environments, *stubs]:
        if name != ALL and name not in python_models:
            raise InputError(f"There is no Python model {name!r}.", f"Known: {', '.join(python_models)}.")
    if stubs and not environments:
        raise InputError("A stub was given without an environment.", "Give the one that it is for, too: --env PATH")
    wanted = {}
    for name in python_models:
        place = environments.get(name, environments.get(ALL))
        if place:
            environment, stub = locate(place)
            given = stubs.get(name, stubs.get(ALL))
            wanted[name] = Placed(environment, given.absolute() if given else stub)
        elif name in stubs:
            raise InputError(f"Model {name} was given a stub, and no environment.", f"Give it one: --env {name}=PATH")
    for placed in dict.fromkeys(wanted.values()):  # once each: a whole archive is read, which is slow
        if placed.environment.is_dir():  # an archive is copied, so that its own path does not matter
            check_path_supported(placed.environment)
        check_fit(inspect(placed.environment), read_stub(placed.stub) if placed.stub else None, find_target(target))
    return wanted
