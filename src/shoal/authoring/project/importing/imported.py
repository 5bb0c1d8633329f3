"""Result of an import: a model folder's configuration, its files, and notes on what was derived from where."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.authoring.repository.parameters import HOST_INPUTS
from shoal.kit.component.spec import TensorSpec
from shoal.system.progress import OnProgress

LABELS = "labels.txt"
MAX_BATCH_SIZE = 512  # default for a model whose file sets no limit


@dataclass(frozen=True)
class Imported:
    """An imported model, to be written as a model folder.

    ``message`` is its ModelConfig. ``files`` are its other files by their paths in the model folder (``1/model.onnx``):
    bytes, or the path of a file to copy. ``said`` are notes for the user: what was derived, and from what. ``beside``
    are the files of further model folders that the model needs, such as its tokenizer, by their paths in the project
    (``preprocess/tokens/config.pbtxt``).
    """

    message: Any
    files: Mapping[str, bytes | Path]
    said: tuple[str, ...]
    beside: Mapping[str, str | bytes | Path] = field(default_factory=dict)


def split_source(source: object) -> tuple[Path, str]:
    """Split ``FILE.py:CLASS`` into the file and the name of the class, which is empty for all other sources."""
    file, _, name = str(source).rpartition(":")
    return (Path(file), name) if file.endswith(".py") else (Path(str(source)), "")


@contextmanager
def stage(on_progress: OnProgress, name: str) -> Iterator[None]:
    """Report the start and the end of the stage ``name`` to ``on_progress``; if the stage fails, only the start."""
    on_progress(name, 0, 1)
    yield
    on_progress(name, 1, 1)


def make_config(
    name: str,
    backend: str,
    inputs: Iterable[TensorSpec],
    outputs: Iterable[TensorSpec],
    *,
    artifact: str,
    max_batch_size: int = MAX_BATCH_SIZE,
    parameters: Mapping[str, str] | None = None,
) -> Any:
    """Build the ModelConfig message of a model on the CPU; ``artifact`` is the file in ``1/`` that its backend opens.

    A tensor with empty dims has one number per row. Triton's way to declare it is dims [ 1 ] with an empty reshape.
    """
    from tritonclient.grpc import model_config_pb2

    message = model_config_pb2.ModelConfig(name=name, backend=backend, max_batch_size=max_batch_size)
    for tensors, entries in ((inputs, message.input), (outputs, message.output)):
        for tensor in tensors:
            entry = entries.add(name=tensor.name, dims=tensor.dims or [1])
            entry.data_type = model_config_pb2.DataType.Value(tensor.dtype)
            if not tensor.dims:
                entry.reshape.SetInParent()
    if max_batch_size:
        message.dynamic_batching.SetInParent()
    message.instance_group.add().kind = model_config_pb2.ModelInstanceGroup.KIND_CPU
    given = {"artifacts": artifact, **(parameters or {}), HOST_INPUTS: "no"}
    for key, value in given.items():
        message.parameters[key].string_value = value
    return message


def write_labels(message: Any, labels: Sequence[str]) -> dict[str, bytes]:
    """Name the classes of a model's only output in its parameter ``labels``, and in the file for Triton; return that.

    Triton's file has a label per line: if a label is empty or has a line break, there is only the parameter.
    """
    message.parameters["labels"].string_value = json.dumps([*labels], ensure_ascii=False)
    if any(label.splitlines() != [label] for label in labels):
        return {}
    message.output[0].label_filename = LABELS
    return {LABELS: "".join(f"{label}\n" for label in labels).encode()}
