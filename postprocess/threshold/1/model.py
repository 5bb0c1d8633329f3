import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from shoal import Arrays, Component, Context, Parameters, check_numbers


class Threshold(Component):
    """Compare scores with a threshold; true where a score reaches it."""

    def setup(self, context: Context) -> None:
        parameters = Parameters(context.spec)
        self.score, self.above = parameters.tensors("FP32[n] -> BOOL[n]")
        self.threshold = parameters.number("threshold", 0.5)

    def run(self, batch: Arrays) -> Arrays:
        score = batch[self.score]
        check_numbers({self.score: score}, self.context.device)
        return {self.above: score >= self.threshold}


TritonPythonModel = Threshold.for_triton()
