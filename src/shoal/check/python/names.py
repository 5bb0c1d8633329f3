"""The tensors that a ``model.py`` names, compared with those that its configuration declares.

Only what is certain counts: names that are string literals, in code that runs for every request. A ``model.py`` may
serve several configurations, and test which of them it has.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import lru_cache

from shoal.check.findings import Findings, Rule, Severity
from shoal.check.models import Model, Repository
from shoal.check.python.source import PB, Function, Source, argument, examine, walk_within

READS = Rule("reads-unknown-input", Severity.WARNING)
WRITES = Rule("writes-unknown-output", Severity.WARNING)
NEVER_WRITTEN = Rule("output-never-written", Severity.WARNING)
CONFIG = Rule("wrong-config-name", Severity.ERROR, is_core=True)
RULES = (READS, WRITES, NEVER_WRITTEN, CONFIG)

_TENSORS = (f"{PB}.Tensor", f"{PB}.Tensor.from_dlpack")
_ENTRY_POINTS = ("initialize", "execute")
_CONDITIONS = ast.If | ast.IfExp | ast.While | ast.BoolOp | ast.Try | ast.TryStar | ast.match_case | ast.Lambda


def find(model: Model, repository: Repository) -> Findings:
    """Compare what a Python model reads and writes with what it declares."""
    del repository
    if model.message is not None and not model.is_completed:
        yield from examine(model, lambda source: _look(source, model))


def _look(source: Source, model: Model) -> Findings:
    states = model.message.sequence_batching
    inputs = [*(t.name for t in model.inputs), *(c.name for c in states.control_input)]
    inputs += [*(s.input_name for s in states.state), *(n for b in model.message.batch_input for n in b.target_name)]
    outputs = [*(t.name for t in model.outputs), *(s.output_name for s in states.state)]
    constants = _constants(source)
    for call in source.calls:
        match source.name(call.func).removeprefix(f"{PB}."):
            case "get_input_tensor_by_name":
                yield from _check_read(source, call, READS, "reads the input", constants, inputs, model)
            case "get_input_config_by_name":
                yield from _check_read(source, call, CONFIG, "asks for", constants, inputs, model)
            case "get_output_config_by_name":
                yield from _check_read(source, call, CONFIG, "asks for", constants, outputs, model)
    yield from _check_written(source, constants, outputs, model)


def _check_read(
    source: Source, call: ast.Call, rule: Rule, what: str, constants: Mapping[str, str], known: list[str], model: Model
) -> Findings:
    """Find a call that returns None, whose value is used like any other."""
    name = _text(argument(call, 1, "name"), constants)
    if (
        name is not None
        and name not in known
        and _fails_on_none(source, call)
        and _is_certain(source, call, name, known)
    ):
        shown = f"Declared: {', '.join(known)}." if known else "Declare it."
        yield rule.at(source.at(call), f"It {what} {name}, which {model.path.name} does not declare.", shown)


def _check_written(source: Source, constants: Mapping[str, str], outputs: list[str], model: Model) -> Findings:
    if "InferenceRequest" in source.words:
        return  # a tensor may be an input of another model
    made = [call for call in source.calls if source.name(call.func) in _TENSORS]
    written = [_text(argument(call, 0, "name"), constants) for call in made]
    has_unknown = False
    for call, name in zip(made, written, strict=True):
        if name is not None and name not in outputs and _is_certain(source, call, name, outputs):
            has_unknown = True
            what = f"It writes the output {name}, which {model.path.name} does not declare."
            yield WRITES.at(source.at(call), what, f"Declared: {', '.join(outputs)}." if outputs else "Declare it.")
    # An unknown name is most likely meant to be that of an output that is never written: one finding is enough.
    if has_unknown or not made or None in written or not _are_all_made_here(source):
        return
    for index, tensor in enumerate(model.outputs):
        if tensor.name not in written:
            yield NEVER_WRITTEN.at(
                model.at("output", index, "name"),
                f"{source.path.relative_to(model.folder)} never writes the output {tensor.name}.",
                "Write it, or remove it here.",
            )


def _constants(source: Source) -> dict[str, str]:
    """Names, and attributes of ``self``, that the file binds once, to a string."""
    bindings: Counter[str] = Counter()
    texts: dict[str, str] = {}
    for node in source.nodes:
        if isinstance(node, ast.arg):
            bindings[node.arg] += 1
        elif isinstance(node, ast.alias):
            bindings[node.asname or node.name] += 1
        elif isinstance(node, ast.Name | ast.Attribute) and not isinstance(node.ctx, ast.Load):
            bindings[_key(node)] += 1
        match node:
            case ast.Assign(targets=[ast.Name() | ast.Attribute() as target], value=ast.Constant(value=str(text))):
                texts[_key(target)] = text
    return {name: text for name, text in texts.items() if bindings[name] == 1}


def _key(node: ast.Name | ast.Attribute) -> str:
    # A constant of a class is a name where it is bound, and an attribute where it is read.
    return node.id if isinstance(node, ast.Name) else node.attr


def _text(node: ast.expr | None, constants: Mapping[str, str]) -> str | None:
    """The text that ``node`` stands for; None where that is open."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name() | ast.Attribute(value=ast.Name(id="self")):
            return constants.get(_key(node))
    return None


