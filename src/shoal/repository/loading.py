"""Load the component of a ``model.py`` into this process."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from shoal.component.base import Component
from shoal.errors import ArtifactError

_FIX = "Derive a class from shoal's Component, and end the file with TritonPythonModel = Yours.for_triton()"


def component_class(path: Path) -> type[Component]:
    """Return the component class that a ``model.py`` exports to Triton.

    The file's first line puts its folder first on ``sys.path``, for stubs. This is undone here, or a copy of shoal
    in that folder would win over this one.

    Raises:
        ArtifactError: it is not a Python file, needs a module that is not here, or exports no component of shoal's.
    """
    name = f"_shoal_model_{abs(hash(str(path.resolve())))}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ArtifactError(f"{path} cannot be loaded.", "Name a Python file.")
    module = importlib.util.module_from_spec(spec)
    before, short = list(sys.path), "/".join(path.parts[-3:])  # MODEL/VERSION/model.py
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ImportError as error:  # a plain model of Triton's imports what is in its stubs alone
        raise ArtifactError(f"{short} is not a shoal component that loads in this process: {error}.", _FIX) from None
    finally:
        sys.path[:] = before
    component = getattr(getattr(module, "TritonPythonModel", None), "component_class", None)
    if not (isinstance(component, type) and issubclass(component, Component)):
        raise ArtifactError(f"{short} is not a shoal component.", _FIX)
    return component
