import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from typing import Any

from shoal.component import Parameters
from shoal.generation import Weights
from shoal.generation.engines.base import EngineComponent
from shoal.generation.engines.vllm import DTYPES, VllmEngine, read_arguments


class LlmVllm(EngineComponent):
    """Continue token ids with vLLM."""

    def make_engine(self, weights: Weights, parameters: Parameters, **common: Any) -> VllmEngine:
        dtype, arguments = parameters.choice("dtype", DTYPES), read_arguments(parameters)
        count = self.context.device.ledger.count
        return VllmEngine(weights, dtype=dtype, arguments=arguments, count=count, **common)


TritonPythonModel = LlmVllm.for_triton()
