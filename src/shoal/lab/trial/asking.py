"""Requests to one model of a trial: one row, many rows, and many requests at once."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shoal.authoring.check.models import Model
from shoal.authoring.check.tried import find_reason
from shoal.authoring.repository.config import ModelConfig
from shoal.authoring.repository.model_code import is_component
from shoal.clients.client.calls import IS_FINAL, Call, Method, Parameter, count_rows
from shoal.clients.client.failures import CallError, Kind, stream_failure, strip
from shoal.kit.component.spec import Arrays
from shoal.lab.trial.requests import find_misfit, make_requests, repeat
from shoal.lab.trial.server import TrialServer
from shoal.serving.gateway.core.triton_errors import is_dead

REQUEST_SECONDS = 40.0
_BATCH_SECONDS, _BATCH_BYTES, _AT_ONCE, _BURSTS = 0.2, 16 * 2**20, 32, 8
_SEQUENCES = itertools.count(1)
# A stream's errors have no code. These are what a component says of its own outputs.
_OUTPUTS = re.compile(r"Output |Model \S+ gave outputs |\w+ of model \S+ (?:return|yield)ed ")

# Triton's words for what no request can be at fault for: answers in pieces that nobody expects, a sequence that has
# ended already, a model or a version that is not there, and tensors of one model that another one does not take.
_FAULTS = re.compile(
    r"expected a single response|is using the decoupled|must specify the START flag|unexpected shape for input"
    r"|Model '?\S+ (with version \d+ )?is not (ready|found)"
)
# Python's words for bytes that are no picture, no JSON and no base64, as a text that was made up is.
_UNREADABLE = re.compile(r"UnidentifiedImageError|cannot identify image|JSONDecodeError|binascii\.Error")


class Asker:
    """Sends a model, which is loaded, its requests. ``sent`` describes the last of them."""

    def __init__(self, server: TrialServer, model: Model, *, is_streamed: bool) -> None:
        assert model.config is not None
        self.sent = ""
        self._server, self._config, self._is_streamed = server, model.config, is_streamed
        self._is_sequence = self._config.message.HasField("sequence_batching")
        # An error of a component about a request has another code than one about the component itself.
        sources = [text for _, text in model.sources if model.is_python]
        self._is_component = any(map(is_component, sources)) or (not sources and not model.is_ensemble)
        self._inner = _find_inner(self._config) if model.is_ensemble else frozenset()
        self._is_exact = bool(sources) and not self._is_component  # others may leave outputs out

    def ask(self) -> Iterator[str]:
        """Send the requests, and yield what the model refused, as the end of a clause.

        Raises:
            CallError: it failed, died, gave no answer, or gave one that its configuration does not declare.
        """
        requests, is_own = make_requests(self._config)
        failures = [CallError(Kind.REFUSED, "no values can be made for its inputs")] * (not requests)
        for inputs in requests:
            begin = time.monotonic()
            try:
                self._send([inputs])
            except CallError as error:
                failures.append(error)
                if error.kind not in (Kind.FAILED, Kind.REFUSED) or is_dead(error.message):
                    raise
            else:
                yield from self._ask_more(inputs, time.monotonic() - begin)
                return
        failures.sort(key=lambda each: each.kind is Kind.REFUSED)
        has_no_rows = self._config.spec.is_batched and not self._config.spec.inputs  # Triton refuses each request
        is_unreadable = not is_own and bool(_UNREADABLE.search(failures[0].message))
        if (failures[0].kind is Kind.FAILED and not is_unreadable) or is_own or has_no_rows:
            raise failures[0]
        yield f": {find_reason(failures[0].message)} Its parameter canary may be a request that it takes."

    def _ask_more(self, inputs: Arrays, seconds: float) -> Iterator[str]:
        """Send many rows, and many requests at once, given inputs that were answered within some seconds."""
        spec = self._config.spec
        if not spec.is_batched or self._is_sequence:
            return
        given = count_rows(inputs)
        sizes = (len(b"".join(v.ravel())) if v.dtype == np.object_ else v.nbytes for v in inputs.values())
        times = max(5, int(_BATCH_SECONDS / seconds))  # fewer could be as many as the columns: what mixes them works
        rows = min(spec.max_batch_size, given * times, given * max(1, int(_BATCH_BYTES / max(1, sum(sizes)))))
        many = {key: repeat(value, rows) for key, value in inputs.items()}
        # again and again, since only requests that wait for one another become one batch
        is_joined = self._config.message.HasField("dynamic_batching")
        bursts = [[inputs] * min(times, _AT_ONCE)] * _BURSTS * is_joined
        end = math.inf
        for number, requests in enumerate([[many] * (rows > given), *bursts]):
            if number > 2 and time.monotonic() > end:  # not before two bursts, however long they take
                return
            end = min(end, time.monotonic() + _BATCH_SECONDS) if len(requests) > 1 else end
            try:
                self._send(requests)
            except CallError as error:
                if error.kind not in (Kind.REFUSED, Kind.BUSY):
                    raise
                yield f" with {self.sent}: {find_reason(error.message)}"
                return

    def _send(self, requests: Sequence[Arrays]) -> None:
        """Send requests at once, or a sequence of two, and compare the answers with the declaration."""
        if not requests:
            return
        spec = self._config.spec
        rows = count_rows(requests[0]) if spec.is_batched and requests[0] else 1
        self.sent = f"{len(requests)} requests at once" if len(requests) > 1 else f"{rows} row{'s' * (rows > 1)}"
        parameters: list[Mapping[str, Parameter]] = [{}] * len(requests)
        if self._is_sequence:
            number, requests = next(_SEQUENCES), [*requests, *requests]
            parameters = [{"sequence_id": number, f"sequence_{end}": True} for end in ("start", "end")]
        # in a stream, requests arrive close to each other, and some become one batch
        method = Method.STREAM if self._is_streamed or len(requests) > 1 else Method.INFER
        calls = [Call(method, spec.name, each, parameters=p) for each, p in zip(requests, parameters, strict=True)]
        for group in [[call] for call in calls] if self._is_sequence else [calls]:
            answers = self._receive(group)
            is_streamed, is_exact = self._is_streamed, self._is_exact
            if misfit := find_misfit(spec, answers, rows, is_streamed=is_streamed, is_exact=is_exact):
                raise CallError(Kind.FAILED, misfit)

    def _receive(self, calls: Sequence[Call]) -> list[Any]:
        try:
            answers = self._server.ask(calls, REQUEST_SECONDS)
        except CallError as error:
            raise CallError(self._classify(error), error.message) from None
        # the end of a stream may be a message without an answer
        return [a for a in answers if a.outputs or not self._is_streamed or not a.parameters[IS_FINAL].bool_param]

    def _classify(self, error: CallError) -> Kind:
        """Return FAILED for an exception or a component's own fault, REFUSED for a model's answer that is an error."""
        if error.kind not in (Kind.FAILED, Kind.REFUSED) or stream_failure(error.message).kind is Kind.FAILED:
            return Kind.FAILED if error.kind is Kind.REFUSED else error.kind
        if _FAULTS.search(error.message) or self._inner & {*re.findall(r"\w+", error.message)}:
            return Kind.FAILED
        is_fault = error.kind is Kind.FAILED or _OUTPUTS.match(strip(error.message))
        return Kind.FAILED if self._is_component and is_fault else Kind.REFUSED


def _find_inner(config: ModelConfig) -> frozenset[str]:
    """Find the names under which steps take only what other steps give: a request is not at fault for these."""
    given = {tensor.name for tensor in config.spec.inputs}
    maps = [pair for step in config.message.ensemble_scheduling.step for pair in step.input_map.items()]
    return frozenset({key for key, tensor in maps if tensor not in given} - given - {k for k, t in maps if t in given})
