"""Answers in pieces, in the code of a ``model.py``: what stops the server, never ends, or is lost."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence

from shoal.check.findings import Findings, Rule, Severity
from shoal.check.models import Model, Repository
from shoal.check.python.source import PB, Function, Source, argument, examine, is_literal, parse, served_sources
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
        for block in _blocks(source):
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


def _blocks(source: Source) -> Iterator[Sequence[ast.stmt]]:
    """Yield every list of statements that run one after another."""
    for node in source.nodes:
        blocks = (getattr(node, name, None) for name in ("body", "orelse", "finalbody"))
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


def _is_final(source: Source, call: ast.Call) -> bool:
    """Whether a call of ``send`` ends the answers."""
    flags = argument(call, 1, "flags")
    if not isinstance(flags, ast.Name | ast.Attribute):
        return False
    named = {flags.attr if isinstance(flags, ast.Attribute) else flags.id}
    for node in source.tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in named:
                named.add(source.name(value).rpartition(".")[2])
    return _FINAL in named


def _bound(function: ast.AST, name: str) -> list[ast.AST]:
    """Return what binds ``name`` in a function, its parameters aside."""
    return [
        node
        for node in walk(function)
        if any(isinstance(n, ast.Name) and n.id == name and not isinstance(n.ctx, ast.Load) for n in _targets(node))
    ]


def _targets(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if isinstance(child, ast.Tuple | ast.List | ast.Starred):
            yield from _targets(child)


def _check_asked(source: Source) -> Findings:
    """Find requests to decoupled models whose answers are taken for one, or are awaited."""
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
            function = source.function_of(call)
            if _bound(function, name) != [parent]:
                return False
            uses = [
                n for n in walk(function) if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)
            ]
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
    """Whether the code looks at, or sets, whether it is decoupled."""
    texts = {node.value for node in source.nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return any("decoupled" in word or "transaction_policy" in word for word in (*source.words, *texts))


def _check_loops(source: Source) -> Findings:
    """Find one sender with which a model that is not decoupled sends in a loop."""
    if "get_response_sender" not in source.words:
        return
    for call in source.calls:
        match call.func:
            case ast.Attribute(value=ast.Name(id=name), attr="send"):
                loop = _loop_around(source, call)
                if loop is not None and not _bound(loop, name) and _sends_response(source, call, name):
                    what = f"{name} sends in a loop, and a model that is not decoupled may send one answer per request."
                    yield MISMATCH.at(source.at(call), what, f"Add {_POLICY} to config.pbtxt, or send once.")


def _loop_around(source: Source, call: ast.Call) -> ast.AST | None:
    """The innermost loop around a call in its function; None where it ends with that call."""
    node: ast.AST = call
    while not isinstance(parent := source.parents[node], Function | ast.Module | ast.Lambda):
        for block in (getattr(parent, name, None) for name in ("body", "orelse", "finalbody")):
            if isinstance(block, list) and node in block:
                after = block[block.index(node) :]
                if any(isinstance(each, ast.Break | ast.Return | ast.Raise) for each in after):
                    return None
        if isinstance(parent, ast.For | ast.While) and node in parent.body:
            return parent
        node = parent
    return None


def _sends_response(source: Source, call: ast.Call, name: str) -> bool:
    """Whether ``name.send`` certainly sends an answer, and not the last one."""
    given = argument(call, 0, "response")
    if given is None or _is_final(source, call):
        return False
    if isinstance(given, ast.Call) and source.name(given.func) == f"{PB}.InferenceResponse":
        return True
    bound = _bound(source.function_of(call), name)
    return bool(bound) and all(_is_call(getattr(by, "value", None), ("get_response_sender",)) for by in bound)


def _is_call(node: ast.AST | None, names: Collection[str]) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names


def _check_errors(source: Source) -> Findings:
    for call in source.calls:
        if not _is_call(call, ("send",)) or not _is_final(source, call):
            continue
        given: ast.AST | None = argument(call, 0, "response")
        if isinstance(given, ast.Name):
            bound = _bound(source.function_of(call), given.id)
            given = getattr(bound[0], "value", None) if len(bound) == 1 else None
        is_response = isinstance(given, ast.Call) and source.name(given.func) == f"{PB}.InferenceResponse"
        error = argument(given, 1, "error") if is_response and isinstance(given, ast.Call) else None
        if error is not None and not is_literal(error, None):
            yield LOST.at(
                source.at(call),
                "It sends an error with the final flag: a model that calls this one may wait for ever.",
                "Send the error by itself, then send(flags=FINAL).",
            )
