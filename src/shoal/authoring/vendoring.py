"""Find the part of shoal that a model's code imports, directly or indirectly, and copy it into the model folder."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import shoal
from shoal.errors import ArtifactError

IMPORT_FIX = "Import from shoal itself, such as: from shoal import Component"
_ROOT = Path(shoal.__file__).parent


def copy_package(folder: Path, *modules: str) -> None:
    """Copy ``modules`` of shoal, and the part of shoal that the code in ``folder`` imports, to ``folder/shoal``.

    Raises:
        ArtifactError: the code imports what this version of shoal does not have.
    """
    for path in sorted(folder.glob("**/*.py")):
        for line, name in find_unknown(path):
            where = f"{'/'.join(path.parts[-3:])}:{line}"  # MODEL/VERSION/model.py
            raise ArtifactError(f"{where}: shoal {shoal.__version__} has no {name}.", IMPORT_FIX)
    for source in find_carried(sorted(folder.glob("**/*.py")), *modules):
        copy = folder / "shoal" / source.relative_to(_ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)


def find_carried(sources: Iterable[Path], *modules: str) -> list[Path]:
    """Return the files of shoal that ``sources`` need: modules that they import, also indirectly, and data files.

    ``modules`` are modules of shoal that are needed beside what the sources import, by dotted name.
    """
    found = {path for module in modules for path in _find_files(module)}
    waiting = [*sources, *found]
    while waiting:
        source = waiting.pop()
        new = (_find_used_by_own(source) if source.is_relative_to(_ROOT) else set(_find_used(source))) - found
        found |= new
        waiting += [path for path in new if path.suffix == ".py"]
    return sorted(found)


def find_unknown(source: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the dotted name of each import from shoal in ``source`` that this version does not have."""
    found = dict[tuple[int, str], None]()
    for line, module, name in _find_imports(source):
        place = _ROOT.joinpath(*module.split(".")[1:])
        if not place.is_dir():
            if not place.with_suffix(".py").is_file():
                found[line, module] = None
        elif name and place == _ROOT and not (place / name).is_dir() and name not in {*shoal.__all__, *vars(shoal)}:
            found[line, f"{module}.{name}"] = None
    yield from found


@cache  # shoal's own files stay as they are while it runs
def _find_used_by_own(source: Path) -> frozenset[Path]:
    data = {path.name: path for path in source.parent.iterdir() if path.suffix not in ("", ".py")}
    names = (node.value for node in ast.walk(ast.parse(source.read_bytes())) if isinstance(node, ast.Constant))
    return frozenset({*_find_used(source), *(data[name] for name in names if isinstance(name, str) and name in data)})


def _find_used(source: Path) -> Iterator[Path]:
    for _, module, name in _find_imports(source):
        yield from (path for path in _find_files(module, name) if path.is_file())


def _find_imports(source: Path) -> Iterator[tuple[int, str, str]]:
    """Yield each import from shoal in ``source``: its line, the module, and the name that is imported from it.

    After ``import shoal``, each ``shoal.NAME`` counts as an import of this name: shoal imports it at its first use.
    """
    try:
        tree = ast.parse(source.read_bytes())
    except (SyntaxError, ValueError, RecursionError):  # `shoal check` reports it
        return
    nodes = [*_walk(tree)]
    imports = (alias for node in nodes if isinstance(node, ast.Import) for alias in node.names)
    own_names = {alias.asname or alias.name for alias in imports if alias.name == "shoal"}
    for node in nodes:
        found: list[tuple[int, str, str]] = []
        if isinstance(node, ast.Import):
            found = [(node.lineno, alias.name, "") for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in own_names:
            found = [(node.lineno, "shoal", node.attr)]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found = [(node.lineno, node.module, alias.name) for alias in node.names]
        yield from (each for each in found if each[1].partition(".")[0] == "shoal")


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield ``node`` and all nodes in it, except those under ``if TYPE_CHECKING``."""
    yield node
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    for child in ast.iter_child_nodes(node):
        yield from _walk(child)


def _find_files(module: str, name: str = "") -> Iterator[Path]:
    """Yield the files of shoal that are loaded for ``import module`` or ``from module import name``.

    These are the module, the ``__init__.py`` of its packages and, if the module only re-exports ``name``, the module
    that defines it.
    """
    parts = module.split(".")
    for number in range(1, len(parts)):
        yield _ROOT.joinpath(*parts[1:number], "__init__.py")
    place = _ROOT.joinpath(*parts[1:])
    if not place.is_dir():
        yield place.with_suffix(".py")
        return
    yield place / "__init__.py"
    if name and ((place / f"{name}.py").is_file() or (place / name).is_dir()):
        yield from _find_files(f"{module}.{name}")
    elif home := shoal.read_homes(str(place / "__init__.py")).get(name):
        yield from _find_files(home)
