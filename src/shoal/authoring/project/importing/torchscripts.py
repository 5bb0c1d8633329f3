"""Import of TorchScript models: forward's arguments are read from the archive, its outputs observed by running it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.authoring.check.torchscript import ForeignError, Script
from shoal.authoring.project.importing.imported import MAX_BATCH_SIZE, Imported, make_config
from shoal.authoring.project.importing.probe_model import ROWS, WIDTHS, Arrays, Trial, TrialError, choose_mask, explain
from shoal.authoring.project.scaffold.names import parse_type
from shoal.errors import ArtifactError, InputError
from shoal.kit.component.provenance import read_archive
from shoal.kit.component.spec import DTYPES, STRING, ModelSpec, TensorSpec
from shoal.kit.encoders.unbinding import unbind

FILE = "model.pt"
_TYPES = [name for name in DTYPES if name != STRING and name not in ("TYPE_UINT16", "TYPE_UINT32", "TYPE_UINT64")]
_OF_NUMPY = {np.dtype(DTYPES[name]): name for name in _TYPES}
_OF_TORCH = {"Float": "FP32", "Double": "FP64", "Half": "FP16", "Long": "INT64", "Int": "INT32", "Bool": "BOOL"}
_WRAP = "Wrap the module in one whose forward takes tensors and gives a tensor, or a tuple of them."


def draft_torchscript(
    source: Any,
    name: str,
    *,
    inputs: Sequence[str] | None = None,
    mask: str | None = None,
    max_batch_size: int = MAX_BATCH_SIZE,
    scratch: Path,
) -> Imported:
    """Draft a model folder for Triton's ``pytorch`` backend from a torch.jit.save file or a torch.jit.ScriptModule.

    ``inputs`` gives the dtype and dims of each argument of forward without the rows, which only a traced module's file
    has; of these, integers of two dimensions are taken for token ids, of any length:
    ``DTYPE:DIMS``, in the order of the arguments, such as ``INT64:-1`` or ``FP32:3,224,224``; -1 is any size. The
    model's inputs are called INPUT__0, INPUT__1, ..., or like forward's arguments if each entry is ``NAME:DTYPE:DIMS``
    with an argument's name. The outputs are called OUTPUT__0, OUTPUT__1, ...; their dtypes and dims are observed by
    running forward on generated rows. ``mask`` names the attention mask, as an input or as an argument of forward, so
    that rows of similar length run together. ``max_batch_size`` is 0 for a module without a batch dimension.

    Raises:
        InputError: ``inputs`` is missing, for a module that was not traced, or does not fit forward.
        ArtifactError: the file is not a TorchScript archive; or forward takes or returns something other than tensors,
            fails, or gives an answer to a row that depends on other rows.
    """
    path = _save(source, scratch / FILE)
    original = path
    module, path, notes, is_unbound = _load(path, scratch)
    taken = _arguments(module, path)
    traced = [] if inputs else _read_traced(original)
    specs = _declare(inputs or traced, taken)
    if mask in taken:
        mask = specs[taken.index(mask)].name
    bound = _open(original).eval() if is_unbound else None
    trial = Trial(path, specs, lambda arrays: _call_both(module, bound, arrays), is_batched=max_batch_size > 0)
    outputs = _observe(trial)
    spec = ModelSpec(name, specs, outputs, max_batch_size)
    parameters, more = choose_mask(spec, mask, trial)
    message = make_config(
        name, "pytorch", specs, outputs, artifact=FILE, max_batch_size=max_batch_size, parameters=parameters
    )
    names = ", ".join(f"{spec.name} for {argument}" for spec, argument in zip(specs, taken, strict=True))
    shown = f"forward run on {ROWS[0]} and {ROWS[1]} rows, {WIDTHS[0]} and {WIDTHS[1]} wide where a size is open"
    what = Path(source).name if isinstance(source, str | Path) else f"a {type(source).__name__}"
    said = (
        f"TorchScript, from {what}: forward({', '.join(taken)})",
        *notes,
        f"inputs {'of the example that it was traced with' if traced else 'as given'}: {names}",
        f"outputs from {shown}",
        *more,
    )
    return Imported(message, {f"1/{FILE}": path}, said)


def _save(source: Any, path: Path) -> Path:
    """Return the path of a TorchScript file; if ``source`` is a module, save it to ``path`` first."""
    import torch

    from shoal.kit.encoders.export import save_script

    if isinstance(source, str | Path):
        return Path(source)
    if not isinstance(source, torch.jit.ScriptModule):
        raise InputError(
            f"A {type(source).__name__} is not a TorchScript module.",
            "Convert it: torch.jit.trace(model.eval(), example_inputs), or torch.jit.script(model.eval()).",
        )
    save_script(source, path)
    return path


def _load(path: Path, scratch: Path) -> tuple[Any, Path, list[str], bool]:
    """Load a TorchScript file in evaluation mode; return the module, the path of its file, and notes for the user.

    If the module was saved in training mode, or its code names a device, the file is a changed copy in ``scratch``. The
    last value is whether the copy uses the device of its inputs in place of one that the code names.
    """
    from shoal.kit.encoders.export import save_script

    try:
        with closing(Script(path)) as script:
            ties, is_bound = read_archive(path), any(script.devices())  # before torch, which does not verify checksums
        module = _open(path)
        if operator := _find_training(module):
            raise ArtifactError(
                f"{path} was traced in training mode: {operator} is computed as in training after eval(), too.",
                "Trace it in evaluation mode: torch.jit.trace(model.eval(), example_inputs).",
            )
        if not (module.training or is_bound):
            return module, path, [], False
        notes = ["it was saved in training mode, and is written in evaluation mode"] if module.training else []
        module.eval()
        if is_bound:
            unbind(module)
        changed = scratch / f"changed-{FILE}"
        save_script(module, changed, ties)
        with closing(Script(changed)) as script:
            is_unbound = is_bound and not any(script.devices())
        if is_bound:
            notes.append(
                "its code named a device, and now uses the device of its inputs; its answers are the same"
                if is_unbound
                else "its code names a device, and runs on that one only: `shoal check` names the line"
            )
    except (ForeignError, OSError, RuntimeError) as error:
        raise ArtifactError(
            f"{path} is not a TorchScript archive: {explain(error)}.",
            "Save the module: torch.jit.trace(model.eval(), example_inputs).save(PATH). Or export it to ONNX.",
        ) from error
    return _open(changed), changed, notes, is_bound


# Operators that are computed in two ways, and the arguments that are all true, as constants, in training.
_TRAINING = {
    **dict.fromkeys(
        ("dropout", "dropout_", "feature_dropout", "feature_alpha_dropout", "alpha_dropout"), ("p", "train")
    ),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), ("dropout", "train")),
    **dict.fromkeys(("batch_norm", "rrelu", "rrelu_"), ("training",)),
    "scaled_dot_product_attention": ("dropout_p",),
}


def _find_training(module: Any) -> str:
    """Return the name of an operator that is computed as in training, whatever the mode; empty if there is none."""
    import torch

    if not hasattr(module, "forward"):
        return ""
    graph = module.inlined_graph  # to which its nodes do not hold
    for name, wanted in _TRAINING.items():
        for node in graph.findAllNodes(f"aten::{name}"):
            names = [each.name for each in torch._C.parse_schema(node.schema()).arguments]
            inputs = dict(zip(names, node.inputs(), strict=True))
            has_none = name == "batch_norm" and inputs["running_mean"].type().kind() == "NoneType"  # it keeps none
            if not has_none and all(inputs[each].toIValue() for each in wanted):
                return name
    return ""


def _open(path: Path, **options: bool) -> Any:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.load(str(path), map_location="cpu", **options)


def _arguments(module: Any, path: Path) -> list[str]:
    """Return the names of forward's arguments, which must all be tensors."""
    arguments = module.forward.schema.arguments[1:] if hasattr(module, "forward") else []
    if not arguments or any(str(argument.type) != "Tensor" for argument in arguments):
        shown = ", ".join(f"{argument.name}: {argument.type}" for argument in arguments)
        raise ArtifactError(f"{path} is called as forward({shown}), which takes more than tensors.", _WRAP)
    return [argument.name for argument in arguments]


