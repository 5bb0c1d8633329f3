import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from collections.abc import Iterator
from contextlib import closing

import numpy as np

from shoal.component import Arrays, Context, Parameters, Stream, StreamingComponent
from shoal.generation import Completions, Piece, join_pieces


class LlmBls(StreamingComponent):
    """Call the prompt component, then the engine, and convert its tokens to text; a stop word stops the engine."""

    library = "numpy"
    optional_outputs = frozenset({"cumulative_logprob", "logprobs"})

    def setup(self, context: Context) -> None:
        parameters = Parameters(context.spec)
        self.prompt, self.engine = parameters.text("calls").split()
        self.completions = Completions.read(parameters)

    def answers(self, inputs: Arrays, stream: Stream) -> Iterator[Arrays]:
        models = self.context.models
        request = models.infer(self.prompt, inputs)
        is_whole = not request["streaming"].item()
        request["streaming"] = np.array([[True]])  # also a whole answer ends at its stop word
        text = self.completions.open(request)
        pieces: list[Piece] = []  # of a whole answer, so far
        stream.farewell = lambda: text.pack(join_pieces([*pieces, text.cancelled()]))
        with closing(models.stream(self.engine, request, until=stream)) as answers:
            for answer in answers:
                piece = text.take(answer)
                if is_whole:
                    pieces.append(piece)
                elif piece.text or piece.finish_reason:
                    yield text.pack(piece)
                if piece.finish_reason:
                    break
        if is_whole and pieces:
            yield text.pack(join_pieces(pieces))


TritonPythonModel = LlmBls.for_triton()
