"""Answers in pieces, in the code of a ``model.py``: what stops the server, never ends, or is lost."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from shoal.check.findings import Findings, Rule, Severity
from shoal.check.models import Model, Repository
from shoal.check.python.source import PB, Source, argument, examine, is_literal, parse, served_sources
from shoal.check.python.source import walk_within as walk

CANCELLED = Rule("cancelled-after-final", Severity.ERROR)
MISMATCH = Rule("decoupled-mismatch", Severity.ERROR)
UNREAD = Rule("answers-not-iterated", Severity.ERROR)
ASYNC = Rule("async-exec-decoupled", Severity.WARNING)
LOST = Rule("error-with-final", Severity.ADVICE)
RULES = (CANCELLED, MISMATCH, UNREAD, ASYNC, LOST)

_FINAL = "TRITONSERVER_RESPONSE_COMPLETE_FINAL"
_OF_ONE_ANSWER = ("has_error", "error", "output_tensors")
_POLICY = "model_transaction_policy { decoupled: true }"


def find(model: Model, repository: Repository) -> Findings:
    """Find mistakes in how a Python model sends and reads answers."""
    del repository
    if model.message is None:
        return
    is_decoupled = model.message.model_transaction_policy.decoupled

    def look(source: Source) -> Findings:
        for node in source.nodes:
            for block in _blocks(node) if not isinstance(node, ast.ExceptHandler | ast.match_case) else ():
                yield from _check_block(source, block)
        yield from _check_asked(source)
        yield from _check_component(source, is_decoupled=is_decoupled)
        if is_decoupled:
            yield from _check_errors(source)
        elif not _may_be_decoupled(source):
            yield from _check_loops(source)

    yield from examine(model, look)


def is_stateful(model: Model) -> bool:
    """Whether a class of its code says ``is_stateful = True``."""
    trees = (parse(text) for _, text in served_sources(model))
    bodies = [
        n.body for tree in trees if isinstance(tree, ast.Module) for n in tree.body if isinstance(n, ast.ClassDef)
    ]
    return any(
        isinstance(node, ast.Assign | ast.AnnAssign)
        and is_literal(node.value, True)
        and any(isinstance(each, ast.Name) and each.id == "is_stateful" for each in _targets(node))
        for body in bodies
        for node in body
    )


def _blocks(node: ast.AST) -> Iterator[Sequence[ast.stmt]]:
    """Yield the lists of statements directly under ``node`` that run one after another."""
    for owner in (node, *getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        blocks = (getattr(owner, name, None) for name in ("body", "orelse", "finalbody"))
        yield from (block for block in blocks if isinstance(block, list))


def _check_block(source: Source, block: Sequence[ast.stmt]) -> Findings:
    """Find senders that are asked whether their client has left, after what certainly ended them."""
    ended: dict[str, int] = {}
    for statement in block:
        match _evaluated(statement):
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="is_cancelled")) as call if name in ended:
                yield CANCELLED.at(
                    source.at(call),
                    f"{name}.is_cancelled() is called after the final flag was sent (line {ended[name]}): it crashes"
                    " Triton, with all its models.",
                    "Ask before the final flag, under a lock where another thread may send it.",
                )
        for node in walk(statement):
            if isinstance(node, ast.Return | ast.Raise | ast.Break | ast.Continue):
                ended.clear()  # what follows may not run after that
            elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                ended.pop(node.id, None)
        match statement:
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="send")) as call):
                if _is_final(source, call):
                    ended[name] = call.lineno


def _evaluated(statement: ast.stmt) -> ast.expr | None:
    """Return what a statement evaluates whatever happens: its value or test, the first part of ``and`` and ``or``."""
    first = getattr(statement, "test", None) or getattr(statement, "value", None)
    while isinstance(first, ast.BoolOp | ast.UnaryOp | ast.IfExp):
        match first:
            case ast.BoolOp(values=[first, *_]) | ast.UnaryOp(operand=first) | ast.IfExp(test=first):
                continue
    return first


@lru_cache(maxsize=4)
def _finals(tree: ast.Module) -> frozenset[str]:
    """The names of the final flag: Triton's, and those that the module gives it."""
    named = [node for node in tree.body if isinstance(node, ast.Assign) and _last_name(node.value) == _FINAL]
    return frozenset(
        [_FINAL, *(target.id for node in named for target in node.targets if isinstance(target, ast.Name))]
    )


def _last_name(node: ast.AST | None) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def _is_final(source: Source, call: ast.Call) -> bool:
    """Whether a call of ``send`` ends the answers."""
    return _last_name(argument(call, 1, "flags")) in _finals(source.tree)


