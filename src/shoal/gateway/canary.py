"""Canary requests: each model is periodically sent a request with a known answer."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from shoal.component.spec import DTYPES, STRING, TensorSpec
from shoal.composition.warmup import FOLDER, requested, serialize
from shoal.errors import ArtifactError
from shoal.gateway.fronts import is_dead
from shoal.repository.config import ModelConfig
from shoal.repository.graph import is_decoupled

PARAMETER = "canary"  # of a decoupled model's configuration: the inputs of its canary
TOLERANCE = 0.03  # relative and absolute: batch neighbours and BF16 change less
MOST_SECONDS = 30.0  # between two canaries of a slow model
PATIENCE = 60.0  # seconds; a hanging process is detected earlier by Watch
SECONDS = 2.0  # between two canaries of a model, at least
SHARE = 0.02  # of a model's time, at most


class Verdict(Enum):
    """Diagnosis of a model whose canary failed."""

    WRONG = "it answers something else"
    FAILED = "it answers an error"
    GONE = "its process has died"
    LATE = "it does not answer in time"
    BUSY = "it was not asked: too many wait"


class WrongError(Exception):
    """A canary's answer is wrong or missing."""

    def __init__(self, verdict: Verdict, message: str) -> None:
        super().__init__(message)
        self.verdict = verdict


@dataclass
class Canary:
    """A request made from a model's warm-up; its first answer, from the first server, is the expected one.

    ``sent`` is when the canary in flight was sent, 0 if none is; ``latency`` is that of the last one, in seconds.
    """

    model: str
    request: Any
    is_decoupled: bool = False
    expected: dict[str, Any] = field(default_factory=dict)
    sent: float = 0.0
    latency: float = 0.0
    shortest: float = math.inf

    @property
    def period(self) -> float:
        """Seconds between two canaries, from the shortest latency: under load canaries queue as well."""
        return min(MOST_SECONDS, max(SECONDS, self.shortest / SHARE))

    async def ask(self, stub: Any) -> None:
        """Send the canary through the gRPC ``stub`` and check the answer.

        Raises:
            WrongError: it differs from the expected one, is an error, or is late.
        """
        import grpc  # type: ignore[import-untyped]

        start = self.sent = time.monotonic()
        try:
            if self.is_decoupled:
                found = await self._ask_stream(stub)
            else:
                found = dict(_read(await stub.ModelInfer(self.request, timeout=PATIENCE)))
        except grpc.aio.AioRpcError as error:
            raise WrongError(_judge(error), f"{error.code().name}: {error.details()}") from None
        except ValueError as error:  # the bytes do not match the shape
            raise WrongError(Verdict.WRONG, str(error)) from None
        finally:
            self.sent = 0.0
        self.latency = time.monotonic() - start
        self.shortest = min(self.shortest, self.latency)
        if not self.expected:
            self.expected = found
        for name, right in self.expected.items():
            if name not in found or not _is_same(found[name], right):
                raise WrongError(Verdict.WRONG, f"its output {name} is not what it was at the start")

    async def _ask_stream(self, stub: Any) -> dict[str, Any]:
        """Return all answers of a decoupled model: their outputs, named with the answer's number, and how many."""
        found: dict[str, Any] = {}
        number = 0
        async for answer in stub.ModelStreamInfer(iter([self.request]), timeout=PATIENCE):
            if answer.error_message:
                verdict = Verdict.GONE if is_dead(answer.error_message) else Verdict.FAILED
                raise WrongError(verdict, answer.error_message)
            outputs = dict(_read(answer.infer_response))
            found |= {f"{name} of answer {number}": value for name, value in outputs.items()}
            number += bool(outputs)
        return found | {"number of answers": np.array(number)}


def _judge(error: Any) -> Verdict:
    code, details = error.code().name, error.details() or ""
    if is_dead(details):
        return Verdict.GONE
    if code == "DEADLINE_EXCEEDED":
        return Verdict.LATE
    if code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED") and "queue" in details:
        return Verdict.BUSY
    return Verdict.GONE if code == "UNAVAILABLE" else Verdict.FAILED


