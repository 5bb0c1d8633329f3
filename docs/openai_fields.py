"""Writer of the fields in openai-reference.md, from the types of requests: ``python docs/openai_fields.py``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.serving.gateway.v1.document import OPERATIONS, describe
from shoal.serving.gateway.v1.schema import IDLE

PAGE = Path(__file__).with_name("openai-reference.md")
_BLOCK = re.compile(r"(<!-- fields \(written by .*\) -->\n)(?:.*\n)*?(<!-- end of fields -->)")
_MOST = 2**31 - 1  # which stands for no bound
_NAMES = {"integer": "whole number", "array": "list", "string": "text", "boolean": "true or false"}


def rewrite(text: str) -> str:
    """Return the page's text with the table written again."""
    return _BLOCK.sub(lambda found: f"{found[1]}\n{write_table()}\n{found[2]}", text)


def write_table() -> str:
    """Return a row for each field and form: its name, its values, and the paths of the requests that have it."""
    schemas = describe()["components"]["schemas"]
    paths: dict[tuple[str, str], list[str]] = {}
    for operation in OPERATIONS:
        given = schemas[operation.request.__name__] if operation.request else {"properties": {}}
        for name, kind in given["properties"].items():
            shown = _show(kind, schemas)
            if shown and name not in IDLE:
                mark = "" if name in given["required"] else "?"
                paths.setdefault((f"{name}{mark}", shown), []).append(operation.path)
    rows = [
        f"| `{name.rstrip('?')}`{' (required)' if not name.endswith('?') else ''} | {shown} | {_join(found)} |"
        for (name, shown), found in sorted(paths.items())
    ]
    return "\n".join(["| field | values | of |", "|---|---|---|", *rows, ""])


def _join(paths: list[str]) -> str:
    return ", ".join(f"`{path.replace('{model}', 'NAME')}`" for path in paths)


def _show(kind: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """Return a type in a few words; empty if it has no value but null."""
    if name := kind.get("$ref"):
        return f"`{name.rpartition('/')[2]}`"
    if choices := kind.get("anyOf"):
        return " or ".join(dict.fromkeys(filter(None, (_show(each, schemas) for each in choices))))
    if values := [value for value in kind.get("enum", ()) if value is not None]:
        return ", ".join(f"`{json.dumps(value)}`" for value in values)
    if kind.get("type") == "null" or "enum" in kind:
        return ""
    what = _NAMES.get(kind.get("type", ""), kind.get("type", "any value"))
    if what == "list":
        inside = _show(kind.get("items", {}), schemas)
        what = f"list of ({inside})" if " or " in inside else f"list of {inside}"
    return what + _bound(kind)


def _bound(kind: Mapping[str, Any]) -> str:
    """Return the bounds of a type, with a comma before them; empty without any."""
    found = []
    for least, most, unit in (("minimum", "maximum", ""), ("minLength", "maxLength", " characters"), (
        "minItems", "maxItems", " entries",
    )):  # fmt: skip
        numbers = [kind.get(least), None if kind.get(most, _MOST) >= _MOST else kind[most]]
        if None not in numbers:
            found.append(f"{numbers[0]} to {numbers[1]}{unit}")
        elif numbers[0] is not None and numbers[0] > -_MOST:
            found.append(f"{numbers[0]} or more{unit}")
        elif numbers[1] is not None:
            found.append(f"at most {numbers[1]}{unit}")
    return f", {', '.join(found)}" if found else ""


if __name__ == "__main__":
    PAGE.write_text(rewrite(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
