"""Canary requests: each model is periodically sent a request with a known answer."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from shoal.authoring.repository.call_graph import is_decoupled
from shoal.authoring.repository.config import ModelConfig
from shoal.authoring.repository.warmup_request import FOLDER, requested
from shoal.clients.client.calls import Call, Method, decode, to_arrays
from shoal.clients.client.failures import CallError, Kind
from shoal.clients.client.grpc_transport import AsyncGrpc
from shoal.errors import ArtifactError, InputError
from shoal.kit.component.spec import DTYPES, STRING, Array, TensorSpec
from shoal.serving.gateway.core.triton_errors import is_dead

TOLERANCE = 0.03  # relative and absolute; other rows of a batch and BF16 change answers by less
MOST_SECONDS = 30.0  # between two canaries of a slow model
PATIENCE = 60.0  # seconds; a hanging process is detected earlier by ProcessMonitor
SECONDS = 2.0  # between two canaries of a model, at least
SHARE = 0.02  # of a model's time that canaries may take


class Verdict(Enum):
    """Diagnosis of a model whose canary request (a periodic test request) failed."""

    WRONG = "it gives another answer than before"
    FAILED = "it answers an error"
    GONE = "its process has died"
    LATE = "it does not answer in time"
    BUSY = "it refused the request: too many wait"


class WrongError(Exception):
    """The answer to a canary request (a periodic test request) is wrong or missing."""

    def __init__(self, verdict: Verdict, message: str) -> None:
        super().__init__(message)
        self.verdict = verdict


@dataclass
class Canary:
    """Periodic test request to a model. Later answers must match the first answer, which the first server gave.

    ``padded`` are outputs that may be wider than in the first answer, since longer rows of a batch pad them.
    ``sent`` is the time at which the canary now in flight was sent, or 0 if none is in flight. ``latency`` is how many
    seconds the last answered canary took.
    """

    model: str
    inputs: Mapping[str, Array]
    is_decoupled: bool = False
    padded: Collection[str] = ()
    expected: dict[str, Array] = field(default_factory=dict)
    sent: float = 0.0
    latency: float = 0.0
    shortest: float = math.inf

    @property
    def period(self) -> float:
        """Seconds between two canary requests, computed from the shortest latency, which load does not prolong."""
        return min(MOST_SECONDS, max(SECONDS, self.shortest / SHARE))

    async def ask(self, client: AsyncGrpc) -> None:
        """Send the canary request and check the answer.

        Raises:
            WrongError: the answer differs from the expected answer, is an error, or is late.
        """
        start = self.sent = time.monotonic()
        try:
            found = await self._ask(client)
        except CallError as error:
            raise WrongError(_judge(error), error.message) from None
        finally:
            self.sent = 0.0
        self.latency = time.monotonic() - start
        self.shortest = min(self.shortest, self.latency)
        if not self.expected:
            self.expected = found
        for name, right in self.expected.items():
            if name not in found or not _is_same(found[name], right, is_padded=name in self.padded):
                raise WrongError(Verdict.WRONG, f"its output {name} is not what it was at the start")

    async def _ask(self, client: AsyncGrpc) -> dict[str, Array]:
        """Send the request and return the outputs.

        For a decoupled model, return the outputs of all answers; each output's name ends with the number of its answer.
        """
        if not self.is_decoupled:
            return dict(await client.send(self._call(Method.INFER), PATIENCE))
        found: dict[str, Array] = {}
        number, answers = 0, client.stream(self._call(Method.STREAM))
        while (answer := await answers.read(PATIENCE)) is not None:
            found |= {f"{name} of answer {number}": value for name, value in answer.items()}
            number += 1
        return found | {"number of answers": np.array(number)}

    def _call(self, method: Method) -> Call:
        return Call(method, self.model, self.inputs, request_id="canary")


def _judge(error: CallError) -> Verdict:
    if is_dead(error.message) or error.kind in (Kind.UNREACHABLE, Kind.CONNECTION_LOST):
        return Verdict.GONE
    if error.kind is Kind.BUSY and "queue" in error.message:
        return Verdict.BUSY
    return Verdict.LATE if error.kind is Kind.TIMEOUT else Verdict.FAILED


def make_canaries(configs: dict[str, ModelConfig]) -> dict[str, Canary]:
    """Make a canary request for each model with a warm-up, and for each ensemble whose inputs can be generated.

    A decoupled model gets one only if its configuration has the parameter ``canary``, a JSON object of inputs. Any
    other request could take long, or have a different answer each time.

    Raises:
        ArtifactError: a parameter ``canary`` is not a JSON object of inputs.
    """
    found = {}
    for name, config in configs.items():
        is_streamed = is_decoupled(config, configs.get)
        if is_streamed:
            inputs = read_parameter(config)
        else:
            inputs = _of_ensemble(config) if config.is_ensemble else read_warmup(config)
        if inputs:
            padded = {t.name for t in config.spec.outputs if config.spec.is_batched and -1 in t.dims}
            found[name] = Canary(name, inputs, is_streamed, padded)
    return found


def read_warmup(config: ModelConfig) -> dict[str, Array]:
    """Build a canary's inputs from the model's first warm-up request.

    Warm-up data has no batch dimension, so a batch dimension of 1 is added. Inputs without a data file are zeros or
    empty strings.

    Raises:
        ArtifactError: a data file cannot be read, or does not fit its input.
    """
    from tritonclient.grpc import model_config_pb2
    from tritonclient.utils import InferenceServerException

    found: dict[str, Array] = {}
    for warmup in list(config.message.model_warmup)[:1]:
        rows = 1 if config.spec.is_batched else None
        for name, given in warmup.inputs.items():
            dtype = model_config_pb2.DataType.Name(given.data_type)
            if dtype not in DTYPES:  # BF16, which has no NumPy form
                return {}
            if given.input_data_file:
                datatype = "BYTES" if dtype == STRING else dtype.removeprefix("TYPE_")
                try:
                    content = (config.folder / FOLDER / given.input_data_file).read_bytes()
                    found[name] = decode(datatype, [*([rows] if rows else []), *given.dims], memoryview(content))
                except (OSError, ValueError, struct.error, InferenceServerException) as error:
                    path = f"{config.name}/{FOLDER}/{given.input_data_file}"
                    raise ArtifactError(
                        f"{path} does not fit input {name}: {getattr(error, 'strerror', error)}.",
                        "Run shoal check on the repository.",
                    ) from None
            else:  # zeros, also where the warm-up has random data, so that the answer is reproducible
                found[name] = TensorSpec(name, dtype, tuple(given.dims)).zeros(rows)
    return found


def read_parameter(config: ModelConfig) -> dict[str, Array]:
    """Read a canary's inputs from the model's parameter ``canary``, such as ``{"COUNT": [[2]]}``."""
    given = config.canary
    if given is None:
        return {}
    try:
        return to_arrays(config.spec.inputs, given, is_batched=config.spec.is_batched)
    except (ValueError, InputError) as error:
        raise ArtifactError(
            f"Parameter canary of model {config.name} does not fit its inputs: {error}",
            'Write for example {"COUNT": [[2]]}.',
        ) from None


def _of_ensemble(config: ModelConfig) -> dict[str, Array]:
    values = requested(config.spec)
    needed = [tensor.name for tensor in config.spec.inputs if not tensor.is_optional]
    return {name: values[name] for name in needed} if values.keys() >= {*needed} else {}


def _is_same(found: Array, right: Array, *, is_padded: bool) -> bool:
    if is_padded and found.ndim == right.ndim:
        found = found[(slice(None), *map(slice, right.shape[1:]))]
    if found.shape != right.shape or found.dtype != right.dtype:
        return False
    if found.dtype.kind != "f":
        return bool(np.array_equal(found, right))
    return bool(np.allclose(found, right, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True))
