"""Syntax trees of ``model.py`` files, which are parsed and never run."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TypeAlias

from shoal.authoring.check.findings import Findings, Place
from shoal.authoring.check.models import Model

PB = "triton_python_backend_utils"
CLASS = "TritonPythonModel"
MAX_SOURCE_BYTES = 256 * 1024  # parsed within a second; four times the longest model.py that we have seen
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_CONDITIONAL = ast.If | ast.IfExp | ast.Try | ast.Match | ast.BoolOp | ast.Lambda | ast.While
_KEEPS_SIGNATURE = frozenset({"no_grad", "inference_mode", "override", "annotate", "enable_grad", "autocast"})
_LEAVES = ast.Return | ast.Raise | ast.Break | ast.Continue


@dataclass(frozen=True)
class SourceFile:
    """Parsed ``model.py``. ``names`` maps each imported name to its full dotted name."""

    path: Path
    tree: ast.Module
    names: Mapping[str, str] = field(default_factory=dict)

    def at(self, node: ast.AST) -> Place:
        """Return the place of ``node``."""
        return Place(self.path, getattr(node, "lineno", 0))

    def name(self, node: ast.AST) -> str:
        """Return the full dotted name of ``node``, by the file's imports; empty if ``node`` is not a (dotted) name."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        return ".".join([self.names.get(node.id, node.id), *reversed(parts)])

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the file's syntax tree."""
        return tuple(ast.walk(self.tree))

    @cached_property
    def parents(self) -> Mapping[ast.AST, ast.AST]:
        """Parent of each node."""
        return {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}

    def function_of(self, node: ast.AST) -> Function | ast.Module:
        """Return the innermost function around ``node``, or the module if there is no function."""
        while not isinstance(node, Function | ast.Module):
            node = self.parents[node]
        return node

    @cached_property
    def _bindings(self) -> Mapping[tuple[ast.AST, str], list[ast.AST]]:
        """For each function and name, or ``self.NAME``, the nodes that bind the name there."""
        found: dict[tuple[ast.AST, str], list[ast.AST]] = {}
        for node in self.nodes:
            if isinstance(node, ast.arg):
                found.setdefault((self.function_of(node), node.arg), []).append(node)
            elif isinstance(node, ast.Name | ast.Attribute) and not isinstance(node.ctx, ast.Load):
                found.setdefault((self.function_of(node), self.name(node)), []).append(self.parents[node])
        return found

    @cached_property
    def _owners(self) -> Mapping[str, list[ast.AST]]:
        """For each name, the functions that bind it, or the module."""
        owners: dict[str, list[ast.AST]] = {}
        for function, name in self._bindings:
            owners.setdefault(name, []).append(function)
        return owners

    def _find_owner(self, node: ast.AST, name: str) -> ast.AST:
        """Return where a name has its value from: the module, or for ``self.NAME`` a method, if that alone binds it."""
        owners, here = self._owners.get(name, []), self.function_of(node)
        is_shared = len(owners) == 1 and (owners[0] is self.tree or name.startswith("self."))
        return owners[0] if is_shared else here

    def follow(self, node: ast.AST) -> ast.AST:
        """Return the expression assigned to a name or to ``self.NAME``, or the loop or argument that it is from.

        Other expressions are returned as they are, and so are names unless the function around binds them exactly once.
        """
        while name := self.name(node):
            match self._bindings.get((self._find_owner(node, name), name), []):
                case [ast.Assign() as bound] if bound.lineno < getattr(node, "lineno", 0):
                    if isinstance(node, ast.Attribute) and self.always_in(bound, may_leave=True) is None:
                        return node
                    node = bound.value
                case [ast.For(target=ast.Name()) | ast.comprehension(target=ast.Name()) | ast.arg() as bound]:
                    return bound
                case _:
                    return node
        return node

    def binds_once(self, node: ast.Name) -> bool:
        """Whether the statement around ``node`` alone binds this name in its function, which has no ``global``."""
        function = self.function_of(node)
        outer = (n for n in walk_within(function) if isinstance(n, ast.Global | ast.Nonlocal))
        is_local = isinstance(function, Function) and not any(node.id in each.names for each in outer)
        return is_local and self._bindings[function, node.id] == [self.parents[node]]

    def find_texts(self, node: ast.AST | None) -> list[str]:
        """Return the texts that an argument certainly takes, one after another: of a literal, a loop, or each call."""
        found: list[ast.AST | None] = []
        match node and self.follow(node):
            case ast.Constant(value=str(text)):
                return [text]
            case ast.arg() as given:
                found = [*self.find_given(given)]
            case ast.For(iter=iterable) | ast.comprehension(iter=iterable):
                listed = self.follow(iterable)
                found = [*listed.elts] if isinstance(listed, ast.List | ast.Tuple) else []
        return [each.value for each in found if isinstance(each, ast.Constant) and isinstance(each.value, str)]

    def find_given(self, given: ast.arg) -> list[ast.expr | None]:
        """Return what each call in the file gives an argument of a function, or of a lambda that has a name."""
        function = self.parents[self.parents[given]]
        if not isinstance(function, Function | ast.Lambda):
            return []
        index = function.args.args.index(given) if given in function.args.args else 99
        calls = self.find_calls(function)
        return [argument(c, index - self.name(c.func).startswith("self."), given.arg) for c in calls]

    def find_calls(self, function: Function | ast.Lambda) -> list[ast.Call]:
        """Return the calls of a function, or of a lambda that has a name, in the file."""
        name = getattr(function, "name", "")
        match self.parents[function]:
            case ast.Assign(targets=[ast.Name(id=given)]):
                name = given
        return self._find_named(name) if name else []

    def _find_named(self, name: str) -> list[ast.Call]:
        return [call for call in self.calls if self.name(call.func) in (name, f"self.{name}")]

    def is_passed(self, node: ast.AST) -> bool:
        """Whether ``node`` is the argument after ``self`` of a method."""
        function = self.function_of(node)
        return isinstance(function, Function) and function.args.args[1:2] == [node]

    def always_in(self, node: ast.AST, *, may_leave: bool = False, in_try: bool = False) -> str | None:
        """Return the name of the function that always evaluates ``node``, empty for the module; None if it may not.

        Code under a condition or in a ``try`` may be for another configuration, and so may what follows a statement
        that leaves the function or a loop, unless ``may_leave``. With ``in_try``, a ``try`` is no condition.
        """
        start = node
        while not isinstance(node, Function | ast.Module):
            inner, node = node, self.parents[node]
            in_body = isinstance(node, ast.Try) and inner in node.body
            if inner is getattr(node, "test", None) or (in_try and in_body):
                continue
            if isinstance(node, ast.Lambda) and (calls := self.find_calls(node)):
                return self.always_in(calls[0], may_leave=may_leave, in_try=in_try)
            if isinstance(node, _CONDITIONAL) or (isinstance(node, ast.With) and "suppress" in self.words):
                return None
        leaves = (each.lineno for each in walk_within(node) if isinstance(each, _LEAVES))
        if not may_leave and any(line < getattr(start, "lineno", 0) for line in leaves):
            return None
        return node.name if isinstance(node, Function) else ""

    def runs_in(self, node: ast.AST, *, may_leave: bool = False, in_try: bool = False, depth: int = 3) -> str | None:
        """Return the method that always evaluates ``node``, such as ``execute``; empty for the module, or None.

        A function of the file counts as a part of the method that always calls it.
        """
        name = self.always_in(node, may_leave=may_leave, in_try=in_try)
        if name in ("", "initialize", "execute", "finalize", None) or not depth:
            return name
        calls = self._find_named(name)
        found = (self.runs_in(call, may_leave=may_leave, in_try=in_try, depth=depth - 1) for call in calls)
        return next((each for each in found if each is not None), None)

    @cached_property
    def calls(self) -> tuple[ast.Call, ...]:
        """All calls in the file."""
        return tuple(node for node in self.nodes if isinstance(node, ast.Call))

    @cached_property
    def awaits(self) -> bool:
        """Whether the file awaits anything, or leaves that to asyncio."""
        return any(isinstance(node, ast.Await) or getattr(node, "id", "") == "asyncio" for node in self.nodes)

    @cached_property
    def bound(self) -> frozenset[str]:
        """All names that the file binds anywhere."""
        names = set()
        for node in self.nodes:
            if isinstance(node, ast.Name):
                if not isinstance(node.ctx, ast.Load):
                    names.add(node.id)
            elif isinstance(node, ast.alias):
                names.add(node.asname or node.name.partition(".")[0])
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.MatchMapping):
                names.add(node.rest or "")
            elif not isinstance(node, ast.Attribute | ast.Constant | ast.Call):
                names.add(getattr(node, "name", None) or "")  # a function, a class, an exception, a pattern
        return frozenset(names)

    @cached_property
    def texts(self) -> frozenset[str]:
        """All texts that are literals in the file."""
        return frozenset(n.value for n in self.nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))

    @property
    def tests(self) -> bool:
        """Whether the file is a test of what Triton refuses."""
        return "assertRaises" in self.words

    @cached_property
    def words(self) -> frozenset[str]:
        """All names, attributes and imported names in the file."""
        words = set()
        for node in self.nodes:
            if isinstance(node, ast.Name):
                words.add(node.id)
            elif isinstance(node, ast.Attribute):
                words.add(node.attr)
            elif isinstance(node, ast.alias):
                words.add(node.asname or node.name)
        return frozenset(words)


