import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from shoal.component import Parameters
from shoal.generation import Limits, Weights
from shoal.generation.engines.base import EngineComponent
from shoal.generation.engines.hf import HfEngine
from shoal.generation.engines.hf_static import HfStaticEngine
from shoal.generation.engines.loading import DTYPES


class LlmHf(EngineComponent):
    """Continue token ids with a transformers model, in continuous or (parameter ``static``) static batches."""

    def make_engine(self, weights: Weights, limits: Limits, parameters: Parameters) -> HfEngine | HfStaticEngine:
        dtype, threads = parameters.choice("dtype", DTYPES), self.context.num_threads
        cache_tokens = parameters.whole("cache_tokens", 0)
        if parameters.flag("static", default=False):
            return HfStaticEngine(weights, limits, dtype=dtype, threads=threads)
        return HfEngine(weights, limits, dtype=dtype, threads=threads, cache_tokens=cache_tokens)


TritonPythonModel = LlmHf.for_triton()
