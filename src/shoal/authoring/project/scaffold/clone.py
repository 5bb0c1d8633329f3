"""Copies of model folders under a new name, with other parameters, tensors and artifacts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.authoring.check.config.engines import FILE as ENGINE_FILE
from shoal.authoring.check.config.engines import check_arguments
from shoal.authoring.check.findings import Place, Severity
from shoal.authoring.composition.labels import find_labels
from shoal.authoring.composition.writing import version_files
from shoal.authoring.project.scaffold import text
from shoal.authoring.project.scaffold.names import check_name, find_project_folders
from shoal.authoring.project.scaffold.skeletons import Skeleton, alone, check_category, make_skeleton
from shoal.authoring.repository.config import CONFIG, ModelConfig, as_config
from shoal.errors import InputError
from shoal.kit.component.files import read_json
from shoal.kit.component.spec import TensorSpec
from shoal.system.files import parse_json


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
    """Draft a copy, called ``name``, of the model folder ``like`` of shoal or the project.

    ``settings`` are new values of parameters, by name, and for the vLLM backend of engine arguments, which go into
    ``model.json``; ``artifacts`` are files for the version folder ``1/``, by their
    names there. ``inputs`` and ``outputs`` replace the dtype and dims of the tensors with the same names. If ``like``
    has two or more inputs, all of one dtype and shape, as ``blend`` does, a new name in ``inputs`` adds an input.
    ``category`` is the project's folder for the copy, such as ``postprocess``; its default is the category of ``like``.
    A pipeline that runs only the copy is drafted too, with a test.

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
    settings, engine = _divide(source, settings or {})
    message, config_text = _edit(source, name, settings, inputs, outputs)
    config = as_config(message, source.folder)
    folder = f"{category or source.folder.parent.name}/{name}"
    _check_artifacts(source, artifacts or {})
    files = {**_find_files(source), **{f"1/{file}": path for file, path in (artifacts or {}).items()}}
    here = {path.removeprefix("1/") for path in files}
    missing = [file for file in config.artifacts if file.is_required and here.isdisjoint(file.names)]
    spec = config.spec
    width = text.find_width(spec.parameters, [path for name, path in files.items() if name.endswith(".json")])
    ensemble = text.write_alone(pipeline, name, spec.max_batch_size, spec.inputs, spec.outputs)
    widths = {tensor.name: width for tensor in spec.inputs}
    test = text.write_test(name, pipeline, spec.inputs, [config], is_batched=spec.is_batched, widths=widths)
    said = [f"{folder} is a copy of {source.folder}."]
    if missing:
        options = " ".join(f"--artifact {file.names[0]}=PATH" for file in missing)
        listed = ", ".join(map(str, missing))
        said.append(f"Before it is tested or served, put {listed} into {folder}/1, as {options} does.")
    made: dict[str, str | Path] = {f"{folder}/{CONFIG}": config_text}
    made |= {f"{folder}/{path}": file for path, file in files.items()}
    if engine:
        made[f"{folder}/1/{ENGINE_FILE}"] = _write_engine_args(source, engine)
    return make_skeleton(root, pipeline, ensemble, name, test, made, said)


def _find_model(like: str, available: Mapping[str, ModelConfig]) -> ModelConfig:
    known = sorted(name for name, model in available.items() if not model.is_ensemble)
    if like not in available:
        raise InputError(f"There is no model {like} to copy.", f"Known: {', '.join(known)}.")
    if available[like].is_ensemble:
        raise InputError(f"{like} is a pipeline, which calls models by name.", f"Known models: {', '.join(known)}.")
    return available[like]


def _find_files(model: ModelConfig) -> dict[str, Path]:
    """Find the files to copy, by their paths in the model folder."""
    files = {str(path.relative_to(model.folder)): path for path in version_files(model.folder)}
    files |= dict(find_labels(model, {}).values())
    if len(files) > 1:
        files.pop("1/.gitkeep", None)
    return files


def _check_artifacts(source: ModelConfig, artifacts: Mapping[str, Path]) -> None:
    known = [name for artifact in source.artifacts for name in artifact.names]
    for name, path in artifacts.items():
        if name not in known:
            listed = f"It has: {', '.join(known)}." if known else "It has none."
            raise InputError(f"{source.name} has no artifact {name}.", listed)
        if not path.is_file():
            raise InputError(f"There is no file {path} for the artifact {name}.", f"Name one: --artifact {name}=PATH")


