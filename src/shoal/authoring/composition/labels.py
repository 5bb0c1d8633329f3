"""Files with the names of classes, one per line, which Triton's classification extension and ``/v1/classify`` read."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from shoal.authoring.repository.config import ModelConfig, as_config
from shoal.system.files import read_text

_PARAMETER = "labels"  # of components that name classes, such as top_k


def find_labels(model: ModelConfig, members: Mapping[str, ModelConfig]) -> dict[str, tuple[str, Path]]:
    """Return the label files of a model's outputs: by output, the name in the model's folder and the file itself.

    An ensemble's output without a file has that of the step that gives it. ``members`` are the steps' models, by name.
    """
    found = {}
    for index, tensor in enumerate(model.message.output):
        name = tensor.label_filename
        if name:
            path = PurePosixPath(name)
            is_inside = not path.is_absolute() and ".." not in path.parts
            if is_inside and (model.folder / path).is_file():  # if not, check finds it
                found[tensor.name] = name, model.folder / path
            continue
        for step in model.steps:
            output = next((output for output, mapped in step.outputs.items() if mapped == tensor.name), "")
            labels = find_labels(members[step.model], members) if output else {}
            if output in labels:
                found[tensor.name] = f"labels-{index}.txt", labels[output][1]
    return found


def give(models: Sequence[ModelConfig]) -> list[ModelConfig]:
    """Return the models; an empty parameter ``labels`` gets the names of the classes that the model's steps read.

    It stays empty if a step reads scores without names, or steps read scores with different ones.
    """
    members, read = {model.name: model for model in models}, defaultdict[str, set[str]](set)
    for model in models:
        for step in model.steps:
            for tensor in step.inputs.values():
                read[step.model].add(_find_names(model, tensor, members))
    return [
        _with_labels(model, *read[model.name])
        if len(read[model.name]) == 1 and model.spec.parameters.get(_PARAMETER, "unknown") == ""
        else model
        for model in models
    ]


def _find_names(ensemble: ModelConfig, tensor: str, members: Mapping[str, ModelConfig]) -> str:
    """Return the names of the classes whose scores a tensor of an ensemble has, as JSON; empty without names."""
    for step in ensemble.steps:
        output = next((output for output, mapped in step.outputs.items() if mapped == tensor), "")
        labels = find_labels(members[step.model], members) if output else {}
        if output in labels:
            lines = read_text(labels[output][1]).rstrip("\n").split("\n")
            return json.dumps(lines, ensure_ascii=False)
    return ""


def _with_labels(model: ModelConfig, labels: str) -> ModelConfig:
    message = type(model.message)()
    message.CopyFrom(model.message)
    message.parameters[_PARAMETER].string_value = labels
    return as_config(message, model.folder)
