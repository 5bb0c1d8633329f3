"""Rules for a ``model.py`` that uses the Python backend's objects: arguments, attributes, and tensors of called models.

The objects are those of python_backend, src/pb_stub.cc, with what later releases than 24.10 have added.
"""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Mapping

from shoal.authoring.check.findings import Findings, Rule, Severity
from shoal.authoring.check.models import Model, Repository
from shoal.authoring.check.python.source import PB, SourceFile, argument, examine

ARGUMENTS = Rule("wrong-arguments", Severity.ERROR)
ATTRIBUTE = Rule("unknown-attribute", Severity.ERROR)
TENSORS = Rule("called-tensor-unknown", Severity.ERROR)

_REQUEST = f"{PB}.InferenceRequest"
_SIGNATURES = {
    f"{PB}.Tensor": inspect.signature(lambda name, array, /: None),
    f"{PB}.Tensor.from_dlpack": inspect.signature(lambda name, array, /: None),
    f"{PB}.TritonError": inspect.signature(lambda message, code=None: None),
    f"{PB}.InferenceResponse": inspect.signature(lambda output_tensors=None, error=None, parameters=None: None),
    "sender.send": inspect.signature(lambda response=None, flags=0: None),
    _REQUEST: inspect.signature(
        lambda *, inputs, requested_output_names, model_name, request_id="", correlation_id=0, model_version=-1,
        flags=0, timeout=0, preferred_memory=None, trace=None, parameters=None: None
    ),
}  # fmt: skip
# Argument: the type of literals that it takes, where ast.Call is for objects of pb_utils, and bytes for arrays.
_TAKES: Mapping[str, type] = {
    **dict.fromkeys(("name", "message", "model_name", "request_id"), str),
    **dict.fromkeys(("model_version", "flags", "timeout"), int),
    **dict.fromkeys(("output_tensors", "inputs", "requested_output_names"), list),
    **dict.fromkeys(("code", "error", "response", "preferred_memory", "trace"), ast.Call),
    "array": bytes,
}
_ATTRIBUTES = {
    "request": """inputs request_id correlation_id requested_output_names flags set_flags timeout parameters trace exec
    async_exec get_response_sender is_cancelled set_release_flags""".split(),
    "tensor": "name as_numpy triton_dtype to_dlpack from_dlpack is_cpu shape".split(),
    "response": "output_tensors has_error error parameters".split(),
    "response sender": "send is_cancelled".split(),
    "pb_utils": """TRITONSERVER_MEMORY_CPU TRITONSERVER_MEMORY_GPU TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END TRITONSERVER_RESPONSE_COMPLETE_FINAL TRITONSERVER_REQUEST_RELEASE_ALL
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE""".split(),
}
_MADE = {_REQUEST: "request", f"{PB}.InferenceResponse": "response"} | dict.fromkeys(
    (f"{PB}.Tensor", f"{PB}.get_input_tensor_by_name", f"{PB}.get_output_tensor_by_name"), "tensor"
)


def find(model: Model, repository: Repository) -> Findings:
    """Find calls, attributes and names of tensors with which the code of a Python model certainly fails."""

    def look(source: SourceFile) -> Findings:
        for node in source.nodes:
            if isinstance(node, ast.Call):
                yield from _check_call(source, node)
                if source.name(node.func) == _REQUEST:
                    yield from _check_tensors(source, node, repository)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                yield from _check_attribute(source, node)

    if model.message is not None:
        yield from examine(model, look)


def _check_call(source: SourceFile, call: ast.Call) -> Findings:
    match call.func:
        case ast.Attribute(attr="send", value=value) if _kind(source, value) == "response sender":
            name = "sender.send"
        case function:
            name = source.name(function)
    form = _SIGNATURES.get(name)
    given = {keyword.arg or "": keyword.value for keyword in call.keywords}
    is_open = "" in given or any(isinstance(each, ast.Starred) for each in call.args)
    if form is None or is_open or (name == _REQUEST and call.args) or "assertRaises" in source.words:
        return
    shown = name.replace(PB, "pb_utils")
    fix = f"It takes {shown}{form}.".replace("/, ", "").replace(", /", "")
    try:
        bound = form.bind(*call.args, **given)
    except TypeError as error:
        yield ARGUMENTS.at(source.at(call), f"{shown}(): {error}.", fix)
        return
    for argument_name, value in bound.arguments.items():
        kind, wanted = _literal(source, source.follow(value)), _TAKES.get(argument_name)
        if kind is not None and wanted is not None and not issubclass(kind, wanted):
            what = f"{shown}() does not take {ast.unparse(value)[:60]} as {argument_name}: incompatible arguments."
            yield ARGUMENTS.at(source.at(call), what, fix)


def _literal(source: SourceFile, node: ast.AST) -> type | None:
    """Return the type of a literal, or ``ast.Call`` for an object of pb_utils; None if unknown."""
    match node:
        case ast.Constant(value=str() | int() | float() as value):
            return type(value)
        case ast.JoinedStr():
            return str
        case ast.List() | ast.Tuple() | ast.ListComp():
            return list
        case ast.Call() if source.name(node.func) in _MADE:
            return ast.Call
    return None


def _kind(source: SourceFile, node: ast.AST) -> str:
    """Return which of the backend's objects an expression is certainly, such as ``request``; empty if unknown."""
    match source.follow(node):
        case ast.Call(func=ast.Attribute(attr="get_response_sender")):
            return "response sender"
        case ast.Call(func=made):
            return _MADE.get(source.name(made), "")
        case ast.For(iter=iterable) as loop if source.is_passed(source.follow(iterable)):
            return "request" if getattr(source.function_of(loop), "name", "") == "execute" else ""
    return ""


def _check_attribute(source: SourceFile, node: ast.Attribute) -> Findings:
    is_constant = source.name(node).startswith(f"{PB}.TRITONSERVER_")
    kind = "pb_utils" if is_constant else _kind(source, node.value)
    known = _ATTRIBUTES.get(kind, [node.attr])
    if node.attr in known or node.attr.startswith("__"):
        return
    close = difflib.get_close_matches(node.attr, known, 1)
    fix = f"Write {close[0]}." if close else f"Known: {', '.join(known)}."
    if (kind, node.attr) == ("request", "send"):
        fix = "Send through request.get_response_sender()."
    yield ATTRIBUTE.at(source.at(node), f"{'' if is_constant else 'A '}{kind} has no attribute {node.attr}.", fix)


def _check_tensors(source: SourceFile, call: ast.Call, repository: Repository) -> Findings:
    """Find tensors that the model, which the code calls by its name, does not have."""
    match argument(call, 4, "model_name"):
        case ast.Constant(value=str(name)) if name in repository.known:
            called = repository.known[name]
        case _:
            return
    if called.message is None or called.is_completed:
        return
    sequences = called.message.sequence_batching
    inputs = [*called.inputs, *sequences.control_input]
    for kind, names, known in (
        ("input", argument(call, 2, "inputs"), [*(t.name for t in inputs), *(s.input_name for s in sequences.state)]),
        (
            "output",
            argument(call, 3, "requested_output_names"),
            [*(t.name for t in called.outputs), *(s.output_name for s in sequences.state)],
        ),
    ):
        for each in names.elts if isinstance(names, ast.List) else ():
            match argument(each, 0, "") if isinstance(each, ast.Call) and _kind(source, each) == "tensor" else each:
                case ast.Constant(value=str(tensor)) if tensor not in known:
                    what = f"unexpected inference {kind} '{tensor}' for model '{name}'."
                    yield TENSORS.at(source.at(call), what, f"Its {kind}s are: {', '.join(known)}.")
