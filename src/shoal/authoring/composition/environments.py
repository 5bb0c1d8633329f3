"""Check execution environments and stubs, and put them where Triton looks for them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.authoring.environment.building import ARCHIVE, locate
from shoal.authoring.environment.embedded import STUB
from shoal.authoring.environment.fit import check_fit
from shoal.authoring.environment.inspection import inspect
from shoal.authoring.environment.stub import read_stub
from shoal.authoring.environment.targets import find_target
from shoal.authoring.repository.config import ModelConfig
from shoal.errors import InputError
from shoal.system.files import copy_file
from shoal.system.paths import check_path_supported

ALL = ""  # the name under which an environment is given to every Python model
PARAMETER = "EXECUTION_ENV_PATH"
_IN_MODEL = f"$$TRITON_MODEL_DIRECTORY/{ARCHIVE}"  # Triton replaces the variable by the model's folder


@dataclass(frozen=True)
class Placed:
    """An environment for a model, which is an archive or a folder, and the stub that goes with it."""

    environment: Path
    stub: Path | None

    @property
    def path(self) -> str:
        """Value of ``EXECUTION_ENV_PATH``: the path of the folder, or of the archive's copy in the model's folder."""
        return str(self.environment) if self.environment.is_dir() else _IN_MODEL

    def write(self, folder: Path, message: Any, copies: dict[Path, Path]) -> None:
        """Put the environment and its stub into a model's ``folder``, and its path into the configuration ``message``.

        An archive is copied for the first model and hard-linked for the other models; ``copies`` maps each archive to
        its first copy. An environment that is a folder is not copied.
        """
        message.parameters[PARAMETER].string_value = self.path
        if not self.environment.is_dir():
            first = copies.setdefault(self.environment, folder / ARCHIVE)
            if first == folder / ARCHIVE:
                copy_file(self.environment, first)
            else:
                try:
                    os.link(first, folder / ARCHIVE)
                except OSError:  # some file systems have no hard links
                    shutil.copyfile(first, folder / ARCHIVE)
        if self.stub:
            copy_file(self.stub, folder / STUB)
            (folder / STUB).chmod(0o755)


def find_environments(
    models: Sequence[ModelConfig], environments: Mapping[str, Path], stubs: Mapping[str, Path], target: str
) -> dict[str, Placed]:
    """Return the environment of each Python model that has one, checked against its stub and the server.

    Keys of ``environments`` and ``stubs`` are names of models, or ``ALL`` for all Python models. An environment is an
    archive, a folder, or the output of `shoal env build`, whose stub is used if ``stubs`` has none.

    Raises:
        InputError: a name is not that of a Python model, a stub is given without an environment, or Triton does not
            support a path.
        ArtifactError: environment, stub and server do not fit together.
    """
    python_models = [model.name for model in models if model.backend == "python"]
    for name in [*environments, *stubs]:
        if name != ALL and name not in python_models:
            raise InputError(f"There is no Python model {name!r}.", f"Known: {', '.join(python_models)}.")
    if stubs and not environments:
        raise InputError("A stub was given without an environment.", "Also give the environment: --env PATH")
    wanted = {}
    for name in python_models:
        place = environments.get(name, environments.get(ALL))
        if place:
            environment, stub = locate(place)
            given = stubs.get(name, stubs.get(ALL))
            wanted[name] = Placed(environment, given.absolute() if given else stub)
        elif name in stubs:
            raise InputError(
                f"Model {name} was given a stub, and no environment.", f"Give an environment: --env {name}=PATH"
            )
    for placed in dict.fromkeys(wanted.values()):  # each environment once: reading a whole archive is slow
        if placed.environment.is_dir():  # an archive is copied, so that its own path does not matter
            check_path_supported(placed.environment)
        check_fit(inspect(placed.environment), read_stub(placed.stub) if placed.stub else None, find_target(target))
    return wanted
