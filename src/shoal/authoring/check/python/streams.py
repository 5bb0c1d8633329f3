"""Rules for a ``model.py`` that streams its answers: calls that crash the server, block it, or lose an answer."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from shoal.authoring.check.findings import Findings, Rule, Severity
from shoal.authoring.check.models import Model, Repository
from shoal.authoring.check.python.source import PB, SourceFile, argument, examine, is_literal, served_sources
from shoal.authoring.check.python.source import walk_within as walk
from shoal.authoring.repository.model_code import find_constants

CANCELLED = Rule("cancelled-after-final", Severity.ERROR)
MISMATCH = Rule("decoupled-mismatch", Severity.ERROR)
ASYNC = Rule("async-exec-decoupled", Severity.WARNING)
LOST = Rule("error-with-final", Severity.ADVICE)

_FINAL = "TRITONSERVER_RESPONSE_COMPLETE_FINAL"
_POLICY = "model_transaction_policy { decoupled: true }"


def find(model: Model, repository: Repository) -> Findings:
    """Find mistakes in how a Python model sends and reads answers."""
    del repository
    if model.message is None:
        return
    is_decoupled = model.message.model_transaction_policy.decoupled

    def look(source: SourceFile) -> Findings:
        for node in source.nodes if {"send", "is_cancelled"} <= source.words else ():
            for block in _blocks(node) if not isinstance(node, ast.ExceptHandler | ast.match_case) else ():
                yield from _check_block(source, block)
        yield from _check_asked(source)
        yield from _check_component(source, is_decoupled=is_decoupled)
        if is_decoupled:
            yield from _check_errors(source)

    yield from examine(model, look)


def is_stateful(model: Model) -> bool:
    """Whether a class in the model's code has ``is_stateful = True``."""
    return any(True in find_constants(text, "is_stateful") for _, text in served_sources(model))


def _blocks(node: ast.AST) -> Iterator[Sequence[ast.stmt]]:
    """Yield the blocks directly under ``node``: lists of statements that run one after another."""
    for owner in (node, *getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        blocks = (getattr(owner, name, None) for name in ("body", "orelse", "finalbody"))
        yield from (block for block in blocks if isinstance(block, list))


def _check_block(source: SourceFile, block: Sequence[ast.stmt]) -> Findings:
    """Find calls of ``is_cancelled`` on a response sender that has certainly sent the final flag before."""
    ended: dict[str, int] = {}
    for statement in block:
        match _evaluated(statement):
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="is_cancelled")) as call if name in ended:
                yield CANCELLED.at(
                    source.at(call),
                    f"{name}.is_cancelled() is called after the final flag was sent (line {ended[name]}): it crashes"
                    " Triton, with all its models.",
                    "Call it before the final flag, under a lock if another thread may send the flag.",
                )
        for node in walk(statement):
            if isinstance(node, ast.Return | ast.Raise | ast.Break | ast.Continue):
                ended.clear()  # the code after this may not run
            elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                ended.pop(node.id, None)
        match statement:
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="send")) as call):
                if is_final(source, call):
                    ended[name] = call.lineno


def _evaluated(statement: ast.stmt) -> ast.expr | None:
    """Return the expression that a statement always evaluates first: ``a`` in ``a and b``, or in ``x if a else y``."""
    first = getattr(statement, "test", None) or getattr(statement, "value", None)
    while isinstance(first, ast.BoolOp | ast.UnaryOp | ast.IfExp):
        match first:
            case ast.BoolOp(values=[first, *_]) | ast.UnaryOp(operand=first) | ast.IfExp(test=first):
                continue
    return first


def is_final(source: SourceFile, call: ast.Call) -> bool:
    """Whether a call of ``send`` passes Triton's final flag, directly or through a constant of the module."""
    named = [node for node in source.tree.body if isinstance(node, ast.Assign) and _last_name(node.value) == _FINAL]
    finals = [_FINAL, *(target.id for node in named for target in node.targets if isinstance(target, ast.Name))]
    return _last_name(argument(call, 1, "flags")) in finals


def _last_name(node: ast.AST | None) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def _check_asked(source: SourceFile) -> Findings:
    """Find requests that the code sends to decoupled models with ``async_exec``."""
    for call in source.calls:
        if _is_call(call, "async_exec") and is_literal(argument(call, 0, "decoupled"), True):
            yield ASYNC.at(
                source.at(call),
                "async_exec(decoupled=True) fails at random under load, and its answers block the event loop.",
                "Send each request in a thread of its own: for answer in request.exec(decoupled=True).",
            )


def _check_component(source: SourceFile, *, is_decoupled: bool) -> Findings:
    """Find a StreamingComponent whose configuration is not decoupled, or a Component whose configuration is."""
    classes = {node.name: node for node in source.tree.body if isinstance(node, ast.ClassDef)}
    for node in source.tree.body:
        match node:
            case ast.Assign(
                targets=[ast.Name(id="TritonPythonModel")],
                value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="for_triton")),
            ) if name in classes:
                bases = {source.name(base) for base in classes[name].bases}
                kinds = {base.rpartition(".")[2] for base in bases if base.startswith("shoal.")}
                if "StreamingComponent" in kinds and not is_decoupled and not _answers_either_way(classes[name]):
                    what = f"{name} is a StreamingComponent, and its configuration is not decoupled."
                    yield MISMATCH.at(source.at(classes[name]), what, f"Add {_POLICY} to config.pbtxt.")
                elif kinds == {"Component"} and is_decoupled:
                    what = f"{name} is a Component, which answers once, and its configuration is decoupled."
                    fix = "Derive it from StreamingComponent, or remove model_transaction_policy from config.pbtxt."
                    yield MISMATCH.at(source.at(classes[name]), what, fix)


def _answers_either_way(node: ast.ClassDef) -> bool:
    names = (target for each in node.body if isinstance(each, ast.Assign) for target in each.targets)
    return any(isinstance(target, ast.Name) and target.id == "answers_either_way" for target in names)


def _is_call(node: ast.AST | None, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name


def _check_errors(source: SourceFile) -> Findings:
    for call in source.calls:
        if not _is_call(call, "send") or not is_final(source, call):
            continue
        given = source.follow(argument(call, 0, "response") or call)
        is_response = isinstance(given, ast.Call) and source.name(given.func) == f"{PB}.InferenceResponse"
        error = argument(given, 1, "error") if is_response and isinstance(given, ast.Call) else None
        if error is not None and not is_literal(error, None):
            yield LOST.at(
                source.at(call),
                "It sends an error with the final flag: a model that calls this model may wait forever.",
                "Send the error by itself, then send(flags=FINAL).",
            )