@lru_cache(maxsize=64)
def _names(around: ast.AST) -> tuple[Mapping[str, list[ast.AST]], Mapping[str, list[ast.Name]]]:
    """Return the nodes that bind each name in a function or loop, parameters aside, and those that read it."""
    bound: dict[str, list[ast.AST]] = defaultdict(list)
    read: dict[str, list[ast.Name]] = defaultdict(list)
    for node in walk(around):
        for name in {n.id for n in _targets(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}:
            bound[name].append(node)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            read[node.id].append(node)
    return bound, read


def _targets(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if isinstance(child, ast.Tuple | ast.List | ast.Starred):
            yield from _targets(child)


def _check_asked(source: Source) -> Findings:
    """Find requests to decoupled models whose iterator of answers is used like one answer, or is awaited."""
    for call in source.calls:
        if not isinstance(call.func, ast.Attribute) or not is_literal(argument(call, 0, "decoupled"), True):
            continue
        if call.func.attr == "async_exec":
            yield ASYNC.at(
                source.at(call),
                "async_exec(decoupled=True) fails at random under load, and its answers block the event loop.",
                "Ask in a thread of its own for each request: for answer in request.exec(decoupled=True).",
            )
        elif call.func.attr == "exec" and _is_taken_for_one(source, call):
            yield UNREAD.at(
                source.at(call),
                "exec(decoupled=True) returns an iterator of answers, which is used like one answer.",
                "Read them: for answer in request.exec(decoupled=True). For a model that is not decoupled, exec().",
            )


def _is_taken_for_one(source: Source, call: ast.Call) -> bool:
    uses: list[ast.AST] = [call]
    parent = source.parents[call]
    match parent:
        case ast.Assign(targets=[ast.Name(id=name)]):
            bound, read = _names(source.function_of(call))
            uses = [*read.get(name, [])] if bound[name] == [parent] else []
    return any(_is_of_one(source, use) for use in uses)


def _is_of_one(source: Source, use: ast.AST) -> bool:
    match source.parents[use]:
        case ast.Attribute(attr=attribute):
            return attribute in _OF_ONE_ANSWER
        case ast.Call(func=function, args=[first, *_]):
            return first is use and source.name(function) == f"{PB}.get_output_tensor_by_name"
    return False


def _check_component(source: Source, *, is_decoupled: bool) -> Findings:
    """Find a component of shoal's whose class and configuration differ in whether it answers in pieces."""
    classes = {node.name: node for node in source.tree.body if isinstance(node, ast.ClassDef)}
    for node in source.tree.body:
        match node:
            case ast.Assign(
                targets=[ast.Name(id="TritonPythonModel")],
                value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="for_triton")),
            ) if name in classes:
                bases = {source.name(base) for base in classes[name].bases}
                kinds = {base.rpartition(".")[2] for base in bases if base.startswith("shoal.")}
                if "StreamingComponent" in kinds and not is_decoupled:
                    what = f"{name} is a StreamingComponent, and its configuration is not decoupled."
                    yield MISMATCH.at(source.at(classes[name]), what, f"Add {_POLICY} to config.pbtxt.")
                elif kinds == {"Component"} and is_decoupled:
                    what = f"{name} is a Component, which answers once, and its configuration is decoupled."
                    fix = "Derive it from StreamingComponent, or remove model_transaction_policy from config.pbtxt."
                    yield MISMATCH.at(source.at(classes[name]), what, fix)


def _may_be_decoupled(source: Source) -> bool:
    """Whether the code mentions decoupled models, so that it may read or set the policy itself."""
    texts = {node.value for node in source.nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return any("decoupled" in word or "transaction_policy" in word for word in (*source.words, *texts))


def _check_loops(source: Source) -> Findings:
    """Find one sender with which a model that is not decoupled sends in a loop."""
    if "get_response_sender" not in source.words:
        return
    for loop in (node for node in source.nodes if isinstance(node, ast.For | ast.While)):
        for name, call in _sends(loop.body):
            if name not in _names(loop)[0] and _sends_response(source, call, name):
                what = f"{name} sends in a loop, and a model that is not decoupled may send one answer per request."
                yield MISMATCH.at(source.at(call), what, f"Add {_POLICY} to config.pbtxt, or send once.")


def _sends(block: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls ``name.send(...)`` of a loop's block, without inner loops and blocks that leave the loop."""
    if any(isinstance(statement, ast.Break | ast.Return | ast.Raise) for statement in block):
        return
    for statement in block:
        match statement:
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="send")) as call):
                yield name, call
            case ast.If() | ast.Try() | ast.With() | ast.Match():
                for inner in _blocks(statement):
                    yield from _sends(inner)


def _sends_response(source: Source, call: ast.Call, name: str) -> bool:
    """Whether ``name.send`` certainly sends an answer, and not the last one."""
    given = argument(call, 0, "response")
    if given is None or _is_final(source, call):
        return False
    if isinstance(given, ast.Call) and source.name(given.func) == f"{PB}.InferenceResponse":
        return True
    bound = _names(source.function_of(call))[0].get(name, [])
    return bool(bound) and all(_is_call(getattr(by, "value", None), "get_response_sender") for by in bound)


def _is_call(node: ast.AST | None, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name


def _check_errors(source: Source) -> Findings:
    for call in source.calls:
        if not _is_call(call, "send") or not _is_final(source, call):
            continue
        given: ast.AST | None = argument(call, 0, "response")
        if isinstance(given, ast.Name):
            bound = _names(source.function_of(call))[0].get(given.id, [])
            given = getattr(bound[0], "value", None) if len(bound) == 1 else None
        is_response = isinstance(given, ast.Call) and source.name(given.func) == f"{PB}.InferenceResponse"
        error = argument(given, 1, "error") if is_response and isinstance(given, ast.Call) else None
        if error is not None and not is_literal(error, None):
            yield LOST.at(
                source.at(call),
                "It sends an error with the final flag: a model that calls this one may wait for ever.",
                "Send the error by itself, then send(flags=FINAL).",
            )
