"""Code that works in a shell and not in Triton: capsules without their stream, text in ASCII."""

from __future__ import annotations

import ast

from shoal.check.findings import Findings, Rule, Severity
from shoal.check.python.source import PB, Function, Source, argument, walk_within

CAPSULE = Rule("dlpack-capsule", Severity.WARNING)
ASCII = Rule("text-opened-as-ascii", Severity.WARNING)
RULES = (CAPSULE, ASCII)

_CAPSULES = frozenset({"to_dlpack", "toDlpack", "toDLPack", "__dlpack__"})


def look(source: Source) -> Findings:
    """Each place in one source."""
    yield from _check_capsules(source)
    yield from _check_opens(source)


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
                        "It is given a capsule, whose stream Triton cannot wait for.",
                        "Pass the array itself; where it has no __dlpack__, synchronize its stream first.",
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
