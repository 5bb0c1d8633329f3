"""Reachability of places in a ``model.py``: in every configuration, or only after a test of the settings."""

from __future__ import annotations

import ast
import re
from functools import cached_property
from typing import NamedTuple

from shoal.check.python.source import Function, Source, walk_within

# Entry points: methods that Triton or a component of shoal calls.
_CALLED = frozenset({"execute", "initialize", "finalize", "auto_complete_config", "is_ready", "run", "check", "load"})
_LEAVES = ast.Return | ast.Raise | ast.Continue | ast.Break
_MAX_VALUES = 20  # examined per name
_NO_SETTINGS = frozenset({"self", "cls", "request", "requests"})


class _Exit(NamedTuple):
    """An early exit (``if ...: return``, ``raise``, ...): whether its test reads settings, and the texts in it."""

    line: int
    is_about_settings: bool
    texts: frozenset[str]


class Guards:
    """Conditions that guard each place of one source."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._exits: dict[ast.AST, list[_Exit]] = {}
        self._values: dict[ast.AST, dict[str, list[ast.expr]]] = {}

    def is_free(self, node: ast.AST, names: frozenset[str], *, minds_try: bool) -> bool:
        """Whether each run reaches ``node``, which uses the tensors ``names``; ``minds_try``: and may fail there."""
        return self._is_free(node, names, minds_try, set())

    def _is_free(self, node: ast.AST, names: frozenset[str], minds_try: bool, seen: set[str]) -> bool:
        # Climb the syntax tree to the function: any branch around the node, or early exit before it, is a guard.
        # Then the same for each use of the function, until an entry point is reached.
        # Climb from the node to its function past conditions and early exits, then on from the function's callers
        # until a method that Triton calls: one unconditional path is enough.
        function = self._source.function_of(node)
        child = node
        while child is not function:
            parent = self._source.parents[child]
            if _is_condition(parent, child, minds_try=minds_try):
                return False
            if isinstance(child, ast.stmt) and any(
                found.line < child.lineno and (found.is_about_settings or names & found.texts)
                for found in self._exits_in(parent)
            ):
                return False
            child = parent
        if isinstance(function, ast.Module) or function.name in _CALLED:
            return True
        name = function.name
        if name in seen or (name.startswith("__") and name.endswith("__")):
            return name not in seen
        seen.add(name)  # each function is followed once: also ends recursion
        return any(self._is_free(use, names, minds_try, seen) for use in self._loads.get(name, []))

    @cached_property
    def _loads(self) -> dict[str, list[ast.AST]]:
        """Every read of a name or attribute, by name: calls and references."""
        found: dict[str, list[ast.AST]] = {}
        for node in self._source.nodes:
            if isinstance(getattr(node, "ctx", None), ast.Load) and isinstance(node, ast.Name | ast.Attribute):
                found.setdefault(node.id if isinstance(node, ast.Name) else node.attr, []).append(node)
        return found

    def _exits_in(self, around: ast.AST) -> list[_Exit]:
        """Early exits among the statements of ``around``: what follows runs only where their tests fail."""
        if around not in self._exits:
            ways = [node for node in ast.iter_child_nodes(around) if isinstance(node, ast.If)]
            found = self._exits[around] = []
            for node in (node for node in ways if isinstance(node.body[-1], _LEAVES)):
                found.append(_Exit(node.lineno, *self._read(node.test, self._source.function_of(node))))
        return self._exits[around]

    def _read(self, test: ast.AST, function: Function | ast.Module, depth: int = 0) -> tuple[bool, frozenset[str]]:
        """Whether a test reads settings, which determine the tensors; and the texts in it."""
        texts: frozenset[str] = frozenset()
        if _is_about_answers(test):
            return False, texts
        settings = _parameters(function)
        for node in ast.walk(test):
            match node:
                case ast.Constant(value=str(value)):
                    texts |= {value}
                case ast.Compare(ops=[ast.In() | ast.NotIn()]):
                    return True, texts
                case ast.Attribute(value=ast.Name(id="self" | "cls")):
                    parent = self._source.parents[node]
                    if not (isinstance(parent, ast.Call) and parent.func is node and parent.args):
                        return True, texts
                case ast.Name() if node.id in settings:
                    return True, texts
                case ast.Name() if not depth:
                    for bound in self._bound(function).get(node.id, [])[:_MAX_VALUES]:
                        is_about_settings, more = self._read(bound, function, 1)
                        texts |= more
                        if is_about_settings:
                            return True, texts
        return False, texts

    def _bound(self, function: Function | ast.Module) -> dict[str, list[ast.expr]]:
        if function not in self._values:
            values = self._values[function] = {}
            for node in walk_within(function):
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    values.setdefault(node.targets[0].id, []).append(node.value)
        return self._values[function]


def _parameters(function: Function | ast.Module) -> frozenset[str]:
    """The arguments of a function that may be settings."""
    if isinstance(function, ast.Module):
        return frozenset()
    names = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
    return frozenset(names - _NO_SETTINGS - ({function.args.args[-1].arg} if function.name in _CALLED else set()))


def _is_condition(parent: ast.AST, child: ast.AST, *, minds_try: bool) -> bool:
    """Whether ``parent`` can run without running its part ``child``."""
    match parent:
        case ast.If() | ast.IfExp() | ast.While():
            return child is not parent.test and not _is_constant(parent.test) and not _is_about_answers(parent.test)
        case ast.BoolOp():
            return child is not parent.values[0]
        case ast.Try() | ast.TryStar():
            return minds_try and bool(parent.handlers) and child in parent.body
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            return not isinstance(child, ast.comprehension) and any(part.ifs for part in parent.generators)
    return isinstance(parent, ast.ExceptHandler | ast.match_case)


def _is_constant(test: ast.expr) -> bool:
    return isinstance(test, ast.Constant) or (isinstance(test, ast.Name) and test.id == "__debug__")


def _is_about_answers(test: ast.AST) -> bool:
    """Whether a test only selects decoupled mode, which does not change the tensors."""
    names = [getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(test)]
    return any(re.search("decoupled", name) for name in names) and not any(
        isinstance(node, ast.BoolOp) for node in ast.walk(test)
    )
