import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from collections.abc import Iterator

import numpy as np

from shoal import Arrays, Completions, Context, Parameters, Stream, StreamingComponent, read_streaming


class LlmBls(StreamingComponent):
    """Call the prompt component, then the engine, and convert its tokens to text; a stop word stops the engine."""

    library = "numpy"
    optional_outputs = frozenset({"cumulative_logprob", "logprobs"})

    def setup(self, context: Context) -> None:
        parameters = Parameters(context.spec)
        self.prompt, self.engine = parameters.words("calls", least=2, most=2)
        self.completions = Completions.read(parameters)
        self.outputs = frozenset(tensor.name for tensor in context.spec.outputs)

    def answers(self, inputs: Arrays, stream: Stream) -> Iterator[Arrays]:
        models = self.context.models
        request = models.infer(self.prompt, inputs)
        is_streaming = read_streaming(request["streaming"], "stream")
        request["streaming"] = np.ones_like(request["streaming"])  # also a whole answer ends at its stop word
        texts = self.completions.open_rows(request, is_streaming=is_streaming, outputs=self.outputs)
        stream.farewell = texts.cancelled
        yield from models.pass_on(self.engine, request, stream, texts)


TritonPythonModel = LlmBls.for_triton()
