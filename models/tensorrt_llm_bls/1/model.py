import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from collections.abc import Iterator
from contextlib import closing

import numpy as np

from shoal import Arrays, Completions, Context, Parameters, Stream, StreamingComponent
from shoal.kit.generation.answers import join_rows, split_rows
from shoal.kit.generation.trtllm import LOG_PROBS, BlsSettings, accept, engine_request, query


class TensorrtLlmBls(StreamingComponent):
    """Call preprocessing, then the engine, and convert its tokens to text, as TensorRT-LLM's BLS model does."""

    library = "numpy"
    answers_either_way = True
    optional_outputs = frozenset(LOG_PROBS)
    flat_outputs = frozenset({"text_output"})

    def setup(self, context: Context) -> None:
        parameters = Parameters(context.spec)
        self.settings, self.completions = BlsSettings(parameters), Completions.read(parameters)

    def check(self, inputs: Arrays) -> None:
        self.settings.check(inputs)

    def answers(self, inputs: Arrays, stream: Stream) -> Iterator[Arrays]:
        models, settings, spec = self.context.models, self.settings, self.context.spec
        inputs = accept(inputs)
        is_streaming = spec.is_decoupled and bool(np.any(inputs.get("stream", False)))
        preprocessed = models.infer(settings.prompt, query(inputs))
        rows, request = settings.open_rows(self.completions, preprocessed), engine_request(inputs, preprocessed)
        if not spec.is_decoupled:
            for number, answer in split_rows(models.infer(settings.engine, request)):
                rows[number].take(answer)
            yield join_rows([row.pack() for row in rows])
            return
        with closing(models.stream(settings.engine, request, until=stream)) as answers:
            for joined in answers:
                for number, answer in split_rows(joined):
                    if (row := rows[number]).is_complete:
                        continue
                    row.take(answer)
                    if row.has_news if is_streaming else row.is_complete:
                        yield row.pack()
                if all(row.is_complete for row in rows):
                    return
        for row in rows:
            if not row.is_complete:
                row.take(None)
                yield row.pack()


TritonPythonModel = TensorrtLlmBls.for_triton()
