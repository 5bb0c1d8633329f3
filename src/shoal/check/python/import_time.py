"""Code that runs while a ``model.py`` is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shoal.check.python.source import Function, Source


def at_import(source: Source) -> Iterator[tuple[ast.Call, str]]:
    """The calls that the import itself makes, and those in functions of the file that it calls."""
    seen: set[str] = set()
    for node in _run(source.tree):
        if not isinstance(node, ast.Call):
            continue
        yield node, ""
        name = source.name(node.func)
        own = source.functions.get(name)
        if own is not None and name not in seen:
            seen.add(name)
            for statement in own.body:
                yield from ((n, name) for n in _run(statement) if isinstance(n, ast.Call))


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """Walk what runs when ``node`` does: bodies of classes, but not those of functions."""
    stack = [node]
    while stack:
        current = stack.pop()
        if isinstance(current, Function):
            stack += [*current.decorator_list, *current.args.defaults, *(d for d in current.args.kw_defaults if d)]
        elif not isinstance(current, ast.Lambda):
            yield current
            stack.extend(reversed(list(ast.iter_child_nodes(current))))
