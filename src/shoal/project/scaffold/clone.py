"""Copies of model folders under a new name, with other parameters, tensors and artifacts."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.component.spec import TensorSpec
from shoal.composition.warmup import FOLDER
from shoal.errors import InputError, ShoalError
from shoal.project.draft import Draft
from shoal.project.scaffold import text
from shoal.project.scaffold.names import check_name, find_project_folders
from shoal.project.scaffold.sample_request import find_width
from shoal.project.scaffold.skeletons import Skeleton, alone, check_category, gitignore, path_of_test, pipeline_files
from shoal.project.scaffold.test_template import write_test
from shoal.repository.config import CONFIG, ModelConfig, as_config


def draft_like(
    name: str,
    like: str,
    *,
    category: str | None = None,
    settings: Mapping[str, str] | None = None,
    artifacts: Mapping[str, Path] | None = None,
    inputs: Sequence[TensorSpec] = (),
    outputs: Sequence[TensorSpec] = (),
    project: Path | str = ".",
) -> Skeleton:
    """Draft a copy of the model folder of model ``like``, from shoal or the project.

    ``settings`` are parameters by name, ``artifacts`` files by their names in ``1/``. ``inputs`` and ``outputs`` are
    declarations that replace those of the same names; if a model takes two or more inputs of one dtype and shape, as
    ``blend`` does, a new name adds an input. The category is that of ``like`` unless given.

    Raises:
        InputError: a name cannot be used; ``like`` has no such parameter, artifact or tensor; or a file does not exist.
    """
    root = Path(project)
    available = find_project_folders(root)
    pipeline = alone(name)
    for each in (name, pipeline):
        check_name(each, available)
    if category is not None:
        check_category(category)
    source = _find_model(like, available)
    message, config_text = _edit(source, name, settings or {}, inputs, outputs)
    config = as_config(message, source.folder)
    folder = f"{category or source.folder.parent.name}/{name}"
    files = _version_files(source.folder)
    given = _check_artifacts(source, artifacts or {})
    here = {*given, *(path.removeprefix("1/") for path in files)}
    absent = [artifact for artifact in config.artifacts if here.isdisjoint(artifact.names)]
    missing = [artifact for artifact in absent if artifact.is_required]
    width, problem = _try(
        config, {**files, **{f"1/{file}": path for file, path in given.items()}}, folder, is_whole=not absent
    )
    test = path_of_test(name)
    draft = Draft(root)
    draft.add(
        {
            f"{folder}/{CONFIG}": config_text,
            **{f"{folder}/{path}": file for path, file in files.items()},
            **{f"{folder}/1/{file}": path for file, path in given.items()},
        }
    )
    spec = config.spec
    draft.add(
        pipeline_files(pipeline, text.write_alone(pipeline, name, spec.max_batch_size, spec.inputs, spec.outputs))
    )
    widths = {tensor.name: width for tensor in spec.inputs}
    written = write_test(name, pipeline, spec.inputs, [config], is_batched=spec.is_batched, widths=widths)
    draft.add({test: written, **gitignore(root)})
    said = [f"{folder} is a copy of {source.folder}."]
    if missing:
        options = " ".join(f"--artifact {file.names[0]}=PATH" for file in missing)
        listed = ", ".join(map(str, missing))
        said.append(f"Before it is tested or served, put {listed} into {folder}/1, as {options} does.")
    elif problem:
        said.append(f"It does not start yet: {problem}")
    return Skeleton(draft, pipeline, test, tuple(said))


def _try(config: ModelConfig, files: Mapping[str, Path], place: str, *, is_whole: bool) -> tuple[int, str]:
    """Return the width of a request that the new component answers, and why it does not start without its artifacts.

    It runs in a temporary folder, which messages show as ``place``, its later folder.

    Raises:
        InputError: it has all artifacts, and does not start with these parameters and tensors.
    """
    with tempfile.TemporaryDirectory(prefix="shoal-") as aside:
        folder = Path(aside).resolve()
        for name, path in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(path.resolve())
        try:
            return find_width(replace(config, folder=folder)), ""
        except ShoalError as error:
            what, fix = (said.replace(str(folder), place) for said in (error.what, error.fix))
            if is_whole:
                raise InputError(f"It would not start: {what}", fix) from None
            return text.WIDTH, f"{what} {fix}".rstrip()
        except Exception as error:  # raised by a user's component
            return text.WIDTH, f"{type(error).__name__}: {error}"


def _find_model(like: str, available: Mapping[str, ModelConfig]) -> ModelConfig:
    known = sorted(name for name, model in available.items() if not model.is_ensemble)
    if like not in available:
        raise InputError(f"There is no model {like} to copy.", f"Known: {', '.join(known)}.")
    if available[like].is_ensemble:
        raise InputError(f"{like} is a pipeline, which calls models by name.", f"Known models: {', '.join(known)}.")
    return available[like]


def _version_files(model: Path) -> dict[str, Path]:
    """Find the files of the version folders and of the warm-up, by their paths in the model folder."""
    found = (path for pattern in ("[0-9]*", FOLDER) for path in sorted(model.glob(f"{pattern}/**/*")))
    files = {str(path.relative_to(model)): path for path in found if path.is_file() and "__pycache__" not in path.parts}
    if len(files) > 1:
        files.pop("1/.gitkeep", None)
    return files


def _check_artifacts(source: ModelConfig, artifacts: Mapping[str, Path]) -> Mapping[str, Path]:
    known = [name for artifact in source.artifacts for name in artifact.names]
    for name, path in artifacts.items():
        if name not in known:
            listed = f"It has: {', '.join(known)}." if known else "It has none."
            raise InputError(f"{source.name} has no artifact {name}.", listed)
        if not path.is_file():
            raise InputError(f"There is no file {path} for the artifact {name}.", f"Name one: --artifact {name}=PATH")
    return artifacts


# --- config.pbtxt: edited as text to keep its comments; the message it must parse to is built alongside -----------


def _edit(
    source: ModelConfig,
    name: str,
    settings: Mapping[str, str],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
) -> tuple[Any, str]:
    """Build the new configuration, as a message and as text."""
    message = type(source.message)()
    message.CopyFrom(source.message)
    edited = _Edited((source.folder / CONFIG).read_text(encoding="utf-8"))
    message.name = name
    edited.put(("name",), "name", text.quote(name))
    for key, value in settings.items():
        known = sorted(key for key in message.parameters if key != "artifacts")
        if key not in known:
            raise InputError(f"{source.name} has no parameter {key}.", f"It has: {', '.join(known) or 'none'}.")
        message.parameters[key].string_value = value
        edited.put_parameter(key, text.quote(value))
    for field, entries, tensors in (("input", message.input, inputs), ("output", message.output, outputs)):
        _edit_tensors(source.name, field, entries, tensors, edited)
    return message, edited.result(message)


def _edit_tensors(source: str, field: str, entries: Any, tensors: Sequence[TensorSpec], edited: _Edited) -> None:
    places = {entry.name: place for place, entry in enumerate(entries)}
    takes_more = field == "input" and len(entries) > 1 and len({(e.data_type, tuple(e.dims)) for e in entries}) == 1
    for tensor in tensors:
        dims = f"[ {', '.join(map(str, tensor.dims))} ]"
        place = places.get(tensor.name)
        if place is not None:
            edited.put((field, place, "data_type"), "data_type", tensor.dtype)
            edited.put((field, place, "dims"), "dims", dims)
        elif takes_more:
            edited.add((field, len(places) - 1), tensor.name, tensor.dtype, dims)
        else:
            raise InputError(f"{source} has no {field} {tensor.name}.", f"It has: {', '.join(places)}.")
        entry = entries.add(name=tensor.name) if place is None else entries[place]
        entry.data_type = _number(entry, tensor.dtype)
        entry.ClearField("dims")
        entry.dims.extend(tensor.dims)


def _number(entry: Any, dtype: str) -> int:
    return int(entry.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_name[dtype].number)


class _Edited:
    """Line editor for a configuration: replaces single values in place."""

    def __init__(self, original: str) -> None:
        from shoal.check.config_lines import locate

        self._fields = locate(original)
        self._lines = original.split("\n")
        self._added: list[tuple[int, list[str]]] = []

    def put(self, path: tuple[str | int, ...], field: str, value: str) -> None:
        self._replace(self._fields.find(*path).line, field, value)

    def put_parameter(self, key: str, value: str) -> None:
        for entry in self._fields.entries("parameters", key):
            self._replace(entry.find("value", "string_value").line, "string_value", value)

    def add(self, last: tuple[str | int, ...], name: str, dtype: str, dims: str) -> None:
        """Append a tensor after ``last``, the last existing one."""
        block = ["  {", f"    name: {text.quote(name)}", f"    data_type: {dtype}", f"    dims: {dims}"]
        self._added.append((self._fields.find(*last).line, ["  },", *block]))

    def _replace(self, line: int, field: str, value: str) -> None:
        old = r'("(\\.|[^"\\])*"|\'(\\.|[^\'\\])*\'|\[[^\]]*\]|[\w.-]+)'
        replace: Callable[[re.Match[str]], str] = lambda found: f"{found[1]}{value}"  # noqa: E731
        self._lines[line - 1] = re.sub(rf"(\b{field}\s*:\s*){old}", replace, self._lines[line - 1], count=1)

    def result(self, message: Any) -> str:
        """Return the edited text if it parses to ``message``; else ``message`` as Protobuf prints it, uncommented."""
        from google.protobuf import text_format

        written = "\n".join(self._with_added())
        try:
            if text_format.Parse(written, type(message)()) == message:
                return written
        except text_format.ParseError:
            pass
        return str(text_format.MessageToString(message, as_utf8=True))

    def _with_added(self) -> list[str]:
        lines = list(self._lines)
        for after, block in reversed(self._added):  # all go after the same tensor, so insert the last first
            ends = [place for place in range(after, len(lines)) if lines[place].strip() in ("}", "},")]
            for end in ends[:1]:
                lines[end:end] = block
        return lines