def served_sources(model: Model) -> tuple[tuple[Path, str], ...]:
    """Return path and text of the ``model.py`` of each version that Triton loads; none if the backend is not Python."""
    message = model.message
    if not model.is_python or (message is not None and message.default_model_filename not in ("", "model.py")):
        return ()
    return tuple((path, text) for path, text in model.sources if int(path.parent.name) in model.served_versions)


@lru_cache(maxsize=4)
def _read(path: Path, text: str) -> SourceFile | None:
    found = parse(text)
    return SourceFile(path, found, _imports(found)) if isinstance(found, ast.Module) else None


def examine(model: Model, look: Callable[[SourceFile], Findings]) -> Findings:
    """Call ``look`` with each ``model.py`` and yield the findings; skip code that is nested too deeply to walk."""
    for path, text in served_sources(model):
        source = _read(path, text)
        if source is not None:
            with suppress(RecursionError):
                yield from list(look(source))


@lru_cache(maxsize=4)  # several modules of rules parse the same texts
def parse(text: str) -> ast.Module | SyntaxError | None:
    """Parse Python code, without its ``if __name__ == "__main__":`` blocks.

    Return the error if that fails, or None if the code is too long or nested too deeply.
    """
    if len(text) > MAX_SOURCE_BYTES:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about a model.py do not concern this process
            tree = ast.parse(text.removeprefix("\ufeff"))
            tree.body = [node for node in tree.body if not _is_main_guard(node)]
    except SyntaxError as error:
        return error
    except ValueError as error:  # a NUL, until Python 3.12
        return SyntaxError(str(error))
    except (RecursionError, MemoryError):
        return None
    return tree


