import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from collections.abc import Callable
from pathlib import Path

from shoal import Array, Arrays, Component, Context, Device
from shoal.kit.component.provenance import check_ties
from shoal.errors import needs
from shoal.kit.forests import checkpoints
from shoal.kit.forests.treelite import FilSettings, check_categories, find_categories, load_model, make_predict

_DEFAULT_STREAM = 1  # cudaStreamLegacy of cuda_runtime_api.h; nvForest's default stream is not ordered after it


class Forest(Component):
    """Runs ``checkpoint.tl`` for a model whose configuration names ``fil``, on servers without that backend.

    The answers are the same as from FIL for the parameters ``output_class`` (or ``is_classifier``), ``predict_proba``
    and ``threshold``. Parameters that affect only performance are ignored. ``default_model_filename`` may name another
    file. On a GPU, the library nvForest runs the forest; on the host, Treelite's GTIL does.
    """

    def setup(self, context: Context) -> None:
        path = context.artifact(context.spec.filename or "checkpoint.tl")
        forest = checkpoints.read_forest(path)  # before Treelite or nvForest, which a damaged file can crash
        check_ties(forest.ties, path)
        forest.check(context.spec, path)
        self.settings = FilSettings.read(context.spec)
        if context.device.is_host:
            model = load_model(path)
            self.predict, self.categories = make_predict(model), find_categories(model)
        else:
            self.predict, self.categories = _on_gpu(path, forest, context.device), ()

    def check(self, inputs: Arrays) -> None:
        (features,) = self.context.spec.inputs
        check_categories(inputs[features.name], self.categories, features.name)

    def run(self, batch: Arrays) -> Arrays:
        (features,), (scores,) = self.context.spec.inputs, self.context.spec.outputs
        return {scores.name: self.settings.answer(self.predict(batch[features.name]), scores.dims[0])}


def _on_gpu(path: Path, forest: checkpoints.Forest, device: Device) -> Callable[[Array], Array]:
    """Load the forest into nvForest, in single precision and on the default stream.

    Return a function from features to predictions, FP32 ``[rows, outputs]``.
    """
    with needs("gpu"):
        import nvforest

    handle = nvforest.Handle(stream=_DEFAULT_STREAM)
    loaded = nvforest.load_model(
        str(path),
        model_type="treelite_checkpoint",
        device="gpu",
        device_id=device.index,
        precision="single",
        handle=handle,
    )
    predict = loaded.predict_proba if forest.is_classifier else loaded.predict  # a classifier's predict gives classes
    return lambda rows: predict(rows).reshape(-1, forest.num_classes)


TritonPythonModel = Forest.for_triton()
