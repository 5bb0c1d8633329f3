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
from shoal.authoring.check.python.source import PB, SourceFile, argument, examine, is_literal
from shoal.authoring.check.python.types import UNICODE, find_dtype, is_torch, name_dtype

ARGUMENTS = Rule("wrong-arguments", Severity.ERROR)
ATTRIBUTE = Rule("unknown-attribute", Severity.ERROR)
TENSORS = Rule("called-tensor-unknown", Severity.ERROR)
CALL = Rule("wrong-call", Severity.ERROR)

_REQUEST = f"{PB}.InferenceRequest"
_SIGNATURES = {
    f"{PB}.Tensor": inspect.signature(lambda name, array, /: None),
    f"{PB}.Tensor.from_dlpack": inspect.signature(lambda name, array, /: None),
    f"{PB}.TritonError": inspect.signature(lambda message, code=None: None),
    f"{PB}.InferenceResponse": inspect.signature(lambda output_tensors=None, error=None, parameters=None: None),
    "sender.send": inspect.signature(lambda response=None, flags=0: None),
    "logger.log": inspect.signature(lambda message, level=None, /: None),
    **dict.fromkeys(
        ("logger.log_info", "logger.log_warn", "logger.log_error", "logger.log_verbose"),
        inspect.signature(lambda message, /: None),
    ),
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
    "logger": "log log_info log_warn log_error log_verbose INFO WARNING ERROR VERBOSE".split(),
    "pb_utils": """TRITONSERVER_MEMORY_CPU TRITONSERVER_MEMORY_GPU TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END TRITONSERVER_RESPONSE_COMPLETE_FINAL TRITONSERVER_REQUEST_RELEASE_ALL
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE""".split(),
}
# What Triton adds to pb_utils after it has imported model.py.
_ADDED = frozenset(
    """Tensor InferenceRequest InferenceResponse TritonError Logger Metric MetricFamily get_model_dir load_model
    unload_model is_model_ready PreferredMemory""".split()
)
_METHODS = ("as_numpy", "is_cpu", "has_error", "is_cancelled")
_USES = _ADDED.union(_METHODS, {"parameters"})
_MADE = {_REQUEST: "request", f"{PB}.InferenceResponse": "response"} | dict.fromkeys(
    (f"{PB}.Tensor", f"{PB}.get_input_tensor_by_name", f"{PB}.get_output_tensor_by_name"), "tensor"
)


def find(model: Model, repository: Repository) -> Findings:
    """Find calls, attributes and names of tensors with which the code of a Python model certainly fails."""

    def look(source: SourceFile) -> Findings:
        for node in source.nodes:
            if isinstance(node, ast.Call):
                yield from _check_call(source, node)
                yield from _check_tensors(source, node, repository)
                yield from _check_exec(source, node, repository)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                yield from _check_attribute(source, node)
                yield from _check_use(source, node) if node.attr in _USES else ()
            elif isinstance(node, ast.BinOp | ast.Subscript):
                yield from _check_operand(source, node)
            elif isinstance(node, ast.ImportFrom) and node.module == PB:
                yield from _check_import(source, node)

    if model.message is not None:
        yield from examine(model, look)


def _check_call(source: SourceFile, call: ast.Call) -> Findings:
    match call.func:
        case ast.Attribute(attr="send", value=value) if _kind(source, value) == "response sender":
            name = "sender.send"
        case ast.Attribute(attr=attr, value=value) if _is_logger(source, value):
            name = f"logger.{attr}"
        case function:
            name = source.name(function)
    form = _SIGNATURES.get(name)
    given = {keyword.arg or "": keyword.value for keyword in call.keywords}
    is_open = "" in given or any(isinstance(each, ast.Starred) for each in call.args)
    if form is None or is_open or (name == _REQUEST and call.args) or source.tests:
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
        if kind is ast.Call and name == f"{PB}.Tensor.from_dlpack":
            continue  # tensors have __dlpack__
        if name == f"{PB}.Tensor" and argument_name == "array" and find_dtype(source, value) == UNICODE:
            what = "NumPy dtype is not supported: the array has texts, and no dtype."
            yield ARGUMENTS.at(source.at(call), what, "Make it with dtype=np.object_.")
        is_tensor = argument_name == "response" and _kind(source, value) == "tensor"
        if kind is not None and wanted is not None and (is_tensor or not issubclass(kind, wanted)):
            what = f"{shown}() does not take {ast.unparse(value)[:60]} as {argument_name}: incompatible arguments."
            yield ARGUMENTS.at(source.at(call), what, fix)


def _literal(source: SourceFile, node: ast.AST) -> type | None:
    """Return the type of a literal, or ``ast.Call`` for an object of pb_utils or torch; None if unknown."""
    match node:
        case ast.Constant(value=str() | int() | float() as value):
            return type(value)
        case ast.JoinedStr():
            return str
        case ast.List() | ast.Tuple() | ast.ListComp():
            return list
        case ast.Dict() | ast.DictComp():
            return dict
        case ast.Call() if source.name(node.func) in _MADE or is_torch(source, node):
            return ast.Call
        case ast.BinOp() if is_torch(source, node):
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


