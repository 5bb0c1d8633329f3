import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from shoal import Arrays, Component, Context, InputError, Parameters, check_finite, namespace


class Blend(Component):
    """Weighted mean of tensors of one shape; a soft vote if the tensors are class probabilities."""

    def setup(self, context: Context) -> None:
        parameters, number = Parameters(context.spec), max(2, len(context.spec.inputs))
        *self.inputs, self.blend = parameters.tensors(", ".join(["FP32[...]"] * number) + " -> FP32[...]")
        weights = parameters.numbers("weights") or [1.0] * number
        if len(weights) != number or min(weights) < 0 or not sum(weights):
            why = f"expected {number} weights, one per input, none negative and not all 0"
            raise parameters.refusal("weights", why, str([1] * number))
        self.weights = [weight / sum(weights) for weight in weights]

    def check(self, inputs: Arrays) -> None:
        shapes = {name: list(inputs[name].shape) for name in self.inputs}
        if len({*map(str, shapes.values())}) > 1:
            listing = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
            raise InputError(f"The tensors to blend have different shapes: {listing}.", "Send tensors of one shape.")

    def run(self, batch: Arrays) -> Arrays:
        arrays = {name: batch[name] for name in self.inputs}
        check_finite(arrays, self.context.device)
        xp = namespace(*arrays.values())
        # In FP64, so that the mean of equal numbers is that number.
        parts = [weight * xp.astype(x, xp.float64) for weight, x in zip(self.weights, arrays.values(), strict=True)]
        return {self.blend: xp.astype(sum(parts), xp.float32)}


TritonPythonModel = Blend.for_triton()
