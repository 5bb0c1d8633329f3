"""Tensors that a ``model.py`` reads and writes, by their literal names; what is not certain is left out."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from shoal.check.python.guards import Guards
from shoal.check.python.literals import Literals
from shoal.check.python.source import PB, Function, Source, argument, walk_within

_TENSORS = frozenset({f"{PB}.Tensor", f"{PB}.Tensor.from_dlpack"})
_RESPONSE, _REQUEST = f"{PB}.InferenceResponse", f"{PB}.InferenceRequest"
_READ = f"{PB}.get_input_tensor_by_name"
_TESTS = ast.Compare | ast.BoolOp | ast.UnaryOp | ast.If | ast.IfExp | ast.While | ast.NamedExpr | ast.Assert


@dataclass(frozen=True)
class Use:
    """Tensors named at ``node``; ``is_certain`` where the model fails, or answers wrongly, if they do not exist.

    A use behind a test is not certain: one ``model.py`` may serve several configurations, and test which it has.
    """

    node: ast.AST
    names: frozenset[str]
    is_certain: bool


class Scope:
    """A function, without those within: what its names are bound to, and where they are used."""

    def __init__(self, node: ast.AST, source: Source) -> None:
        self.values: dict[str, list[ast.expr]] = {}  # also what is appended to a list
        self.uses: dict[str, list[ast.Name]] = {}
        self.known: dict[str, bool] = {}
        self.breaks: dict[str, bool] = {}
        calls: dict[str, list[ast.Call]] = {_RESPONSE: [], _REQUEST: []}
        for inner in walk_within(node):
            if isinstance(inner, ast.Assign):
                for target in inner.targets:
                    self._add(target, inner.value)
            elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load):
                self.uses.setdefault(inner.id, []).append(inner)
            elif isinstance(inner, ast.Call):
                calls.get(source.name(inner.func), []).append(inner)
                if isinstance(inner.func, ast.Attribute):
                    self._add(inner.func.value, inner.args[0] if inner.func.attr == "append" and inner.args else inner)
        self.given = {what: self._given(nodes) for what, nodes in calls.items()}

    def _add(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.values.setdefault(target.id, []).append(value)

    def _given(self, calls: list[ast.Call]) -> set[str]:
        """The names that go into ``calls``, directly or through a list."""
        found = {node.id for call in calls for node in ast.walk(call) if isinstance(node, ast.Name)}
        for name in list(found):
            for value in self.values.get(name, []):
                elements = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
                found |= {element.id for element in elements if isinstance(element, ast.Name)}
        return found


class Flow:
    """Tensors that one source reads and writes; ``is_writing_open``: it may write more than that."""

    def __init__(self, source: Source) -> None:
        self._source, self._literals, self._guards = source, Literals(source), Guards(source)
        self._scopes: dict[ast.AST, Scope] = {}
        self.reads: list[Use] = []
        self.writes: list[Use] = []
        self.input_configs: list[Use] = []
        self.output_configs: list[Use] = []
        component = self._component()
        if component is not None:
            self.is_writing_open = False
            self._follow_component(component)
            return
        words = source.words
        self.is_writing_open = bool(words & {"output_tensors", "get_output_tensor_by_name", "inputs"})
        for call in source.calls:
            self._follow(call, source.name(call.func))

    def _follow(self, call: ast.Call, name: str) -> None:
        lists = {
            f"{PB}.get_input_config_by_name": self.input_configs,
            f"{PB}.get_output_config_by_name": self.output_configs,
        }
        if name == _READ or name in lists:
            names = self._literals.texts(argument(call, 1, "name"))
            if names is not None:
                is_certain = self._fails_on_none(call) and self._guards.is_free(call, names, minds_try=True)
                lists.get(name, self.reads).append(Use(call, names, is_certain))
        elif name in _TENSORS:
            names = self._literals.texts(argument(call, 0, "name"))
            if names is None:
                self.is_writing_open = True
            elif self._flow_of(call) is not False:
                is_certain = self._flow_of(call) is True and self._guards.is_free(call, names, minds_try=False)
                self.writes.append(Use(call, names, is_certain))
        elif name == _RESPONSE:
            given = argument(call, 0, "output_tensors")
            is_hidden = any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords)
            if is_hidden or (given is not None and not self._is_known(given, self._scope(call))):
                self.is_writing_open = True

    def _scope(self, node: ast.AST) -> Scope:
        """The function around ``node``."""
        node = self._source.function_of(node)
        if node not in self._scopes:
            self._scopes[node] = Scope(node, self._source)
        return self._scopes[node]

    # Reading

    def _fails_on_none(self, call: ast.Call) -> bool:
        """Whether the code breaks where ``call`` returns None: it uses the value and never tests it."""
        parent = self._source.parents[call]
        if isinstance(parent, ast.Attribute | ast.Subscript):
            return True
        if not (
            isinstance(parent, ast.Assign) and len(parent.targets) == 1 and isinstance(parent.targets[0], ast.Name)
        ):
            return False
        name = parent.targets[0].id
        scope = self._scope(call)
        if name not in scope.breaks:
            uses = [self._source.parents[node] for node in scope.uses.get(name, [])]
            is_asked = any(isinstance(use, _TESTS) for use in uses)
            scope.breaks[name] = not is_asked and any(isinstance(use, ast.Attribute | ast.Subscript) for use in uses)
        return scope.breaks[name]

    # Writing

    def _flow_of(self, call: ast.Call) -> bool | None:
        """Whether a tensor is an output, rather than an input of a request to another model; None: unknown."""
        node: ast.AST = call
        carrier = ""
        while node in self._source.parents and not isinstance(node, ast.stmt):
            node = self._source.parents[node]
            if isinstance(node, ast.Call):
                name = self._source.name(node.func)
                if name in (_RESPONSE, _REQUEST):
                    return name == _RESPONSE
                if isinstance(node.func, ast.Attribute) and node.func.attr == "append":
                    carrier = getattr(node.func.value, "id", "")
        if "InferenceRequest" not in self._source.words:
            return True
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            carrier = node.targets[0].id
        given = self._scope(call).given
        goes_out, goes_on = (carrier in given[what] for what in (_RESPONSE, _REQUEST))
        return None if goes_out == goes_on else goes_out

    def _is_known(self, node: ast.expr, scope: Scope, depth: int = 0) -> bool:
        """Whether all tensors in a response are made in the same function."""
        if depth > 4:
            return False
        if isinstance(node, ast.List | ast.Tuple):
            return all(self._is_known(element, scope, depth + 1) for element in node.elts)
        if isinstance(node, ast.ListComp):
            return self._is_known(node.elt, scope, depth + 1)
        if isinstance(node, ast.BinOp):
            return all(self._is_known(side, scope, depth + 1) for side in (node.left, node.right))
        if isinstance(node, ast.Name):
            if node.id not in scope.known:
                values = scope.values.get(node.id, [])
                scope.known[node.id] = False  # for one that refers to itself
                scope.known[node.id] = bool(values) and all(self._is_known(v, scope, depth + 1) for v in values)
            return scope.known[node.id]
        return isinstance(node, ast.Call) and self._source.name(node.func) in _TENSORS

    # Components of shoal

    def _component(self) -> ast.ClassDef | None:
        """The class whose ``for_triton()`` is the model, if it is defined here."""
        for node in self._source.tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                owner, _, method = self._source.name(node.value.func).rpartition(".")
                for other in self._source.tree.body if method == "for_triton" else ():
                    if isinstance(other, ast.ClassDef) and other.name == owner:
                        return other
        return None

    def _follow_component(self, owner: ast.ClassDef) -> None:
        methods = {node.name: node for node in owner.body if isinstance(node, Function)}
        for name in {"check", "run"} & set(methods):
            if len(methods[name].args.args) == 2:
                self._follow_arrays(methods[name], methods[name].args.args[1].arg)
        if "run" not in methods or any(
            self._source.name(base).rpartition(".")[2] != "Component" for base in owner.bases
        ):
            self.is_writing_open = True
        for node in walk_within(methods["run"]) if "run" in methods else ():
            if isinstance(node, ast.Return):
                self._follow_answer(node, methods["run"])

    def _follow_arrays(self, method: Function, name: str) -> None:
        asked: set[str] = set()
        subscripts: list[Use] = []
        for node in ast.walk(method):
            if not (isinstance(node, ast.Name) and node.id == name):
                continue
            parent = self._source.parents[node]
            around = self._source.parents.get(parent)
            key: ast.expr | None = None
            if isinstance(parent, ast.Subscript) and isinstance(parent.ctx, ast.Load):
                key = parent.slice
            elif isinstance(parent, ast.Compare) and isinstance(parent.ops[0], ast.In | ast.NotIn):
                key = parent.left
            elif isinstance(parent, ast.Attribute) and parent.attr == "get" and isinstance(around, ast.Call):
                key = argument(around, 0, "key")
            names = self._literals.texts(key)
            if names is None:
                continue
            if isinstance(parent, ast.Subscript):
                subscripts.append(Use(parent, names, is_certain=True))
            else:
                asked |= names
                self.reads.append(Use(parent, names, is_certain=False))
        for use in subscripts:
            is_certain = not use.names & asked and self._guards.is_free(use.node, use.names, minds_try=True)
            self.reads.append(Use(use.node, use.names, is_certain))

    def _follow_answer(self, node: ast.Return, run: Function) -> None:
        value = node.value
        if isinstance(value, ast.Name):
            scope = self._scope(run)
            values = scope.values.get(value.id, [])
            value = values[0] if len(values) == 1 and len(scope.uses.get(value.id, [])) == 1 else None
        keys = value.keys if isinstance(value, ast.Dict) else [None]
        for key in keys:
            names = self._literals.texts(key)
            if names is None:
                self.is_writing_open = True
            else:
                self.writes.append(Use(key or node, names, self._guards.is_free(node, names, minds_try=False)))
