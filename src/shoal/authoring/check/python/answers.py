"""Rules for the answers of a ``model.py``: one response per request, or a stream that ends; names and types."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shoal.authoring.check.findings import Findings, Rule, Severity
from shoal.authoring.check.models import Model, Repository
from shoal.authoring.check.python.source import PB, Function, SourceFile, argument, examine, find_execute, is_literal
from shoal.authoring.check.python.source import walk_within as walk
from shoal.authoring.check.python.streams import is_final
from shoal.authoring.check.python.types import UNICODE, find_dtype, name_dtype

ANSWERS = Rule("wrong-answers", Severity.ERROR)
OUTPUT = Rule("output-not-made", Severity.ERROR)
TYPE = Rule("output-type", Severity.WARNING)

_LISTS = (ast.List, ast.ListComp)
_RESPONSE, _TENSOR = f"{PB}.InferenceResponse", f"{PB}.Tensor"


def find(model: Model, repository: Repository) -> Findings:
    """Find answers of a Python model that Triton refuses or waits for, and those that differ from the configuration."""
    del repository

    def look(source: SourceFile) -> Findings:
        execute = find_execute(source)
        if execute is not None:
            yield from _check_return(source, execute, is_decoupled=is_decoupled)
            yield from _check_kept(source, execute) if not is_decoupled else ()
            if model.message.HasField("dynamic_batching") and not is_decoupled:
                yield from _check_loop(source, execute)
        is_alone = all(path == source.path for path in source.path.parent.rglob("*.py"))
        if "get_response_sender" in source.words and is_alone:
            yield from _check_end(source)
        yield from _check_repeated(source, is_decoupled=is_decoupled)
        if not model.is_completed and not source.tests:
            yield from _check_outputs(source, model, is_alone=is_alone)

    if model.message is not None:
        is_decoupled = model.message.model_transaction_policy.decoupled
        yield from examine(model, look)


def _check_return(source: SourceFile, execute: Function, *, is_decoupled: bool) -> Findings:
    """Find an ``execute`` that returns nothing, without response senders, one response, or a list though it streams."""
    leaves = [node for node in walk(execute) if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom)]
    if is_decoupled:
        for node in leaves:
            is_list = isinstance(node, ast.Return) and node.value and isinstance(source.follow(node.value), _LISTS)
            if is_list and source.always_in(node, may_leave=True) is not None:
                what = "The model is decoupled, and the execute function must return None: every request fails."
                fix = "Send each response: request.get_response_sender().send(response, flags=...)"
                yield ANSWERS.at(source.at(node), what, f"{fix}, or remove model_transaction_policy from config.pbtxt.")
        return
    if "get_response_sender" in source.words:
        return
    if not any(node.value for node in leaves) and not isinstance(execute.body[-1], ast.Raise):
        what = "It returns nothing: Triton 24.10 never answers its requests."
        yield ANSWERS.at(source.at(execute), what, "End it with: return responses")
    for node in leaves:
        given = source.follow(node.value) if isinstance(node, ast.Return) and node.value else node
        match given:
            case ast.Subscript(value=items, slice=ast.Constant()):
                is_one = isinstance(source.follow(items), ast.List)
            case _:
                is_one = isinstance(given, ast.Call) and source.name(given.func) == _RESPONSE
        if is_one:
            what = "It returns a response in place of a list of one per request: every request fails."
            yield ANSWERS.at(source.at(node), what, "Append each response to a list, and return that.")


def _check_loop(source: SourceFile, execute: Function) -> Findings:
    """Find an ``execute`` that returns within its loop over the requests, or appends one response behind that loop."""
    loops = [node for node in walk(execute) if isinstance(node, ast.For | ast.While | ast.comprehension)]
    requests = [arg.arg for arg in execute.args.args[1:2]]
    what = "It answers one request of those that dynamic batching gives it: the others fail."
    for loop in loops if len(loops) > 1 else ():
        match getattr(loop, "body", [])[-1:]:
            case [ast.Return(value=ast.Name(id=name)) as last]:
                if any(source.name(call.func) == f"{name}.append" for call in source.calls if call in ast.walk(loop)):
                    yield ANSWERS.at(source.at(last), what, "Return behind the loop.")
    match loops:
        case [ast.For(iter=ast.Name(id=name)) as loop] if [name] == requests:
            leaves = next((node for node in loop.body if isinstance(node, ast.Return)), None)
            if leaves is not None and not any(isinstance(node, ast.Continue) for node in walk(loop)):
                yield ANSWERS.at(source.at(leaves), what, "Return behind the loop.")
            made = [call for call in source.calls if source.name(call.func) == _RESPONSE]
            behind = execute.body[execute.body.index(loop) + 1 :] if loop in execute.body else []
            if len(made) == 1 and any(made[0] in ast.walk(node) for node in behind):
                yield ANSWERS.at(source.at(made[0]), what, "Make each response within the loop over the requests.")


def _check_kept(source: SourceFile, execute: Function) -> Findings:
    """Find requests that ``continue`` leaves without a response, and a list of responses that is never emptied."""
    within = list(walk(execute))
    bound = {node.attr for node in within if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    appends = [c for c in within if isinstance(c, ast.Call) and getattr(c.func, "attr", "") in ("append", "extend")]
    for node in within:
        match node:
            case ast.Return(value=ast.Attribute(value=ast.Name(id="self"), attr=name) as kept) if name not in bound:
                if any(source.name(call.func) == f"{source.name(kept)}.append" for call in appends):
                    what = f"self.{name} keeps the responses of earlier calls: the second request gets two, and fails."
                    yield ANSWERS.at(source.at(node), what, "Make the list in execute: responses = []")
            case ast.Continue():
                loop, before = _find_loop(source, node)
                returned = [each.value for each in within if isinstance(each, ast.Return)]
                is_ours = isinstance(loop, ast.For) and source.is_passed(source.follow(loop.iter))
                names = [f"{value.id}.append" for value in returned if isinstance(value, ast.Name)]
                inside = [call for call in ast.walk(loop) if call in appends]
                is_made = any(isinstance(call, ast.Call) and source.name(call.func) in names for call in inside)
                if is_ours and is_made and not any(call in appends for each in before for call in ast.walk(each)):
                    what = "A request that comes to this continue gets no response: Triton refuses the whole batch."
                    yield ANSWERS.at(
                        source.at(node), what, "Append a response before it, such as one with a TritonError."
                    )


def _find_loop(source: SourceFile, node: ast.AST) -> tuple[ast.AST, list[ast.stmt]]:
    """Return the loop around a statement, and what that loop certainly runs before the statement."""
    before: list[ast.stmt] = []
    while True:
        above = source.parents[node]
        for block in (getattr(above, name, None) for name in ("body", "orelse", "handlers", "finalbody")):
            if isinstance(block, list) and node in block:
                before += [each for each in block[: block.index(node)] if not isinstance(each, ast.If)]
        if isinstance(above, ast.For | ast.While | Function | ast.Module):
            return above, before
        node = above


def _check_repeated(source: SourceFile, *, is_decoupled: bool) -> Findings:
    """Find senders that get several responses from a loop: of a model that is not decoupled, or each with the flag."""
    for call in source.calls if "get_response_sender" in source.words else ():
        if not isinstance(call.func, ast.Attribute) or argument(call, 0, "response") is None:
            continue
        made = source.follow(call.func.value)
        is_thread = not is_decoupled and isinstance(made, ast.arg) and "sender" in made.arg
        is_sender = isinstance(made, ast.Call) and getattr(made.func, "attr", "") == "get_response_sender"
        if call.func.attr != "send" or not (is_sender or is_thread):
            continue
        loop, _ = _find_loop(source, call)
        if is_thread:
            is_certain = source.always_in(call, may_leave=True, in_try=True) is not None
        else:
            is_certain = source.runs_in(call, may_leave=True, in_try=True) == "execute"
        if not is_certain or not isinstance(loop, ast.For | ast.While) or made in ast.walk(loop):
            continue
        if any(isinstance(node, ast.Break | ast.Return) for node in loop.body):
            continue
        if not is_decoupled:
            what = "It sends several responses, and the model is not decoupled: the client gets one, and waits."
            yield ANSWERS.at(source.at(call), what, "Add model_transaction_policy { decoupled: true } to config.pbtxt.")
        elif is_final(source, call):
            what = "Each response has the final flag: the client gets the first one alone."
            yield ANSWERS.at(source.at(call), what, "Send the flag by itself, behind the loop.")


def _check_end(source: SourceFile) -> Findings:
    """Find response senders that never get the final flag."""
    sends = [call for call in source.calls if isinstance(call.func, ast.Attribute) and call.func.attr == "send"]
    flags = [argument(call, 1, "flags") for call in sends]
    is_open = any(keyword.arg is None for call in sends for keyword in call.keywords)
    if sends and not is_open and all(each is None or is_literal(each, 0) for each in flags):
        what = "No answer has the final flag: a client waits for more for ever."
        fix = "End each request with: sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)"
        yield ANSWERS.at(source.at(sends[-1]), what, fix)


def _tensors(source: SourceFile) -> Iterator[ast.Call]:
    """Yield the tensors that are certainly for an answer, and not for a model that the code calls."""
    if "InferenceRequest" not in source.words:
        yield from (call for call in source.calls if source.name(call.func) in (_TENSOR, f"{_TENSOR}.from_dlpack"))
        return
    for call in source.calls:
        given = argument(call, 0, "output_tensors") if source.name(call.func) == _RESPONSE else None
        listed = source.follow(given) if given is not None else None
        for each in listed.elts if isinstance(listed, ast.List | ast.Tuple) else ():
            made = source.follow(each)
            if isinstance(made, ast.Call) and source.name(made.func) == _TENSOR:
                yield made


def _check_outputs(source: SourceFile, model: Model, *, is_alone: bool) -> Findings:
    """Find tensors of another type than declared, and a declared output in whose place another one is made."""
    states = model.message.sequence_batching.state
    dtypes = {tensor.name: tensor.dtype for tensor in model.outputs}
    known = {*dtypes, *(state.output_name for state in states)}
    known |= {name for batch in model.message.batch_output for name in batch.target_name}
    missing = [name for name in dtypes if name not in source.texts]
    named = [argument(call, 0, "") for call in source.calls if source.name(call.func).startswith(_TENSOR)]
    is_certain = is_alone and all(isinstance(name, ast.Constant) for name in named)
    for call in _tensors(source):
        match [source.follow(each) for each in call.args]:
            case [ast.Constant(value=str(name)), *_] if name not in known and missing and is_certain:
                what = f"It makes the output {name}, which {model.path.name} does not declare, and never {missing[0]}."
                yield OUTPUT.at(source.at(call), what, f"Declared: {', '.join(dtypes)}.")
            case [ast.Constant(value=str(name)), array] if name in dtypes:
                found, wanted = find_dtype(source, array), name_dtype(dtypes[name])
                if found not in ("", wanted, UNICODE) and wanted:
                    what = f"The output {name} is {found}, and {model.path.name} declares {dtypes[name]}."
                    yield TYPE.at(source.at(call), what, f"Make the array with dtype=np.{wanted}.")
