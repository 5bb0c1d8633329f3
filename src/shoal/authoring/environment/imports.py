"""Python modules that a model's code imports, and the packages to install for them in NVIDIA's image."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from shoal.authoring.environment.stub import parse_version
from shoal.authoring.environment.targets import OLDEST_PYTHON
from shoal.authoring.vendoring import find_carried
from shoal.errors import InputError
from shoal.system.files import read_bytes
from shoal.system.paths import shipped_root

DEVICE = frozenset({"cupy", "nvforest", "pylibcudf", "rmm"})  # imported on a GPU alone
_TEXT = frozenset({"jinja2", "tokenizers"})  # imported by the first model that reads a tokenizer or a template
_OF_TRITON = frozenset({"c_python_backend_utils", "triton_python_backend_utils"})
_LIBRARY = re.compile(rb"^[^\S\n]+library *(:[^=\n]*)?= *[\"'](torch|numpy|engine)[\"'] *(#.*)?$", re.MULTILINE)
_PACKAGES = {"PIL": "pillow", "cupy": "cupy-cuda13x", "nvforest": "nvforest-cu13"}
_RELEASED = "pylibcudf-cu13"  # whose bounds are those of all packages of RAPIDS
_RAPIDS = frozenset("cudf cugraph cuml cuvs dask_cudf dask_cuda pylibcudf pylibcugraph pylibraft raft_dask rmm".split())
_MISSING = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})  # what a missing module is


class _Import(Enum):
    """When a module is imported: always, at the code's start; later; or perhaps."""

    FIRST, NEEDED, OPTIONAL = range(3)


@dataclass(frozen=True)
class Imports:
    """Modules that code imports: ``first`` at its start, ``later`` in functions and under conditions.

    ``optional`` are those of the latter that the code does without. ``is_ours``: whether the code imports shoal.
    ``uses_cupy``: whether its components' arrays on a GPU are CuPy's.
    """

    first: frozenset[str]
    later: frozenset[str]
    is_ours: bool
    uses_cupy: bool
    optional: frozenset[str] = frozenset()

    def find_needed(self, *, on_gpu: bool = False, is_beside_gpu: bool = False) -> frozenset[str]:
        """Return the modules that a model needs on the host or a GPU.

        A component on the host needs CuPy, or torch, if another model may leave a tensor on a GPU (``is_beside_gpu``).
        """
        device = DEVICE if on_gpu and self.uses_cupy else {"cupy"} if is_beside_gpu else frozenset()
        return self.first | (self.later & (_TEXT | device) if self.is_ours else self.later - self.optional)


def find_imports(folder: Path) -> Imports:
    """Find what ``folder/model.py`` imports, itself and through the modules beside it and shoal.

    ``shoal`` is among the modules only if no copy of it is beside ``model.py``. Code that cannot be parsed counts as
    code without imports, since ``shoal check`` reports it.
    """
    model = folder / "model.py"
    found, waiting = {model}, [model]
    kinds: dict[_Import, set[str]] = {kind: set() for kind in _Import}
    beside: dict[str, set[Path]] = {}  # files of each module, which most files of shoal import again
    while waiting:
        for name, kind in _read(waiting.pop()):
            if name not in beside:
                files = [folder / f"{name}.py", *(folder / name).glob("**/*.py")]
                beside[name] = {path for path in files if path.is_file()}
                new = beside[name]
                if name == "shoal" and not new:
                    new = {path for path in find_carried([model]) if path.suffix == ".py"}
                waiting += new - found
                found |= new
            if not beside[name]:
                kinds[kind].add(name)
    is_ours = "shoal" in beside
    uses_cupy = is_ours and not any(_LIBRARY.search(read_bytes(path)) for path in found)
    first, needed, optional = map(frozenset, kinds.values())
    return Imports(first, (needed | optional) - first, is_ours, uses_cupy, optional - needed - first)


def _read(path: Path) -> frozenset[tuple[str, _Import]]:
    """Return the first part of each imported module's name, and when it is imported."""
    try:
        return frozenset(_find_modules(read_bytes(path)))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return frozenset()


@lru_cache(maxsize=1024)  # every model folder has a copy of the same files of shoal
def _find_modules(code: bytes) -> tuple[tuple[str, _Import], ...]:
    return tuple(_walk(ast.parse(code), _Import.FIRST))


def _walk(parent: ast.AST, kind: _Import) -> Iterator[tuple[str, _Import]]:
    """Yield the modules that a node's children import; ``kind`` is that of an import among them."""
    within = kind if kind is _Import.OPTIONAL else _Import.NEEDED
    for node in ast.iter_child_nodes(parent):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in {name.partition(".")[0] for name in names}:
            if name not in sys.stdlib_module_names and name not in _OF_TRITON:
                yield name, kind
        yield from _walk(node, _Import.OPTIONAL if _is_optional(node) else within)


def _is_optional(node: ast.AST) -> bool:
    """Whether the code inside runs for a type checker alone, or may fail to import a module."""
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in {getattr(each, "id", getattr(each, "attr", "")) for each in ast.walk(node.test)}
    if not isinstance(node, ast.Try):
        return False
    types = [each for handler in node.handlers for each in ast.walk(handler.type or ast.Name("Exception"))]
    return bool(_MISSING & {getattr(each, "id", "") for each in types})


def find_requirements(modules: Collection[str], cuda: int, python: str) -> list[str]:
    """Return lines for pip that install ``modules`` for a Python, beside a CUDA of the major version ``cuda``, sorted.

    Packages that shoal depends on have its bounds, as in ``env/`` and the package's own extras; those of RAPIDS are of
    one release. Any other package is in the version that pip chooses for the image's Python; and so are all of them
    for a Python on which shoal does not run, for which versions within its bounds may not exist.

    Raises:
        InputError: the package of a module is not known, since it is not installed here.
    """
    required = [line.replace("'", '"').split(";") for line in metadata.requires("shoal") or ()]
    extras = (
        "",
        'extra == "serve"',
        'extra == "llm"',
        'extra == "images"',
    )  # the later ones' bounds replace the earlier ones'
    lines = [line for extra in extras for line, *marks in required if extra in "".join(marks)]
    for file in sorted((shipped_root() / "env").glob("requirements*.txt"), reverse=True):
        lines += [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    bounds = {re.split(r"[^\w.-]", line)[0]: line for line in lines}
    found = []
    for module in modules:
        name = find_package(module)
        line = bounds.get(name) or (module in _RAPIDS and bounds[_RELEASED].replace(_RELEASED, name))
        line = line or _find_installed(module)
        line = line if parse_version(python) >= OLDEST_PYTHON else re.split(r"[^\w.-]", line)[0]
        found.append(line.replace("-cuda13x", f"-cuda{cuda}x").replace("-cu13", f"-cu{cuda}"))
    return sorted(found)


def find_package(module: str) -> str:
    """Return the name of the package that a module is usually in; for a GPU, that for CUDA 13."""
    return _PACKAGES.get(module, f"{module.replace('_', '-')}{'-cu13' * (module in _RAPIDS)}")


def _find_installed(module: str) -> str:
    names = metadata.packages_distributions().get(module)
    if not names:
        raise InputError(
            f"The package of the module {module} is not known: it is not installed here.",
            "Install it here and print again, or give its model an environment: shoal compose --env MODEL=PATH",
        )
    return names[0]
