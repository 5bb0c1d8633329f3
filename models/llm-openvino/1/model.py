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

    def read_own(self, parameters: Parameters) -> None:
        self.dtype, self.cache_tokens = parameters.choice("dtype", DTYPES), parameters.whole("cache_tokens", 0)

    def make_engine(self, weights: Weights, limits: Limits) -> OpenVinoEngine:
        return OpenVinoEngine(
            weights, limits, dtype=self.dtype, cache_tokens=self.cache_tokens, threads=self.context.num_threads
        )


TritonPythonModel = LlmOpenvino.for_triton()