def _is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).startswith("__name__ ==")


def _imports(tree: ast.Module) -> dict[str, str]:
    names = {"pb_utils": PB}  # the usual name, also where the import is within a function or a try
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{'.' * node.level}{node.module or ''}.{alias.name}"
    return names


def argument(call: ast.Call, position: int, name: str) -> ast.expr | None:
    """Return an argument of ``call``, by position or name; None if it is not given, or comes from ``*`` or ``**``."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    given = call.args[: position + 1]
    if len(given) <= position or any(isinstance(arg, ast.Starred) for arg in given):
        return None
    return given[position]


def is_literal(node: ast.AST | None, *values: object) -> bool:
    """Whether ``node`` is a constant with one of ``values``."""
    return isinstance(node, ast.Constant) and any(node.value is v or node.value == v for v in values)


def walk_within(node: ast.AST) -> Iterator[ast.AST]:
    """Yield ``node`` and the nodes under it in source order, without the contents of nested functions and classes."""
    stack = [node]
    while stack:
        current = stack.pop()
        yield current
        if current is node or not isinstance(current, Function | ast.ClassDef | ast.Lambda):
            stack.extend(reversed(list(ast.iter_child_nodes(current))))


def find_methods(source: SourceFile, owner: ast.ClassDef) -> tuple[dict[str, Function], bool]:
    """Return the methods that a class defines exactly once, and whether the class certainly has no ``execute``."""
    defined: dict[str, list[ast.AST]] = {}
    for node in walk_within(owner):
        if isinstance(node, Function):
            defined.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.setdefault(node.id, []).append(node)
    methods = {name: nodes[0] for name, nodes in defined.items() if len(nodes) == 1 and isinstance(nodes[0], Function)}
    has_bases = any(source.name(base) != "object" for base in owner.bases)
    is_plain = not has_bases and not owner.decorator_list and not owner.keywords
    return methods, is_plain and "execute" not in defined and "execute" not in source.words


def keeps_signature(source: SourceFile, method: Function) -> bool:
    """Whether all decorators of a method are known to keep the method's signature and result."""
    names = (d.func if isinstance(d, ast.Call) else d for d in method.decorator_list)
    return all(source.name(name).rpartition(".")[2] in _KEEPS_SIGNATURE for name in names)


def find_execute(source: SourceFile) -> Function | None:
    """Return the ``execute`` of the class ``TritonPythonModel``, unless an unknown decorator may change its result."""
    found = [node for node in source.nodes if isinstance(node, ast.ClassDef) and node.name == CLASS]
    execute = find_methods(source, found[0])[0].get("execute") if len(found) == 1 else None
    return execute if execute is not None and keeps_signature(source, execute) else None
