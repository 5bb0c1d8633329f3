"""Which inputs of a TorchScript module reach, uncast, an operator that takes indices; read from its code alone.

What is not understood ends the trail: an input is reported only where every step from it to the operator is known to
keep its type.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.check.torchscript.archive import Script, attributes, find_method

MAX_DEPTH = 12
_MAX_CALLS = 2000

# Operators that demand an index, by the argument that is one: its position, and its name.
INDICES: Mapping[str, tuple[int, str]] = {
    "embedding": (1, "indices"),
    "embedding_bag": (1, "indices"),
    "gather": (2, "index"),
    "scatter": (2, "index"),
    "scatter_": (2, "index"),
    "scatter_add": (2, "index"),
    "scatter_add_": (2, "index"),
    "index_select": (2, "index"),
    "one_hot": (0, "self"),
    "take": (1, "index"),
    "take_along_dim": (1, "indices"),
}
# Operators whose result has the type of their first argument, whatever the others are.
_KEEPING = {
    "alias", "chunk", "clone", "contiguous", "detach", "expand", "expand_as", "flatten", "flip", "narrow", "permute",
    "repeat", "reshape", "reshape_as", "roll", "select", "slice", "squeeze", "t", "transpose", "unsqueeze", "view",
    "view_as", "unflatten", "movedim",
}  # fmt: skip


class IndexUse(NamedTuple):
    """Input number ``argument`` of the forward is an index of ``operator``."""

    argument: int
    operator: str


@dataclass
class IndexFlow:
    """One walk through an archive's code."""

    script: Script
    num_calls: int = 0
    seen: set[tuple[str, tuple[int | None, ...]]] = field(default_factory=set)

    def find(self, owner: ast.ClassDef, name: str) -> Iterator[IndexUse]:
        """The uses in a module's forward; ``name`` is the module's qualified one."""
        forward = find_method(owner, "forward")
        if forward:
            num_arguments = len(forward.args.args) - 1
            yield from self._follow(forward, [None, *range(num_arguments)], attributes(owner), name, 0)

    def _follow(
        self, function: ast.FunctionDef, given: list[int | None], types: Mapping[str, str], name: str, depth: int
    ) -> Iterator[IndexUse]:
        names = [argument.arg for argument in function.args.args]
        key = (f"{name}.{function.name}", tuple(given))
        self.num_calls += 1
        if (
            key in self.seen
            or depth > MAX_DEPTH
            or self.num_calls > _MAX_CALLS
            or not any(g is not None for g in given)
        ):
            return
        self.seen.add(key)
        scope = _Scope(self, types, names[0] if names and types else "", depth)
        scope.inputs = {argument: origin for argument, origin in zip(names, given, strict=False) if origin is not None}
        yield from scope.run(function.body)

    def call(self, target: str, given: list[int | None], depth: int) -> Iterator[IndexUse]:
        """A call of a function by its qualified name."""
        function = self.script.find_function(target)
        if function:
            yield from self._follow(function, given, {}, target, depth + 1)

    def call_method(self, kind: str, method: str, given: list[int | None], depth: int) -> Iterator[IndexUse]:
        """A call of a module's method, by the module's class."""
        owner = self.script.find_class(kind)
        function = find_method(owner, method) if owner else None
        if owner and function:
            yield from self._follow(function, [None, *given], attributes(owner), kind, depth + 1)


