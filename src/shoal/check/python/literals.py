"""Strings that a name in a ``model.py`` can have, as far as that is known without running it."""

from __future__ import annotations

import ast

from shoal.check.python.source import Function, Source

_MAX_DEPTH = 8  # of names bound to other names
_CHANGES = frozenset({"append", "extend", "insert", "remove", "pop", "clear", "add", "update"})  # of a list or a set


class Literals:
    """The constants of one source.

    A name counts where the whole file binds it once; an attribute of ``self`` or of a class likewise.
    """

    def __init__(self, source: Source) -> None:
        self._owners = {"self", "cls", *(n.name for n in source.nodes if isinstance(n, ast.ClassDef))}
        self._values: dict[str, list[ast.expr | None]] = {}
        self._loops: dict[str, ast.expr] = {}
        for node in source.nodes:
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                self._bind(node.targets[0], node.value)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self._bind(node.target, node.value)
            elif isinstance(node, ast.For | ast.comprehension):
                self._bind(node.target, None)
                if isinstance(node.target, ast.Name):
                    self._loops[node.target.id] = node.iter
            elif isinstance(node, ast.Assign | ast.Delete):
                for target in node.targets:
                    self._bind(target, None)
            elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr):
                self._bind(node.target, None)
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                self._bind(node.optional_vars, None)
            elif isinstance(node, ast.arg):
                self._values.setdefault(node.arg, []).append(None)
            elif isinstance(node, ast.alias | ast.MatchAs | ast.ExceptHandler | Function | ast.ClassDef):
                self._values.setdefault(getattr(node, "asname", None) or node.name or "", []).append(None)
            elif isinstance(node, ast.Attribute) and node.attr in _CHANGES:
                self._bind(node.value, None)

    def _bind(self, target: ast.expr, value: ast.expr | None) -> None:
        if isinstance(target, ast.Name | ast.Attribute):
            self._values.setdefault(_key(target), []).append(value)
        elif isinstance(target, ast.Tuple | ast.List | ast.Starred):
            for child in ast.iter_child_nodes(target):
                if isinstance(child, ast.expr):
                    self._bind(child, None)

    def texts(self, node: ast.expr | None, depth: int = 0) -> frozenset[str] | None:
        """The texts that ``node`` can be; None where that is open."""
        if depth > _MAX_DEPTH:
            return None
        if isinstance(node, ast.Constant):
            return frozenset({node.value}) if isinstance(node.value, str) else None
        if isinstance(node, ast.IfExp):
            one, other = self.texts(node.body, depth + 1), self.texts(node.orelse, depth + 1)
            return one | other if one is not None and other is not None else None
        values = self._bound(node)
        if len(values) == 1 and values[0] is None and isinstance(node, ast.Name) and node.id in self._loops:
            return self._members(self._loops[node.id], depth + 1)
        return self.texts(values[0], depth + 1) if len(values) == 1 else None

    def _bound(self, node: ast.expr | None) -> list[ast.expr | None]:
        if isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id in self._owners
            return self._values.get(node.attr, []) if is_own else []
        return self._values.get(node.id, []) if isinstance(node, ast.Name) else []

    def _members(self, node: ast.expr | None, depth: int) -> frozenset[str] | None:
        """The texts in a list or tuple that nothing changes."""
        if isinstance(node, ast.Name | ast.Attribute) and depth <= _MAX_DEPTH:
            values = self._bound(node)
            return self._members(values[0], depth + 1) if len(values) == 1 else None
        if not isinstance(node, ast.List | ast.Tuple | ast.Set):
            return None
        members: set[str] = set()
        for element in node.elts:
            texts = self.texts(element, depth + 1)
            if texts is None:
                return None
            members |= texts
        return frozenset(members)


def _key(node: ast.Name | ast.Attribute) -> str:
    # Class constants are names where they are bound, and attributes where they are read.
    return node.id if isinstance(node, ast.Name) else node.attr
