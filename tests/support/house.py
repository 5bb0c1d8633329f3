"""The floors of src/shoal and what stands on them, read from the imports.

``python -m tests.support.house`` prints the picture of docs/architecture.md.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from shoal import read_homes
from tests.support.once import ROOT

PACKAGE = ROOT / "src" / "shoal"
FACES = [path for path in PACKAGE.rglob("__init__.py") if "= face(" in path.read_text(encoding="utf-8")]
# Each floor with its rooms in order, and a line of reason. A module imports from its own room and from the rooms and
# floors before it.
FLOORS = {
    "errors": ("", "what every floor raises"),
    "system": ("", "this machine; knows nothing of models"),
    "kit": (
        "component blocks images text generation forests encoders backends",
        "is copied beside a model.py: what it imports, a model's process carries",
    ),
    "authoring": (
        "vendoring environment repository draw check composition project",
        "makes and reads repositories, without a server: a laptop is enough",
    ),
    "clients": ("keys client local llm bulk", "asks models, by a server or in this process, and never starts a server"),
    "serving": ("server gateway", "starts Triton and stands before it, with the clients' own ways of asking"),
    "lab": ("bench tune trial tiny_llm llm_quickstart", "measures what the floors before it make and serve"),
    "cli": ("", "parses, calls, prints; nothing knows it but an application's commands"),
    "readability": ("", "the first application: nothing imports it, entry points lead to it"),
}


def tracked(*patterns: str) -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / line for line in listing.stdout.splitlines() if (ROOT / line).is_file()]


def find_place(module: str) -> tuple[int, int]:
    """The floor and the room of a module by its dotted name."""
    _, floor, room, *_ = [*module.split("."), ""]
    rooms = FLOORS[floor][0].split()
    return list(FLOORS).index(floor), rooms.index(room) if rooms and room else 0


def find_arrows() -> set[tuple[str, str]]:
    """Each module of a floor, with each module that it imports; a name of the package's face counts as its home."""
    homes = {f"shoal.{name}": home for name, home in read_homes(str(PACKAGE / "__init__.py")).items()}
    found = set()
    for path in tracked("src/shoal/**/*.py"):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        if path.parent == PACKAGE and path.stem not in FLOORS:  # the face of the package, and its start
            continue
        used = {homes.get(name, name) for name in find_imports(ast.parse(path.read_text(encoding="utf-8")))}
        found |= {(module, name) for name in used if name.startswith("shoal.") and name.split(".")[1] in FLOORS}
    return found


def find_imports(node: ast.AST, is_face: bool = False) -> Iterator[str]:
    """Dotted names of what is imported; of a package's names, as if they were modules too.

    What a face imports for type checkers is left out: who imports a name from a face needs the module at its home.
    """
    if is_face and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield node.module
    for child in ast.iter_child_nodes(node):
        yield from find_imports(child, is_face)


def draw() -> str:
    """The rooms with their arrows, as Mermaid: without those to errors and system, and those that others imply."""
    arrows: dict[str, set[str]] = {}
    for module, used in find_arrows():
        room, other = _room(module), _room(used)
        if room != other and not {room, other} & {"errors", "system"}:
            arrows.setdefault(room, set()).add(other)
    below: dict[str, set[str]] = {}
    for room in TopologicalSorter(arrows).static_order():
        below[room] = set().union(arrows.get(room, set()), *(below[other] for other in arrows.get(room, ())))
    lines = ["flowchart TD"]
    for floor, (rooms, _) in list(FLOORS.items())[2:]:
        nodes = [f"    {floor}_{room}[{room}]" for room in rooms.split()]
        lines += [f"  subgraph {floor}", *nodes, "  end"] if nodes else [f"  {floor}"]
    for room, others in sorted(arrows.items()):
        implied = set().union(*(below[other] for other in others))
        lines += [f"  {room} --> {other}" for other in sorted(others - implied)]
    return "\n".join(lines) + "\n"


def _room(module: str) -> str:
    _, floor, room, *_ = [*module.split("."), ""]
    return f"{floor}_{room}" if room in FLOORS[floor][0].split() else floor


if __name__ == "__main__":
    sys.stdout.write(draw())
