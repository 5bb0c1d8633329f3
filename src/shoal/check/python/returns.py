"""Can a function end without returning anything? Where that cannot be told, nothing is said."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from enum import IntEnum

from shoal.check.python.conditions import Conditions, negation
from shoal.check.python.escape import Requests
from shoal.check.python.source import Function, Source, is_literal, walk_within

_EXITS = frozenset({"sys.exit", "exit", "quit", "os._exit", "os.abort", "pytest.fail"})
_ENDLESS = frozenset({"itertools.count", "itertools.cycle"})
# Somebody else's function of such a name is taken for one that does not come back.
_LEAVES = re.compile(r"_*((re)?(raise|throw|abort|exit|die|panic|fail)|assert_never|unreachable)", re.IGNORECASE)
_NEVER = frozenset({"typing.NoReturn", "typing.Never", "typing_extensions.NoReturn", "typing_extensions.Never"})


class Reach(IntEnum):
    """Whether control comes to a place."""

    NO = 0
    MAYBE = 1
    YES = 2


class Ends:
    """Where ``function`` certainly can end without a value: bare returns, and ``falls``, whether its end is reached."""

    def __init__(self, function: Function, source: Source, requests: Requests, *, depth: int = 0) -> None:
        self._source, self._requests, self._depth = source, requests, depth
        self._known: dict[str, Reach] = {}
        self._conditions = Conditions(function, source)
        self._gone: set[str] = set()  # tests behind which it is gone where they hold
        self._is_sure = True
        self.bare: list[ast.Return] = []
        self.reach = self._passes(function.body)

    @property
    def falls(self) -> bool:
        """Whether its end is reached for certain, whatever the tests on the way say."""
        return self.reach is Reach.YES

    def _passes(self, body: Sequence[ast.stmt], *, is_sure: bool = True) -> Reach:
        """Whether control can leave ``body`` at its end."""
        before = self._is_sure
        self._is_sure = before and is_sure
        reach = Reach.YES
        for statement in body:
            reach = min(reach, self._pass(statement))
            if reach is Reach.NO:
                break
            self._is_sure = self._is_sure and reach is Reach.YES
        self._is_sure = before
        return reach

    def _pass(self, node: ast.stmt) -> Reach:
        match node:
            case ast.Return():
                if self._is_sure and (node.value is None or is_literal(node.value, None)):
                    self.bare.append(node)
                return Reach.NO
            case ast.Raise() | ast.Continue() | ast.Break():
                return Reach.NO
            case ast.Assert():
                return Reach.NO if isinstance(node.test, ast.Constant) and not node.test.value else Reach.YES
            case ast.Expr():
                return self._pass_call(node.value)
            case ast.If():
                return self._pass_if(node)
            case ast.While():
                return self._pass_while(node)
            case ast.For() | ast.AsyncFor():
                return self._pass_for(node)
            case ast.With() | ast.AsyncWith():
                is_caught = any(self._suppresses(item.context_expr) for item in node.items)
                return max(self._passes(node.body), Reach.YES if is_caught else Reach.NO)
            case ast.Try() | ast.TryStar():
                return self._pass_try(node)
            case ast.Match():
                return self._pass_match(node)
        return Reach.MAYBE if self._requests.is_kept(node) else Reach.YES

    def _pass_if(self, node: ast.If) -> Reach:
        truth = self._conditions.truth(node.test)
        if truth is not None:
            return self._passes(node.body if truth else node.orelse)
        is_open = self._conditions.is_open(node.test)
        body = self._passes(node.body, is_sure=not is_open)
        is_last = negation(node.test) in self._gone  # all other ways have been taken
        if body is Reach.NO:
            self._gone.add(ast.dump(node.test))
        reach = max(body, self._passes(node.orelse, is_sure=not (is_open or is_last)))
        return min(reach, Reach.MAYBE) if is_open else max(body, min(reach, Reach.MAYBE)) if is_last else reach

    def _pass_while(self, node: ast.While) -> Reach:
        body = self._passes(node.body)
        if isinstance(node.test, ast.Constant) and node.test.value:
            return Reach.YES if _has(node.body, ast.Break) else Reach.NO
        return self._pass_loop(node, body)

    def _pass_for(self, node: ast.For | ast.AsyncFor) -> Reach:
        body = self._passes(node.body)
        if isinstance(node.iter, ast.Call) and self._source.name(node.iter.func) in _ENDLESS:
            return Reach.YES if _has(node.body, ast.Break) else Reach.NO
        if not self._conditions.is_over_requests(node.iter):
            return self._pass_loop(node, body)
        if _has(node.body, ast.Break):
            return Reach.YES
        return min(self._passes(node.orelse), Reach.YES if _has(node.body, ast.Continue) else body)

    def _pass_loop(self, node: ast.For | ast.AsyncFor | ast.While, body: Reach) -> Reach:
        """Of one that ends when it likes: where it can return, its end may be one that never comes."""
        reach = self._passes(node.orelse)
        if _has(node.body, ast.Break):
            return Reach.YES
        is_retry = body is not Reach.YES or any(
            isinstance(inner, ast.Return) and inner.value is not None and not is_literal(inner.value, None)
            for inner in walk_within(node)
        )
        return min(reach, Reach.MAYBE) if is_retry else reach

    def _pass_try(self, node: ast.Try | ast.TryStar) -> Reach:
        before = len(self.bare)
        reach = self._passes([*node.body, *node.orelse])
        for handler in node.handlers:
            reach = max(self._passes(handler.body), reach)
        after = len(self.bare)
        last = self._passes(node.finalbody)
        if last is Reach.NO:
            del self.bare[before:after]  # what finally does takes the place of every return before it
        return min(reach, last)

    def _pass_match(self, node: ast.Match) -> Reach:
        reach = max(self._passes(case.body) for case in node.cases)
        if any(_takes_all(case) for case in node.cases):
            return reach
        # Of an enumeration or of types it may name all that there are; of numbers and texts it never does.
        parts = [part for case in node.cases for part in ast.walk(case.pattern)]
        is_closed = any(isinstance(part, ast.MatchClass | ast.MatchSingleton | ast.Attribute) for part in parts)
        return max(reach, Reach.MAYBE if is_closed else Reach.YES)

    def _pass_call(self, node: ast.expr) -> Reach:
        """Whether a call comes back, and leaves the requests unanswered."""
        if isinstance(node, ast.Await):
            node = node.value
        if not isinstance(node, ast.Call):
            return Reach.YES
        name = self._source.name(node.func)
        last = name.rpartition(".")[2]
        own = self._source.functions.get(last)
        if own is None:
            if name in _EXITS or _LEAVES.match(last):
                return Reach.NO
            calls = (inner for inner in ast.walk(node) if isinstance(inner, ast.Call))
            return Reach.MAYBE if any(map(self._requests.is_handed, calls)) else Reach.YES
        if self._depth:
            return Reach.YES
        if last not in self._known:
            self._known[last] = self._comes_back(own)
        is_answered = self._requests.is_given(node) and self._requests.are_handed_on
        return min(self._known[last], Reach.MAYBE) if is_answered else self._known[last]

    def _comes_back(self, own: Function) -> Reach:
        if own.returns is not None and self._source.name(own.returns) in _NEVER:
            return Reach.NO
        if any(isinstance(node, ast.Return | ast.Yield) for node in walk_within(own)):
            return Reach.YES
        return Reach.NO if Ends(own, self._source, self._requests, depth=1).reach is Reach.NO else Reach.YES

    def _suppresses(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Call) and self._source.name(node.func).rpartition(".")[2] == "suppress"


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