@lru_cache(maxsize=64)
def _survey(function: Function | ast.Module) -> tuple[Mapping[str, list[ast.AST]], int]:
    """The places where a function reads each name, and the line of its first early exit."""
    reads: dict[str, list[ast.AST]] = defaultdict(list)
    first = sys.maxsize
    for node in walk_within(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            reads[node.id].append(node)
        elif isinstance(node, ast.Return | ast.Raise | ast.Continue | ast.Break):
            first = min(first, node.lineno)
    return reads, first


def _fails_on_none(source: Source, call: ast.Call) -> bool:
    """Whether the code fails if ``call`` returns None: it only takes attributes or items of the result."""
    uses: list[ast.AST] = [call]
    match source.parents[call]:
        case ast.Assign(targets=[ast.Name(id=name)]):
            uses = _survey(source.function_of(call))[0].get(name, [])
    return bool(uses) and all(isinstance(source.parents[use], ast.Attribute | ast.Subscript) for use in uses)


def _is_certain(source: Source, call: ast.Call, name: str, known: list[str]) -> bool:
    """Whether ``call`` runs in each configuration: without a test around it or an early exit before it.

    Which functions run is known of those that Triton calls. In others only a misspelt name counts: one with the
    letters of a declared one, in another order or case.
    """
    function = source.function_of(call)
    if _survey(function)[1] < call.lineno:
        return False
    around: ast.AST = call
    while around is not function:
        around = source.parents[around]
        if isinstance(around, _CONDITIONS) or any(part.ifs for part in getattr(around, "generators", ())):
            return False
    is_entry_point = any(source.functions.get(entry) is function for entry in _ENTRY_POINTS)
    return is_entry_point or sorted(name.lower()) in [sorted(other.lower()) for other in known]


def _are_all_made_here(source: Source) -> bool:
    """Whether each tensor of each response is made by a call in this file."""
    bound: dict[str, list[ast.expr]] = defaultdict(list)
    for node in source.nodes:
        match node:
            case ast.Assign(targets=targets):
                for target in targets:
                    if isinstance(target, ast.Name):
                        bound[target.id].append(node.value)
            case ast.AugAssign(target=ast.Name(id=name)):
                bound[name].append(node.value)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[element]):
                bound[name].append(element)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name))):  # it may change a list in another way
                bound[name].append(node)
    seen: set[str] = set()

    def is_made_here(node: ast.expr) -> bool:
        match node:
            case ast.Name(id=name) if name in seen:
                return True  # decided already; where it is not made here, nothing else matters
            case ast.Name(id=name):
                seen.add(name)
                return bool(bound[name]) and all(map(is_made_here, bound[name]))
            case ast.List() | ast.Tuple():
                return all(map(is_made_here, node.elts))
        return isinstance(node, ast.Call) and source.name(node.func) in _TENSORS

    for call in source.calls:
        if source.name(call.func) == f"{PB}.InferenceResponse":
            given = argument(call, 0, "output_tensors")
            is_hidden = any(keyword.arg is None for keyword in call.keywords) or (call.args and given is None)
            if is_hidden or (given is not None and not is_made_here(given)):
                return False
    return True
