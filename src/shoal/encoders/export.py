"""Export of an encoder to TorchScript or ONNX; the file is loaded again and compared with the encoder."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.component.provenance import METADATA, dump_ties
from shoal.encoders.encoder import Trunked, quiet_transformers
from shoal.errors import ArtifactError, InputError, needs

TOLERANCE = 1e-5  # between the encoder that was trained and the TorchScript that is served
NAMES = (("INPUT__0", "INPUT__1"), ("OUTPUT__0",))  # of the model folder's tensors
COMPARED_SHAPES = ((1, 8), (1, 9), (2, 16), (3, 40), (8, 64))
_ARITHMETIC = {f"aten::{name}" for name in ("add", "sub", "mul", "div", "floor_divide")}


def trace(encoder: Trunked) -> Any:
    """Return the encoder as TorchScript for every batch size, width and device.

    The example is padded: with a mask of ones alone the attention would take a shortcut and the trace keep it.
    """
    with torch.inference_mode(), quiet_transformers(), warnings.catch_warnings():
        # transformers branches on sizes that do not matter here; what matters is compared afterwards, at other shapes
        warnings.simplefilter("ignore")
        module: Any = torch.jit.trace(encoder.eval(), _example(encoder), check_trace=False)
    unbind(module)
    return module


def unbind(module: Any) -> None:
    """Rewrite a traced module in place so that it runs on the device of its inputs, to the bit as before.

    A trace keeps ``x.device`` as a constant, the device that it was made on, and ``torch.jit.load(map_location=...)``
    does not change it: on a GPU the positions and masks that transformers makes would stay on the host. Each such
    constant becomes the device of the method's first tensor. Python numbers that a trace keeps as tensors without
    dimensions become numbers again: loaded to a GPU, one that is added to a width makes every call wait for the device.
    """
    for part in module.modules():
        for name in part._c._method_names():
            graph = part._c._get_method(name).graph
            tensors = [value for value in graph.inputs() if value.type().kind() == "TensorType"]
            for node in graph.findAllNodes("prim::Constant"):
                made = _unbound(graph, node, tensors)
                if made is not None:
                    node.output().replaceAllUsesWith(made)
                    node.destroy()


def _unbound(graph: Any, node: Any, tensors: Sequence[Any]) -> Any:
    """Return the value that replaces a constant; None if it can stay."""
    graph.setInsertPoint(node)
    if node.output().type().kind() == "DeviceObjType" and tensors:
        device = graph.create("prim::device", [tensors[0]], 1).insertBefore(node)
        device.output().setType(node.output().type())
        return device.output()
    is_tensor = node.hasAttribute("value") and node.kindOf("value") == "t"
    if is_tensor and node.t("value").ndim == 0 and all(_takes_numbers(use) for use in node.output().uses()):
        return graph.insertConstant(node.t("value").item())
    return None


def _takes_numbers(use: Any) -> bool:
    """Whether a number may replace a tensor here: as the second operand of arithmetic."""
    return use.offset == 1 and use.user.kind() in _ARITHMETIC


def _example(encoder: Trunked) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, _limits(encoder)[0], (2, 13))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    return ids, mask


def _limits(encoder: Trunked) -> tuple[int, int]:
    """Return the trunk's numbers of tokens and of positions."""
    config: Any = encoder.trunk.config
    return int(config.vocab_size), int(config.max_position_embeddings)


def export_encoder(encoder: Trunked, path: Path, *, ties: Mapping[str, str]) -> None:
    """Write the encoder to ``path`` as TorchScript (``.pt``) or ONNX (``.onnx``), load it again and compare the two.

    Raises:
        InputError: ``path`` has another suffix.
        ArtifactError: outputs differ by more than 1e-5 at some shape.
    """
    if path.suffix not in (".pt", ".onnx"):
        raise InputError(f"No engine runs {path.name}.", "Name a file that ends in .pt or .onnx.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is deprecated, and what Triton serves
        if path.suffix == ".onnx":
            _write_onnx(encoder, path, ties)
            served: Any = _read_onnx(path)
        else:
            torch.jit.save(trace(encoder), str(path), _extra_files={METADATA: dump_ties(ties)})
            served = torch.jit.load(str(path))
    difference = compare(served, encoder, COMPARED_SHAPES)
    if not difference <= TOLERANCE:
        raise ArtifactError(
            f"{path.name} differs from the trained encoder by {difference:g}.", f"Allowed: {TOLERANCE:g}."
        )


def _write_onnx(encoder: Trunked, path: Path, ties: Mapping[str, str]) -> None:
    """Write ONNX for Triton's ``onnxruntime`` backend, which matches tensors by name."""
    with needs("serve"):
        import onnx

    axes = {0: "rows", 1: "width"}
    with torch.inference_mode(), quiet_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as of a trace
        torch.onnx.export(
            encoder.eval(), _example(encoder), str(path), dynamo=False, opset_version=17,
            input_names=list(NAMES[0]), output_names=list(NAMES[1]),
            dynamic_axes={NAMES[0][0]: axes, NAMES[0][1]: axes, NAMES[1][0]: {0: "rows"}},
        )  # fmt: skip
    model = onnx.load(str(path))
    onnx.helper.set_model_props(model, {METADATA: dump_ties(ties)})
    onnx.save(model, str(path))


def _read_onnx(path: Path) -> Callable[[Tensor, Tensor], Tensor]:
    with needs("serve"):
        import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(ids: Tensor, mask: Tensor) -> Tensor:
        given = {name: tensor.numpy() for name, tensor in zip(NAMES[0], (ids, mask), strict=True)}
        return torch.from_numpy(session.run(None, given)[0])

    return run


def compare(served: Any, encoder: Trunked, shapes: Sequence[tuple[int, int]]) -> float:
    """Return the greatest output difference over batches of these shapes, padded and unpadded; NaN if one is."""
    differences = []
    num_tokens, num_positions = _limits(encoder)
    generator = torch.Generator().manual_seed(0)
    for rows, widest in shapes:
        width = min(widest, num_positions)
        ids = torch.randint(0, num_tokens, (rows, width), generator=generator)
        padded = torch.ones_like(ids)
        padded[:, max(2, width // 2) :] = 0
        for mask in (torch.ones_like(ids), padded):
            with torch.inference_mode():
                differences.append((served(ids, mask) - encoder(ids, mask)).abs().max())
    return float(torch.stack(differences).max())  # NaN where one of them is
