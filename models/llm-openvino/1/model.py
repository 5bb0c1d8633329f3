import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from shoal import Parameters
from shoal.kit.generation.contract import Limits
from shoal.kit.generation.weights import Weights
from shoal.kit.generation.engines.base import EngineComponent
from shoal.kit.generation.engines.openvino import DTYPES, OpenVinoEngine


class LlmOpenvino(EngineComponent):
    """Continue token ids with a language model on OpenVINO, in continuous batches."""

    library = "numpy"

    def make_engine(self, weights: Weights, limits: Limits, parameters: Parameters) -> OpenVinoEngine:
        return OpenVinoEngine(
            weights,
            limits,
            dtype=parameters.choice("dtype", DTYPES),
            cache_tokens=parameters.whole("cache_tokens", 0),
            threads=self.context.num_threads,
        )


TritonPythonModel = LlmOpenvino.for_triton()
