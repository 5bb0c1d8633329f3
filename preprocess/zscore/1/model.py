import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import numpy as np

from shoal import SETUP, Arrays, Component, Context, InputError, Parameters, fixed_by, normalise, read_zscore

FIX = 'Write {"mean": [...], "std": [...]}: one finite number per column; a std of 1 for a column that does not vary.'


class ZScore(Component):
    """Standardise each column: subtract its mean and divide by its standard deviation."""

    def setup(self, context: Context) -> None:
        parameters = Parameters(context.spec)
        self.x, self.z = parameters.tensors("FP32[n] -> FP32[n]")
        with fixed_by(FIX):
            lists = read_zscore(context.artifact("zscore.json"))
        self.num_columns = len(lists[0])
        parameters.expect("n", self.num_columns, "the columns of zscore.json are")
        self.mean, self.std = (context.device.put(np.array(numbers), SETUP) for numbers in lists)

    def check(self, inputs: Arrays) -> None:
        width = inputs[self.x].shape[1]
        if width != self.num_columns:
            raise InputError(f"{self.x} has {width} columns; zscore.json has {self.num_columns}.", "Send as many.")

    def run(self, batch: Arrays) -> Arrays:
        return {self.z: normalise(batch[self.x], self.mean, self.std)}


TritonPythonModel = ZScore.for_triton()
