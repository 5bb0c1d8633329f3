"""Base class of components. It joins requests to a batch, runs the batch once, and splits the outputs by request."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from array_api_compat import device as device_of
from numpy.typing import NDArray

from shoal.errors import ArtifactError, SetupError, ShoalError, forget_frames
from shoal.kit.component.context import Context
from shoal.kit.component.ledger import BATCHES, ROWS
from shoal.kit.component.spec import STRING, Array, Arrays, ModelSpec, TensorSpec
from shoal.kit.component.tensors import Device, namespace, to_inside
from shoal.kit.component.triton import TritonModel

_MAX_CONCAT = 8  # to concatenate more arrays in one call, CuPy uploads a table of pointers
_log = logging.getLogger("shoal")


class Component:
    """Base class of a component: a model in Python code that Triton, a client, or this process can run.

    Subclass it in ``1/model.py``, write ``run``, and end the file with ``TritonPythonModel = Yours.for_triton()``::

        class Double(Component):
            def run(self, batch):
                return {"Y": batch["X"] * 2}

    Tensors are declared once, in the model's ``config.pbtxt``; ``self.context.spec`` has these declarations.
    ``shoal serve FILE.py:CLASS`` writes that file, from the class's ``inputs`` and ``outputs``: lists of
    ``NAME:DTYPE:DIMS``.

    On a GPU, arrays are CuPy arrays; set ``library = "torch"`` for torch tensors, or ``library = "numpy"`` for a
    component that computes on the host only, and refuses a GPU. Set ``is_stateful = True`` if answers depend on earlier
    requests: requests are then answered one by one, in order. By default, the requests of a batch that fails are run
    again one by one, which would change the state twice.
    """

    library: ClassVar[str] = "cupy"
    is_stateful: ClassVar[bool] = False
    is_decoupled: ClassVar[bool] = False
    answers_either_way: ClassVar[bool] = False  # in pieces, or whole if the model is not decoupled
    optional_outputs: ClassVar[frozenset[str]] = frozenset()  # declared outputs that an answer may leave out
    flat_outputs: ClassVar[frozenset[str]] = frozenset()  # of dims [-1], [rows, 1] here: Triton gets [rows]

    def __init__(self, context: Context) -> None:
        if self.is_decoupled != context.spec.is_decoupled and not self.answers_either_way:
            raise SetupError(
                f"{type(self).__name__} answers a request {'in pieces' if self.is_decoupled else 'once'}, but the"
                f" config.pbtxt of model {context.spec.name} is {'not ' if self.is_decoupled else ''}decoupled.",
                f"{'Add' if self.is_decoupled else 'Remove'} model_transaction_policy {{ decoupled: true }}"
                f"{'' if self.is_decoupled else ', or write a StreamingComponent'}.",
            )
        self.context = context
        context.device.prepare()
        with context.device.active():
            self.setup(context)
        context.device.ledger.end_setup()

    def setup(self, context: Context) -> None:
        """Load artifacts and build the state that every call uses. Called once."""

    def check(self, inputs: Arrays) -> None:
        """Validate one request: raise ``InputError`` to refuse it. Other requests of the batch are not affected.

        ``inputs`` are arrays as received: tensors from a client are on the host, even if this component is on a GPU.
        """

    def run(self, batch: Arrays) -> Arrays:
        """Answer a whole batch.

        ``batch`` maps input names to arrays ``[rows, *dims]`` on ``self.context.device``; TYPE_STRING inputs are NumPy
        object arrays of ``bytes``; an optional input that was left out is absent. Return every declared output, with
        the same number of rows; those in ``optional_outputs`` may be missing. Texts may be ``bytes`` or ``str``, which
        becomes UTF-8. Do not keep references to ``batch`` after the call.
        """
        raise NotImplementedError(f"{type(self).__name__} must define run(batch)")

    def is_ready(self) -> bool:
        """Whether requests can be answered now, from the end of ``setup`` to ``close``. Called often: return at once.

        Triton asks this from release 26.03 on.
        """
        return True

    def close(self) -> None:
        """Release the resources that ``setup`` acquired. Called once, when the model is unloaded."""

    def process(self, requests: Sequence[Arrays]) -> list[Arrays | ShoalError]:
        """Return one answer per request, in order: its outputs, or its own error.

        Requests with the same set of inputs are joined to one batch if tensors have a batch dimension, unless the
        component is stateful. If a joined batch fails, each of its requests is run again alone, so that one bad request
        does not fail the others.
        """
        spec = self.context.spec
        requests = [to_inside(spec.inputs, inputs, is_batched=spec.is_batched) for inputs in requests]
        answers: list[Arrays | ShoalError] = [{}] * len(requests)
        groups: dict[tuple[frozenset[str], int], list[int]] = {}
        for index, inputs in enumerate(requests):
            try:
                self.check(inputs)
            except Exception as error:
                answers[index] = self.failure(error)
            else:
                alone = 0 if self.context.spec.is_batched and not self.is_stateful else index
                groups.setdefault((frozenset(inputs), alone), []).append(index)
        for members in groups.values():
            for index, answer in zip(members, self._answer([requests[i] for i in members]), strict=True):
                answers[index] = answer
        return answers

    def _answer(self, requests: list[Arrays]) -> list[Arrays | ShoalError]:
        spec, device = self.context.spec, self.context.device
        try:
            with device.active():
                batch, counts = join(spec, requests, device)
                device.ledger.count(BATCHES)
                device.ledger.count(ROWS, sum(counts))
                outputs = self.run(batch)
            outputs = check_outputs(spec, outputs, sum(counts), self.optional_outputs)
            return list(split(outputs, counts))
        except Exception as error:
            if len(requests) == 1:
                return [self.failure(error)]
            forget_frames(error)
        return [self._answer([request])[0] for request in requests]

    def failure(self, error: Exception) -> ShoalError:
        """Return the error for the client. Unexpected errors may name local paths, so their text is only logged.

        In the caller's own process, the error has this text, and the line of the component's code. The traceback is
        dropped: it holds the request.
        """
        if isinstance(error, ShoalError) and not isinstance(error, ArtifactError | SetupError):
            answer = error
        else:
            name, is_local = self.context.spec.name, self.context.is_local
            _log.log(logging.DEBUG if is_local else logging.ERROR, "model %s failed on a request", name, exc_info=error)
            what = f"Model {name} failed on this request"
            if is_local:
                answer = ShoalError(f"{what}: {_describe(error, self.context.folder)}")
            else:
                answer = ShoalError(f"{what} ({type(error).__name__}).", "See the server's log.")
        forget_frames(error)
        return answer

    @classmethod
    def for_triton(cls) -> type[TritonModel]:
        """Return the ``TritonPythonModel`` class that Triton's Python backend looks for in ``model.py``."""
        return type("TritonPythonModel", (TritonModel,), {"component_class": cls})


