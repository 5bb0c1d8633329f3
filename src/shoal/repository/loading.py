"""The component behind a ``model.py``, in this process."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from shoal.component.base import Component
from shoal.errors import ArtifactError, needs


def component_class(path: Path) -> type[Component]:
    """The component that a ``model.py`` hands to Triton.

    The file's first line puts its folder first on ``sys.path``, which is for stubs: it is undone here, or a copy of
    shoal beside it would win over this one.
    """
    name = f"_shoal_model_{abs(hash(str(path.resolve())))}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ArtifactError(f"{path} cannot be loaded.", "Name a Python file.")
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    sys.modules[name] = module
    try:
        with needs("serve"):
            spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    component: type[Component] = module.TritonPythonModel.component_class
    return component
