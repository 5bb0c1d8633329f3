"""Settings of a component in the text of its ``model.py``, which is not run."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any

from shoal.authoring.repository.config import ModelConfig
from shoal.kit.component.spec import ENGINE_LIBRARY, HOST_LIBRARY
from shoal.system.files import read_text

_MAX_SOURCE = 256 * 1024  # bytes, parsed within a second
_FAULTS = (SyntaxError, ValueError, RecursionError, MemoryError)


@lru_cache(maxsize=64)
def find_constants(text: str, name: str) -> tuple[Any, ...]:
    """Return the constants that the classes of Python code assign to ``name`` in their bodies; empty if it is damaged.

    For example ``(True,)`` for a class with the line ``is_stateful = True``.
    """
    if name not in text or len(text) > _MAX_SOURCE:
        return ()
    with warnings.catch_warnings(), suppress(*_FAULTS):
        warnings.simplefilter("ignore")  # warnings about a model.py do not concern this process
        return tuple(_find(ast.parse(text.removeprefix("\ufeff")), name))
    return ()


def _find(tree: ast.Module, name: str) -> Iterator[Any]:
    for statement in (each for owner in tree.body if isinstance(owner, ast.ClassDef) for each in owner.body):
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=found)], value=ast.Constant(value=value))
                | ast.AnnAssign(target=ast.Name(id=found), value=ast.Constant(value=value))
            ) if found == name:
                yield value


def is_component(text: str) -> bool:
    """Whether the code of a ``model.py`` exports a component of shoal."""
    return "shoal" in text and ".for_triton()" in text


def find_library(text: str) -> str:
    """Return the array library of a component (``Component.library``), from the code of its ``model.py``."""
    found = find_constants(text, "library") if is_component(text) else ()
    return next((name for name in (HOST_LIBRARY, ENGINE_LIBRARY) if name in found), "")


def read_code(model: ModelConfig) -> str:
    """Return the code of a Python model, the first version's that can be read; empty if there is none."""
    for path in sorted(model.folder.glob("[0-9]*/model.py")):
        with suppress(OSError, ValueError):
            return read_text(path)
    return ""
