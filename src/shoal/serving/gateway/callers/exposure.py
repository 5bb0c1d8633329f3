"""Exposure of models to clients: those that they may ask, and those that they may see."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.serving.gateway.callers.access_log import current_entry
from shoal.serving.gateway.callers.callers import ANYONE, Caller
from shoal.serving.gateway.refusals import RefusalReason, RefusedError

MOST_LISTED = 20  # models named in a refusal


class Exposure:
    """The models of a service, as its clients have them.

    Clients may send requests to the models in ``exposed``, or to those of them that a caller is limited to. They may
    read the metadata, configuration and statistics of the models in ``visible``: the exposed models and the models that
    these call. ``default`` is the model whose configuration clients get if they name no model.
    """

    def __init__(self, exposed: Iterable[str], visible: Iterable[str] = (), default: str = "") -> None:
        self._exposed = frozenset(exposed)
        self._visible, self.default = self._exposed.union(visible), default

    def is_exposed(self, model: str, caller: Caller = ANYONE) -> bool:
        """Whether a caller may send requests to a model."""
        return model in self._exposed and (caller.models is None or model in caller.models)

    def is_visible(self, model: str, caller: Caller = ANYONE) -> bool:
        """Whether a caller may read a model's metadata, configuration and statistics."""
        return model in self._visible and (caller.models is None or model in caller.models)

    def check_exposed(self, model: str, caller: Caller) -> None:
        """Raise ``RefusedError`` unless a caller may send requests to a model."""
        self.check_allowed(model, caller)
        if not self.is_exposed(model, caller):
            raise self._absent(model, caller)

    def check_visible(self, model: str, caller: Caller) -> None:
        """Raise ``RefusedError`` unless a caller may see a model's metadata, configuration and statistics."""
        self.check_allowed(model, caller)
        if not self.is_visible(model, caller):
            raise self._absent(model, caller)

    def find_default(self, caller: Caller) -> str:
        """Return the model that a caller gets if it names none: the default, or the only one that it may ask, or ""."""
        allowed = [name for name in self._exposed if self.is_exposed(name, caller)]
        if self.is_visible(self.default, caller) or caller.models is None:
            return self.default
        return allowed[0] if len(allowed) == 1 else ""

    def check_allowed(self, model: str, caller: Caller) -> None:
        """Raise ``RefusedError`` if a caller is limited to other models, whether there is such a model or not.

        All requests for a model come here, and the model is noted for the audit.
        """
        current_entry().model = model
        if model and caller.models is not None and model not in caller.models:
            raise RefusedError(
                RefusalReason.CLOSED, f"This key is not for the model {model[:100]!r}. Models: {self._known(caller)}."
            )

    def _known(self, caller: Caller) -> str:
        return ", ".join([name for name in sorted(self._exposed) if self.is_exposed(name, caller)][:MOST_LISTED])

    def _absent(self, model: str, caller: Caller) -> RefusedError:
        known = self._known(caller)
        what = "is a step, and closed to clients" if self.is_visible(model, caller) else "is not found"
        return RefusedError(
            RefusalReason.ABSENT, f"Request for unknown model: {model[:100]!r} {what}. Models: {known}."
        )
