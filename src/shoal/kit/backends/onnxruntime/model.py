import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from shoal import Array, Arrays, Component, Context, InputError, SetupError
from shoal.kit.component.files import refusal
from shoal.kit.component.spec import ModelSpec
from shoal.kit.component.provenance import METADATA, check_ties, parse_ties
from shoal.kit.encoders.length_bucketing import find_mask, run_by_length
from shoal.errors import needs


class Onnx(Component):
    """Runs ``model.onnx`` for a model whose configuration names ``onnxruntime``, on servers without that backend.

    ``default_model_filename`` may name another file, or a folder with ``model.onnx`` in it. It runs on the host only.
    Tensors are matched by name. If the parameter ``attention_mask`` names an input, rows are run in batches of similar
    length (length bucketing).
    """

    def setup(self, context: Context) -> None:
        with needs("serve"):
            import onnxruntime

        if not context.device.is_host:
            raise SetupError(
                f"Model {context.spec.name} is ONNX, which shoal's own backend runs on the host alone.",
                "Compose with --placement cpu, or for NVIDIA's container, whose backend has a GPU: --target 26.06",
            )
        self.mask = find_mask(context.spec)
        name = context.spec.filename or "model.onnx"
        path = context.artifact(f"{name}/model.onnx" if (context.folder / name).is_dir() else name)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = context.num_threads or 0
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # spinning slows other processes
        try:
            self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its errors have no class in common but this one
            reason = str(error).splitlines()[0].rpartition(" failed:")[2]  # the part before it repeats the path
            raise refusal(path, "valid ONNX model", reason.rstrip(".")) from error
        try:
            ties = parse_ties(self.session.get_modelmeta().custom_metadata_map.get(METADATA, ""))
        except ValueError as error:
            raise refusal(path, "valid ONNX model", str(error)) from error
        check_ties(ties, path)

    def run(self, batch: Arrays) -> Arrays:
        declared = self.context.spec
        spec = replace(declared, inputs=tuple(tensor for tensor in declared.inputs if tensor.name in batch))
        return run_by_length(spec, batch, partial(self.call, spec), self.mask)

    def call(self, spec: ModelSpec, arrays: Sequence[Array]) -> list[Array]:
        """Run the model. Inputs and outputs are in the order of ``spec``; other inputs have a default in the graph."""
        given = {tensor.name: _for_runtime(array) for tensor, array in zip(spec.inputs, arrays, strict=True)}
        return [_for_triton(out) for out in self.session.run([tensor.name for tensor in spec.outputs], given)]


def _for_runtime(array: Array) -> Array:
    """Convert an input for ONNX Runtime, which takes strings as str instead of bytes."""
    if array.dtype != object:
        return np.ascontiguousarray(array)
    try:
        return np.array([text.decode() for text in array.ravel()], object).reshape(array.shape)
    except UnicodeDecodeError as error:
        raise InputError(f"A text is not UTF-8: byte {error.object[error.start]:#04x} at {error.start}.") from None


def _for_triton(array: Array) -> Array:
    if array.dtype.kind not in "OU":
        return array
    return np.array([str(text).encode() for text in array.ravel()], object).reshape(array.shape)


TritonPythonModel = Onnx.for_triton()
