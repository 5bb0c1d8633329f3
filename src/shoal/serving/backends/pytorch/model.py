import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import warnings

import numpy as np
import torch

from shoal.component.base import Component
from shoal.component.context import Context
from shoal.component.tensors import Array, Arrays
from shoal.component.ties import check_ties, read_ties
from shoal.errors import ArtifactError


class TorchScript(Component):
    """``model.pt`` behind Triton's ``pytorch`` configuration, for servers without the native backend.

    Inputs are given in the order of the configuration, outputs taken in the same way. The parameter ``dtype`` (``fp32``
    or ``bf16``) converts the submodule ``trunk`` at load; the file itself stays fp32.
    """

    def setup(self, context: Context) -> None:
        if context.num_threads:
            torch.set_num_threads(context.num_threads)
        path = context.artifact("model.pt")
        place = "cpu" if context.device.kind == "cpu" else f"cuda:{context.device.index}"
        check_ties(read_ties(path), path)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is deprecated, and what Triton serves
                self.module = torch.jit.load(str(path), map_location=place).eval()
        except RuntimeError as error:
            raise ArtifactError(
                f"{path.name} is not a TorchScript file: {str(error).splitlines()[0]}", "Export it again."
            ) from error
        self._convert(context.spec.parameters.get("dtype", "fp32"))

    def _convert(self, dtype: str) -> None:
        if dtype == "fp32":
            return
        if dtype != "bf16" or not hasattr(self.module, "trunk"):
            raise ArtifactError(
                f"model.pt cannot run in dtype {dtype!r}.",
                "Known: fp32, and bf16 for a module with a submodule `trunk`.",
            )
        self.module.trunk.to(torch.bfloat16)

    def run(self, batch: Arrays) -> Arrays:
        spec = self.context.spec
        with torch.inference_mode():
            outputs = self.module(*(_tensor(batch[tensor.name]) for tensor in spec.inputs))
        if isinstance(outputs, torch.Tensor):
            outputs = (outputs,)
        return {tensor.name: _array(out) for tensor, out in zip(spec.outputs, outputs, strict=True)}


def _tensor(array: Array) -> torch.Tensor:
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        array = array.copy()  # torch has no read-only tensors
    return torch.utils.dlpack.from_dlpack(array)


def _array(tensor: torch.Tensor) -> Array:
    return np.from_dlpack(tensor) if tensor.device.type == "cpu" else tensor


TritonPythonModel = TorchScript.for_triton()
