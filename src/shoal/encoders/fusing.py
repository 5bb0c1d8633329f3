"""Operator fusion for TorchScript on the host: oneDNN runs each linear layer with the operation that follows it.

A traced encoder calls one kernel for a matrix product, one for its activation, one for the residual sum, and packs
every weight again at each call. Here each linear layer's weights are packed once, and the activation or the sum is
computed while the product is still in the cache. The operators are those that torch.compile emits for a CPU, without a
compiler on the serving machine and for every batch size and width.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("shoal")

_FUSED = "mkldnn::_linear_pointwise"
_ROWS = 4096  # tokens of a batch that weights are packed for; other numbers only run a little slower
# Between a module and its fused graph, as a share of the greatest value: rounding from another order of summation.
TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2}
_LEAST_SCALE = 1e-6  # of values to which that applies: below it all are as good as 0
# A score that is near 0 by chance may differ by more than the tolerance (in BF16 one in three did); a wrong graph
# always differs. Hence several trials.
_MOST_TRIALS = 8

Module = Callable[..., Any]


def fuse(module: Module, dtype: str) -> Module:
    """Freeze and fuse a TorchScript module in evaluation mode on the host; return it unchanged if that is impossible.

    ``dtype`` is its main arithmetic: ``fp32`` or ``bf16``. The first batch is computed both ways; the fused graph is
    kept only if its answer is the same up to rounding. One row proves nothing, since a wrong broadcast over rows looks
    right there: a single row is also computed in a batch with its reverse.
    """
    import torch

    if dtype not in TOLERANCES or not torch.backends.mkldnn.is_available():
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
    return _Proving(module, frozen, TOLERANCES[dtype])


class _Proving:
    """Callable that switches to the fused graph once it has answered one batch like the original module."""

    def __init__(self, module: Any, fused: Any, tolerance: float) -> None:
        self._module, self._fused, self._tolerance = module, fused, tolerance
        self._num_trials = 0

    def __call__(self, *inputs: torch.Tensor) -> Any:
        module = self._module  # another thread may set it to None
        return self._fused(*inputs) if module is None else self._prove(module, inputs)

    def _prove(self, module: Any, inputs: Sequence[torch.Tensor]) -> Any:
        plain = module(*inputs)  # an error here is the request's own fault
        pair = _two_rows(inputs)
        if pair is None:
            return plain
        self._num_trials += 1
        try:
            # A module that cannot take two rows is not batched: it fails here, and is served unfused.
            fused = self._fused(*inputs)
            is_same = self._are_same(plain, fused)
            is_same = is_same and (pair is inputs or self._are_same(module(*pair), self._fused(*pair)))
        except RuntimeError as error:
            _log.warning("the fused TorchScript fails: %s", str(error).splitlines()[-1])
            is_same = False
        if is_same:
            self._module = None
            return fused  # as every answer from now on: the same text gets the same bits
        if self._num_trials >= _MOST_TRIALS:
            _log.warning("TorchScript is served as it is: fused, it does not give the same")
            self._fused, self._module = module, None
        return plain

    def _are_same(self, plain: Any, fused: Any) -> bool:
        expected, found = list(_flat(plain)), list(_flat(fused))
        return len(expected) == len(found) and all(map(self._is_same, expected, found))

    def _is_same(self, plain: torch.Tensor, fused: torch.Tensor) -> bool:
        if plain.shape != fused.shape:  # or one would be broadcast to the other
            return False
        if not plain.is_floating_point() or not plain.numel():
            return bool(plain.equal(fused))
        scale = max(_LEAST_SCALE, float(plain.abs().nan_to_num(0.0, 0.0).max()))
        return plain.isclose(fused, rtol=0.0, atol=self._tolerance * scale, equal_nan=True).all().item() is True


def _two_rows(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
    """Return ``inputs`` if they have two rows or more, else one row with its reverse; None if neither is possible."""
    import torch

    rows = {x.shape[0] if x.ndim else 0 for x in inputs}
    if min(rows) > 1:
        return inputs
    return [torch.cat([x, x.flip(-1)]) for x in inputs] if rows == {1} else None


def _flat(outputs: Any) -> Iterator[Any]:
    if isinstance(outputs, tuple | list):
        for output in outputs:
            yield from _flat(output)
    else:
        yield outputs


def _fuse(graph: Any, linear: Any) -> bool:
    """Replace ``linear`` and the operation after it by a fused operator; False if its weights do not allow that."""
    import torch

    x, weight, bias = linear.inputs()
    if weight.node().kind() != "prim::Constant":
        return False
    values = weight.node().t("value")
    if values.layout != torch.strided or values.dtype not in (torch.float32, torch.bfloat16) or min(values.shape) < 2:
        return False
    last, attribute, other = _followed_by(linear)
    graph.setInsertPoint(last)
    packed = graph.create("prim::Constant", [], 1).insertBefore(last)
    packed.t_("value", torch.ops.mkldnn._reorder_linear_weight(values.contiguous(), _ROWS))
    packed.output().setType(weight.type())
    name = graph.insertConstant(attribute)
    if other is None:
        scalars = graph.create("prim::ListConstruct", [], 1).insertBefore(last)
        scalars.output().setType(torch._C.ListType(torch._C.OptionalType(torch._C.NumberType.get())))
        algorithm = list(last.inputs())[1] if last is not linear else graph.insertConstant(None)
        inputs = [x, packed.output(), bias, name, scalars.output(), algorithm]
    else:
        inputs = [x, other, packed.output(), bias, name]
    fused = graph.create(_FUSED, inputs, 1).insertBefore(last)
    last.output().replaceAllUsesWith(fused.output())
    last.destroy()
    if last is not linear:
        linear.destroy()
    return True


def _followed_by(linear: Any) -> tuple[Any, str, Any]:
    """Return the last node to fuse with ``linear``, its operation's name, and for a sum its other operand."""
    uses = linear.output().uses()
    if len(uses) == 1:
        user = uses[0].user
        if user.kind() == "aten::gelu":
            return user, "gelu", None
        if user.kind() == "aten::add":
            one, other, alpha = user.inputs()
            residual = other if one is linear.output() or one.debugName() == linear.output().debugName() else one
            # The product must not broadcast: a residual of the same stream, normalised, is as wide.
            if residual.node().kind() == "aten::layer_norm" and alpha.toIValue() == 1:
                return user, "add", residual
    return linear, "none", None
