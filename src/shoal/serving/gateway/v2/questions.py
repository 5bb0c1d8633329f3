"""Questions about the server and its models, which clients ask over HTTP and gRPC: one table for both.

What clients see of Triton's answer is decided here; the front ends turn it into JSON, and into protobuf messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from shoal.serving.gateway.callers.callers import Caller, Scope
from shoal.serving.gateway.callers.exposure import Exposure

T = TypeVar("T")
MODEL = r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?"
# Fields of a configuration that reveal the server's files and settings.
PRIVATE = "parameters", "model_warmup", "cc_model_filenames", "default_model_filename", "metric_tags"
# The extensions of Triton that are open to clients.
_EXTENSIONS = "classification sequence schedule_policy model_configuration binary_tensor_data parameters statistics"
_OPEN = frozenset(_EXTENSIONS.split())
# Lists in answers: whether clients see an entry, by its name.
_SEEN: dict[str, Callable[[Exposure, Caller, str], bool]] = {
    "extensions": lambda exposure, caller, name: name in _OPEN,
    "model_stats": lambda exposure, caller, name: exposure.is_visible(name, caller),
    "models": lambda exposure, caller, name: exposure.is_exposed(name, caller),
}


class Question(NamedTuple):
    """Question that Triton answers: ``method`` is its method of gRPC, and ``paths`` are its paths over HTTP.

    ``check`` raises ``RefusedError`` unless a caller may ask about a model; it is None if the question is about none.
    Of the answer's list ``entries``, clients see a part. A configuration (``is_config``) has no private fields, and is
    that of the default model if none is named.
    """

    name: str
    scope: Scope
    method: str
    paths: tuple[str, ...]
    verb: str = "GET"
    check: Callable[[Exposure, str, Caller], None] | None = None
    entries: str = ""
    is_config: bool = False

    def find_model(self, exposure: Exposure, model: str, caller: Caller) -> str:
        """Return the model that a caller asks about, empty if there is none.

        Raises:
            RefusedError: the caller may not ask about it.
        """
        if self.is_config:
            model = model or exposure.find_default(caller)
        if self.check and (model or self.entries != "model_stats"):  # without a name, those of all models
            self.check(exposure, model, caller)
        return model

    def select(self, entries: Iterable[T], name: Callable[[T], str], exposure: Exposure, caller: Caller) -> list[T]:
        """Return those entries of an answer that a caller sees; ``name`` returns the name of one."""
        return [entry for entry in entries if _SEEN[self.entries](exposure, caller, name(entry))]


READY = Question("Readiness", Scope.HEALTH, "ModelReady", (f"{MODEL}/ready",), check=Exposure.check_allowed)
_READ, _is_seen = Scope.READ, Exposure.check_visible
_CONFIGS, _STATISTICS = ("/v2/models//config", f"{MODEL}/config"), ("/v2/models/stats", f"{MODEL}/stats")
QUESTIONS = (
    READY,
    Question("Server metadata", _READ, "ServerMetadata", ("/v2",), entries="extensions"),
    Question("Model metadata", _READ, "ModelMetadata", (MODEL,), check=_is_seen),
    Question("Configuration", _READ, "ModelConfig", _CONFIGS, check=_is_seen, is_config=True),
    Question("Statistics", _READ, "ModelStatistics", _STATISTICS, check=_is_seen, entries="model_stats"),
    Question("Repository index", _READ, "RepositoryIndex", ("/v2/repository/index",), "POST", entries="models"),
)
