"""Files and folders that hold no model that can be served: what each is, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from shoal.authoring.composition.gguf import GGUF


class Foreign(NamedTuple):
    """A kind of file or folder: ``what`` it is, with an article, and the way to a model that can be served."""

    what: str
    fix: str


_PICKLE = Foreign(
    "a pickle",
    "A pickle runs code when it is read: read it yourself, and save a forest with skops.io.dump(model, 'NAME.skops'),"
    " any other model of scikit-learn with skl2onnx.to_onnx (pip install skl2onnx).",
)
_WEIGHTS = Foreign(
    "weights of PyTorch without their model",
    "Save it with torch.jit.save, as .pt; or name the folder of a Hugging Face checkpoint.",
)
_XGBOOST = Foreign("a binary file of XGBoost's", 'Save it as JSON or UBJSON: booster.save_model("model.ubj").')
_TO_ONNX = "Convert it to ONNX, with tf2onnx."
_ENGINE = Foreign("an engine of TensorRT", "Name the ONNX file that it was built from: it runs on one kind of GPU.")
_TABLE = Foreign("a table", "Name a model. To have the rows of a table answered: shoal infer --input FILE")
FILES = {
    **dict.fromkeys((".pkl", ".pickle", ".joblib"), _PICKLE),
    **dict.fromkeys((".pth", ".ckpt", ".bin"), _WEIGHTS),
    **dict.fromkeys((".model", ".bst"), _XGBOOST),
    **dict.fromkeys((".h5", ".keras"), Foreign("a model of Keras", _TO_ONNX)),
    **dict.fromkeys((".engine", ".plan"), _ENGINE),
    **dict.fromkeys((".csv", ".tsv", ".parquet", ".jsonl", ".arrow"), _TABLE),
    ".pb": Foreign("a graph of TensorFlow", _TO_ONNX),
    ".tflite": Foreign("a model of TensorFlow Lite", "Convert it to ONNX, with tf2onnx --tflite."),
    ".safetensors": Foreign("weights without their model", "Name the folder with this file and config.json."),
    ".pt2": Foreign(
        "a program of torch.export",
        "Save the same module with torch.jit.trace and torch.jit.save, as .pt, or as ONNX: torch.onnx.export.",
    ),
    GGUF: Foreign(
        "a language model in GGUF",
        "As a pipeline, it is converted and served: shoal serve FILE, or shoal compose llm_bls REPOSITORY --weights"
        " FILE --together.",
    ),
}
_MARKS = {  # of folders: a file that each has
    "saved_model.pb": Foreign("a SavedModel of TensorFlow", _TO_ONNX),
    "dataset_info.json": Foreign("a data set", _TABLE.fix),
}


def find_foreign(folder: Path) -> Foreign | None:
    """Return what a folder without ``config.json`` is, by its files; None if they do not say it."""
    for name, found in _MARKS.items():
        if (folder / name).is_file():
            return found
    kinds = {FILES.get(each.suffix.lower()) for each in folder.iterdir() if each.suffix and each.suffix != ".md"}
    return Foreign("a data set", _TABLE.fix) if kinds == {_TABLE} else None