# --- what the caller says of the inputs --------------------------------------------------------------------------


def _read_traced(path: Path) -> list[str]:
    """Return the inputs, as ``DTYPE:DIMS``, of the example with which a module was traced; empty if it has none."""
    found = []
    for value in list(_open(path, _restore_shapes=True).forward.graph.inputs())[1:]:
        sizes, dtype = value.type().sizes(), _OF_TORCH.get(value.type().scalarType())
        if dtype is None or len(sizes or ()) < 2:
            return []
        is_ids = dtype in ("INT32", "INT64") and len(sizes) == 2
        found.append(f"{dtype}:{'-1' if is_ids else ','.join(map(str, sizes[1:]))}")
    return found


def _declare(inputs: Sequence[str] | None, taken: list[str]) -> tuple[TensorSpec, ...]:
    forward = f"forward({', '.join(taken)})"
    example = " ".join(["--input INT64:-1"] * len(taken))
    if not inputs:
        raise InputError(
            f"This TorchScript file, of a module that was not traced, lacks dtypes and dims of {forward}.",
            f"Give DTYPE:DIMS for each, without the rows, in that order; for example: {example}"
            f" (in Python: inputs={['INT64:-1'] * len(taken)}).",
        )
    if len(inputs) != len(taken):
        raise InputError(f"{forward} takes {len(taken)} tensors; {len(inputs)} are given.", f"For example: {example}")
    parsed = [_parse(text) for text in inputs]
    names = [spec.name for spec in parsed]
    standard = [f"INPUT__{index}" for index in range(len(taken))]
    if not any(names):
        return tuple(TensorSpec(name, spec.dtype, spec.dims) for name, spec in zip(standard, parsed, strict=True))
    order = next((known for known in (taken, standard) if sorted(known) == sorted(names)), None)
    if order is None:
        raise InputError(
            f"The inputs are named {', '.join(name or 'nothing' for name in names)}; {forward} has other names.",
            f"Use those names ({', '.join(taken)}), or give no names at all: then they are {', '.join(standard)}.",
        )
    return tuple(parsed[names.index(name)] for name in order)


