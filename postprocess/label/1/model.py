import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import numpy as np

from shoal import Arrays, Choices, Component, Context, Parameters


class Label(Component):
    """Return the label of the class with the best score, and that score."""

    library = "numpy"

    def setup(self, context: Context) -> None:
        parameters = Parameters(context.spec)
        self.scores, self.label, self.score = parameters.tensors("FP32[n] -> STRING[1], FP32[1]")
        self.choose = Choices.read(parameters, self.scores, num_best=1)
        self.least = parameters.number("least", -np.inf)
        self.otherwise = parameters.text("otherwise").encode()

    def run(self, batch: Arrays) -> Arrays:
        # Strings exist only on the host: the scores are copied to it once, and the ledger counts this for the label.
        labels, best = self.choose(self.context.device.fetch(batch[self.scores], self.label))
        labels[best < self.least] = self.otherwise
        return {self.label: labels, self.score: best}


TritonPythonModel = Label.for_triton()
