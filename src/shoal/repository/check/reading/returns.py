"""Can a function end without returning anything? Where that cannot be told, the answer is no."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from shoal.repository.check.reading.source import Function, Source, is_literal, walk_within

_EXITS = frozenset({"sys.exit", "exit", "quit", "os._exit", "os.abort", "pytest.fail"})
_ENDLESS = frozenset({"itertools.count", "itertools.cycle"})
# Somebody else's function of such a name is taken for one that does not come back.
_LEAVES = re.compile(r"_*(re)?(raise|throw|abort|exit|die|panic|fail)", re.IGNORECASE)


class Ends:
    """The lines where ``function`` ends without a value: bare returns, and ``falls``, whether its end is reached."""

    def __init__(self, function: Function, source: Source, *, depth: int = 0) -> None:
        self._source, self._depth = source, depth
        self._known: dict[str, bool] = {}
        self._requests = function.args.args[-1].arg if function.args.args else ""
        self.bare: list[ast.Return] = []
        self.falls = self._passes(function.body)

    def _passes(self, body: Sequence[ast.stmt]) -> bool:
        """Whether control can leave ``body`` at its end."""
        return all(self._is_passed(statement) for statement in body)

    def _is_passed(self, node: ast.stmt) -> bool:
        match node:
            case ast.Return():
                if node.value is None or is_literal(node.value, None):
                    self.bare.append(node)
                return False
            case ast.Raise() | ast.Continue() | ast.Break():
                return False
            case ast.Assert():
                return not (isinstance(node.test, ast.Constant) and not node.test.value)
            case ast.Expr():
                return not self._leaves(node.value)
            case ast.If():
                return self._passes_if(node)
            case ast.While():
                return self._passes_while(node)
            case ast.For() | ast.AsyncFor():
                return self._passes_for(node)
            case ast.With() | ast.AsyncWith():
                return self._passes(node.body) or any(self._suppresses(item.context_expr) for item in node.items)
            case ast.Try() | ast.TryStar():
                return self._passes_try(node)
            case ast.Match():
                passes = [self._passes(case.body) for case in node.cases]
                return any(passes) or not any(_takes_all(case) for case in node.cases)
        return True

    def _passes_if(self, node: ast.If) -> bool:
        if isinstance(node.test, ast.Constant):
            return self._passes(node.body if node.test.value else node.orelse)
        if self._asks_for_no_requests(node.test):
            return self._passes(node.orelse)
        passes_body, passes_else = self._passes(node.body), self._passes(node.orelse)
        return passes_body or passes_else

    def _passes_while(self, node: ast.While) -> bool:
        self._passes(node.body)
        if isinstance(node.test, ast.Constant) and node.test.value:
            return _has(node.body, ast.Break)
        return self._passes(node.orelse) or _has(node.body, ast.Break)

    def _passes_for(self, node: ast.For | ast.AsyncFor) -> bool:
        passes = self._passes(node.body)
        if isinstance(node.iter, ast.Call) and self._source.name(node.iter.func) in _ENDLESS:
            return _has(node.body, ast.Break)
        is_taken = self._is_over_requests(node.iter) and not passes and not _has(node.body, ast.Continue)
        return (self._passes(node.orelse) and not is_taken) or _has(node.body, ast.Break)

    def _passes_try(self, node: ast.Try | ast.TryStar) -> bool:
        before = len(self.bare)
        passes = self._passes([*node.body, *node.orelse])
        for handler in node.handlers:
            passes = self._passes(handler.body) or passes
        after = len(self.bare)
        if self._passes(node.finalbody):
            return passes
        del self.bare[before:after]  # what finally does takes the place of every return before it
        return False

    def _leaves(self, node: ast.expr) -> bool:
        """Whether a call never comes back."""
        if isinstance(node, ast.Await):
            node = node.value
        if not isinstance(node, ast.Call):
            return False
        name = self._source.name(node.func)
        last = name.rpartition(".")[2]
        own = self._source.functions.get(last)
        if own is None:
            return name in _EXITS or bool(_LEAVES.match(last))
        if self._depth:
            return False
        if last not in self._known:
            returns = any(isinstance(n, ast.Return | ast.Yield) for n in walk_within(own))
            self._known[last] = not returns and not Ends(own, self._source, depth=1).falls
        return self._known[last]

    def _suppresses(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Call) and self._source.name(node.func).rpartition(".")[2] == "suppress"

    def _is_over_requests(self, node: ast.expr) -> bool:
        """Whether a loop runs over the requests, of which there is always one."""
        if isinstance(node, ast.Call) and self._source.name(node.func) in (
            "enumerate",
            "list",
            "reversed",
            "tqdm.tqdm",
        ):
            node = node.args[0] if node.args else node
        return isinstance(node, ast.Name) and node.id == self._requests

    def _asks_for_no_requests(self, node: ast.expr) -> bool:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            node = node.operand
            if isinstance(node, ast.Call) and self._source.name(node.func) == "len" and node.args:
                node = node.args[0]
            return isinstance(node, ast.Name) and node.id == self._requests
        if not (isinstance(node, ast.Compare) and isinstance(node.left, ast.Call) and node.left.args):
            return False
        of = node.left.args[0]
        is_length = self._source.name(node.left.func) == "len" and isinstance(of, ast.Name) and of.id == self._requests
        return is_length and isinstance(node.ops[0], ast.Eq) and is_literal(node.comparators[0], 0)


def _takes_all(case: ast.match_case) -> bool:
    return case.guard is None and isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None


def _has(body: Sequence[ast.stmt], kind: type[ast.Break] | type[ast.Continue]) -> bool:
    """Whether a ``break`` or ``continue`` in ``body`` belongs to the loop around it."""
    for node in body:
        if isinstance(node, kind):
            return True
        if isinstance(node, Function | ast.ClassDef):
            continue
        if isinstance(node, ast.For | ast.AsyncFor | ast.While):
            if _has(node.orelse, kind):
                return True
            continue
        for child in ast.iter_child_nodes(node):
            inner = [child] if isinstance(child, ast.stmt) else getattr(child, "body", [])
            if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case) and _has(inner, kind):
                return True
    return False
