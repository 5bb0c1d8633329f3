import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from shoal import Arrays, Choices, Component, Context, Parameters


class TopK(Component):
    """Return labels and scores of the best classes, the best first."""

    library = "numpy"

    def setup(self, context: Context) -> None:
        parameters = Parameters(context.spec)
        self.scores, self.labels, self.best = parameters.tensors("FP32[n] -> STRING[k], FP32[k]")
        num_best = parameters.whole("k", parameters.sizes.get("k", 0))
        if num_best:
            parameters.expect("k", num_best, "its parameter k is")
        self.choose = Choices.read(parameters, self.scores, num_best)

    def run(self, batch: Arrays) -> Arrays:
        # Strings exist only on the host: the scores are copied to it once, and the ledger counts this for the labels.
        labels, best = self.choose(self.context.device.fetch(batch[self.scores], self.labels))
        return {self.labels: labels, self.best: best}


TritonPythonModel = TopK.for_triton()
