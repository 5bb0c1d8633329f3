"""Export of an encoder to TorchScript or ONNX; the file is loaded again and compared with the encoder."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from shoal.errors import ArtifactError, InputError, SetupError, needs
from shoal.kit.component.provenance import METADATA, dump_ties
from shoal.kit.encoders.encoder import MAX_REASON, Trunked, count_positions, quiet_transformers
from shoal.kit.encoders.unbinding import unbind

TOLERANCE = 1e-5  # between the encoder that was trained and the TorchScript that is served
NAMES = (("INPUT__0", "INPUT__1"), ("OUTPUT__0",))  # of the model folder's tensors
SEGMENTS = "INPUT__2"  # of one that takes segment ids
COMPARED_SHAPES = ((1, 8), (1, 9), (2, 16), (3, 40), (8, 64))
_torch_repeat_interleave = torch.repeat_interleave


def trace(encoder: Trunked) -> Any:
    """Trace the encoder to TorchScript that runs with every batch size and width, and on every device.

    The example has padding. If its mask had only ones, transformers' attention would take a shortcut, and the trace
    would contain only that shortcut.

    Raises:
        ArtifactError: the encoder cannot be traced.
    """
    with torch.inference_mode(), quiet_transformers(), warnings.catch_warnings():
        # transformers branches on sizes that do not matter here; what matters is compared afterwards, at other shapes
        warnings.simplefilter("ignore")
        try:
            module: Any = torch.jit.trace(encoder.eval(), _example(encoder), check_trace=False)
        except Exception as error:  # of many kinds, by model
            kind = getattr(encoder.trunk.config, "model_type", "its kind")
            raise ArtifactError(
                f"An encoder of the kind {kind} cannot be traced: {' '.join(str(error).split())[:200]}.",
                "Take an encoder of BERT's family.",
            ) from error
    unbind(module)
    return module


def _example(encoder: Trunked) -> tuple[Tensor, ...]:
    ids = torch.randint(0, _limits(encoder)[0], (2, 13))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    return ids, mask, *_segment(encoder, mask)


def _segment(encoder: Trunked, mask: Tensor) -> tuple[Tensor, ...]:
    """Return segment ids for a mask, in which the second text begins after a quarter; none if none are taken."""
    if not encoder.takes_segments:
        return ()
    segments = mask.clone()
    segments[:, : mask.shape[1] // 4] = 0
    return (segments,)


def _limits(encoder: Trunked) -> tuple[int, int]:
    """Return the size of the trunk's vocabulary, and its number of positions, which is the maximum width."""
    config: Any = encoder.trunk.config
    return int(config.vocab_size), count_positions(encoder.trunk)