def _parse(text: str) -> TensorSpec:
    """Parse an input as given on the command line, ``DTYPE:DIMS`` (with an empty name) or ``NAME:DTYPE:DIMS``."""
    name = text.rpartition(":")[0].rpartition(":")[0]
    example = "For example INT64:-1 or FP32:3,224,224, without the rows; -1 is any size."
    dtype, dims = parse_type(text.removeprefix(f"{name}:"), f"The input {text!r}", example, _TYPES)
    return TensorSpec(name, dtype, dims)


# --- what forward gives ------------------------------------------------------------------------------------------


def _observe(trial: Trial) -> tuple[TensorSpec, ...]:
    try:
        found = trial.observe()
    except TrialError as error:
        raise ArtifactError(
            f"{trial.path} cannot be tried: {error}.", "Fix the inputs that you gave, or the module."
        ) from error
    return tuple(TensorSpec(f"OUTPUT__{index}", _OF_NUMPY[dtype], dims) for index, (dtype, dims) in enumerate(found))


def _call_both(module: Any, bound: Any, arrays: Arrays) -> list[NDArray[Any]]:
    """Run a module, and compare its answers to the bit with those of ``bound``, if that is not None."""
    found = _call(module, arrays)
    before = found if bound is None else _call(bound, arrays)
    if [(array.dtype, array.shape, array.tobytes()) for array in found] != [
        (array.dtype, array.shape, array.tobytes()) for array in before
    ]:
        raise ArtifactError(
            "The code names a device, and without it the answers are others.",
            "Make tensors with device=x.device, and save the module with torch.jit.script.",
        )
    return found


def _call(module: Any, arrays: Arrays) -> list[NDArray[Any]]:
    import torch

    with torch.inference_mode():
        given = module(*map(torch.from_numpy, arrays))
    tensors = [given] if isinstance(given, torch.Tensor) else given
    if not isinstance(tensors, tuple | list) or isinstance(given, list):
        raise ArtifactError(f"forward returns a {type(given).__name__}, not a tensor.", _WRAP)
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise ArtifactError(f"Output {index} of forward is a {type(tensor).__name__}, not a tensor.", _WRAP)
        if str(tensor.dtype).removeprefix("torch.") not in map(str, _OF_NUMPY):
            raise ArtifactError(
                f"Output {index} of forward is {tensor.dtype}, which clients cannot take.", "Cast it: .float()"
            )
    return [tensor.numpy() for tensor in tensors]
