import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from shoal import Arrays, Component, Context, Parameters, Preprocessing


class TensorrtLlmPreprocessing(Component):
    """Turn a text into the token ids and word lists that an engine takes, under TensorRT-LLM's names."""

    library = "numpy"
    optional_outputs = frozenset({"OUT_MIN_TOKENS", "OUT_SEED"})

    def setup(self, context: Context) -> None:
        self.preprocessing = Preprocessing.read(Parameters(context.spec))

    def run(self, batch: Arrays) -> Arrays:
        return self.preprocessing.convert({n: self.context.device.fetch(array, n) for n, array in batch.items()})

    def close(self) -> None:
        self.preprocessing.prompts.close()


TritonPythonModel = TensorrtLlmPreprocessing.for_triton()
