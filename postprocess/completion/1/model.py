import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import numpy as np

from shoal import Arrays, Completions, Component, Context, Parameters


class Completion(Component):
    """Convert the tokens of a language model's answers to text, separately for each stream of answers."""

    library = "numpy"
    is_stateful = True
    optional_outputs = frozenset({"cumulative_logprob", "logprobs"})

    def setup(self, context: Context) -> None:
        self.completions = Completions.read(Parameters(context.spec))

    def run(self, batch: Arrays) -> Arrays:
        fetch = self.context.device.fetch
        rows = np.arange(len(batch["output_ids"]), dtype=np.int32)
        inputs = {name: fetch(array, name) for name, array in batch.items()}
        return self.completions.answer({"batch_index": rows[:, None], **inputs})


TritonPythonModel = Completion.for_triton()
