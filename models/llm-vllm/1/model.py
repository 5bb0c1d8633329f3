import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from pathlib import Path

from shoal.component import Arrays, Context, Parameters, Stream, StreamingComponent
from shoal.component.streaming import QueueStream
from shoal.generation import TokenRequest, find_weights
from shoal.generation.engines.vllm import DTYPES, VllmEngine, read_arguments


class LlmVllm(StreamingComponent):
    """Continue token ids with vLLM."""

    def setup(self, context: Context) -> None:
        parameters = Parameters(context.spec)
        folder = parameters.text("model")
        if not Path(folder).is_absolute():
            raise parameters.refusal("model", "expected the absolute path of a weights folder", "/models/llama")
        self.engine = VllmEngine(
            find_weights(folder),
            slots=parameters.whole("slots", 16, most=1024),
            context=parameters.whole("context", 0),
            dtype=parameters.choice("dtype", DTYPES),
            threads=context.num_threads,
            arguments=read_arguments(parameters),
            count=context.device.ledger.count,
        )
        warm = QueueStream(self, 1)
        self.engine.admit(TokenRequest((0,), 2), warm)
        list(warm)

    def open(self, inputs: Arrays, stream: Stream) -> None:
        self.engine.admit(TokenRequest.read(inputs, self.engine.limits), stream)

    def close(self) -> None:
        self.engine.close()


TritonPythonModel = LlmVllm.for_triton()
