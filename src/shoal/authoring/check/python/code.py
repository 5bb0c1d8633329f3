"""Rules for the code of a ``model.py``: class and methods, tensor names, DLPack capsules, and text files."""

from __future__ import annotations

import ast
import difflib
import re
import sys
from collections.abc import Mapping

import shoal
from shoal.authoring.check.findings import Findings, Place, Rule, Severity
from shoal.authoring.check.models import Model, Repository
from shoal.authoring.check.python.source import (
    CLASS,
    PB,
    Function,
    SourceFile,
    argument,
    examine,
    find_methods,
    is_literal,
    keeps_signature,
    parse,
    served_sources,
    walk_within,
)
from shoal.authoring.environment.stub import parse_version
from shoal.authoring.vendoring import IMPORT_FIX, find_unknown
from shoal.system.files import read_bytes

SYNTAX = Rule("model-py-syntax", Severity.ERROR, is_core=True)
NO_CLASS = Rule("no-model-class", Severity.ERROR, is_core=True)
SIGNATURE = Rule("wrong-signature", Severity.ERROR, is_core=True)
CAPSULE = Rule("dlpack-capsule", Severity.WARNING)
ASCII = Rule("text-opened-as-ascii", Severity.WARNING)
UNKNOWN = Rule("import-not-in-shoal", Severity.ERROR)
READS = Rule("reads-unknown-input", Severity.ERROR)
OPTIONAL = Rule("optional-input-read", Severity.WARNING)
CONFIG = Rule("wrong-config-name", Severity.ERROR, is_core=True)

# Syntax node: the first Python with it.
_FIRST = {"Match": (3, 10), "TryStar": (3, 11), "TypeAlias": (3, 12)}
# Method: number of arguments that Triton passes, and the right signature.
_CALLS = {
    "__init__": (0, "__init__(self)"),
    "initialize": (1, "initialize(self, args)"),
    "execute": (1, "execute(self, requests)"),
    "is_ready": (0, "is_ready(self)"),
    "auto_complete_config": (1, "@staticmethod auto_complete_config(auto_complete_model_config)"),
}
_CAPSULES = frozenset({"to_dlpack", "toDlpack", "toDLPack", "__dlpack__"})


def find(model: Model, repository: Repository) -> Findings:
    """Find mistakes in the code of a Python model."""
    target = repository.target if not model.may_bring_python else None
    python = parse_version(target.python)[:2] if target else ()
    for path, text in served_sources(model):
        yield from _check_syntax(Place(path), text, python)
        if "shoal" in text and not (path.parent / "shoal").is_dir():  # the package that is installed, or a copy of it
            for line, name in find_unknown(path):
                yield UNKNOWN.at(Place(path, line), f"shoal {shoal.__version__} has no {name}.", f"{IMPORT_FIX}.")

    def look(source: SourceFile) -> Findings:
        found = [node for node in source.nodes if isinstance(node, Function | ast.ClassDef) and node.name == CLASS]
        if not found:
            yield from _check_missing(source)
        elif len(found) == 1 and isinstance(found[0], ast.ClassDef):
            yield from _check_methods(source, found[0], is_fixed=model.is_fixed)
        yield from _check_capsules(source)
        yield from _check_opens(source)
        for node in source.nodes if python else ():
            if (first := _FIRST.get(type(node).__name__, python)) > python:
                what = f"Python {target and target.python} of the target cannot parse it: {type(node).__name__}."
                yield SYNTAX.at(source.at(node), what, f"Python {first[0]}.{first[1]} can. Write it otherwise.")
        if model.message is not None and not model.is_completed:
            yield from _check_names(source, model)

    yield from examine(model, look)


def _check_syntax(place: Place, text: str, python: tuple[int, ...]) -> Findings:
    found = parse(text)
    if isinstance(found, ast.Module) and "�" in text:
        try:  # the text has replacement characters: the file declares another encoding, or is invalid
            ast.parse(read_bytes(place.path))
        except SyntaxError as error:
            found = error
        except (OSError, ValueError, RecursionError, MemoryError):
            return
    if isinstance(found, SyntaxError) and not (_may_be_newer(found) and (not python or python > sys.version_info[:2])):
        shown = (found.text or "").strip()[:80]
        reason = found.msg.partition("; use sys.")[0]
        yield SYNTAX.at(
            Place(place.path, found.lineno or 0),
            f"Python cannot parse it: {reason}{f'; the line is: {shown}' if shown else ''}.",
            "Fix that line; `python -m py_compile model.py` shows the next one.",
        )


