import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from collections.abc import Callable
from pathlib import Path

from shoal.component.base import Component
from shoal.component.context import Context
from shoal.component.forests import load_forest
from shoal.component.tensors import Array, Arrays, Device
from shoal.component.ties import check_ties, read_forest
from shoal.errors import needs

_DEFAULT_STREAM = 1  # cudaStreamLegacy of cuda_runtime_api.h; nvForest's own choice would not wait for it


class Forest(Component):
    """``checkpoint.tl`` behind Triton's ``fil`` configuration, for servers without the native backend.

    Regression forests only. On a GPU nvForest computes them, on the host ONNX Runtime or Treelite's own GTIL engine.
    """

    def setup(self, context: Context) -> None:
        path = context.artifact("checkpoint.tl")
        forest = read_forest(path)  # before Treelite or nvForest, which a damaged file can crash
        check_ties(forest.ties, path)
        forest.check(context.spec, path, needs_regressor=True)
        self.predict = load_forest(path) if context.device.is_host else _on_gpu(path, context.device)

    def run(self, batch: Arrays) -> Arrays:
        (features,), (scores,) = self.context.spec.inputs, self.context.spec.outputs
        return {scores.name: self.predict(batch[features.name])}


def _on_gpu(path: Path, device: Device) -> Callable[[Array], Array]:
    """nvForest in single precision, on the device's default stream: FP32 ``[rows, 1]``."""
    with needs("gpu"):
        import nvforest

    handle = nvforest.Handle(stream=_DEFAULT_STREAM)
    forest = nvforest.load_model(
        str(path),
        model_type="treelite_checkpoint",
        device="gpu",
        device_id=device.index,
        precision="single",
        handle=handle,
    )
    return lambda rows: forest.predict(rows).reshape(-1, 1)


TritonPythonModel = Forest.for_triton()
