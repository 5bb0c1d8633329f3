"""The page of public names, from their signatures and docstrings: ``python docs/api.py > docs/api.md``."""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

_TITLE = """# Public names

What `import shoal` hands out. Everything else may change without notice. This page is made from the code's own
docstrings by `python docs/api.py > docs/api.md`, and a test compares both: a public name changes only on purpose.
"""
FACES = ("shoal",)


def make_page() -> str:
    """The page's whole text."""
    seen: list[Any] = []
    return "\n".join([_TITLE, *(section for package in FACES for section in _sections(package, seen))])


def _sections(package: str, seen: list[Any]) -> Iterator[str]:
    """A section for each name, except for objects that an earlier package has."""
    face = importlib.import_module(package)
    for name in sorted(face.__all__, key=str.lower):
        thing = getattr(face, name)
        if not any(thing is other for other in seen):
            seen.append(thing)
            yield _section(package, name, thing)


def _section(package: str, name: str, thing: Any) -> str:
    if not inspect.isclass(thing) and not inspect.isfunction(thing):  # a constant, or the name of a type
        return f"## {name}\n\n    from {package} import {name}\n"
    lines = [f"## {name}", "", f"    {package}.{name}{_signature(thing)}", "", _describe(inspect.getdoc(thing) or "")]
    for member, method in _members(thing):
        head = f"    {member}{_signature(method)}" if callable(method) else f"    {member}"
        lines += [f"### {name}.{member}", "", head, "", _describe(inspect.getdoc(method) or "")]
    return "\n".join(lines)


def _members(thing: Any) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class, as they stand in its source, those it inherits behind its own."""
    if not inspect.isclass(thing):
        return
    seen: set[str] = set()
    for owner in thing.__mro__:
        if not owner.__module__.startswith("shoal"):
            continue
        for name, value in vars(owner).items():
            is_ours = callable(getattr(thing, name, None)) or isinstance(value, property)
            if is_ours and not name.startswith("_") and name not in seen:
                seen.add(name)
                yield name, value if isinstance(value, property) else getattr(thing, name)


def _signature(thing: Any) -> str:
    """With annotations as they are written, one line."""
    if inspect.isclass(thing) and issubclass(thing, Exception):
        thing = thing.__init__
    try:
        signature = inspect.signature(thing)
    except ValueError:
        return ""
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    text = re.sub(r"<[^=]*? at 0x\w+>", "...", str(signature.replace(parameters=parameters)))
    text = re.sub(r"ForwardRef\('([^']*)'\)", r"\1", text)  # of named tuples
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)  # annotations are kept as texts


def _describe(text: str) -> str:
    """A docstring as Markdown: literal blocks are indented there too, double backticks single, errors a list."""
    text = text.replace("``", "`").replace("::\n", ":\n")
    body, _, raised = text.partition("\nRaises:\n")
    if not raised:
        return f"{body.rstrip()}\n"
    entries = textwrap.dedent(raised).splitlines()
    joined: list[str] = []
    for line in entries:
        if line.startswith(" ") and joined:
            joined[-1] += f" {line.strip()}"
        else:
            joined.append(line)
    errors = "\n".join(f"- `{name}`: {why.strip()}" for name, _, why in (line.partition(":") for line in joined))
    return f"{body.rstrip()}\n\nRaises:\n\n{errors}\n"


if __name__ == "__main__":
    print(make_page(), end="")
