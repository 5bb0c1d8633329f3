"""Interface for calls from a component to other models: through Triton, or within this process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from typing import Protocol

from shoal.component.tensors import Array, Arrays
from shoal.errors import SetupError, suggest

CALLS = "calls"  # parameter of a model's configuration: names of the models that its code calls, separated by spaces
CALLING = "shoal.component.triton_callees"  # module that only models with this parameter need
STOP = "stop"  # optional input of a streaming model: a request with it ends the running request of the same id


class Leavable(Protocol):
    """Part of a ``Stream`` to a client that calls use."""

    def on_leave(self, call: Callable[[], None]) -> None:
        """Run ``call`` when the client leaves."""


class Callees:
    """Other models that a component can call, through ``self.context.models``.

    ``known`` are their names, which the parameter ``calls`` in the component's ``config.pbtxt`` lists.
    """

    def __init__(self, known: Collection[str] = ()) -> None:
        self._known = known

    def infer(self, model: str, inputs: Arrays, *, outputs: Sequence[str] = ()) -> dict[str, Array]:
        """Call a model that answers once, and return its answer. ``outputs`` names the wanted outputs; empty for all.

        Raises:
            InputError: the model refused the request.
            SetupError: the parameter ``calls`` does not list the model.
            ServerError: the model cannot answer now.
            ShoalError: the model failed.
        """
        self._check(model)
        return self._infer(model, inputs, outputs)

    def stream(
        self, model: str, inputs: Arrays, *, outputs: Sequence[str] = (), until: Leavable | None = None
    ) -> Generator[dict[str, Array]]:
        """Yield a model's answers as they come. Close the generator to stop the model early.

        ``until`` is the stream to a client. When this client leaves, the model is stopped too, and the answers end.

        Raises:
            InputError, SetupError, ServerError, ShoalError: as in ``infer``; also possible after some answers.
        """
        self._check(model)
        yield from self._stream(model, inputs, outputs, until)

    def _check(self, model: str) -> None:
        if model not in self._known:
            raise SetupError(
                f"The code calls model {model}, which the parameter calls does not list.", suggest(model, self._known)
            )

    def _infer(self, model: str, inputs: Arrays, outputs: Sequence[str]) -> dict[str, Array]:
        raise NotImplementedError

    def _stream(
        self, model: str, inputs: Arrays, outputs: Sequence[str], until: Leavable | None
    ) -> Generator[dict[str, Array]]:
        raise NotImplementedError


def choose(answer: Arrays, outputs: Sequence[str]) -> dict[str, Array]:
    """Return the arrays of ``answer`` that ``outputs`` names, or all if it names none."""
    return {name: answer[name] for name in outputs or answer}
