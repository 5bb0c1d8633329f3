"""Reusable pre- and post-processing components for NVIDIA Triton, and the tools that make served pipelines of them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shoal.errors import ArtifactError, InputError, ServerError, SetupError, ShoalError

if TYPE_CHECKING:
    from shoal.client.aio import AsyncClient as AsyncClient
    from shoal.client.calls import Answer as Answer
    from shoal.client.client import Client as Client
    from shoal.component.base import Component as Component
    from shoal.component.context import Context as Context
    from shoal.composition.compose import compose as compose
    from shoal.composition.ensemble import Ensemble as Ensemble
    from shoal.local import Pipeline as Pipeline
    from shoal.local import load as load
    from shoal.project.importing.add_model import add_model as add_model
    from shoal.server.launch import serve as serve

__version__ = "0.1.0"

# Looked up on first use: `import shoal` stays light, and beside a model.py only component/ exists.
HOMES = {
    "Answer": "shoal.client.calls",
    "AsyncClient": "shoal.client.aio",
    "Client": "shoal.client.client",
    "Component": "shoal.component.base",
    "Context": "shoal.component.context",
    "Ensemble": "shoal.composition.ensemble",
    "Pipeline": "shoal.local",
    "add_model": "shoal.project.importing.add_model",
    "compose": "shoal.composition.compose",
    "load": "shoal.local",
    "serve": "shoal.server.launch",
}

__all__ = ["ArtifactError", "InputError", "ServerError", "SetupError", "ShoalError", *HOMES]


def __getattr__(name: str) -> Any:
    if name in HOMES:
        return getattr(import_module(HOMES[name]), name)
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
