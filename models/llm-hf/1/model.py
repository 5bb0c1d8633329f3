import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from pathlib import Path

from shoal.component import Arrays, Context, Parameters, Stream, StreamingComponent
from shoal.component.streaming import QueueStream
from shoal.generation import TokenRequest, find_weights
from shoal.generation.engines.hf import HfEngine
from shoal.generation.engines.hf_static import HfStaticEngine
from shoal.generation.engines.loading import DTYPES


class LlmHf(StreamingComponent):
    """Continue token ids with a transformers model, in continuous batches or, with ``static``, in plain ones."""

    def setup(self, context: Context) -> None:
        parameters = Parameters(context.spec)
        folder = parameters.text("model")
        if not Path(folder).is_absolute():
            raise parameters.refusal("model", "expected the absolute path of a weights folder", "/models/llama")
        slots, length = parameters.whole("slots", 16, most=1024), parameters.whole("context", 0)
        cache_tokens = parameters.whole("cache_tokens", 0)
        dtype, is_static = parameters.choice("dtype", DTYPES), parameters.flag("static", default=False)
        weights, threads = find_weights(folder), context.num_threads
        self.engine: HfEngine | HfStaticEngine
        if is_static:
            self.engine = HfStaticEngine(weights, slots=slots, context=length, dtype=dtype, threads=threads)
        else:
            self.engine = HfEngine(
                weights, slots=slots, context=length, cache_tokens=cache_tokens, dtype=dtype, threads=threads
            )
        warm = QueueStream(self, 1)
        self.engine.admit(TokenRequest((0,), 2), warm)
        list(warm)

    def open(self, inputs: Arrays, stream: Stream) -> None:
        self.engine.admit(TokenRequest.read(inputs, self.engine.limits), stream)

    def close(self) -> None:
        self.engine.close()


TritonPythonModel = LlmHf.for_triton()
