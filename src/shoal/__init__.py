"""Reusable pre- and post-processing components for NVIDIA Triton, and the tools that make served pipelines of them."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.client.aio import AsyncClient as AsyncClient
    from shoal.client.calls import Answer as Answer
    from shoal.client.client import Client as Client
    from shoal.component.base import Component as Component
    from shoal.component.base import Context as Context
    from shoal.composition.compose import compose as compose
    from shoal.composition.ensemble import Ensemble as Ensemble
    from shoal.errors import ArtifactError as ArtifactError
    from shoal.errors import InputError as InputError
    from shoal.errors import ServerError as ServerError
    from shoal.errors import SetupError as SetupError
    from shoal.errors import ShoalError as ShoalError
    from shoal.local import Pipeline as Pipeline
    from shoal.local import load as load
    from shoal.project.importing.add_model import add_model as add_model
    from shoal.server.launch import serve as serve

__version__ = "0.1.0"


def face(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package whose names are imported on first use, each from its home."""

    def look_up(name: str) -> Any:
        if name in homes:
            return getattr(import_module(homes[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return look_up, lambda: sorted(homes)


# `import shoal` stays light, and beside a model.py only what that imports exists.
HOMES = {
    "add_model": "shoal.project.importing.add_model",
    "Answer": "shoal.client.calls",
    "ArtifactError": "shoal.errors",
    "AsyncClient": "shoal.client.aio",
    "Client": "shoal.client.client",
    "Component": "shoal.component.base",
    "compose": "shoal.composition.compose",
    "Context": "shoal.component.base",
    "Ensemble": "shoal.composition.ensemble",
    "InputError": "shoal.errors",
    "load": "shoal.local",
    "Pipeline": "shoal.local",
    "serve": "shoal.server.launch",
    "ServerError": "shoal.errors",
    "SetupError": "shoal.errors",
    "ShoalError": "shoal.errors",
}
__all__ = [*HOMES]
__getattr__, __dir__ = face(__name__, HOMES)