def _is_logger(source: SourceFile, node: ast.AST) -> bool:
    return "Logger" in source.words and source.name(source.follow(node)) == f"{PB}.Logger"


def _check_attribute(source: SourceFile, node: ast.Attribute) -> Findings:
    is_constant = source.name(node).startswith(f"{PB}.TRITONSERVER_")
    kind = "pb_utils" if is_constant else "logger" if _is_logger(source, node.value) else _kind(source, node.value)
    known = _ATTRIBUTES.get(kind, [node.attr])
    if node.attr in known or node.attr.startswith("__"):
        return
    close = difflib.get_close_matches(node.attr, known, 1)
    fix = f"Write {close[0]}." if close else f"Known: {', '.join(known)}."
    if (kind, node.attr) == ("request", "send"):
        fix = "Send through request.get_response_sender()."
    yield ATTRIBUTE.at(source.at(node), f"{'' if is_constant else 'A '}{kind} has no attribute {node.attr}.", fix)


def _check_use(source: SourceFile, node: ast.Attribute) -> Findings:
    """Find methods that are tested and not called, and what pb_utils does not have while ``model.py`` is imported."""
    above = source.parents[node]
    is_part = isinstance(above, ast.Call) and getattr(source.parents[above], "attr", "get") in ("get", "items", "keys")
    is_part = is_part and isinstance(source.parents[above], ast.Attribute | ast.Subscript)
    if node.attr == "parameters" and is_part and _kind(source, node.value) == "request":
        what = "The parameters of a request are a text, of which this takes a part by name."
        yield ATTRIBUTE.at(source.at(node), what, "Parse it first: json.loads(request.parameters())")
    is_sender = node.attr == "is_cancelled" and "get_response_sender" in source.words
    is_method = node.attr in _METHODS and (_kind(source, node.value) or is_sender)
    is_used = isinstance(above, ast.If | ast.While | ast.BoolOp | ast.UnaryOp | ast.BinOp | ast.Subscript)
    if isinstance(above, ast.Call) and source.name(above.func) == "json.loads" and node.attr == "parameters":
        is_method = is_used = _kind(source, node.value) == "request"
    if is_method and (is_used or (isinstance(above, ast.Assign) and _is_object(source, node))):
        what = f"{node.attr} is a method, which this does not call."
        yield ATTRIBUTE.at(source.at(node), what, f"Write {ast.unparse(node)}().")
    if source.name(node).removeprefix(f"{PB}.") in _ADDED and source.function_of(node) is source.tree:
        what = f"module '{PB}' has no attribute '{node.attr}' while model.py is imported: Triton adds it later."
        yield ATTRIBUTE.at(source.at(node), what, "Use it in initialize.")


def _is_object(source: SourceFile, node: ast.AST) -> bool:
    """Whether what ``node`` gives has its attributes or parts read."""
    reads = (each.value for each in source.nodes if isinstance(each, ast.Attribute | ast.Subscript))
    return any(source.name(read) and source.follow(read) is node for read in reads)


def _check_operand(source: SourceFile, node: ast.BinOp | ast.Subscript) -> Findings:
    """Find a tensor of pb_utils that is used like an array."""
    operands = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.value]
    if any(_kind(source, each) == "tensor" for each in operands):
        what = "A tensor is no array: neither arithmetic nor an index takes it."
        yield ATTRIBUTE.at(source.at(node), what, "Write as_numpy() behind it.")


def _check_import(source: SourceFile, node: ast.ImportFrom) -> Findings:
    """Find classes that Triton adds to pb_utils only after it has imported ``model.py``."""
    added = [alias.name for alias in node.names if alias.name in _ADDED]
    if added and source.function_of(node) is source.tree:
        what = f"cannot import name '{added[0]}': Triton adds it after model.py is imported."
        yield ATTRIBUTE.at(source.at(node), what, f"Write pb_utils.{added[0]} where it is used.")


def _find_names(source: SourceFile, call: ast.AST) -> list[str]:
    """Return the names of the models that an ``InferenceRequest`` may go to: a literal, or what a table holds."""
    given = (
        argument(call, 4, "model_name") if isinstance(call, ast.Call) and source.name(call.func) == _REQUEST else None
    )
    name = source.follow(given) if given is not None else None
    if isinstance(name, ast.arg) and len(passed := source.find_given(name)) == 1 and passed[0] is not None:
        name = source.follow(passed[0])
    if isinstance(name, ast.Subscript) and isinstance(table := source.follow(name.value), ast.Dict):
        return [v.value for v in table.values if isinstance(v, ast.Constant) and isinstance(v.value, str)]
    return [name.value] if isinstance(name, ast.Constant) and isinstance(name.value, str) else []