def make_canaries(configs: dict[str, ModelConfig]) -> dict[str, Canary]:
    """Make a canary for each model with a warm-up, and for each ensemble whose inputs can be synthesised.

    A decoupled model is asked only what its parameter ``canary`` says, a JSON object of inputs: any other request may
    take long, or have another answer each time.

    Raises:
        ArtifactError: such a parameter is no such object.
    """
    found = {}
    for name, config in configs.items():
        is_streamed = is_decoupled(config, configs.get)
        if is_streamed:
            inputs = _of_parameter(config)
        else:
            inputs = _of_ensemble(config) if config.is_ensemble else _of_warmup(config)
        if inputs:
            found[name] = Canary(name, _make_request(name, inputs), is_streamed)
    return found


Inputs = dict[str, tuple[str, list[int], bytes]]  # Triton's name of the dtype, shape, content


def _of_warmup(config: ModelConfig) -> Inputs:
    """Build inputs from the first warm-up request.

    Warm-up data has no batch dimension, so it is added; inputs without a data file are zeros.
    """
    from tritonclient.grpc import model_config_pb2

    found: Inputs = {}
    for warmup in list(config.message.model_warmup)[:1]:
        rows = [1] if config.spec.is_batched else []
        for name, given in warmup.inputs.items():
            dtype = model_config_pb2.DataType.Name(given.data_type).removeprefix("TYPE_")
            shape = [*rows, *given.dims]
            if given.input_data_file:
                content = (config.folder / FOLDER / given.input_data_file).read_bytes()
            else:  # zeros, also where the warm-up has random data, so that the answer is reproducible
                size = 4 if dtype == "STRING" else np.dtype(DTYPES[f"TYPE_{dtype}"]).itemsize
                content = bytes(int(np.prod(shape)) * size)
            found[name] = ("BYTES" if dtype == "STRING" else dtype, shape, content)
    return found


def _of_parameter(config: ModelConfig) -> Inputs:
    """Read inputs from the parameter ``canary``: ``{"COUNT": [[2]]}``."""
    text = config.spec.parameters.get(PARAMETER)
    if text is None:
        return {}
    try:
        given = json.loads(text)
        specs = {tensor.name: tensor for tensor in config.spec.inputs}
        arrays = {
            name: np.array(value, specs[name].numpy_dtype)
            if specs[name].dtype != STRING
            else np.vectorize(str.encode, otypes=[np.object_])(value)
            for name, value in given.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ArtifactError(
            f"{config.name}: the parameter {PARAMETER} is not a JSON object of inputs: {error!r}.",
            'Write for example {"COUNT": [[2]]}.',
        ) from None
    return {name: (_wire_name(specs[name]), list(x.shape), serialize(x)) for name, x in arrays.items()}


def _of_ensemble(config: ModelConfig) -> Inputs:
    values = requested(config.spec)
    needed = [tensor for tensor in config.spec.inputs if not tensor.is_optional]
    if any(tensor.name not in values for tensor in needed):
        return {}
    return {t.name: (_wire_name(t), list(values[t.name].shape), serialize(values[t.name])) for t in needed}


def _wire_name(tensor: TensorSpec) -> str:
    return "BYTES" if tensor.dtype == STRING else tensor.dtype.removeprefix("TYPE_")


def _make_request(model: str, inputs: Inputs) -> Any:
    from tritonclient.grpc import service_pb2

    request = service_pb2.ModelInferRequest(model_name=model, id="canary")
    for name, (dtype, shape, content) in inputs.items():
        request.inputs.add(name=name, datatype=dtype, shape=shape)
        request.raw_input_contents.append(content)
    return request


def _read(answer: Any) -> Any:
    from tritonclient.utils import triton_to_np_dtype

    for tensor, content in zip(answer.outputs, answer.raw_output_contents, strict=True):
        dtype = None if tensor.datatype in ("BYTES", "BF16") else triton_to_np_dtype(tensor.datatype)
        value = content if dtype is None else np.frombuffer(content, dtype).reshape(list(tensor.shape))
        yield tensor.name, value


def _is_same(found: Any, right: Any) -> bool:
    if isinstance(right, bytes):
        return bool(found == right)
    if found.shape != right.shape or found.dtype != right.dtype:
        return False
    if found.dtype.kind != "f":
        return bool(np.array_equal(found, right))
    return bool(np.allclose(found, right, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True))
