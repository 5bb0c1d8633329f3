import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from shoal import Parameters
from shoal.kit.generation.contract import Limits
from shoal.kit.generation.weights import Weights
from shoal.kit.generation.engines.base import Engine, EngineComponent
from shoal.kit.generation.engines.batching import AUTO, WAYS, choose_engine
from shoal.kit.generation.engines.loading import DTYPES, find_place, load_model
from shoal.kit.generation.engines.scoring import PromptScorer
from shoal.kit.generation.weights import QUANTIZED


class LlmHf(EngineComponent):
    """Continue token ids with a transformers model, in the first way of batching that computes it rightly."""

    library = "engine"

    def make_engine(self, weights: Weights, limits: Limits, parameters: Parameters) -> Engine:
        cache_tokens, way = parameters.whole("cache_tokens", 0), parameters.choice("batching", (AUTO, *WAYS))
        place, dtype = find_place(self.context.device), parameters.choice("dtype", (AUTO, *DTYPES))
        quantized = parameters.choice("quantize", QUANTIZED)
        model = load_model(weights, dtype, self.context.num_threads, place, quantized=quantized)
        self.score = PromptScorer(model).score
        return choose_engine(self, model, limits, cache_tokens=cache_tokens, way=way)


TritonPythonModel = LlmHf.for_triton()
