import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal import Array, Arrays, ArtifactError, Component, Context
from shoal.kit.component.files import refusal
from shoal.kit.component.provenance import check_ties, read_archive
from shoal.kit.encoders.fusing import fuse
from shoal.kit.encoders.length_bucketing import find_mask, run_by_length

if TYPE_CHECKING:  # torch is imported only once the device is chosen
    import torch


class TorchScript(Component):
    """Runs ``model.pt`` for a model whose configuration names ``pytorch``, on servers without that backend.

    ``default_model_filename`` may name another file. Inputs and outputs are matched by position, in the order of the
    configuration. When the model is loaded, its submodule ``trunk`` is converted to the type in the parameter ``dtype``
    (``fp32``, ``bf16`` or ``fp16``); the file itself stays fp32. On the host, the graph is frozen and fused. If the
    parameter ``attention_mask`` names an input, rows on the host are run in batches of similar length (length
    bucketing).
    """

    library = "torch"

    def setup(self, context: Context) -> None:
        import torch

        if context.num_threads:
            torch.set_num_threads(context.num_threads)
        self.mask = find_mask(context.spec) if context.device.is_host else ""
        path = context.artifact(context.spec.filename or "model.pt")
        check_ties(read_archive(path), path)  # before torch, which verifies no checksum
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is deprecated, and what Triton serves
                module = torch.jit.load(str(path), map_location=context.device.torch_name).eval()
        except RuntimeError as error:
            raise refusal(path, "TorchScript file", str(error).splitlines()[0].rstrip(".")) from error
        if not context.device.is_host:
            _check_device(module, context.device.torch_name)
        dtype = context.spec.parameters.get("dtype", "fp32")
        _convert(module, dtype)
        self.module = fuse(module, dtype) if context.device.is_host else module

    def run(self, batch: Arrays) -> Arrays:
        return run_by_length(self.context.spec, batch, self.call, self.mask)

    def call(self, arrays: Sequence[Array]) -> list[Array]:
        """Run the module, and return its outputs as arrays."""
        import torch

        with torch.inference_mode():
            outputs = self.module(*map(_tensor, arrays))
        to_array = np.from_dlpack if self.context.device.is_host else torch.Tensor.detach
        return [to_array(out) for out in ((outputs,) if isinstance(outputs, torch.Tensor) else outputs)]


def _check_device(module: "torch.jit.ScriptModule", device: str) -> None:
    """Refuse a graph with constants on another device than ``device``, because every request would then fail."""
    graph: Any = module.inlined_graph  # nodes live as long as their graph is held
    for node in graph.findAllNodes("prim::Constant"):
        if node.output().type().kind() == "DeviceObjType" and str(node.output().toIValue()) != device:
            raise ArtifactError(
                f"model.pt is bound to {node.output().toIValue()} and cannot run on {device}.",
                "Export it again: shoal train or shoal add-model write files for every device;"
                " `shoal check` names the line of a file of your own.",
            )


def _convert(module: "torch.jit.ScriptModule", dtype: str) -> None:
    import torch

    if dtype == "fp32":
        return
    known = {"bf16": torch.bfloat16, "fp16": torch.float16}
    if dtype not in known or not hasattr(module, "trunk"):
        raise ArtifactError(
            f"model.pt cannot run in dtype {dtype!r}.",
            "Known: fp32, and bf16 or fp16 for a module with a submodule `trunk`.",
        )
    module.trunk.to(known[dtype])


def _tensor(array: Array) -> "torch.Tensor":
    import torch

    if isinstance(array, np.ndarray) and not array.flags.writeable:
        array = array.copy()  # torch has no read-only tensors
    return torch.utils.dlpack.from_dlpack(array)


TritonPythonModel = TorchScript.for_triton()
