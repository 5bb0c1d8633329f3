"""Description of OpenAI's API as a page: its types in a few words, which the documentation has too."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from shoal.serving.gateway.v1.document import REF, describe

_BOUNDS = (("minimum", "maximum", ""), ("minLength", "maxLength", " characters"), ("minItems", "maxItems", " entries"))
_MOST = 2**31 - 1  # no bound
_WORDS = {"integer": "whole number", "string": "text", "boolean": "true or false", "null": "`null`"}
_STYLE = "body{font-family:sans-serif;max-width:60em;margin:2em auto}td{vertical-align:top;padding-right:2em}"


@cache
def write_page() -> str:
    """Return the description as an HTML page without script."""
    document = describe()
    schemas = document["components"]["schemas"]
    lines = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>API</title><style>{_STYLE}</style>",
        f"<h1>{html.escape(document['info']['title'])}</h1><p>The same for programs: "
        "<a href=/v1/openapi.json>/v1/openapi.json</a>. Keys: <code>Authorization: Bearer KEY</code>.",
    ]
    for path, methods in document["paths"].items():
        ((method, operation),) = methods.items()
        lines.append(f"<h2>{method.upper()} {html.escape(path)}</h2><p>{html.escape(operation['summary'])}")
        if body := operation.get("requestBody"):
            lines.append(f"<p>Request: {_show(body['content']['application/json']['schema'])}")
        for kind, answered in operation["responses"]["200"]["content"].items():
            lines.append(f"<p>{'Events' if 'event' in kind else 'Answer'}: {_show(answered['schema'])}")
        lines.append(f"<p>Refusal: {_show(operation['responses']['4XX']['content']['application/json']['schema'])}")
    for name, each in sorted(schemas.items()):
        lines.append(f"<h3 id={name}>{name}</h3><p>{html.escape(each.get('description', ''))}<table>")
        required = {*each["required"]}
        lines += [
            f"<tr><td>{html.escape(field)}{'' if field in required else ' (optional)'}<td>{_show(kind)}"
            for field, kind in each["properties"].items()
        ]
        lines.append("</table>")
    return "\n".join(lines)


def show_type(kind: Mapping[str, Any]) -> str:
    """Return a type in a few words; the names of types, and values, are between backticks."""
    if reference := kind.get("$ref"):
        return f"`{reference.removeprefix(REF)}`"
    if choices := kind.get("anyOf"):
        return " or ".join(dict.fromkeys(map(show_type, choices)))
    if values := kind.get("enum"):
        return ", ".join(f"`{json.dumps(value)}`" for value in values)
    what: str = kind.get("type", "any value")
    if what == "array":
        inside = show_type(kind.get("items", {}))
        what = f"list of ({inside})" if " or " in inside or ", " in inside else f"list of {inside}"
    bounds = (_show_bound(kind.get(least), kind.get(most), unit) for least, most, unit in _BOUNDS)
    return _WORDS.get(what, what) + "".join(bounds)


def _show_bound(least: int | None, most: int | None, unit: str) -> str:
    has_least, has_most = least is not None and least > -_MOST, most is not None and most < _MOST
    if has_least:
        return f", {least} to {most}{unit}" if has_most else f", {least} or more{unit}"
    return f", at most {most}{unit}" if has_most else ""


def _show(kind: Mapping[str, Any]) -> str:
    """Return a type in a few words, with links to the types that it names."""
    text = re.sub(r"`([A-Z]\w*)`", r"<a href=#\1>\1</a>", html.escape(show_type(kind), quote=False))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", text)
