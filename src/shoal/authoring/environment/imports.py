"""Python modules that a model's code imports, and the packages to install for them in NVIDIA's image."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from shoal.authoring.vendoring import find_carried
from shoal.errors import InputError
from shoal.system.files import read_bytes
from shoal.system.paths import shipped_root

DEVICE = frozenset({"cupy", "nvforest", "pylibcudf", "rmm"})  # imported on a GPU alone
_TEXT = frozenset({"jinja2", "tokenizers"})  # imported by the first model that reads a tokenizer or a template
_OF_TRITON = frozenset({"c_python_backend_utils", "triton_python_backend_utils"})
_LIBRARY = re.compile(rb"^[^\S\n]+library *(:[^=\n]*)?= *[\"'](torch|numpy|engine)[\"'] *(#.*)?$", re.MULTILINE)
_PACKAGES = {
    "PIL": "pillow",
    "cupy": "cupy-cuda13x",
    "nvforest": "nvforest-cu13",
    "pylibcudf": "pylibcudf-cu13",
    "rmm": "rmm-cu13",
}


@dataclass(frozen=True)
class Imports:
    """Modules that code imports: ``first`` at its start, ``later`` in functions and under conditions.

    ``is_ours``: whether the code imports shoal. ``uses_cupy``: whether its components' arrays on a GPU are CuPy's.
    """

    first: frozenset[str]
    later: frozenset[str]
    is_ours: bool
    uses_cupy: bool

    def find_needed(self, *, on_gpu: bool = False, is_beside_gpu: bool = False) -> frozenset[str]:
        """Return the modules that a model needs on the host or a GPU.

        A component on the host needs CuPy if another model may leave a tensor on a GPU (``is_beside_gpu``).
        """
        device = DEVICE if on_gpu and self.uses_cupy else {"cupy"} if is_beside_gpu else frozenset()
        return self.first | (self.later & (_TEXT | device)) if self.is_ours else self.first


def find_imports(folder: Path) -> Imports:
    """Find what ``folder/model.py`` imports, itself and through the modules beside it and shoal.

    ``shoal`` is among the modules only if no copy of it is beside ``model.py``. Code that cannot be parsed counts as
    code without imports, since ``shoal check`` reports it.
    """
    model = folder / "model.py"
    found, waiting = {model}, [model]
    first: set[str] = set()
    later: set[str] = set()
    beside: dict[str, set[Path]] = {}  # files of each module, which most files of shoal import again
    while waiting:
        for name, is_first in _read(waiting.pop()):
            if name not in beside:
                files = [folder / f"{name}.py", *(folder / name).glob("**/*.py")]
                beside[name] = {path for path in files if path.is_file()}
                new = beside[name]
                if name == "shoal" and not new:
                    new = {path for path in find_carried([model]) if path.suffix == ".py"}
                waiting += new - found
                found |= new
            if not beside[name]:
                (first if is_first else later).add(name)
    is_ours = "shoal" in beside
    uses_cupy = is_ours and not any(_LIBRARY.search(read_bytes(path)) for path in found)
    return Imports(frozenset(first), frozenset(later - first), is_ours, uses_cupy)


def _read(path: Path) -> frozenset[tuple[str, bool]]:
    """Return the first part of each imported module's name, and whether the import always runs."""
    try:
        return frozenset(_find_modules(read_bytes(path)))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return frozenset()


@lru_cache(maxsize=1024)  # every model folder has a copy of the same files of shoal
def _find_modules(code: bytes) -> tuple[tuple[str, bool], ...]:
    return tuple(_walk(ast.parse(code)))


def _walk(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in {name.partition(".")[0] for name in names}:
            if name not in sys.stdlib_module_names and name not in _OF_TRITON:
                yield name, node in tree.body


def find_requirements(modules: Collection[str], cuda: int) -> list[str]:
    """Return lines for pip that install ``modules`` beside a CUDA of the major version ``cuda``, sorted.

    Packages that shoal depends on have its bounds, as in ``env/`` and the package's own extras. Any other module is in
    the version that is installed here.

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
        name = _PACKAGES.get(module, module.replace("_", "-"))
        line = bounds.get(name) or _find_installed(module)
        found.append(line.replace("-cuda13x", f"-cuda{cuda}x").replace("-cu13", f"-cu{cuda}"))
    return sorted(found)


def _find_installed(module: str) -> str:
    names = metadata.packages_distributions().get(module)
    if not names:
        raise InputError(
            f"The package of the module {module} is not known: it is not installed here.",
            "Install it here and print again, or give its model an environment: shoal compose --env MODEL=PATH",
        )
    return f"{names[0]}=={metadata.version(names[0]).partition('+')[0]}"
