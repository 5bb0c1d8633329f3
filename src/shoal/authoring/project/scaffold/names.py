"""Validation of names for Triton, pytest and Python, and parsing of ``NAME:DTYPE:DIMS``."""

from __future__ import annotations

import keyword
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from shoal.authoring.repository.config import ModelConfig
from shoal.authoring.repository.find_graph import find_model_folders
from shoal.authoring.repository.manifest import MANIFEST
from shoal.errors import InputError
from shoal.kit.component.files import find_repeated
from shoal.kit.component.spec import DTYPES, TensorSpec
from shoal.system.paths import shipped_root

_NAME = re.compile(r"(?=.{1,64}$)[A-Za-z][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*")
_TENSOR = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,47}")
_IMPORTED = {"ArtifactError", "Arrays", "Component", "Context"}  # by the generated files
_EXAMPLES = "For example: {0} TEXT:STRING:1, or {0} IMAGE:FP32:3,224,224; -1 is any size"


def find_project_folders(project: Path) -> Mapping[str, ModelConfig]:
    """Find all model folders, shoal's own and the project's, by model name.

    Raises:
        InputError: ``project`` is a file, or a composed repository.
    """
    if project.exists() and not project.is_dir():
        raise InputError(f"{project} is not a folder.", "Name the folder of your project: --project .")
    if (project / MANIFEST).exists():
        raise InputError(
            f"{project} is a repository that shoal composed: the next `shoal compose` replaces it.",
            "Name the folder of your project, which holds its model folders: --project .",
        )
    return find_model_folders([project])


def check_name(name: str, available: Mapping[str, ModelConfig]) -> None:
    """Check that a new model may be called ``name``.

    Raises:
        InputError: the name is invalid for Triton, pytest or Python, or taken by another model.
    """
    if not _NAME.fullmatch(name):
        near = re.sub(r"[^A-Za-z0-9._-]+|\.(?=\.)", "_", name).strip("._-").lstrip("0123456789._-")[:64]
        raise InputError(
            f"{name!r} is not a valid model name: use up to 64 letters, digits, _, - and ., each . between two of"
            " the others, and begin with a letter, so that Triton can use it as a folder.",
            f"For example: {near or 'word_count'}",
        )
    if name not in available:
        return
    folder = available[name].folder
    if folder.resolve().is_relative_to(shipped_root().resolve()):
        raise InputError(
            f"{name} is a model of shoal's own: yours would replace it in every pipeline that calls it.",
            f"Choose another name: my_{name}",
        )
    raise InputError(f"There is a model {name} already, in {folder}.", "Choose another name, or remove that folder.")


def class_name(name: str) -> str:
    """Return the Python class name of a component from its model's name: ``WordLength`` from ``word-length``."""
    made = "".join(part[:1].upper() + part[1:] for part in re.split("[_.-]", name))
    return f"{made}Model" if made in _IMPORTED or keyword.iskeyword(made) else made


def parse_tensor(text: str, option: str) -> TensorSpec:
    """Parse a declaration such as ``TEXT:STRING:1``; ``option`` is its command-line option, such as ``--input``.

    Raises:
        InputError: the declaration is invalid; the message shows a valid example.
    """
    example = _EXAMPLES.format(option)
    name, _, rest = text.partition(":")
    dtype, _, dims = rest.partition(":")
    if not (name and dtype and dims):
        raise InputError(f"{option} {text!r} is not NAME:DTYPE:DIMS.", example)
    check_tensor_name(name, f"{option} {text!r}")
    return TensorSpec(name, *parse_type(rest, f"{option} {text!r}", example))


def parse_type(
    text: str, where: str, example: str, known: Collection[str] = tuple(DTYPES)
) -> tuple[str, tuple[int, ...]]:
    """Parse ``DTYPE:DIMS`` such as ``FP32:3,-1``; ``known`` are the allowed dtypes.

    ``where`` begins the error messages; ``example`` is the advice for invalid dims.

    Raises:
        InputError: the dtype is unknown, or the dims are invalid.
    """
    dtype, _, dims = text.partition(":")
    full = f"TYPE_{dtype.upper().removeprefix('TYPE_')}"
    if full not in known:
        names = ", ".join(each.removeprefix("TYPE_") for each in known)
        raise InputError(f"{where} has an unknown dtype: {dtype}.", f"Known: {names}.")
    if not re.fullmatch(r"(-1|0*[1-9]\d{0,8})(,(-1|0*[1-9]\d{0,8}))*", dims):
        raise InputError(f"{where} has invalid dimensions: {dims}.", example)
    return full, tuple(map(int, dims.split(",")))


def check_tensor_name(name: str, where: str) -> None:
    """Check that a tensor may be called ``name``; ``where``, the option with the name, begins the error message.

    Raises:
        InputError: the name is invalid.
    """
    if not _TENSOR.fullmatch(name):
        raise InputError(
            f"{where} has an invalid tensor name {name!r}: use up to 48 letters, digits, _, . and -, and begin with a"
            " letter or _, so that it can be a file name too.",
            "For example: TEXT, or input__0",
        )


def check_distinct(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
    """Check that there are inputs and outputs, and that all their names differ: an ensemble would merge equal names.

    Raises:
        InputError: there are no inputs or no outputs, or two tensors have the same name.
    """
    for option, tensors in (("--input", inputs), ("--output", outputs)):
        if not tensors:
            raise InputError(f"No {option} is given.", _EXAMPLES.format(option))
    names = [tensor.name for tensor in (*inputs, *outputs)]
    twice = find_repeated(names)
    if twice:
        raise InputError(f"There are two tensors {twice}.", "Give each input and output a name of its own.")
