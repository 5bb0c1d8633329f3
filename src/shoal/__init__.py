"""Reusable pre- and post-processing components for NVIDIA Triton, and the tools that make served pipelines of them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shoal.errors import ArtifactError, InputError, ServerError, SetupError, ShoalError

if TYPE_CHECKING:
    from shoal.component.base import Component as Component
    from shoal.component.context import Context as Context
    from shoal.project.importing.add_model import add_model as add_model
    from shoal.repository.check import Finding as Finding
    from shoal.repository.check import check as check
    from shoal.repository.compose import compose as compose
    from shoal.serving.aio import AsyncClient as AsyncClient
    from shoal.serving.calls import Answer as Answer
    from shoal.serving.client import Client as Client
    from shoal.serving.local import LocalPipeline as LocalPipeline
    from shoal.serving.pipeline import Pipeline as Pipeline
    from shoal.serving.server import serve as serve

__version__ = "0.1.0"

# Looked up on first use: `import shoal` stays light, and beside a model.py only component/ exists.
_HOMES = {
    "Answer": "shoal.serving.calls",
    "AsyncClient": "shoal.serving.aio",
    "Client": "shoal.serving.client",
    "Component": "shoal.component.base",
    "Context": "shoal.component.context",
    "Finding": "shoal.repository.check",
    "LocalPipeline": "shoal.serving.local",
    "Pipeline": "shoal.serving.pipeline",
    "add_model": "shoal.project.importing.add_model",
    "check": "shoal.repository.check",
    "compose": "shoal.repository.compose",
    "serve": "shoal.serving.server",
}

__all__ = ["ArtifactError", "InputError", "ServerError", "SetupError", "ShoalError", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")