def _may_be_newer(error: SyntaxError) -> bool:
    """Whether a newer Python may accept the line of a syntax error, for its nested f-string or its type parameters."""
    line = error.text or ""
    is_new = re.match(r"\s*(type\s+\w[^=]*=|(async\s+)?(def|class)\s+\w+\s*\[)", line)
    return (bool(is_new) or error.msg.startswith("f-string")) and sys.version_info < (3, 12)


def _check_missing(source: SourceFile) -> Findings:
    """Find code that certainly does not define, import or assign the class ``TritonPythonModel``."""
    is_made = source.words & {CLASS, "*", "exec", "globals", "setattr", "__getattr__"}
    if is_made or any(is_literal(node, CLASS) for node in source.nodes):
        return
    classes = [node for node in source.tree.body if isinstance(node, ast.ClassDef)]
    alike = [owner for owner in classes if any(getattr(node, "name", "") == "execute" for node in owner.body)]
    if len(alike) == 1:
        yield NO_CLASS.at(
            source.at(alike[0]),
            f"It defines no {CLASS}; the class with an execute is {alike[0].name}.",
            f"Name it {CLASS}, or end the file with: {CLASS} = {alike[0].name}",
        )
    else:
        yield NO_CLASS.at(Place(source.path), f"It defines no {CLASS}.", f"Write a class {CLASS} with an execute.")


def _check_methods(source: SourceFile, owner: ast.ClassDef, *, is_fixed: bool) -> Findings:
    methods, lacks_execute = find_methods(source, owner)
    if is_fixed:  # the server never calls it
        methods.pop("auto_complete_config", None)
    for name, (given, form) in _CALLS.items():
        method = methods.get(name)
        if method is not None and not _is_callable(source, method, given, on_class=name == "auto_complete_config"):
            wanted = f"with {given} argument{'s'[: given != 1]}" if given else "without arguments"
            what = f"Triton calls {name} {wanted}, which {name}({ast.unparse(method.args)}) does not take."
            yield SIGNATURE.at(source.at(method), what, f"Write {form}.")
    yield from _check_misspelt(source, methods) if not owner.bases else ()
    initialize, execute = methods.get("initialize"), methods.get("execute")
    if isinstance(initialize, ast.AsyncFunctionDef):
        yield SIGNATURE.at(source.at(initialize), "Triton does not await initialize: it never runs.", "Write def.")
    if lacks_execute:
        what = f"{owner.name} has no execute: it loads, but every request fails."
        yield SIGNATURE.at(source.at(owner), what, f"Write {_CALLS['execute'][1]}.")
    if execute is None:
        return
    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in walk_within(execute)):
        what = "It yields, so Triton gets a generator in place of a list: every request fails."
        yield SIGNATURE.at(source.at(execute), what, "Return a list, or send each part through a response sender.")


def _check_misspelt(source: SourceFile, methods: Mapping[str, Function]) -> Findings:
    """Find a method whose name resembles that of one that Triton calls, and that nothing calls."""
    for name, method in methods.items():
        close = difflib.get_close_matches(name.lower(), ("initialize", "execute", "finalize"), 1, 0.8)
        if close and name not in source.words and close[0] not in methods:
            what = f"Triton calls {close[0]}, and nothing calls {name}."
            yield SIGNATURE.at(source.at(method), what, f"Name it {close[0]}.")


def _is_callable(source: SourceFile, method: Function, given: int, *, on_class: bool) -> bool:
    """Whether a method takes the ``given`` number of arguments; true if an unknown decorator may change its signature.

    ``on_class``: Triton calls the method on the class, not on an instance.
    """
    kinds = [source.name(decorator) for decorator in method.decorator_list]
    is_bound = not on_class
    if kinds == ["staticmethod"]:
        is_bound = False
    elif kinds == ["classmethod"]:
        is_bound = True
    elif not keeps_signature(source, method):
        return True
    args = method.args
    most, given = len(args.posonlyargs) + len(args.args), given + is_bound
    if any(default is None for default in args.kw_defaults):
        return False
    return most - len(args.defaults) <= given and (given <= most or args.vararg is not None)