class _Scope:
    """One function's names: which are an input still, which are submodules, which are functions."""

    def __init__(self, flow: IndexFlow, types: Mapping[str, str], itself: str, depth: int) -> None:
        self.flow, self.types, self.itself, self.depth = flow, types, itself, depth
        self.inputs: dict[str, int] = {}
        self.modules: dict[str, str] = {}
        self.functions: dict[str, str] = {}

    def run(self, body: list[ast.stmt]) -> Iterator[IndexUse]:
        for statement in body:
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                yield from self._uses(statement.value)
                self._assign(statement.targets[0], statement.value)
            elif isinstance(statement, ast.If):
                yield from self._uses(statement.test)
                self._branch(statement)
            elif isinstance(statement, ast.Return | ast.Expr) and statement.value:
                yield from self._uses(statement.value)
            else:  # a loop may not be run at all
                self._forget(statement)
            if isinstance(statement, ast.Return):
                return

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        self._forget(target)
        if not isinstance(target, ast.Name):
            return
        origin = self._origin(value)
        if origin is not None:
            self.inputs[target.id] = origin
        kind = self._module(value)
        if kind:
            self.modules[target.id] = kind
        if isinstance(value, ast.Attribute) and ast.unparse(value).startswith("__torch__."):
            self.functions[target.id] = ast.unparse(value)

    def _branch(self, statement: ast.If) -> None:
        """Only what both branches agree on is known behind them; what they use may not be run."""
        ends = []
        for body in (statement.body, statement.orelse):
            scope = _Scope(self.flow, self.types, self.itself, self.depth)
            scope.inputs = dict(self.inputs)
            scope.modules, scope.functions = dict(self.modules), dict(self.functions)
            for inner in body:
                if isinstance(inner, ast.Assign) and len(inner.targets) == 1:
                    scope._assign(inner.targets[0], inner.value)
                else:
                    scope._forget(inner)
            ends.append(scope)
        one, other = ends
        self.inputs = {name: origin for name, origin in one.inputs.items() if other.inputs.get(name) == origin}
        self.modules = {name: kind for name, kind in one.modules.items() if other.modules.get(name) == kind}
        self.functions = {name: what for name, what in one.functions.items() if other.functions.get(name) == what}

    def _forget(self, node: ast.AST) -> None:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                for known in (self.inputs, self.modules, self.functions):
                    known.pop(inner.id, None)

    def _origin(self, value: ast.expr) -> int | None:
        """Which input a value still is."""
        if isinstance(value, ast.Name):
            return self.inputs.get(value.id)
        if isinstance(value, ast.Call) and value.args and _operator(value) in _KEEPING:
            return self._origin(value.args[0])
        return None

    def _module(self, value: ast.expr) -> str:
        """The class of a submodule; empty where it is none."""
        if isinstance(value, ast.Name):
            return self.modules.get(value.id, "")
        owner: ast.expr | None = None
        attribute = ""
        if isinstance(value, ast.Attribute):
            owner, attribute = value.value, value.attr
        elif isinstance(value, ast.Call) and ast.unparse(value.func) == "getattr" and len(value.args) == 2:
            key = value.args[1]  # getattr(self.layers, "0")
            owner, attribute = value.args[0], str(key.value) if isinstance(key, ast.Constant) else ""
        if owner is None:
            return ""
        types = self.types
        if not (isinstance(owner, ast.Name) and owner.id == self.itself):
            holder = self.flow.script.find_class(self._module(owner))
            types = attributes(holder) if holder else {}
        kind = types.get(attribute, "")
        return kind if kind.startswith("__torch__.") else ""

    def _uses(self, value: ast.expr) -> Iterator[IndexUse]:
        for call in ast.walk(value):
            if isinstance(call, ast.Call):
                yield from self._call(call)

    def _call(self, call: ast.Call) -> Iterator[IndexUse]:
        operator = _operator(call)
        if operator:
            if operator in INDICES:
                position, name = INDICES[operator]
                index = next((k.value for k in call.keywords if k.arg == name), None)
                index = index or (call.args[position] if position < len(call.args) else None)
                origin = self._origin(index) if index else None
                if origin is not None:
                    yield IndexUse(origin, operator)
            return
        given = [self._origin(argument) for argument in call.args]
        if call.keywords:
            return
        if isinstance(call.func, ast.Attribute):
            kind = self._module(call.func.value)
            if kind:
                yield from self.flow.call_method(kind, call.func.attr, given, self.depth)
            elif ast.unparse(call.func).startswith("__torch__."):
                yield from self.flow.call(ast.unparse(call.func), given, self.depth)
        elif isinstance(call.func, ast.Name) and call.func.id in self.functions:
            yield from self.flow.call(self.functions[call.func.id], given, self.depth)


def _operator(call: ast.Call) -> str:
    """``gather`` for ``torch.gather(...)``; empty for a call of anything else."""
    function = call.func
    is_operator = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
    return function.attr if is_operator and function.value.id == "torch" else ""  # type: ignore[attr-defined]
