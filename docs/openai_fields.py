"""Writer of the fields in openai-reference.md, from the types of requests: ``python docs/openai_fields.py``."""

from __future__ import annotations

import re
from pathlib import Path

from shoal.serving.gateway.v1.document import OPERATIONS, describe
from shoal.serving.gateway.v1.document_page import show_type
from shoal.serving.gateway.v1.schema import IDLE

PAGE = Path(__file__).with_name("openai-reference.md")
_BLOCK = re.compile(r"(<!-- fields \(written by .*\) -->\n)(?:.*\n)*?(<!-- end of fields -->)")
_NULL = re.compile(r"(, | or )`null`|^`null`(, | or |$)")


def rewrite(text: str) -> str:
    """Return the page's text with the table written again."""
    return _BLOCK.sub(lambda found: f"{found[1]}\n{write_table()}\n{found[2]}", text)


def write_table() -> str:
    """Return a row for each field and form: its name, its values but null, and the paths of requests that have it."""
    schemas = describe()["components"]["schemas"]
    paths: dict[tuple[str, str], list[str]] = {}
    for operation in OPERATIONS:
        given = schemas[operation.request.__name__] if operation.request else {"properties": {}}
        for name, kind in given["properties"].items():
            shown = _NULL.sub("", show_type(kind))
            if shown and name not in IDLE:
                mark = "" if name in given["required"] else "?"
                path = operation.path.replace("{model}", "NAME")
                paths.setdefault((f"{name}{mark}", shown), []).append(f"`{path}`")
    rows = [
        f"| `{name.rstrip('?')}`{' (required)' if not name.endswith('?') else ''} | {shown} | {', '.join(found)} |"
        for (name, shown), found in sorted(paths.items())
    ]
    return "\n".join(["| field | values | of |", "|---|---|---|", *rows, ""])


if __name__ == "__main__":
    PAGE.write_text(rewrite(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
