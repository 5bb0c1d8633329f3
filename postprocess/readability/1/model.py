import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from shoal import Arrays, Component, Context, blend, check_weight
from shoal.readability import read_weight


class Blend(Component):
    """Return the weighted mean of the encoder's and the forest's scores, and both scores."""

    def setup(self, context: Context) -> None:
        settings = context.optional_artifact("postprocess.json")
        self.weight = read_weight(settings) if settings else 0.5

    def check(self, inputs: Arrays) -> None:
        if "BERT_WEIGHT_INPUT" in inputs:
            weight = self.context.device.fetch(inputs["BERT_WEIGHT_INPUT"], "BERT_WEIGHT_INPUT")
            check_weight(weight, name="BERT_WEIGHT")

    def run(self, batch: Arrays) -> Arrays:
        bert, forest = batch["BERT_LARGE_SCORE"], batch["CUML_SCORE"]
        score = blend(batch.get("BERT_WEIGHT_INPUT", self.weight), bert, forest)
        return {"OUTPUT0": score, "BERT_SCORE": bert, "FOREST_SCORE": forest}


TritonPythonModel = Blend.for_triton()
