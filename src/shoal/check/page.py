"""Page of all rules: ``python -m shoal.check.page > docs/rules.md``."""

from __future__ import annotations

import difflib
import sys

from shoal.check.families import FAMILIES, RULES
from shoal.check.findings import Rule
from shoal.errors import InputError

_HEAD = """# What `shoal check` looks for

Each rule has a name that never changes its meaning. An **error** keeps a model from loading, or makes it answer
wrongly; a **warning** costs time, memory or safety. Rules marked *core* are Triton's own: it refuses what breaks them,
and the finding says so in Triton's words, with the file, the line and the fix that its log lacks.
`shoal check --explain RULE` prints an entry of this page.

This page is made from the rules: `python -m shoal.check.page > docs/rules.md`.
"""


def explain_rules(name: str) -> str:
    """Describe a rule, or ``all``, as Markdown.

    Raises:
        InputError: the rule is unknown.
    """
    if name == "all":
        return page()
    if name not in RULES:
        close = difflib.get_close_matches(name, RULES, 3, 0.4)
        hint = f"Do you mean {' or '.join(close)}?" if close else "shoal check --explain all shows them."
        raise InputError(f"Unknown rule {name!r}.", hint)
    return _entry(RULES[name], 1)


def page() -> str:
    """Write the page, every rule by family."""
    parts = [_HEAD]
    for family in FAMILIES:
        title = (family.__doc__ or "").strip().split("\n")[0].rstrip(".")
        parts.append(f"\n## {title}\n")
        parts += [f"\n{_entry(rule, 3)}" for rule in family.RULES]
    return "".join(parts)


def _entry(rule: Rule, level: int) -> str:
    kind = f"{rule.severity}{', *core*' if rule.is_core else ''}"
    return (
        f"{'#' * level} {rule.id}\n\n{rule.title} ({kind}).\n\n{rule.why}\n\nSource: {rule.source.rstrip('.')}.\n\n"
        f"```text\n# wrong\n{rule.bad}\n```\n\n```text\n# right\n{rule.good}\n```\n"
    )


if __name__ == "__main__":
    sys.stdout.write(page())
