"""Rewrite a TorchScript module so that it runs on the device of its inputs; nothing is imported for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_ARITHMETIC = {f"aten::{name}" for name in ("add", "sub", "mul", "div", "floor_divide")}


def unbind(module: Any) -> None:
    """Rewrite a traced module in place so that it runs on the device of its inputs, with bit-identical answers.

    A trace keeps ``x.device`` as a constant, the device of the trace's example, and
    ``torch.jit.load(map_location=...)`` does not change the constant: on a GPU the positions and masks that
    transformers makes would stay on the host. Each such constant is replaced by the device of the method's first
    tensor.

    A trace also keeps some Python numbers as tensors without dimensions. They become numbers again: on a GPU, adding
    such a tensor to a width makes every call wait for the device.
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
    """Return the value that replaces the constant ``node`` in ``graph``; None if the constant can stay."""
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
    """Whether a number may replace the tensor in this use, as the second operand of an arithmetic operator."""
    return use.offset == 1 and use.user.kind() in _ARITHMETIC
