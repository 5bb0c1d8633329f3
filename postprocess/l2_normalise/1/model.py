import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from shoal import Arrays, Component, Context, Parameters, check_finite, namespace


class L2Normalise(Component):
    """Scale embeddings to Euclidean length 1; an embedding of zeros is unchanged."""

    def setup(self, context: Context) -> None:
        self.embedding, self.unit = Parameters(context.spec).tensors("FP32[n] -> FP32[n]")

    def run(self, batch: Arrays) -> Arrays:
        check_finite({self.embedding: batch[self.embedding]}, self.context.device)
        xp = namespace(batch[self.embedding])
        embedding = xp.astype(batch[self.embedding], xp.float64)  # in FP64 the square of any FP32 number is finite
        length = xp.sqrt(xp.sum(embedding * embedding, axis=-1, keepdims=True))
        unit = embedding / xp.where(length > 0, length, xp.ones_like(length))
        return {self.unit: xp.astype(unit, xp.float32)}


TritonPythonModel = L2Normalise.for_triton()
