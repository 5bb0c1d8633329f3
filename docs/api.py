"""Page of public names, made from their signatures and docstrings whenever the site is built: ``make docs``."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import shoal

_TITLE = """# Public names

What `import shoal` hands out. Everything else may change without notice. The list is in `src/shoal/__init__.py`.
"""


def make_page() -> str:
    """Return the page's whole text."""
    return "\n".join([_TITLE, *(_section(name, getattr(shoal, name)) for name in sorted(shoal.__all__, key=str.lower))])


def _section(name: str, thing: Any) -> str:
    is_ours = inspect.isfunction(thing) or (inspect.isclass(thing) and thing.__module__.startswith("shoal"))
    if not is_ours:  # a constant, or the name of a type
        return f"## {name}\n\n    from shoal import {name}\n"
    lines = [f"## {name}", "", f"    shoal.{name}{_signature(thing)}", "", _describe(inspect.getdoc(thing) or "")]
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
