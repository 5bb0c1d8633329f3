"""Rules for what Triton's backends read of a configuration, and shoal's backends of the same names do not.

Shoal's backends serve TorchScript, ONNX and forests on the embedded server, which lacks Triton's. The table of both is
in ``docs/serving.md``.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.authoring.check.findings import Findings, Place, Rule, Severity
from shoal.authoring.check.forest import FILES
from shoal.authoring.check.models import Model, Repository, is_file
from shoal.authoring.repository.devices import PYTHON_BASED_BACKENDS
from shoal.errors import ArtifactError
from shoal.kit.encoders.length_bucketing import ATTENTION_MASK, find_mask

UNSUPPORTED = Rule("not-in-own-backend", Severity.ERROR)
IGNORED = Rule("ignored-by-own-backend", Severity.ADVICE)

# Backend: parameters that change the time or the memory that Triton's backend takes, and no answer.
# Sources: fil_backend, src/shared_state.h and docs/model_config.md; onnxruntime_backend, src/onnxruntime.cc;
# pytorch_backend, src/pt/model_state.cc; openvino_backend, README.md.
PARAMETERS = {
    "fil": """algo blocks_per_sm chunk_size cpu_nthread layout storage_type threads_per_tree transfer_threshold
        use_experimental_optimizations""",
    "onnxruntime": """arena_extend_strategy cudnn_conv_algo_search cudnn_conv_use_max_workspace
        do_copy_in_default_stream enable_mem_arena enable_mem_pattern execution_mode gpu_mem_limit inter_op_thread_count
        memory.enable_memory_arena_shrinkage session.use_device_allocator_for_initializers""",
    "openvino": """COMPILATION_NUM_THREADS ENABLE_BATCH_PADDING NUM_STREAMS PERFORMANCE_HINT
        SKIP_OV_DYNAMIC_BATCHSIZE""",
    "pytorch": """DISABLE_CUDNN DISABLE_OPTIMIZED_EXECUTION ENABLE_CACHE_CLEANING ENABLE_JIT_EXECUTOR
        ENABLE_JIT_PROFILING ENABLE_TENSOR_FUSER ENABLE_WEIGHT_SHARING INFERENCE_MODE INTER_OP_THREAD_COUNT""",
}
OPTIMIZATIONS = ("graph", "cuda", "execution_accelerators")  # fields of `optimization`
_CONTAINER = "compose for NVIDIA's container, whose backend has it: --target 26.06"


def find(model: Model, repository: Repository) -> Findings:
    """Find fields, parameters and files that the backends of the embedded server refuse or ignore."""
    is_embedded = repository.target is not None and repository.target.is_embedded
    if model.message is None or not is_embedded or model.backend not in PYTHON_BASED_BACKENDS:
        return
    for place, what, fix in _find_unsupported(model):
        yield UNSUPPORTED.at(
            place,
            f"shoal's {model.backend} backend, which serves {model.name} here, {what}.",
            f"{fix}, or {_CONTAINER}",
        )
    if model.config and not (model.backend == "pytorch" and _is_on_gpu(model)):
        try:
            find_mask(model.config.spec)
        except ArtifactError as error:
            yield UNSUPPORTED.at(model.at_entry("parameters", key=ATTENTION_MASK), error.what, error.fix)
    names = [name for name in PARAMETERS[model.backend].split() if model.parameters.get(name, "AUTO") != "AUTO"]
    ignored = [(model.at_entry("parameters", key=name), name) for name in names]
    for name in OPTIMIZATIONS:
        if model.message.optimization.HasField(name):
            ignored.append((model.at("optimization", name), f"optimization.{name}"))
    for place, name in ignored:
        what = f"{name} of {model.name} has no effect on the embedded server; answers are the same."
        yield IGNORED.at(place, what, f"Remove it, or {_CONTAINER}")


def _is_on_gpu(model: Model) -> bool:
    return any(group.kind == group.KIND_GPU for group in model.message.instance_group)


def _find_unsupported(model: Model) -> Iterator[tuple[Place, str, str]]:
    """Yield the place of each mistake, what the backend does not do, and the way out without a container."""
    message = model.message
    for name in ("batch_input", "batch_output"):
        if len(getattr(message, name)):
            yield model.at(name), f"does not make the tensors of {name}", "Let a component make them"
    if message.cc_model_filenames and _is_on_gpu(model):
        yield model.at("cc_model_filenames"), "does not choose a file by the GPU", "Name one in default_model_filename"
    for index, tensor in enumerate(model.inputs):
        if tensor.is_optional and model.backend != "onnxruntime":  # whose graphs may have a default
            place = model.at("input", index, "optional")
            yield place, f"needs each input, and {tensor.name} may be left out", "Remove optional"
    for kind, tensors in (("input", message.input), ("output", message.output)):
        for index, tensor in enumerate(tensors):
            is_open = max([*tensor.reshape.shape].count(-1), [*tensor.dims].count(-1)) > 1
            if tensor.HasField("reshape") and (is_open or model.backend == "fil"):
                place = model.at(kind, index, "reshape")
                yield place, f"does not reshape {tensor.name}", "Declare the shape that the model itself has"
    if model.backend == "fil":
        kind = model.parameters.get("model_type", "xgboost")
        if kind in FILES and kind != "treelite_checkpoint":
            place = model.at_entry("parameters", key="model_type")
            yield place, f"reads no {kind}", f"Convert it: shoal add-model {FILES[kind]} NAME"
        for index, tensor in enumerate(model.outputs):
            if tensor.name == "treeshap_output":
                yield model.at("output", index, "name"), "computes no treeshap_output", "Remove the output"
    elif model.backend == "openvino":
        for name, value in (("TARGET_DEVICE", "CPU"), ("CPU_EXTENSION_PATH", ""), ("RESHAPE_IO_LAYERS", "NO")):
            if model.parameters.get(name, value) != value:
                yield model.at_entry("parameters", key=name), f"does not read {name}", "Remove it"
    elif model.backend == "pytorch":
        name = message.default_model_filename or "model.pt"
        for version in model.served_versions:
            folder = model.folder / str(version)
            others = [folder / each for each in ("model.py", "model.pt2") if is_file(folder / each)]
            if name.endswith(".pt2"):
                others = [folder / name]
            elif is_file(folder / name):  # a model.py beside it is NVIDIA's Python runtime, where it holds weights
                others = [other for other in others if other.suffix == ".py"]
            if others:
                yield Place(others[0]), "reads only TorchScript", "Export the model with torch.jit"
