import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from shoal.kit.generation.contract import Limits
from shoal.kit.generation.weights import Weights
from shoal.kit.generation.engines.base import Engine, EngineComponent


class LlmOnnx(EngineComponent):
    """Continue token ids with a decoder on ONNX Runtime, in continuous batches."""

    library = "numpy"

    def make_engine(self, weights: Weights, limits: Limits) -> Engine:
        from shoal.kit.generation.engines.onnx import OnnxEngine  # imports onnxruntime

        return OnnxEngine(weights, limits, self.context.num_threads)


TritonPythonModel = LlmOnnx.for_triton()
