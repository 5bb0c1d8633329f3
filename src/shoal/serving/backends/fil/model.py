import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import numpy as np
import treelite

from shoal.component.base import Component
from shoal.component.context import Context
from shoal.component.tensors import Arrays
from shoal.component.ties import check_ties, forest_ties, load_forest
from shoal.errors import ArtifactError


class Forest(Component):
    """``checkpoint.tl`` behind Triton's ``fil`` configuration, for servers without the native backend.

    Regression forests only; Treelite's own GTIL engine computes them, on one thread: at the sizes of a request threads
    cost more than they bring.
    """

    def setup(self, context: Context) -> None:
        path = context.artifact("checkpoint.tl")
        self.model = load_forest(path)
        check_ties(forest_ties(self.model), path)
        self._check(context)

    def _check(self, context: Context) -> None:
        (features,), (scores,) = context.spec.inputs, context.spec.outputs
        found, declared = self.model.num_feature, features.dims
        if (found,) != declared or scores.dims != (1,):
            raise ArtifactError(
                f"checkpoint.tl takes {found} features and gives 1 score; the config of {context.spec.name} declares"
                f" {features.name} {list(declared)} and {scores.name} {list(scores.dims)}.",
                "Export the forest again, or mend the dims.",
            )

    def run(self, batch: Arrays) -> Arrays:
        (features,), (scores,) = self.context.spec.inputs, self.context.spec.outputs
        leaves = treelite.gtil.predict(self.model, batch[features.name], nthread=1)
        return {scores.name: leaves.reshape(-1, 1).astype(np.float32)}


TritonPythonModel = Forest.for_triton()
