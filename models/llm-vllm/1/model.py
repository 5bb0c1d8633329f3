import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from shoal import Parameters
from shoal.kit.generation.contract import Limits
from shoal.kit.generation.weights import Weights
from shoal.kit.generation.engines.base import EngineComponent
from shoal.kit.generation.engines.vllm import DTYPES, VllmEngine, read_arguments


class LlmVllm(EngineComponent):
    """Continue token ids with vLLM."""

    library = "engine"

    def read_own(self, parameters: Parameters) -> None:
        self.dtype, self.arguments = parameters.choice("dtype", DTYPES), read_arguments(parameters)
        self.has_threads = bool(parameters.text("threads"))

    def make_engine(self, weights: Weights, limits: Limits) -> VllmEngine:
        return VllmEngine(
            weights,
            limits,
            dtype=self.dtype,
            # Unless they are given, vLLM binds threads of its own to cores.
            threads=self.context.num_threads if self.has_threads else None,
            arguments=self.arguments,
            device=self.context.device,
        )


TritonPythonModel = LlmVllm.for_triton()
