"""Load the component that a ``model.py`` defines into this process."""

from __future__ import annotations

from pathlib import Path

from shoal.authoring.vendoring import IMPORT_FIX
from shoal.errors import ArtifactError, SetupError
from shoal.kit.component.base import Component
from shoal.kit.component.hosted import load_module

_EXTRAS = {**dict.fromkeys(("torch", "transformers", "jinja2", "safetensors"), "llm"), "PIL": "images"}
_FIX = "Derive a class from shoal's Component, and end the file with TritonPythonModel = Yours.for_triton()"


def component_class(path: Path) -> type[Component]:
    """Return the component class that a ``model.py`` exports to Triton.

    Raises:
        ArtifactError: the file is not Python code, imports a module that is not installed, or exports no shoal
            component.
        SetupError: it imports a library of an extra of shoal that is not installed.
    """
    short = "/".join(path.parts[-3:])  # MODEL/VERSION/model.py
    try:
        module = load_module(path)
    except ImportError as error:  # a Python model without shoal imports modules that only Triton's stubs provide
        what, fix = f"{short} is not a shoal component that loads in this process: {error}.", _FIX
        if (error.name or "").partition(".")[0] == "shoal":
            fix = f"{IMPORT_FIX}. If another version of shoal composed it, compose it again."
        if extra := _EXTRAS.get((error.name or "").partition(".")[0]):
            raise SetupError(
                f"{short} needs {error.name}, which is not installed.", f"Type: pip install 'shoal[{extra}]'"
            ) from None
        raise ArtifactError(what, fix) from None
    component = getattr(getattr(module, "TritonPythonModel", None), "component_class", None)
    if not (isinstance(component, type) and issubclass(component, Component)):
        raise ArtifactError(f"{short} is not a shoal component.", _FIX)
    return component
