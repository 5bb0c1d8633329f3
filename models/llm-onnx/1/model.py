import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from pathlib import Path

from shoal.component import Arrays, Context, Parameters, Stream, StreamingComponent
from shoal.component.streaming import QueueStream
from shoal.generation import TokenRequest, find_weights
from shoal.generation.engines.onnx import OnnxEngine


class LlmOnnx(StreamingComponent):
    """Continue token ids with a decoder on ONNX Runtime, in continuous batches."""

    def setup(self, context: Context) -> None:
        parameters = Parameters(context.spec)
        folder = parameters.text("model", str(context.folder.absolute()))
        if not Path(folder).is_absolute():
            raise parameters.refusal("model", "expected the absolute path of a weights folder", "/models/llama")
        slots, length = parameters.whole("slots", 16, most=1024), parameters.whole("context", 0)
        self.engine = OnnxEngine(find_weights(folder), slots=slots, context=length, threads=context.num_threads)
        warm = QueueStream(self, 1)
        self.engine.admit(TokenRequest((0,), 2), warm)
        list(warm)

    def open(self, inputs: Arrays, stream: Stream) -> None:
        self.engine.admit(TokenRequest.read(inputs, self.engine.limits), stream)

    def close(self) -> None:
        self.engine.close()


TritonPythonModel = LlmOnnx.for_triton()
