"""Read and write ``config.pbtxt`` with Triton's own protobuf schema, and convert it to typed records."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.authoring.repository.parameters import ParameterProperties
from shoal.errors import ArtifactError
from shoal.kit.component.spec import ModelSpec
from shoal.system.files import read_text

CONFIG = "config.pbtxt"
MAX_CONFIG = 2**20  # bytes; more takes many seconds to parse
MAX_MODELS, MAX_STEPS, MAX_ENTRIES = 5000, 1000, 10_000  # per repository, ensemble and field


@dataclass(frozen=True)
class Step:
    """One step of an ensemble: a model, and the ensemble tensor that each of the model's tensors is mapped to.

    ``inputs`` and ``outputs`` map the model's tensor names to the ensemble's tensor names.
    """

    model: str
    version: int
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True)
class Artifact:
    """A file that a model needs beside its code; ``names`` are its possible names in the version folder."""

    names: tuple[str, ...]
    is_required: bool

    def __str__(self) -> str:
        return " or ".join(self.names)

    def find(self, folders: Iterable[Path]) -> list[Path]:
        """Return the artifact's files in the first of ``folders`` that has any of them; empty if no folder does."""
        for folder in folders:
            found = [folder / name for name in self.names if os.path.lexists(folder / name)]
            if found:
                return found
        return []


@dataclass(frozen=True)
class ModelConfig(ParameterProperties):
    """A model's configuration: the fields and parameters that shoal reads, and the complete ModelConfig message."""

    spec: ModelSpec
    backend: str
    platform: str
    steps: tuple[Step, ...]
    folder: Path
    message: Any

    @property
    def name(self) -> str:
        """The model's name in a repository."""
        return self.spec.name

    @property
    def is_ensemble(self) -> bool:
        """Whether the model is an ensemble."""
        return self.platform == "ensemble"

    @property
    def is_native(self) -> bool:
        """Whether a backend runs the model's file: the model is neither Python code nor an ensemble."""
        return not self.is_ensemble and self.backend != "python"

    @property
    def artifacts(self) -> tuple[Artifact, ...]:
        """Files that must be in the version folder, beside the code.

        The parameter ``artifacts`` lists their names, separated by spaces: ``?`` after a name marks an optional file,
        and ``|`` separates alternatives, one of which is enough.
        """
        words = self.spec.parameters.get("artifacts", "").split()
        return tuple(Artifact(tuple(word.removesuffix("?").split("|")), not word.endswith("?")) for word in words)


def read_config(folder: Path) -> ModelConfig:
    """Read ``folder/config.pbtxt``; a model without a name gets the name of its folder, as in Triton.

    Raises:
        ArtifactError: there is no such file, or it is not a model configuration; the error names the file and the line.
    """
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    path = folder / CONFIG
    try:
        text = read_text(path, MAX_CONFIG)
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactError(
            f"{folder} is not a model folder: it has no config.pbtxt.", "Name a model's folder."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(
            f"{path} cannot be read: {getattr(error, 'strerror', error)}.", "Write it as UTF-8 text of at most 1 MiB."
        ) from None
    message = model_config_pb2.ModelConfig()
    if excess := find_backslashes(text):
        raise ArtifactError(f"{path} cannot be read: {excess}.", "Remove them.")
    try:
        text_format.Parse(text, message)
    except (text_format.ParseError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}:{error}", "Fix that line; the fields are Triton's ModelConfig.") from None
    message.name = message.name or folder.name
    if excess := find_excess(message):
        raise ArtifactError(f"{path} cannot be read: {excess}.", "Divide it into several models.")
    return as_config(message, folder)


def check_number(folder: Path, number: int) -> None:
    """Check that a folder holds no more models than are read.

    Raises:
        ArtifactError: it does.
    """
    if number > MAX_MODELS:
        raise ArtifactError(
            f"{folder} holds {number:,} models, and at most {MAX_MODELS:,} are read.", "Divide it into several folders."
        )


def find_backslashes(text: str) -> str:
    """Return what is wrong, as a clause, with a text in which protobuf would look for escapes for too long."""
    most = 100  # in a row; its time grows with the square of their number
    return f"it has more than {most} backslashes in a row" if "\\" * most in text else ""


def find_excess(message: Any) -> str:
    """Return which field of a ModelConfig message has more entries than are read, as a clause; empty if none has."""
    for field, entries in message.ListFields():
        is_ensemble, is_repeated = field.name == "ensemble_scheduling", hasattr(entries, "__len__")
        number, most = (len(entries.step), MAX_STEPS) if is_ensemble else (0, MAX_ENTRIES)
        if is_repeated and not isinstance(entries, str):
            number = max(len(entries), *(len(each.dims) for each in entries if field.name in ("input", "output")), 0)
        if number > most:
            return f"its {field.name} has {number:,} entries, and at most {most:,} are read"
    return ""


def as_config(message: Any, folder: Path) -> ModelConfig:
    """Convert the ModelConfig message of a model folder to a ``ModelConfig``; the default name is the folder's."""
    from google.protobuf import json_format

    fields = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return ModelConfig(
        spec=ModelSpec.from_config({**fields, "name": message.name or folder.name}),
        backend=message.backend,
        platform=message.platform,
        steps=tuple(
            # protobuf's maps have no order of their own
            Step(
                s.model_name,
                int(s.model_version),
                dict(sorted(s.input_map.items())),
                dict(sorted(s.output_map.items())),
            )
            for s in message.ensemble_scheduling.step
        ),
        folder=folder,
        message=message,
    )


def write_config(message: Any, path: Path, *, comment: str) -> None:
    """Write a ModelConfig message in text form, under a comment line."""
    from google.protobuf import text_format

    path.write_text(f"# {comment}\n{text_format.MessageToString(message, as_utf8=True)}", encoding="utf-8")
