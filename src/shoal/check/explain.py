"""Descriptions of the rules, from the pages in ``docs/rules``."""

from __future__ import annotations

import difflib
import re

from shoal.errors import InputError
from shoal.paths import shipped_root


def explain_rules(name: str) -> str:
    """Return the description of a rule, or ``all`` pages, as Markdown.

    Raises:
        InputError: the rule is unknown.
    """
    pages = read_pages()
    if name == "all":
        return "\n".join(pages.values())
    entries = split_entries("\n".join(pages.values()))
    if name not in entries:
        close = difflib.get_close_matches(name, entries, 3, 0.4)
        hint = f"Do you mean {' or '.join(close)}?" if close else "shoal check --explain all shows them."
        raise InputError(f"Unknown rule {name!r}.", hint)
    return entries[name]


def read_pages() -> dict[str, str]:
    """Read the pages, by subject."""
    paths = sorted((shipped_root() / "docs" / "rules").glob("*.md"))
    return {path.stem: path.read_text(encoding="utf-8") for path in paths}


def split_entries(page: str) -> dict[str, str]:
    """Split a page into the entries of its rules, each with its heading, which is the rule's id."""
    sections = re.split(r"(?m)^(?=#{1,3} )", page)
    return {match[1]: section.strip() + "\n" for section in sections if (match := re.match(r"### (\S+)\n", section))}