# --- engine arguments of the vLLM backend ------------------------------------------------------------------------


def _divide(source: ModelConfig, settings: Mapping[str, str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Divide ``settings`` into parameters, and vLLM's engine arguments as JSON values; only its backend has the latter.

    Raises:
        InputError: vLLM would refuse an engine argument.
    """
    own = {key: text for key, text in settings.items() if source.backend != "vllm" or key in source.message.parameters}
    engine = {key: _parse(text) for key, text in settings.items() if key not in own}
    for finding in check_arguments(engine, lambda _: Place(source.folder)):
        if finding.severity != Severity.ADVICE:
            raise InputError(f"--set: {finding.what}", finding.fix)
    return own, engine


def _parse(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return text


def _write_engine_args(source: ModelConfig, engine: Mapping[str, Any]) -> str:
    arguments = read_json(source.folder / "1" / ENGINE_FILE, "object of vLLM's arguments")
    return f"{json.dumps(arguments | dict(engine), indent=2)}\n"


# --- config.pbtxt: edited as text to keep its comments; the message it must parse to is built alongside -----------

_VALUE = r'("(\\.|[^"\\])*"|\[[^\]]*\]|[\w.-]+)'


def _edit(
    source: ModelConfig,
    name: str,
    settings: Mapping[str, str],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
) -> tuple[Any, str]:
    """Build the copy's configuration; return it as a ModelConfig message and as the text of its ``config.pbtxt``.

    The text keeps the comments of the source's ``config.pbtxt``, unless the edited text does not parse to the message.
    """
    from google.protobuf import text_format
    from google.protobuf.text_encoding import CEscape

    message = type(source.message)()
    message.CopyFrom(source.message)
    message.name = name
    config = _replace((source.folder / CONFIG).read_text(encoding="utf-8"), "", "name", f'"{name}"')
    for key, value in settings.items():
        known = sorted(key for key in message.parameters if key != "artifacts")
        if key not in known:
            raise InputError(f"{source.name} has no parameter {key}.", f"It has: {', '.join(known) or 'none'}.")
        message.parameters[key].string_value = value
        config = _replace(config, f'key: "{key}"', "string_value", f'"{CEscape(value, as_utf8=True)}"')
    for field, entries, tensors in (("input", message.input, inputs), ("output", message.output, outputs)):
        config = _edit_tensors(config, source.name, field, entries, tensors)
    try:
        is_same = text_format.Parse(config, type(message)()) == message
    except text_format.ParseError:
        is_same = False
    return message, config if is_same else str(text_format.MessageToString(message, as_utf8=True))


def _edit_tensors(config: str, source: str, field: str, entries: Any, tensors: Sequence[TensorSpec]) -> str:
    """Change the declarations of ``tensors`` in ``entries``, a field of the message, and in the text ``config``.

    Return the text. ``field`` is ``input`` or ``output``; ``source`` is the model's name, for errors.

    Raises:
        InputError: the model has no such tensor, and cannot take another input.
    """
    from tritonclient.grpc import model_config_pb2

    takes_more = field == "input" and len(entries) > 1 and len({(e.data_type, tuple(e.dims)) for e in entries}) == 1
    for tensor in tensors:
        known = {entry.name: entry for entry in entries}
        if tensor.name in known:
            entry = known[tensor.name]
            for part, value in (("data_type", tensor.dtype), ("dims", text.write_dims(tensor))):
                config = _replace(config, f'name: "{tensor.name}"', part, value)
        elif takes_more:
            last = rf'(name: "{re.escape(entries[-1].name)}".*?\n  \}})'
            added = f",\n{text.write_tensor(tensor)}"
            config = re.sub(last, rf"\1{added}", config, count=1, flags=re.DOTALL)
            entry = entries.add(name=tensor.name)
        else:
            raise InputError(f"{source} has no {field} {tensor.name}.", f"It has: {', '.join(known)}.")
        entry.data_type = model_config_pb2.DataType.Value(tensor.dtype)
        entry.dims[:] = tensor.dims
    return config


def _replace(config: str, after: str, field: str, value: str) -> str:
    """Replace the value of the first ``field`` after the text ``after`` in the text ``config``."""
    pattern = rf"({re.escape(after)}.*?\b{field}\s*:\s*){_VALUE}"
    return re.sub(pattern, lambda found: f"{found[1]}{value}", config, count=1, flags=re.DOTALL)
