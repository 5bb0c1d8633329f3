import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from shoal.component import Arrays, Component, Context, Parameters
from shoal.generation import Completions
from shoal.generation.trtllm import LOG_PROBS, postprocess


class TensorrtLlmPostprocessing(Component):
    """Convert the tokens of an engine's answers to text, under TensorRT-LLM's names."""

    library = "numpy"
    is_stateful = True
    optional_outputs = frozenset({"batch_index", *LOG_PROBS})
    flat_outputs = frozenset({"OUTPUT"})

    def setup(self, context: Context) -> None:
        self.completions = Completions.read(Parameters(context.spec))

    def run(self, batch: Arrays) -> Arrays:
        fetch = self.context.device.fetch
        return postprocess(self.completions, {name: fetch(array, name) for name, array in batch.items()})


TritonPythonModel = TensorrtLlmPostprocessing.for_triton()
