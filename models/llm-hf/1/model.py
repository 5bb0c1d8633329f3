import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from shoal import Parameters
from shoal.kit.generation.contract import Limits
from shoal.kit.generation.engines.base import AUTO, WAYS, Engine, EngineComponent
from shoal.kit.generation.weights import DTYPES, QUANTIZED, Weights


class LlmHf(EngineComponent):
    """Continue token ids with a transformers model, in the first way of batching that computes it rightly."""

    library = "engine"

    def read_own(self, parameters: Parameters) -> None:
        self.cache_tokens, self.way = parameters.whole("cache_tokens", 0), parameters.choice("batching", (AUTO, *WAYS))
        self.dtype = parameters.choice("dtype", (AUTO, *DTYPES))
        self.quantized = parameters.choice("quantize", QUANTIZED)

    def make_engine(self, weights: Weights, limits: Limits) -> Engine:
        from shoal.kit.generation.engines.batching import choose_engine  # imports torch
        from shoal.kit.generation.engines.loading import find_place, load_model
        from shoal.kit.generation.engines.scoring import PromptScorer

        place, threads = find_place(self.context.device), self.context.num_threads
        model = load_model(weights, self.dtype, threads, place, quantized=self.quantized)
        self.score = PromptScorer(model).score
        return choose_engine(self, model, limits, cache_tokens=self.cache_tokens, way=self.way)


TritonPythonModel = LlmHf.for_triton()