def export_encoder(encoder: Trunked, path: Path, *, ties: Mapping[str, str]) -> None:
    """Write the encoder to ``path`` as TorchScript (``.pt``) or ONNX (``.onnx``), load it again and compare the two.

    ``ties`` are the SHA-256 of the files that the encoder was made with, such as its vocabulary, by file name. They are
    stored in the file, so that a server can refuse other files.

    Raises:
        InputError: ``path`` has another suffix.
        ArtifactError: the outputs of the two differ by more than 1e-5 for a batch.
    """
    if path.suffix not in (".pt", ".onnx"):
        raise InputError(f"No engine runs {path.name}.", "Name a file that ends in .pt or .onnx.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is deprecated, but Triton serves it
        if path.suffix == ".onnx":
            _write_onnx(encoder, path, ties)
            served: Any = _read_onnx(path)
        else:
            save_script(trace(encoder), path, ties)
            served = torch.jit.load(str(path))
    try:
        difference = compare(served, encoder, COMPARED_SHAPES)
    except (IndexError, RuntimeError) as error:
        raise ArtifactError(
            f"The encoder fails on texts that its configuration allows: {' '.join(str(error).split())[-200:]}.",
            "Take an encoder of BERT's family.",
        ) from error
    if not difference <= TOLERANCE:
        raise ArtifactError(
            f"{path.name} differs from the trained encoder by {difference:g}.", f"Allowed: {TOLERANCE:g}."
        )


def save_script(module: Any, path: Path, ties: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write a TorchScript module, with ``ties`` if there are any; torch itself would abort on a full disk.

    Raises:
        SetupError: the file cannot be written.
    """
    try:
        with path.open("wb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is deprecated, but Triton serves it
            torch.jit.save(module, file, _extra_files={METADATA: dump_ties(ties)} if ties else None)
    except OSError as error:
        raise SetupError(f"{path} cannot be written: {error.strerror}.", "Make room there.") from error


def _write_onnx(encoder: Trunked, path: Path, ties: Mapping[str, str]) -> None:
    """Write the encoder as ONNX with the tensor names of ``config.pbtxt``, by which Triton's backend finds tensors."""
    with needs("serve"):
        import onnx

    axes = {0: "rows", 1: "width"}
    with torch.inference_mode(), quiet_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in trace
        inputs = [*NAMES[0], *([SEGMENTS] if encoder.takes_segments else [])]
        sizes = {**dict.fromkeys(inputs, axes), NAMES[1][0]: {0: "rows"}}
        names = {"input_names": inputs, "output_names": list(NAMES[1]), "dynamic_axes": sizes}
        other = "Export it as TorchScript: --format torchscript"
        export_onnx(encoder.eval(), _example(encoder), path, "The encoder", other, **names)
    model = onnx.load(str(path))
    onnx.helper.set_model_props(model, {METADATA: dump_ties(ties)})
    onnx.save(model, str(path))


def _repeat_interleave(values: Tensor, repeats: Any, dim: int | None = None, **options: Any) -> Tensor:
    """Repeat each element; torch's own form of this along the last dimension cannot be exported (2.13)."""
    if isinstance(repeats, int) and dim is not None and dim in (-1, values.dim() - 1):
        return values[..., None].expand(*values.shape, repeats).flatten(-2)
    return _torch_repeat_interleave(values, repeats, dim=dim, **options)


def export_onnx(module: nn.Module, example: Any, path: Path, what: str, fix: str, **options: Any) -> None:
    """Trace a module and write it as ONNX; ``options`` are those of ``torch.onnx.export``.

    Raises:
        ArtifactError: the exporter refuses it; the message is one line, with ``what`` and ``fix``.
    """
    try:
        with (
            patch.object(torch._C, "_jit_onnx_log"),  # by which a failing exporter prints the whole graph, always
            patch.object(torch, "repeat_interleave", _repeat_interleave),
            patch.object(torch.Tensor, "repeat_interleave", _repeat_interleave),
        ):
            # The exporter sets the module's mode back, and that of all its parts: dropout would be on in them.
            torch.onnx.export(module.eval(), example, str(path), dynamo=False, opset_version=17, **options)
    except Exception as error:  # the exporter's and the tracer's errors have no other common class
        reason = next(iter(str(error).splitlines()), type(error).__name__)[:MAX_REASON]
        raise ArtifactError(f"{what} cannot be exported to ONNX: {reason.rstrip('.')}.", fix) from error


def _read_onnx(path: Path) -> Callable[..., Tensor]:
    with needs("serve"):
        import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(*tensors: Tensor) -> Tensor:
        given = {name: tensor.numpy() for name, tensor in zip((*NAMES[0], SEGMENTS), tensors, strict=False)}
        return torch.from_numpy(session.run(None, given)[0])

    return run


def compare(served: Any, encoder: Trunked, shapes: Sequence[tuple[int, int]]) -> float:
    """Return the greatest difference between the outputs of ``served`` and ``encoder``; NaN if any difference is NaN.

    ``shapes`` are the (rows, width) of the batches; each batch is run once with padding and once without.
    """
    differences = []
    num_tokens, num_positions = _limits(encoder)
    generator = torch.Generator().manual_seed(0)
    for rows, widest in shapes:
        width = min(widest, num_positions)
        ids = torch.randint(0, num_tokens, (rows, width), generator=generator)
        padded = torch.ones_like(ids)
        padded[:, max(2, width // 2) :] = 0
        for mask in (torch.ones_like(ids), padded):
            given = (ids, mask, *_segment(encoder, mask))
            with torch.inference_mode():
                differences.append((served(*given) - encoder(*given)).abs().max())
    return float(torch.stack(differences).max())  # NaN if any difference is NaN
