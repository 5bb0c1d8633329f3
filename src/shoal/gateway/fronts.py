"""Shared by both fronts: wording of refusals, allow-lists, and clean-up of Triton's error messages."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from typing import Any

from shoal.errors import ArtifactError, InputError
from shoal.gateway.dispatcher import Dispatcher
from shoal.gateway.logs import log
from shoal.gateway.refusals import RefusedError, Why
from shoal.repository.config import ModelConfig
from shoal.repository.default_model import find_top, read_calls

PUBLIC_PARAMETER = "public"  # of a model that clients may ask, beside the ensembles
# What clients may send along with a request, beside what says how it is written.
HEADERS = ("traceparent", "tracestate", "x-request-id")
# Of the extensions that Triton has, those that are open to clients.
EXTENSIONS = (
    "classification", "sequence", "schedule_policy", "model_configuration", "binary_tensor_data", "parameters",
    "statistics",
)  # fmt: skip
# Of a configuration, what tells of the server's files and settings rather than of tensors.
PRIVATE = ("parameters", "model_warmup", "cc_model_filenames", "default_model_filename", "metric_tags")
# Triton's words where the process of a model has died, at once or while it waited for a turn.
_DEAD = re.compile(r"Stub process '.*' is not healthy|Failed to process the request\(s\).*Broken pipe")
_TRACE = re.compile(r"\n+At:\n.*", re.DOTALL)
_OURS = (Why.BUSY, Why.UNAVAILABLE)  # counted by model


def find_exposed(configs: Mapping[str, ModelConfig], names: Iterable[str]) -> set[str]:
    """Return the models that clients may ask: ensembles, public models and ``names``; all models if that is none.

    Raises:
        ArtifactError: a model's parameter is neither true nor false.
    """
    found = set(names)
    for name, config in configs.items():
        value = config.spec.parameters.get(PUBLIC_PARAMETER, "false")
        if value not in ("true", "false"):
            raise ArtifactError(f"{name}: {PUBLIC_PARAMETER} {value!r} is neither true nor false.", "Write true.")
        if config.is_ensemble or value == "true":
            found.add(name)
    return found or set(configs)


def find_default(configs: Mapping[str, ModelConfig], exposed: Container[str], composed_for: object) -> str:
    """Return the model that clients are here for who name none; empty where there are several."""
    try:
        return find_top(read_calls({n: c for n, c in configs.items() if n in exposed}), "The server", composed_for)
    except InputError:
        return ""


def absent(model: str) -> RefusedError:
    """Build the refusal for an unknown or hidden model: one wording for both, which is Triton's."""
    return RefusedError(Why.ABSENT, f"Request for unknown model: {model!r} is not found")


def closed(what: str) -> RefusedError:
    """Build the refusal for a part of Triton that is closed to clients."""
    return RefusedError(Why.CLOSED, f"{what} is closed: only who runs this server may use it.")


def is_dead(message: str) -> bool:
    """Whether Triton says that a model's process has died."""
    return bool(_DEAD.search(message))


def clean(message: str) -> str:
    """Triton's message without the traceback, which names paths of the server."""
    return _TRACE.sub("", message)


def words(refused: RefusedError) -> str:
    """The message for clients, with the way out."""
    if not refused.retry_after:
        return refused.message
    return f"{refused.message} Try again in {max(1, round(refused.retry_after))} s."


def note(dispatcher: Dispatcher, refused: RefusedError) -> None:
    """Count what a client did wrong; a line in ten seconds tells of each kind."""
    if refused.why not in _OURS:
        dispatcher.refusals[refused.why.value] += 1
        log.warning("A request was refused (%s): %s", refused.why.value, refused.message[:200], extra={"most": 1})


def trim_config(config: dict[str, Any]) -> dict[str, Any]:
    """A model's configuration, in JSON, for clients."""
    return {name: value for name, value in config.items() if name not in PRIVATE}


def tell_failure(model: str, request_id: str, message: str) -> None:
    """Log that a request failed which was not at fault itself."""
    log.warning(
        "A request to %s failed: %s", model, message.splitlines()[0] if message else "no reason given",
        extra={"model": model, "request_id": request_id},
    )  # fmt: skip