def _check_capsules(source: SourceFile) -> Findings:
    for call in source.calls:
        given = argument(call, 1, "tensor") if source.name(call.func) == f"{PB}.Tensor.from_dlpack" else None
        if given is None or not _is_capsule(source.follow(given)):
            continue
        within = walk_within(source.function_of(call))
        # A function with these waits for the stream itself, or copies to the host.
        if {"synchronize", "cpu"}.isdisjoint(node.attr for node in within if isinstance(node, ast.Attribute)):
            yield CAPSULE.at(
                source.at(call),
                "It gets a DLPack capsule; Triton cannot wait for the capsule's CUDA stream.",
                "Pass the array itself; if it has no __dlpack__, synchronize the stream first.",
            )


def _is_capsule(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in _CAPSULES


def _check_opens(source: SourceFile) -> Findings:
    if any(source.name(call.func) == "locale.setlocale" for call in source.calls):
        return
    for call in source.calls:
        if source.name(call.func) not in ("open", "io.open") or any(k.arg is None for k in call.keywords):
            continue
        mode = argument(call, 1, "mode")
        is_text = mode is None or (isinstance(mode, ast.Constant) and "b" not in str(mode.value))
        starred = any(isinstance(arg, ast.Starred) for arg in call.args)
        if is_text and argument(call, 3, "encoding") is None and not starred:
            yield ASCII.at(source.at(call), "In Triton, this open() reads or writes ASCII.", 'Add encoding="utf-8".')


def _check_names(source: SourceFile, model: Model) -> Findings:
    """Find tensor names that the configuration does not declare.

    A name is reported if it has the letters of a declared name in another order or case. Any other may be right, since
    a ``model.py`` may serve several configurations: it is reported if the code uses the tensor without looking whether
    it is there, and either never leaves ``execute`` before or never names an input that each request must have.
    """
    states = model.message.sequence_batching
    inputs = [*(t.name for t in model.inputs), *(c.name for c in states.control_input)]
    inputs += [*(s.input_name for s in states.state), *(n for b in model.message.batch_input for n in b.target_name)]
    outputs = [*(t.name for t in model.outputs), *(s.output_name for s in states.state)]
    functions = {
        "get_input_tensor_by_name": (READS, "reads the input", inputs),
        "get_input_config_by_name": (CONFIG, "asks for", inputs),
        "get_output_config_by_name": (CONFIG, "asks for", outputs),
    }
    optional = [tensor.name for tensor in model.inputs if tensor.is_optional]
    required = [tensor.name for tensor in model.inputs if not tensor.is_optional]
    has_unread = bool(required) and source.texts.isdisjoint(required)
    for call in source.calls:
        function = source.name(call.func).removeprefix(f"{PB}.")
        if function not in functions:
            continue
        rule, what, declared = functions[function]
        is_needed = _is_used(source, call, may_leave=has_unread) if rule is READS else _is_indexed(source, call)
        for name in source.find_texts(argument(call, 1, "name")):
            if name not in declared and (is_needed or _is_misspelt(name, declared)):
                yield rule.at(
                    source.at(call),
                    f"It {what} {name}, which {model.path.name} does not declare.",
                    f"Declared: {', '.join(declared)}.",
                )
            elif rule is READS and name in optional and is_needed:
                what = f"It reads {name} as if it were there, and {model.path.name} makes it optional."
                yield OPTIONAL.at(
                    source.at(call), what, "Compare what get_input_tensor_by_name returns with None first."
                )


def _is_used(source: SourceFile, call: ast.Call, *, may_leave: bool) -> bool:
    """Whether ``execute`` certainly calls a method of the tensor that ``call`` returns, or of nothing (None)."""
    method = source.parents[call]
    is_method = isinstance(method, ast.Attribute) and isinstance(source.parents[method], ast.Call)
    return is_method and source.runs_in(call, may_leave=may_leave) == "execute"


def _is_indexed(source: SourceFile, call: ast.Call) -> bool:
    """Whether code that always runs at load takes a part of what ``call`` returns, or of nothing (None)."""
    parts = (node for node in source.nodes if isinstance(node, ast.Subscript))
    return any(source.follow(part.value) is call and source.runs_in(part) in ("", "initialize") for part in parts)


def _is_misspelt(name: str, declared: list[str]) -> bool:
    """Whether ``name`` has the letters of a declared name, in any order and case."""
    return sorted(name.lower()) in [sorted(other.lower()) for other in declared]
