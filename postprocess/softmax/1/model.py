import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from shoal import Arrays, Component, Context, Parameters, check_finite, namespace


class Softmax(Component):
    """Convert logits to probabilities along the last dimension."""

    def setup(self, context: Context) -> None:
        self.logits, self.probabilities = Parameters(context.spec).tensors("FP32[...] -> FP32[...]")

    def run(self, batch: Arrays) -> Arrays:
        logits = batch[self.logits]
        xp = namespace(logits)
        greatest = xp.max(logits, axis=-1, keepdims=True)
        # The maximum is NaN if any logit is. A logit of minus infinity is valid: its probability is 0.
        check_finite({self.logits: greatest}, self.context.device)
        powers = xp.exp(xp.astype(logits, xp.float64) - xp.astype(greatest, xp.float64))
        return {self.probabilities: xp.astype(powers / xp.sum(powers, axis=-1, keepdims=True), xp.float32)}


TritonPythonModel = Softmax.for_triton()
