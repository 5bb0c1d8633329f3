"""Is a place in a ``model.py`` reached whatever the configuration is, or only where something was asked before?"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shoal.repository.check.reading.source import Function, Source, walk_within

# Whom Triton calls, and whom a component of shoal is called by.
_CALLED = frozenset({"execute", "initialize", "finalize", "auto_complete_config", "is_ready", "run", "check", "load"})
_LEAVES = ast.Return | ast.Raise | ast.Continue | ast.Break
_NO_SETTINGS = frozenset({"self", "cls", "request", "requests"})


class Guards:
    """What stands before each place of one source."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._exits: dict[ast.AST, list[ast.If]] = {}
        self._values: dict[ast.AST, dict[str, list[ast.expr]]] = {}

    def is_free(self, node: ast.AST, names: frozenset[str], *, minds_try: bool) -> bool:
        """Whether each run comes to ``node``, which is about the tensors ``names``; ``minds_try``: and breaks there."""
        return self._is_free(node, names, minds_try, frozenset())

    def _is_free(self, node: ast.AST, names: frozenset[str], minds_try: bool, seen: frozenset[str]) -> bool:
        function = self._source.function_of(node)
        child = node
        while child is not function:
            parent = self._source.parents[child]
            if _is_condition(parent, child, minds_try=minds_try):
                return False
            if isinstance(child, ast.stmt) and any(
                guard.lineno < getattr(child, "lineno", 0) and self._asks(guard.test, names, function)
                for guard in self._exits_in(parent)
            ):
                return False
            child = parent
        if isinstance(function, ast.Module) or function.name in _CALLED:
            return True
        name = function.name
        if name in seen or (name.startswith("__") and name.endswith("__")):
            return name not in seen
        return any(self._is_free(use, names, minds_try, seen | {name}) for use in self._uses(function))

    def _uses(self, function: Function) -> Iterator[ast.AST]:
        """Where a function is called, or handed on."""
        for node in self._source.nodes:
            name = getattr(node, "attr", getattr(node, "id", ""))
            if name == function.name and isinstance(getattr(node, "ctx", None), ast.Load):
                yield node

    def _exits_in(self, around: ast.AST) -> list[ast.If]:
        """The tests among the statements of ``around`` behind which it goes on only where they fail."""
        if around not in self._exits:
            statements = (node for node in ast.iter_child_nodes(around) if isinstance(node, ast.If))
            self._exits[around] = [node for node in statements if isinstance(node.body[-1], _LEAVES)]
        return self._exits[around]

    def _asks(self, test: ast.AST, names: frozenset[str], function: Function | ast.Module, depth: int = 0) -> bool:
        """Whether a test can be one for these tensors: it has their name, or looks at settings."""
        if _is_about_answers(test):
            return False
        settings = _parameters(function)
        for node in ast.walk(test):
            match node:
                case ast.Constant(value=str(value)) if value in names:
                    return True
                case ast.Compare(ops=[ast.In() | ast.NotIn()]):
                    return True
                case ast.Attribute(value=ast.Name(id="self" | "cls")):
                    parent = self._source.parents[node]
                    if not (isinstance(parent, ast.Call) and parent.func is node and parent.args):
                        return True
                case ast.Name() if node.id in settings:
                    return True
                case ast.Name() if not depth:
                    values = self._bound(function).get(node.id, [])
                    if any(self._asks(value, names, function, 1) for value in values):
                        return True
        return False

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
    """Whether ``parent`` can run and leave its part ``child`` out."""
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
    """Whether a test asks how to answer, and not what: the tensors of a decoupled model are the same."""
    names = [getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(test)]
    return any(re.search("decoupled", name) for name in names) and not any(
        isinstance(node, ast.BoolOp) for node in ast.walk(test)
    )
