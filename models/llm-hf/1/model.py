import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from typing import Any

from shoal.component import Parameters
from shoal.generation import Weights
from shoal.generation.engines.base import EngineComponent
from shoal.generation.engines.hf import HfEngine
from shoal.generation.engines.hf_static import HfStaticEngine
from shoal.generation.engines.loading import DTYPES


class LlmHf(EngineComponent):
    """Continue token ids with a transformers model, in continuous batches or, with ``static``, in plain ones."""

    def make_engine(self, weights: Weights, parameters: Parameters, **common: Any) -> HfEngine | HfStaticEngine:
        dtype, cache_tokens = parameters.choice("dtype", DTYPES), parameters.whole("cache_tokens", 0)
        if parameters.flag("static", default=False):
            return HfStaticEngine(weights, dtype=dtype, **common)
        return HfEngine(weights, dtype=dtype, cache_tokens=cache_tokens, **common)


TritonPythonModel = LlmHf.for_triton()
