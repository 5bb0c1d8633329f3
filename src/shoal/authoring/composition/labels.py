"""Files with the names of classes, one per line, which Triton's classification extension and ``/v1/classify`` read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from shoal.authoring.repository.config import ModelConfig


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
