"""Shared by both fronts: wording of refusals, allow-lists, and clean-up of Triton's error messages."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from shoal.errors import ArtifactError, InputError
from shoal.gateway.dispatcher import Dispatcher
from shoal.gateway.logs import log
from shoal.gateway.refusals import RefusedError, Why
from shoal.repository.config import ModelConfig
from shoal.repository.default_model import find_top, read_calls

PUBLIC_PARAMETER = "public"  # of a model that clients may ask, beside the ensembles
# Request headers that are passed on, besides those that describe the encoding.
HEADERS = ("traceparent", "tracestate", "x-request-id")
# The extensions of Triton that are open to clients.
EXTENSIONS = (
    "classification", "sequence", "schedule_policy", "model_configuration", "binary_tensor_data", "parameters",
    "statistics",
)  # fmt: skip
# Fields of a configuration that reveal the server's files and settings.
PRIVATE = ("parameters", "model_warmup", "cc_model_filenames", "default_model_filename", "metric_tags")
# Triton's messages for a dead model process, when a request was running and when it was queued.
_DEAD = re.compile(r"Stub process '.*' is not healthy|Failed to process the request\(s\).*Broken pipe")
_TRACE = re.compile(r"\n+At:\n.*", re.DOTALL)
_MOST_LISTED = 20  # models in a refusal
_OURS = (Why.BUSY, Why.UNAVAILABLE)  # counted by model


def find_exposed(configs: Mapping[str, ModelConfig], names: Iterable[str]) -> set[str]:
    """Return the models open to clients: ensembles, public models and those of ``names``; all if there are none.

    Raises:
        ArtifactError: a model's parameter is neither true nor false.
    """
    found = set(names) & configs.keys()
    for name, config in configs.items():
        value = config.spec.parameters.get(PUBLIC_PARAMETER, "false")
        if value not in ("true", "false"):
            raise ArtifactError(f"{name}: {PUBLIC_PARAMETER} {value!r} is neither true nor false.", "Write true.")
        if config.is_ensemble or value == "true":
            found.add(name)
    return found or set(configs)


def find_default(configs: Mapping[str, ModelConfig], exposed: Container[str], composed_for: Sequence[str]) -> str:
    """Return the default model for clients that name none; empty if there are several."""
    try:
        return find_top(read_calls({n: c for n, c in configs.items() if n in exposed}), "The server", composed_for)
    except InputError:
        return ""


def absent(model: str, dispatcher: Dispatcher) -> RefusedError:
    """Build the refusal for an unknown or hidden model: Triton's wording for both, and the models that there are."""
    known = ", ".join(dispatcher.exposed[:_MOST_LISTED])
    what = "is a step, and closed to clients" if dispatcher.is_told(model) else "is not found"
    return RefusedError(Why.ABSENT, f"Request for unknown model: {model[:100]!r} {what}. Models: {known}.")


def closed(what: str) -> RefusedError:
    """Build the refusal for a part of Triton that is closed to clients."""
    return RefusedError(Why.CLOSED, f"{what} is closed to clients of this server.")


def is_dead(message: str) -> bool:
    """Whether Triton says that a model's process has died."""
    return bool(_DEAD.search(message))


def clean(message: str) -> str:
    """Strip the traceback from Triton's message: it names paths of the server."""
    return _TRACE.sub("", message)


def words(refused: RefusedError) -> str:
    """Return the refusal's message for clients, with the time to retry."""
    if not refused.retry_after:
        return refused.message
    return f"{refused.message} Try again in {max(1, round(refused.retry_after))} s."


def note(dispatcher: Dispatcher, refused: RefusedError) -> None:
    """Count a client's fault by kind, and log it, rate-limited."""
    if refused.why not in _OURS:
        dispatcher.refusals[refused.why.value] += 1
        log.warning("A request was refused (%s): %s", refused.why.value, refused.message[:200], extra={"most": 1})


def trim_config(config: dict[str, Any]) -> dict[str, Any]:
    """Remove private fields from a model's configuration in JSON."""
    return {name: value for name, value in config.items() if name not in PRIVATE}


def tell_failure(model: str, request_id: str, message: str) -> None:
    """Log a failed request that was not itself at fault."""
    log.warning(
        "A request to %s failed: %s", model, message.splitlines()[0] if message else "no reason given",
        extra={"model": model, "request_id": request_id},
    )  # fmt: skip
