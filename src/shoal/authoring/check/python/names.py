"""Rules for names that a ``model.py`` uses and nothing gives: variables, and attributes of the model's own object."""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterable
from pathlib import Path

from shoal.authoring.check.findings import Findings, Rule, Severity
from shoal.authoring.check.models import Model, Repository, entries, exists
from shoal.authoring.check.python.source import PB, Function, SourceFile, examine

UNDEFINED = Rule("undefined-name", Severity.ERROR)
MODULE = Rule("module-not-there", Severity.ERROR, is_core=True)
IN_BRANCH = Rule("undefined-in-branch", Severity.WARNING)

_BUILTINS = {*dir(builtins), "__file__", "__annotations__", "__class__", "__path__", "WindowsError"}
# With these, names may come from elsewhere, or are asked for first.
_MAKES_NAMES = frozenset({"*", "exec", "globals", "locals", "vars", "NameError", "__builtins__"})
_MAKES_ATTRIBUTES = frozenset({"setattr", "vars", "__dict__", "__getattr__", "__getattribute__", "AttributeError"})


def find(model: Model, repository: Repository) -> Findings:
    """Find names and attributes of ``self`` that nothing in the file of a Python model binds."""
    del repository
    yield from examine(model, _look)


def _look(source: SourceFile) -> Findings:
    if not any(isinstance(node, ast.Attribute | ast.Name) and source.name(node) == "sys.path" for node in source.nodes):
        yield from _check_modules(source)
    if not source.words & _MAKES_NAMES:
        yield from _check_names(source)
    for node in source.tree.body:
        match node:
            case ast.ClassDef(name="TritonPythonModel", bases=[], keywords=[], decorator_list=[]):
                if not source.words & _MAKES_ATTRIBUTES:
                    yield from _check_attributes(source, node)


def _check_modules(source: SourceFile) -> Findings:
    """Find a module that is not beside ``model.py``, but under nearly this name, or in another folder of the model."""
    folder = source.path.parent
    beside = _list_modules(folder)
    missing = {name.partition(".")[0] for name in source.names.values()} - beside - sys.stdlib_module_names - {PB, ""}
    alike = {name.replace("_", "").lower(): name for name in beside}
    others = dict.fromkeys(_list_modules(folder.parent), folder.parent)
    for path in (path for path in entries(folder.parent) if path.name.isdecimal() and path != folder):
        others |= dict.fromkeys(_list_modules(path), path)
    found = {name: alike.get(name.replace("_", "").lower(), "") for name in missing}
    for node in source.nodes if any(near or name in others for name, near in found.items()) else ():
        if not isinstance(node, ast.Import | ast.ImportFrom) or source.always_in(node) not in ("", "initialize"):
            continue
        given = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""] * (not node.level)
        for name in (each.partition(".")[0] for each in given):
            if found.get(name) or (name in found and name in others):
                what = f"ModuleNotFoundError: {name} is not beside model.py."
                there = found[name] or f"in {others[name].relative_to(folder.parent.parent)}/"
                yield MODULE.at(source.at(node), what, f"It is there as {there}: copy it, or import that name.")


def _list_modules(folder: Path) -> set[str]:
    """List the modules and packages in a folder, for which data, such as a folder ``tokenizer``, is not taken."""
    found = entries(folder)
    packages = {path.name for path in found if path.is_dir() and exists(path / "__init__.py")}
    return packages | {path.stem for path in found if path.suffix == ".py"}


def _check_names(source: SourceFile) -> Findings:
    bound = source.bound | _BUILTINS
    loads = (n for n in source.nodes if isinstance(n, ast.Name) and n.id not in bound and isinstance(n.ctx, ast.Load))
    for name, node in _first(loads):
        if not _is_annotation(source, node):
            what = f"NameError: name '{name}' is not defined."
            yield _choose(source, node).at(source.at(node), what, "Import or define it.")
    for each in source.nodes:
        if isinstance(each, ast.AugAssign) and isinstance(each.target, ast.Name) and source.binds_once(each.target):
            name = each.target.id
            what = f"UnboundLocalError: {name} has no value in this function, which assigns it here."
            yield _choose(source, each).at(source.at(each), what, f"Write global {name}, or {name} = 0 before it.")


def _check_attributes(source: SourceFile, owner: ast.ClassDef) -> Findings:
    given = source.bound | source.texts
    attributes = [node for node in source.nodes if isinstance(node, ast.Attribute)]
    given |= {node.attr for node in attributes if not isinstance(node.ctx, ast.Load)}
    if any(isinstance(n, ast.Name) and n.id == "self" and _is_passed_on(source, n) for n in source.nodes):
        return  # what gets self may set attributes
    reads = (n for n in attributes if n.attr not in given and isinstance(n.value, ast.Name) and n.value.id == "self")
    for name, node in _first(reads):
        is_within = owner.lineno < node.lineno <= (owner.end_lineno or 0)
        if is_within and not name.startswith("__") and isinstance(source.function_of(node), Function):
            what = f"AttributeError: nothing sets self.{name}."
            yield _choose(source, node).at(source.at(node), what, f"Set self.{name} in initialize.")


def _is_passed_on(source: SourceFile, node: ast.Name) -> bool:
    above = source.parents[node]
    return not isinstance(above, ast.Attribute) and not (
        isinstance(above, ast.Call) and getattr(above.func, "id", "") == "super"
    )


def _choose(source: SourceFile, node: ast.AST) -> Rule:
    """Choose the error if loading or each request certainly comes to ``node``."""
    is_certain = source.runs_in(node, may_leave=True, in_try=True) in ("", "initialize", "execute", "finalize")
    return UNDEFINED if is_certain else IN_BRANCH


def _first(nodes: Iterable[ast.expr]) -> Iterable[tuple[str, ast.expr]]:
    """Return each name or attribute with the first place where it is read."""
    found: dict[str, ast.expr] = {}
    for node in sorted(nodes, key=lambda node: node.lineno):
        found.setdefault(getattr(node, "attr", getattr(node, "id", "")), node)
    return found.items()


def _is_annotation(source: SourceFile, node: ast.AST) -> bool:
    """Whether ``node`` is in an annotation, which Python may not evaluate."""
    while not isinstance(node, ast.stmt | ast.arg):
        above = source.parents[node]
        if node is getattr(above, "annotation", None) or node is getattr(above, "returns", None):
            return True
        node = above
    return False