def _describe(error: Exception, folder: Path) -> str:
    """Return an error's class and text, and the last line of code in ``folder`` that led to it."""
    told = f"{type(error).__name__}: {error}".removesuffix(": ")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename).resolve()
        if path.is_relative_to(folder):
            return f"{told} ({'/'.join(path.parts[-3:])}, line {frame.lineno})"  # MODEL/VERSION/model.py
    return told


# --- batches -----------------------------------------------------------------------------------------------------


def join(spec: ModelSpec, requests: Sequence[Arrays], device: Device) -> tuple[Arrays, list[int]]:
    """Join requests with the same set of inputs to a batch on ``device``; return it and each request's row count.

    Inputs that allow ragged batches are padded with zeros to the width of the widest request. Host arrays are joined on
    the host and uploaded in one copy. A single request that is already on ``device`` is not copied.
    """
    counts = [_rows(request) for request in requests] if spec.is_batched else [1]
    names = requests[0].keys()
    inputs = {tensor.name: tensor for tensor in spec.inputs}
    return {name: _join(inputs[name], [request[name] for request in requests], device) for name in names}, counts


def _join(tensor: TensorSpec, arrays: Sequence[Array], device: Device) -> Array:
    if len(arrays) == 1:
        return device.put(arrays[0], tensor.name)
    if not all(isinstance(array, np.ndarray) for array in arrays):  # some, or all, are on the device already
        arrays = [device.put(array, tensor.name) for array in arrays]
    return device.put(_concat(tensor, arrays), tensor.name)


