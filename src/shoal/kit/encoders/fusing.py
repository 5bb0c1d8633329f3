"""Operator fusion for TorchScript on the host: oneDNN runs each linear layer and its GELU at once, with packed weights.

A traced encoder calls one kernel for each matrix product and another for the activation, and converts every weight to
oneDNN's memory layout again at each call. Here the weights are converted once ("packed"), and GELU is computed while
the product is still in the cache. The fused operators are those that torch.compile emits for a CPU; they need no
compiler on the serving machine, and take every batch size and width.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

_log = logging.getLogger("shoal")

_FUSED = "mkldnn::_linear_pointwise"
_ROWS = 4096  # tokens of a batch that weights are packed for; other numbers only run a little slower

Module = Callable[..., Any]


def fuse(module: Module, dtype: str) -> Module:
    """Freeze and fuse a TorchScript module in evaluation mode on the host; return it unchanged if that is impossible.

    ``dtype`` is the dtype that the module mainly computes in, ``fp32`` or ``bf16``. Answers are the same up to
    rounding.
    """
    import torch

    if dtype not in ("fp32", "bf16") or not torch.backends.mkldnn.is_available():
        return module
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # as all of TorchScript
            frozen = torch.jit.freeze(module)
        graph: Any = frozen.graph
        if not sum(_fuse(graph, node) for node in graph.findAllNodes("aten::linear")):
            return module
        torch._C._jit_pass_dce(graph)
        torch._C._jit_pass_lint(graph)
    except RuntimeError as error:
        _log.warning("TorchScript is served as it is; it could not be fused: %s", str(error).splitlines()[0])
        return module
    fused: Module = frozen
    return fused


def _fuse(graph: Any, linear: Any) -> bool:
    """Replace the node ``linear``, and a GELU that directly follows it, by one fused operator.

    Return False, without a change, if the weights of ``linear`` do not allow this.
    """
    import torch

    x, weight, bias = linear.inputs()
    if weight.node().kind() != "prim::Constant":
        return False
    values = weight.node().t("value")
    if values.layout != torch.strided or values.dtype not in (torch.float32, torch.bfloat16) or min(values.shape) < 2:
        return False
    uses = linear.output().uses()
    is_followed = len(uses) == 1 and uses[0].user.kind() == "aten::gelu"
    last = uses[0].user if is_followed else linear
    graph.setInsertPoint(last)
    packed = graph.create("prim::Constant", [], 1).insertBefore(last)
    packed.t_("value", torch.ops.mkldnn._reorder_linear_weight(values.contiguous(), _ROWS))
    packed.output().setType(weight.type())
    scalars = graph.create("prim::ListConstruct", [], 1).insertBefore(last)
    scalars.output().setType(torch._C.ListType(torch._C.OptionalType(torch._C.NumberType.get())))
    name = graph.insertConstant("gelu" if is_followed else "none")
    algorithm = list(last.inputs())[1] if is_followed else graph.insertConstant(None)
    inputs = [x, packed.output(), bias, name, scalars.output(), algorithm]
    fused = graph.create(_FUSED, inputs, 1).insertBefore(last)
    last.output().replaceAllUsesWith(fused.output())
    last.destroy()
    if is_followed:
        linear.destroy()
    return True
