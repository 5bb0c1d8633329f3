"""Ensembles in a few words, for what reads and draws them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.authoring.repository.config import write_config
from shoal.authoring.repository.graph import Graph

Type = tuple[str, Sequence[int]]
VECTOR: Type = ("FP32", [16])


@dataclass(frozen=True)
class Member:
    """A model and its step: the ensemble's tensors go by the same names in the model.

    ``device`` is ``cpu``, ``gpu`` (each one), ``gpu 0 1``, ``auto``, several of them with ``+``, or empty: no group.
    """

    name: str
    reads: Sequence[str]
    writes: Sequence[str]
    device: str = "gpu 0"
    backend: str = "python"
    force: str = "no"  # FORCE_CPU_ONLY_INPUT_TENSORS; empty leaves it out


def write_ensemble(
    repository: Path,
    members: Sequence[Member],
    inputs: Sequence[str],
    outputs: Sequence[str],
    types: Mapping[str, Type] | None = None,
    name: str = "ensemble",
) -> Path:
    """Write a repository; the ensemble's folder."""
    from tritonclient.grpc import model_config_pb2

    types = types or {}
    for member in members:
        message = model_config_pb2.ModelConfig(name=member.name, backend=member.backend, max_batch_size=8)
        _declare(message, member.reads, member.writes, types)
        for group in filter(None, member.device.split("+")):
            kind, *gpus = group.split()
            message.instance_group.add(kind=f"KIND_{kind.upper()}", gpus=map(int, gpus))
        if member.force:
            message.parameters["FORCE_CPU_ONLY_INPUT_TENSORS"].string_value = member.force
        _write(message, repository / member.name)
    message = model_config_pb2.ModelConfig(name=name, platform="ensemble", max_batch_size=8)
    _declare(message, inputs, outputs, types)
    for member in members:
        step = message.ensemble_scheduling.step.add(model_name=member.name, model_version=1)
        for tensors, mapped in ((member.reads, step.input_map), (member.writes, step.output_map)):
            for tensor in tensors:
                mapped[tensor] = tensor
    return _write(message, repository / name)


def make_graph(repository: Path, members: Sequence[Member], *arguments: Any, **options: Any) -> Graph:
    """The graph of such a repository."""
    return Graph.load(write_ensemble(repository, members, *arguments, **options))


def _declare(message: Any, reads: Sequence[str], writes: Sequence[str], types: Mapping[str, Type]) -> None:
    for names, entries in ((reads, message.input), (writes, message.output)):
        for name in names:
            dtype, dims = types.get(name, VECTOR)
            entries.add(name=name, data_type=f"TYPE_{dtype}", dims=dims)


def _write(message: Any, folder: Path) -> Path:
    folder.mkdir(parents=True)
    write_config(message, folder / "config.pbtxt", comment="A test's.")
    return folder


TEN_TYPES: Mapping[str, Type] = {
    "image": ("UINT8", [-1, -1, 3]), "text": ("STRING", [1]), "pixels": ("FP32", [3, 384, 384]), "ids": ("INT64", [-1]),
    "mask": ("INT64", [-1]), "patches": ("FP16", [577, 1024]), "boxes": ("FP32", [-1, 4]),
    "crops": ("FP32", [-1, 3, 48, 320]), "ocr_embedding": ("FP32", [768]), "image_embedding": ("FP32", [768]),
    "text_embedding": ("FP32", [768]), "fused": ("FP32", [2304]), "class_scores": ("FP32", [120]),
    "threshold": ("FP32", [1]), "labels": ("STRING", [-1]),
}  # fmt: skip
TEN_STEPS = (
    Member("image_preprocess", ["image"], ["pixels"]),
    Member("tokenizer", ["text"], ["ids", "mask"], "cpu"),
    Member("vision_encoder", ["pixels"], ["patches"], backend="tensorrt"),
    Member("text_detector", ["pixels"], ["boxes"], backend="tensorrt"),
    Member("box_cropper", ["image", "boxes"], ["crops"], "cpu"),
    Member("text_recognizer", ["crops"], ["ocr_embedding"], backend="onnxruntime"),
    Member("pooler", ["patches"], ["image_embedding"], backend="pytorch"),
    Member("text_encoder", ["ids", "mask"], ["text_embedding"], backend="pytorch"),
    Member("fusion", ["image_embedding", "text_embedding", "ocr_embedding"], ["fused", "class_scores"]),
    Member("decide", ["class_scores", "threshold", "fused"], ["labels"]),
)


def ten_steps(repository: Path) -> Graph:
    """Images and texts: three branches, one of which goes to the host and back."""
    return make_graph(
        *(repository, TEN_STEPS, ["image", "text", "threshold"], ["labels", "class_scores"], TEN_TYPES),
        name="ten_steps",
    )
