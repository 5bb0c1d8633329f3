import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from shoal.component import Arrays, Component, Context, Parameters
from shoal.generation import Completions


class Completion(Component):
    """Convert the tokens of a language model's answers to text, separately for each stream of answers."""

    library = "numpy"
    is_stateful = True
    optional_outputs = frozenset({"cumulative_logprob", "logprobs"})

    def setup(self, context: Context) -> None:
        self.completions = Completions.read(Parameters(context.spec))

    def run(self, batch: Arrays) -> Arrays:
        fetch = self.context.device.fetch
        return self.completions.answer({name: fetch(array, name) for name, array in batch.items()})


TritonPythonModel = Completion.for_triton()
