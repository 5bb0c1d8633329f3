"""Does a ``model.py`` give its requests to code outside of it, which may read them, keep them, or answer them?"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shoal.check.python.source import PB, Function, Source

_NAMES = frozenset({"request", "requests"})  # what everyone calls them
_SAME = frozenset({"enumerate", "iter", "list", "reversed", "set", "sorted", "tqdm.tqdm", "tuple", "zip"})
# What one may hand a request to, and it neither reads a tensor of it nor answers it.
_HARMLESS = _SAME | {"hasattr", "id", "isinstance", "len", "print", "range", "repr", "str", "type"}
_LOGS = re.compile(r"(.*\.)?(log|debug|info|warn|warning|error|exception|critical|log_\w+)")
_MAX_ROUNDS = 8  # of names that stand for names


class Requests:
    """What a source calls its requests, function by function, and whom it gives them to."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._scopes: dict[ast.AST, ast.AST] = {}
        for node in source.nodes:  # each after what is around it
            around = node if isinstance(node, Function | ast.Module) else self._scopes[node]
            self._scopes.update(dict.fromkeys(ast.iter_child_nodes(node), around))
        self._known: set[tuple[ast.AST, str]] = set()
        execute = source.functions.get("execute")
        if execute is not None and execute.args.args:
            self._known.add((execute, execute.args.args[-1].arg))
        bindings = [binding for node in source.nodes for binding in self._bindings(node)]
        for _ in range(_MAX_ROUNDS):
            found = {(scope, name) for scope, name, value in bindings if self._holds(value)}
            if found <= self._known:
                break
            self._known |= found

    def is_handed(self, call: ast.Call) -> bool:
        """Whether ``call`` gives a request to something outside of the file."""
        name = self._source.name(call.func)
        last = getattr(call.func, "attr", name)
        if name.startswith(f"{PB}.") or name in _HARMLESS or last in self._source.functions or _LOGS.fullmatch(name):
            return False
        if last == "append" and isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
            return False  # the list is followed by its name
        return self.is_given(call)

    def is_given(self, call: ast.Call) -> bool:
        """Whether a request is among the arguments of ``call``."""
        return any(self._holds(value) for value in [*call.args, *(keyword.value for keyword in call.keywords)])

    def is_kept(self, node: ast.AST) -> bool:
        """Whether an assignment keeps a request in an object, where anybody may find it."""
        if isinstance(node, ast.Assign):
            return any(not isinstance(t, ast.Name | ast.Tuple) for t in node.targets) and self._holds(node.value)
        return isinstance(node, ast.AugAssign) and not isinstance(node.target, ast.Name) and self._holds(node.value)

    @property
    def are_handed_on(self) -> bool:
        """Whether any leaves the file."""
        return any(self.is_handed(call) for call in self._source.calls) or any(map(self.is_kept, self._source.nodes))

    def _holds(self, node: ast.AST) -> bool:
        """Whether ``node`` is a request, or a collection of such."""
        match node:
            case ast.Name():
                return node.id in _NAMES or (self._scopes[node], node.id) in self._known
            case ast.Tuple() | ast.List() | ast.Set():
                return any(map(self._holds, node.elts))
            case ast.Starred() | ast.Subscript():
                return self._holds(node.value)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                return self._holds(node.elt)
            case ast.Dict():
                return any(map(self._holds, node.values))
            case ast.IfExp():
                return self._holds(node.body) or self._holds(node.orelse)
            case ast.Call():
                return self._source.name(node.func) in _SAME and any(map(self._holds, node.args))
        return False

    def _bindings(self, node: ast.AST) -> Iterator[tuple[ast.AST, str, ast.expr]]:
        """The names that ``node`` binds: in which function, and to what."""
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield self._scopes[node], name, value
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                for name, part in _parts(target, value):
                    yield self._scopes[node], name, part
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[value]):
                yield self._scopes[node], name, value
            case ast.Call():
                own = self._source.functions.get(getattr(node.func, "attr", getattr(node.func, "id", "")))
                if own is not None:
                    names = [argument.arg for argument in own.args.args]
                    names = names[1:] if names[:1] in (["self"], ["cls"]) else names
                    yield from ((own, name, value) for name, value in zip(names, node.args, strict=False))
                    yield from ((own, keyword.arg, keyword.value) for keyword in node.keywords if keyword.arg)


def _parts(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """The names of a loop, each with what it runs over."""
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        given = [None, *value.args] if value.func.id == "enumerate" else value.args if value.func.id == "zip" else []
        for element, part in zip(target.elts, given, strict=False):
            if isinstance(element, ast.Name) and part is not None:
                yield element.id, part
