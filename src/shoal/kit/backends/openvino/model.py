import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal import Array, Arrays, Component, Context, SetupError
from shoal.kit.component.files import refusal
from shoal.kit.component.provenance import METADATA, check_ties, parse_ties
from shoal.kit.encoders.length_bucketing import find_mask, run_by_length
from shoal.kit.encoders.openvino_core import find_core
from shoal.system.machine import computes_bf16


class OpenVino(Component):
    """Runs ``model.xml`` for a model whose configuration names ``openvino``, on servers without that backend.

    ``default_model_filename`` may name another file, such as ``model.onnx``. It runs on the host only. Tensors are
    matched by name. With the parameter ``HINT_BF16``, what is not quantised is computed in BF16 where the processor
    has it. If the parameter ``attention_mask`` names an input, rows are run in batches of similar length and of few
    different shapes.
    """

    def setup(self, context: Context) -> None:
        core = find_core()
        if not context.device.is_host:
            raise SetupError(
                f"Model {context.spec.name} is for OpenVINO, which shoal's own backend runs on the host alone.",
                "Compose with --placement cpu.",
            )
        self.mask = find_mask(context.spec)
        path = context.artifact(context.spec.filename or "model.xml")
        options: dict[str, Any] = {
            "NUM_STREAMS": 1,
            "INFERENCE_NUM_THREADS": context.num_threads or 0,
            "INFERENCE_PRECISION_HINT": "bf16" if self._computes_bf16() else "f32",
        }
        try:
            model = core.read_model(str(path))
            ties = find_ties(model)
            self.request = core.compile_model(model, "CPU", options).create_infer_request()
        except Exception as error:  # its errors have no class in common but this one
            reason = next((line for line in reversed(str(error).strip().splitlines()) if line), "")
            raise refusal(path, "model that OpenVINO runs", reason.strip().rstrip(".")) from error
        check_ties(ties, path)
        taken = {name for tensor in self.request.model_inputs for name in tensor.names}
        self.outputs = {name: tensor for tensor in self.request.model_outputs for name in tensor.names}
        for known, declared in ((taken, context.spec.inputs), (self.outputs, context.spec.outputs)):
            for tensor in declared:
                if tensor.name not in known:
                    raise refusal(path, f"file of model {context.spec.name}", f"it has no tensor {tensor.name}")

    def _computes_bf16(self) -> bool:
        return self.context.spec.parameters.get("HINT_BF16") == "YES" and computes_bf16()

    def run(self, batch: Arrays) -> Arrays:
        return run_by_length(self.context.spec, batch, self.call, self.mask, in_few_shapes=True)

    def call(self, arrays: Sequence[Array]) -> list[Array]:
        """Run the model. Inputs and outputs are in the order of the configuration."""
        spec = self.context.spec
        given = {tensor.name: np.ascontiguousarray(array) for tensor, array in zip(spec.inputs, arrays, strict=True)}
        found = self.request.infer(given, share_inputs=True)
        return [np.array(found[self.outputs[tensor.name]]) for tensor in spec.outputs]  # its buffers are used again


def find_ties(model: Any) -> dict[str, str]:
    """Return the names and SHA-256 of the files that a model was made with, which its metadata has."""
    path = ["framework", METADATA]
    return parse_ties(model.get_rt_info(path).astype(str) if model.has_rt_info(path) else "")


TritonPythonModel = OpenVino.for_triton()
