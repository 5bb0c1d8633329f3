"""Context of a component: everything that it gets at start-up, and the interface for calls to other models."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from shoal.errors import ArtifactError, SetupError, suggest
from shoal.kit.component.files import describe_place
from shoal.kit.component.ledger import Ledger
from shoal.kit.component.spec import Array, Arrays, ModelSpec
from shoal.kit.component.tensors import Device


class Leavable(Protocol):
    """Part of a ``Stream`` to a client that calls use."""

    def on_leave(self, call: Callable[[], None]) -> None:
        """Run ``call`` when the client leaves."""


class Passage(Protocol):
    """Maker of a component's answers from those of a model that it calls."""

    @property
    def is_complete(self) -> bool:
        """Whether no more answers of the model are needed."""

    def take(self, answers: Sequence[Arrays]) -> Iterable[Arrays]:
        """Return the component's answers, any number, that the next answers of the model make."""

    def end(self) -> Iterable[Arrays]:
        """Return the component's answers after the model's last one."""


class Callees:
    """Other models that a component can call, through ``self.context.models``.

    ``known`` are their names, which the parameter ``calls`` in the component's ``config.pbtxt`` lists.
    """

    def __init__(self, known: Collection[str] = ()) -> None:
        self.known = known

    @property
    def ledgers(self) -> Mapping[str, Ledger]:
        """Ledgers of those of the models that run in this process, by name."""
        return {}

    def is_ready(self) -> bool:
        """Whether those of the models that run in this process can be asked now."""
        return True

    def close(self) -> None:
        """Close those of the models that run in this process."""

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

    def pass_on(self, model: str, inputs: Arrays, stream: Leavable, through: Passage) -> Generator[Arrays]:
        """Yield what ``through`` makes of a model's answers, for ``stream``, the one to the caller's client.

        A model in this process takes the stream over: then nothing is yielded, and its answers reach the client without
        a thread of their own. Call this last, by ``yield from``.

        Raises:
            InputError, SetupError, ServerError, ShoalError: as in ``stream``.
        """
        self._check(model)
        yield from self._pass_on(model, inputs, stream, through)

    def _pass_on(self, model: str, inputs: Arrays, stream: Leavable, through: Passage) -> Generator[Arrays]:
        with closing(self._stream(model, inputs, (), stream)) as answers:
            for answer in answers:
                yield from through.take([answer])
                if through.is_complete:
                    break
        yield from through.end()

    def _check(self, model: str) -> None:
        if model not in self.known:
            raise SetupError(
                f"The code calls model {model}, which the parameter calls does not list.", suggest(model, self.known)
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


@dataclass(frozen=True)
class Context:
    """Everything that a component gets at start-up: declaration, artifacts, device and threads.

    ``spec`` is the model's ``config.pbtxt``. ``folder`` is the model's version folder, which contains its artifacts.
    ``num_threads`` is the number of compute threads this instance may use; None keeps the process's own setting.
    ``models`` calls the other models that the configuration's parameter ``calls`` lists. ``is_local`` is true in the
    process of the caller, who may see the texts of unexpected errors.
    """

    spec: ModelSpec
    folder: Path
    device: Device = field(default_factory=Device)
    num_threads: int | None = None
    models: Callees = field(default_factory=Callees)
    is_local: bool = False

    def artifact(self, name: str) -> Path:
        """Return the path of a required artifact of this model.

        Raises:
            ArtifactError: the artifact is missing, or is not a file.
        """
        path = self.folder / name
        if path.is_file():
            return path
        found = describe_place(path)
        missed = f"misses its artifact {name} in {self.folder}"
        raise ArtifactError(
            f"Model {self.spec.name} {missed if found == 'missing' else f'needs the file {path}, which is {found}'}.",
            "Copy it there from the artifact folder that `shoal train` wrote, or use `shoal compose`.",
        )

    def optional_artifact(self, name: str) -> Path | None:
        """Return the path of an optional artifact, or None if it is missing.

        Raises:
            ArtifactError: the artifact exists, but is not a file.
        """
        return self.artifact(name) if os.path.lexists(self.folder / name) else None