def _rows(request: Arrays) -> int:
    return int(next(iter(request.values())).shape[0])


def _concat(tensor: TensorSpec, arrays: Sequence[Array]) -> Array:
    xp = namespace(arrays[0])
    if tensor.is_ragged and len({a.shape[1:] for a in arrays}) > 1:
        widest = max(a.shape[1] for a in arrays)
        arrays = [_widen(a, widest) for a in arrays]
    while len(arrays) > _MAX_CONCAT and not isinstance(arrays[0], np.ndarray):
        arrays = [xp.concat(arrays[k : k + _MAX_CONCAT], axis=0) for k in range(0, len(arrays), _MAX_CONCAT)]
    return xp.concat(list(arrays), axis=0)


def _widen(array: Array, width: int) -> Array:
    xp = namespace(array)
    shape = (array.shape[0], width - array.shape[1], *array.shape[2:])
    zeros = xp.zeros(shape, dtype=array.dtype, device=device_of(array))
    return xp.concat([array, zeros], axis=1)


def check_outputs(spec: ModelSpec, outputs: Arrays, num_rows: int, optional: Set[str] = frozenset()) -> Arrays:
    """Check the outputs' names, dtypes, shapes and row counts, since Triton does not; return them, texts as ``bytes``.

    Outputs in ``optional`` may be missing.

    Raises:
        ShoalError: an output differs from its declaration in ``config.pbtxt``.
    """
    declared = {tensor.name: tensor for tensor in spec.outputs}
    given: Any = outputs  # by code that is not type-checked
    if not isinstance(given, Mapping):
        method, verb = ("answers", "yield") if spec.is_decoupled else ("run", "return")
        kind, example = type(given).__name__, ", ".join(f'"{name}": array' for name in declared)
        what = f"{method} of model {spec.name} {verb}ed {'None' if given is None else f'a {kind}'}."
        raise ShoalError(what, f"It has to {verb} a dict of outputs: {{{example}}}")
    if not declared.keys() - optional <= outputs.keys() <= declared.keys():
        raise ShoalError(f"Model {spec.name} gave outputs {sorted(outputs)}, its config declares {sorted(declared)}.")
    checked = {}
    for name, array in outputs.items():
        if not hasattr(array, "dtype"):
            raise ShoalError(f"Output {name} of model {spec.name} is a {type(array).__name__}, not an array.")
        if declared[name].dtype == STRING and isinstance(array, np.ndarray) and array.dtype.kind in "OUST":
            array = _encode(array)
        mismatch = declared[name].mismatch(array, is_batched=spec.is_batched)
        if mismatch:
            raise ShoalError(f"Output {mismatch}, as the config of model {spec.name} declares.")
        if spec.is_batched and array.shape[0] != num_rows:
            raise ShoalError(f"Output {name} of model {spec.name} has {array.shape[0]} rows for {num_rows} rows in.")
        checked[name] = array
    return checked


def _encode(texts: NDArray[Any]) -> NDArray[Any]:
    """Return an array of ``bytes``. Other elements become UTF-8, as in Triton's stub."""
    flat = texts.ravel().tolist()
    if texts.dtype == np.object_ and {*map(type, flat)} <= {bytes}:
        return texts
    encoded = np.empty(len(flat), np.object_)
    encoded[:] = [bytes(text) if isinstance(text, bytes) else str(text).encode() for text in flat]
    return encoded.reshape(texts.shape)


def split(outputs: Arrays, counts: Sequence[int]) -> Iterator[Arrays]:
    """Yield each request's part of a batch's outputs, as views; ``counts`` are the numbers of rows of the requests."""
    if len(counts) == 1:
        yield outputs
        return
    start = 0
    for count in counts:
        yield {name: array[start : start + count] for name, array in outputs.items()}
        start += count
