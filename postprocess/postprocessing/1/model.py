import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from shoal import Arrays, Component, Context, Parameters, Postprocessing


class TensorrtLlmPostprocessing(Component):
    """Convert the tokens of an engine's answers to text, under TensorRT-LLM's names."""

    library = "numpy"
    is_stateful = True
    optional_outputs = frozenset({"batch_index", "cum_log_probs", "output_log_probs"})
    flat_outputs = frozenset({"OUTPUT"})

    def setup(self, context: Context) -> None:
        self.postprocessing = Postprocessing.read(Parameters(context.spec))

    def run(self, batch: Arrays) -> Arrays:
        fetch = self.context.device.fetch
        return self.postprocessing.convert({name: fetch(array, name) for name, array in batch.items()})


TritonPythonModel = TensorrtLlmPostprocessing.for_triton()
