"""What is known of the tests in a function that Triton calls with its requests: there is always one at least."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

from shoal.check.python.source import Function, Source, is_literal

_LISTS = frozenset({"enumerate", "iter", "list", "reversed", "sorted", "tuple", "tqdm.tqdm", "tqdm.auto.tqdm"})
_COMPARE: Mapping[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_OPPOSITES: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.Is: ast.IsNot,
    ast.In: ast.NotIn,
    ast.Lt: ast.GtE,
    ast.Gt: ast.LtE,
}
_EQUAL = ast.Is | ast.IsNot | ast.Eq | ast.NotEq
_OPPOSITE = {**_OPPOSITES, **{value: key for key, value in _OPPOSITES.items()}}


class Conditions:
    """The tests of ``function``; its last argument are the requests."""

    def __init__(self, function: Function, source: Source) -> None:
        self._source = source
        self._requests = function.args.args[-1].arg if function.args.args else ""

    def truth(self, node: ast.expr) -> bool | None:
        """What a test always gives; None where it depends."""
        match node:
            case ast.Constant():
                return bool(node.value)
            case ast.UnaryOp(op=ast.Not()):
                truth = self.truth(node.operand)
                return None if truth is None else not truth
            case ast.BoolOp():
                truths = [self.truth(value) for value in node.values]
                decisive = isinstance(node.op, ast.Or)
                return decisive if decisive in truths else None if None in truths else not decisive
            case ast.Compare(left=left, ops=[by], comparators=[right]):
                return self._compare(left, by, right)
            case ast.Call(args=[inner]) if self._source.name(node.func) == "bool":
                return self.truth(inner)
        return True if self._is_requests(node) or self._is_length(node) else None

    def is_open(self, node: ast.expr) -> bool:
        """Whether a test asks for the place among the requests: it may hold at the last one, at any rate."""
        is_simple = isinstance(node, ast.Compare) and any(
            isinstance(side, ast.Constant) for side in (node.left, *node.comparators)
        )
        return not is_simple and any(self._is_length(inner) for inner in ast.walk(node))

    def is_over_requests(self, node: ast.expr) -> bool:
        """Whether a loop runs over the requests, or as often."""
        if isinstance(node, ast.Call) and node.args and self._source.name(node.func) in _LISTS:
            return self.is_over_requests(node.args[0])
        if isinstance(node, ast.Call) and self._source.name(node.func) == "range":
            return len(node.args) == 1 and self._is_length(node.args[0])
        return self._is_requests(node)

    def _is_requests(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id == self._requests

    def _is_length(self, node: ast.AST) -> bool:
        is_call = isinstance(node, ast.Call) and self._source.name(node.func) == "len"
        return is_call and len(node.args) == 1 and self._is_requests(node.args[0])  # type: ignore[attr-defined]

    def _compare(self, left: ast.expr, by: ast.cmpop, right: ast.expr) -> bool | None:
        is_nothing = is_literal(right, None) or (isinstance(right, ast.List) and not right.elts)
        if is_nothing and isinstance(by, _EQUAL) and self._is_requests(left):
            return isinstance(by, ast.IsNot | ast.NotEq)
        compare = _COMPARE.get(type(by))
        number = right if self._is_length(left) else left if self._is_length(right) else None
        if compare is None or not (isinstance(number, ast.Constant) and isinstance(number.value, int)):
            return None
        # What holds for one, for two, and for more than the number is what holds for each.
        counts = {1, 2, max(1, number.value), max(1, number.value + 1), max(1, number.value - 1)}
        found = {compare(*((n, number.value) if number is right else (number.value, n))) for n in counts}
        return found.pop() if len(found) == 1 else None


def negation(node: ast.expr) -> str:
    """The dump of the test that holds where ``node`` does not."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ast.dump(node.operand)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OPPOSITE:
        return ast.dump(ast.Compare(node.left, [_OPPOSITE[type(node.ops[0])]()], node.comparators))
    return ast.dump(ast.UnaryOp(ast.Not(), node))
