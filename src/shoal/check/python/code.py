"""The code of a ``model.py``: can the Python backend import it, and call its methods? And two common pitfalls."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shoal.check.findings import Findings, Place, Rule, Severity
from shoal.check.models import Model, Repository
from shoal.check.python.source import (
    PB,
    Function,
    Source,
    argument,
    examine,
    is_literal,
    parse,
    served_sources,
    walk_within,
)

SYNTAX = Rule("model-py-syntax", Severity.ERROR, is_core=True)
NO_CLASS = Rule("no-model-class", Severity.ERROR, is_core=True)
SIGNATURE = Rule("wrong-signature", Severity.ERROR, is_core=True)
FINALIZE = Rule("finalize-not-callable", Severity.WARNING)
RETURNS = Rule("decoupled-returns", Severity.ERROR)
CAPSULE = Rule("dlpack-capsule", Severity.WARNING)
ASCII = Rule("text-opened-as-ascii", Severity.WARNING)
RULES = (SYNTAX, NO_CLASS, SIGNATURE, FINALIZE, RETURNS, CAPSULE, ASCII)

CLASS = "TritonPythonModel"
# The number of arguments that Triton passes, and the right signature.
_CALLS = {
    "__init__": (0, "__init__(self)"),
    "initialize": (1, "initialize(self, args)"),
    "execute": (1, "execute(self, requests)"),
    "is_ready": (0, "is_ready(self)"),
    "finalize": (0, "finalize(self)"),
    "auto_complete_config": (1, "@staticmethod auto_complete_config(auto_complete_model_config)"),
}
_CAPSULES = frozenset({"to_dlpack", "toDlpack", "toDLPack", "__dlpack__"})
_KEEPS_SIGNATURE = frozenset({"no_grad", "inference_mode", "override", "annotate", "enable_grad", "autocast"})


def find(model: Model, repository: Repository) -> Findings:
    """Find mistakes in the code of a Python model."""
    del repository
    for path, text in served_sources(model):
        yield from _check_syntax(Place(path), text)
    is_decoupled = model.message is not None and model.message.model_transaction_policy.decoupled

    def look(source: Source) -> Findings:
        owner = _find_class(source)
        if owner is None:
            yield from _check_class(source)
        else:
            yield from _check_methods(source, owner, is_decoupled=is_decoupled)
        yield from _check_capsules(source)
        yield from _check_opens(source)

    yield from examine(model, look)


def _check_syntax(place: Place, text: str) -> Findings:
    found = parse(text)
    if isinstance(found, ast.Module) and "�" in text:
        try:  # decoded with replacements: the file may declare another encoding, or be invalid
            ast.parse(place.path.read_bytes())
        except SyntaxError as error:
            found = error
        except (OSError, ValueError, RecursionError, MemoryError):
            return
    if isinstance(found, SyntaxError):
        shown = (found.text or "").strip()[:80]
        yield SYNTAX.at(
            Place(place.path, found.lineno or 0),
            f"Python cannot parse it: {found.msg}{f'; the line is: {shown}' if shown else ''}.",
            "Fix that line; `python -m py_compile model.py` shows the next one.",
        )


def _bindings(source: Source) -> Iterator[ast.AST]:
    """Find the statements that bind the model class at module level."""
    for node in walk_within(source.tree):
        is_definition = isinstance(node, Function | ast.ClassDef) and node.name == CLASS
        is_assigned = isinstance(node, ast.Name) and node.id == CLASS and isinstance(node.ctx, ast.Store)
        if is_definition or is_assigned or (isinstance(node, ast.alias) and (node.asname or node.name) in (CLASS, "*")):
            yield node


def _find_class(source: Source) -> ast.ClassDef | None:
    """The one class that is the model's; None where it comes from elsewhere, or from several places."""
    bindings = list(_bindings(source))
    if len(bindings) != 1:
        return None
    if isinstance(bindings[0], ast.ClassDef):
        return bindings[0]
    for node in source.tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and bindings[0] in node.targets:
            return _classes(source).get(node.value.id)
    return None


def _classes(source: Source) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in source.tree.body if isinstance(node, ast.ClassDef)}


def _check_class(source: Source) -> Findings:
    is_hidden = any(
        is_literal(node, CLASS) or (isinstance(node, ast.Global) and CLASS in node.names) for node in source.nodes
    )
    if is_hidden or any(_bindings(source)) or source.words & {"exec", "globals", "setattr", "__getattr__"}:
        return
    alike = [c for c in _classes(source).values() if any(getattr(node, "name", "") == "execute" for node in c.body)]
    if len(alike) == 1:
        yield NO_CLASS.at(
            source.at(alike[0]),
            f"It defines no {CLASS}; the class with an execute is {alike[0].name}.",
            f"Name it {CLASS}, or end the file with: {CLASS} = {alike[0].name}",
        )
    else:
        yield NO_CLASS.at(Place(source.path), f"It defines no {CLASS}.", f"Write a class {CLASS} with an execute.")