def _called(source: SourceFile, call: ast.AST, repository: Repository) -> list[Model]:
    """Return the models of the repository that an ``InferenceRequest`` may go to."""
    found = [repository.known.get(name) for name in _find_names(source, call)]
    return [model for model in found if model is not None and model.message is not None]


def _is_one(source: SourceFile, bound: ast.Assign) -> bool:
    """Whether what ``bound`` assigns is read as a response."""
    first = [*(node.value for node in source.nodes if isinstance(node, ast.Attribute) and node.attr == "has_error")]
    first += [c.args[0] for c in source.calls if source.name(c.func) == f"{PB}.get_output_tensor_by_name" and c.args]
    return any(source.follow(each) is bound.value for each in first)


def _check_exec(source: SourceFile, call: ast.Call, repository: Repository) -> Findings:
    """Find a decoupled model that is called like others, and an ``async_exec`` that is not awaited."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in ("exec", "async_exec"):
        return
    above = source.parents[call]
    if is_literal(argument(call, 0, "decoupled"), True) and isinstance(above, ast.Assign) and _is_one(source, above):
        what = "exec(decoupled=True) gives an iterator over responses, and this is used as one response."
        yield CALL.at(source.at(call), what, "Write: for answer in request.exec(decoupled=True)")
    if call.func.attr == "async_exec" and source.awaits and isinstance(above, ast.Assign) and _is_one(source, above):
        yield CALL.at(source.at(call), "It is read as a response, and not awaited.", "Write await before it.")
    made = source.follow(call.func.value)
    if not isinstance(made, ast.Call) or source.name(made.func) != _REQUEST:
        return
    called = next(iter(_called(source, made, repository)), None)
    is_stream = called is not None and repository.is_decoupled(called.name)
    if called is not None and is_stream and is_literal(argument(call, 0, "decoupled") or ast.Constant(False), False):
        what = f"Model {called.name} is decoupled: it cannot be called by {call.func.attr}()."
        yield CALL.at(source.at(call), what, "Write: for answer in request.exec(decoupled=True)")
    if call.func.attr == "async_exec" and not source.awaits:
        yield CALL.at(
            source.at(call), "Its answer is never awaited.", "Write await before it, in an async def execute."
        )


def _check_tensors(source: SourceFile, call: ast.Call, repository: Repository) -> Findings:
    """Find tensors that the models, which the code calls by name, do not have, and models that do not exist."""
    for name in _find_names(source, call):
        close = difflib.get_close_matches(name, repository.known, 1, 0.8)
        if name not in repository.known and close and not name.startswith(close[0]):  # else perhaps a copy of it
            yield CALL.at(source.at(call), f"It calls {name}, and there is no such model.", f"Write {close[0]}.")
    for called in _called(source, call, repository):
        if not called.is_completed and not source.tests:
            yield from _check_called(source, call, called)


def _check_called(source: SourceFile, call: ast.Call, called: Model) -> Findings:
    match argument(call, 5, "model_version"):
        case ast.Constant(value=int(version)) if version not in called.served_versions:
            served = ", ".join(map(str, called.served_versions)) or "none"
            what = f"Version {version} of {called.name} is not served."
            yield CALL.at(source.at(call), what, f"Served by its version_policy: {served}.")
    sequences = called.message.sequence_batching
    keys = {keyword.arg for keyword in call.keywords}
    is_sequence = called.message.HasField("sequence_batching") and not sequences.iterative_sequence
    if is_sequence and "correlation_id" not in keys and None not in keys:
        what = f"{called.name} has sequences, and the request has no correlation_id."
        yield CALL.at(source.at(call), what, "Give it one, and the flags of the sequence's start and end.")
    dtypes = {tensor.name: tensor.dtype for tensor in called.inputs}
    inputs = [*called.inputs, *sequences.control_input]
    for kind, names, known in (
        ("input", argument(call, 2, "inputs"), [*(t.name for t in inputs), *(s.input_name for s in sequences.state)]),
        (
            "output",
            argument(call, 3, "requested_output_names"),
            [*(t.name for t in called.outputs), *(s.output_name for s in sequences.state)],
        ),
    ):
        listed = source.follow(names) if names is not None else None
        for each in listed.elts if isinstance(listed, ast.List) else ():
            made = source.follow(each)
            match argument(made, 0, "") if isinstance(made, ast.Call) and _kind(source, made) == "tensor" else made:
                case ast.Constant(value=str(tensor)) if tensor not in known:
                    what = f"unexpected inference {kind} '{tensor}' for model '{called.name}'."
                    yield TENSORS.at(source.at(call), what, f"Its {kind}s are: {', '.join(known)}.")
                case ast.Constant(value=str(tensor)) if isinstance(made, ast.Call) and len(made.args) > 1:
                    found, wanted = find_dtype(source, made.args[1]), name_dtype(dtypes.get(tensor, ""))
                    if found and wanted and found != wanted:
                        what = f"It calls {called.name} with {tensor} as {found}, which takes {dtypes[tensor]}."
                        yield CALL.at(source.at(made), what, f"Make the array with dtype=np.{wanted}.")
