"""Reusable pre- and post-processing components for NVIDIA Triton, and the tools that make served pipelines of them."""

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.client.aio import AsyncClient as AsyncClient
    from shoal.client.calls import Answer as Answer
    from shoal.client.client import Client as Client
    from shoal.component.base import Component as Component
    from shoal.component.context import Context as Context
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


_IMPORT = re.compile(r"^    from (\S+) import (\w+) as \2$", re.MULTILINE)


def read_homes(file: str) -> dict[str, str]:
    """Read from ``file``, a package's ``__init__.py``, its public names, each with the module that defines the name."""
    return {name: home for home, name in _IMPORT.findall(Path(file).read_text(encoding="utf-8"))}


def face(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package whose names are imported on first use.

    The names are those that ``file``, the package's ``__init__.py``, imports for type checkers: ``from HOME import NAME
    as NAME``. This keeps `import shoal` fast. It also lets the copy of shoal beside a model.py hold only the modules
    that this model.py imports.
    """
    homes = read_homes(file)

    def look_up(name: str) -> Any:
        if name in homes:
            return getattr(import_module(homes[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return look_up, lambda: sorted(homes), list(homes)


__getattr__, __dir__, __all__ = face(__name__, __file__)