def _methods(source: Source, owner: ast.ClassDef) -> tuple[dict[str, Function], bool]:
    """The methods that a class defines once, and whether it certainly has no ``execute``."""
    defined: dict[str, list[ast.AST]] = {}
    for node in walk_within(owner):
        if isinstance(node, Function):
            defined.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.setdefault(node.id, []).append(node)
    methods = {name: nodes[0] for name, nodes in defined.items() if len(nodes) == 1 and isinstance(nodes[0], Function)}
    has_bases = any(source.name(base) != "object" for base in owner.bases)
    is_plain = not has_bases and not owner.decorator_list and not owner.keywords
    return methods, is_plain and "execute" not in defined and "execute" not in source.words


def _check_methods(source: Source, owner: ast.ClassDef, *, is_decoupled: bool) -> Findings:
    methods, lacks_execute = _methods(source, owner)
    for name, (given, form) in _CALLS.items():
        method = methods.get(name)
        if method is not None and not _is_callable(source, method, given, on_class=name == "auto_complete_config"):
            rule = FINALIZE if name == "finalize" else SIGNATURE
            wanted = f"with {given} argument{'s'[: given != 1]}" if given else "without arguments"
            what = f"Triton calls {name} {wanted}, which {name}({ast.unparse(method.args)}) does not take."
            yield rule.at(source.at(method), what, f"Write {form}.")
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
    elif is_decoupled and _is_plain(source, execute) and "set_model_transaction_policy" not in source.words:
        yield from _check_returns(source, execute)


def _check_returns(source: Source, execute: Function) -> Findings:
    """Find lists that a decoupled model returns.

    Code that mentions decoupled models is skipped, because it may check the mode itself.
    """
    within = list(walk_within(execute))
    texts = {node.value for node in source.nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    if any("decoupled" in word for word in (*source.words, *texts)):
        return  # it may check which mode it is in
    bound: dict[str, list[ast.AST]] = {}
    for node in within:
        for name in (inner for inner in ast.iter_child_nodes(node) if isinstance(inner, ast.Name)):
            if isinstance(name.ctx, ast.Store | ast.Del):
                bound.setdefault(name.id, []).append(node)
    for node in within:
        value = node.value if isinstance(node, ast.Return) else None
        if isinstance(value, ast.Name):
            values = [getattr(by, "value", None) for by in bound.get(value.id, [None])]
        else:
            values = [value]
        if all(isinstance(value, ast.List | ast.ListComp) for value in values):
            what = "It returns a list, which a decoupled model must not do."
            yield RETURNS.at(source.at(node), what, "Send each response through its request's sender; return None.")


def _is_plain(source: Source, method: Function) -> bool:
    """Whether what decorates a method keeps its arguments and its answer."""
    names = (d.func if isinstance(d, ast.Call) else d for d in method.decorator_list)
    return all(source.name(name).rpartition(".")[2] in _KEEPS_SIGNATURE for name in names)


def _is_callable(source: Source, method: Function, given: int, *, on_class: bool) -> bool:
    """Whether a call with ``given`` arguments fits; true where a decorator leaves that open."""
    kinds = [source.name(decorator) for decorator in method.decorator_list]
    is_bound = not on_class
    if kinds == ["staticmethod"]:
        is_bound = False
    elif kinds == ["classmethod"]:
        is_bound = True
    elif not _is_plain(source, method):
        return True
    args = method.args
    most, given = len(args.posonlyargs) + len(args.args), given + is_bound
    if any(default is None for default in args.kw_defaults):
        return False
    return most - len(args.defaults) <= given and (given <= most or args.vararg is not None)


def _check_capsules(source: Source) -> Findings:
    for function in (node for node in source.nodes if isinstance(node, Function)):
        within = list(walk_within(function))
        if {"synchronize", "cpu"} & {node.attr for node in within if isinstance(node, ast.Attribute)}:
            continue  # it waits itself, or there is nothing to wait for
        values: dict[str, bool] = {}  # of each name, whether all that it is bound to are capsules
        for node in (node for node in within if isinstance(node, ast.Assign)):
            for target in (target for target in node.targets if isinstance(target, ast.Name)):
                values[target.id] = values.get(target.id, True) and _is_capsule(node.value)
        for call in within:
            if isinstance(call, ast.Call) and source.name(call.func) == f"{PB}.Tensor.from_dlpack":
                given = argument(call, 1, "tensor")
                if _is_capsule(given) or (isinstance(given, ast.Name) and values.get(given.id)):
                    yield CAPSULE.at(
                        source.at(call),
                        "It gets a capsule; Triton cannot wait for its stream.",
                        "Pass the array itself; if it has no __dlpack__, synchronize its stream first.",
                    )


def _is_capsule(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in _CAPSULES


def _check_opens(source: Source) -> Findings:
    if any(source.name(call.func) == "locale.setlocale" for call in source.calls):
        return
    for call in source.calls:
        if source.name(call.func) not in ("open", "io.open") or any(k.arg is None for k in call.keywords):
            continue
        mode = argument(call, 1, "mode")
        is_text = mode is None or (isinstance(mode, ast.Constant) and "b" not in str(mode.value))
        starred = any(isinstance(arg, ast.Starred) for arg in call.args)
        if is_text and argument(call, 3, "encoding") is None and not starred:
            yield ASCII.at(source.at(call), "This open reads or writes ASCII in Triton.", 'Add encoding="utf-8".')
