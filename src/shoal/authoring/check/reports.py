"""Output of ``shoal check``: a rule's documentation as Markdown, findings as GitHub workflow commands and as SARIF."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import shoal
from shoal.authoring.check.families import RULES
from shoal.authoring.check.findings import Finding, Severity
from shoal.errors import InputError, printable
from shoal.system.paths import shipped_root

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def explain_rules(name: str) -> str:
    """Return the entry of the rule ``name`` in ``docs/rules`` as Markdown; if ``name`` is ``all``, return all pages.

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
    """Read the pages in ``docs/rules``, by file name without ``.md``."""
    paths = sorted((shipped_root() / "docs" / "rules").glob("*.md"))
    return {path.stem: path.read_text(encoding="utf-8") for path in paths}


def split_entries(page: str) -> dict[str, str]:
    """Split a page into entries, by rule id; each entry begins with its heading."""
    sections = re.split(r"(?m)^(?=#{1,3} )", page)
    return {match[1]: section.strip() + "\n" for section in sections if (match := re.match(r"### (\S+)\n", section))}


def github(finding: Finding) -> str:
    """Return a finding as a GitHub workflow command, which GitHub shows as an annotation of the file's line."""
    place = {"file": _relative(finding.place.path), "line": str(finding.place.line or 1), "title": finding.rule.id}
    properties = ",".join(f"{name}={_escape(value, ':,')}" for name, value in place.items())
    kind = "notice" if finding.severity == Severity.ADVICE else finding.severity
    return f"::{kind} {properties}::{_escape(f'{finding.what} {finding.fix}')}"


def _escape(text: str, more: str = "") -> str:
    for char in f"%\r\n{more}":
        text = text.replace(char, f"%{ord(char):02X}")
    return printable(text)


def _relative(path: Path) -> str:
    """Return ``path`` relative to the current folder, or unchanged if it is outside of that folder."""
    here = Path.cwd()
    return (path.relative_to(here) if path.is_relative_to(here) else path).as_posix()


def sarif(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return a SARIF 2.1.0 log with all rules and the findings."""
    numbers = {name: number for number, name in enumerate(RULES)}
    driver = {"name": "shoal check", "version": shoal.__version__, "rules": list(_rules())}
    results = [_result(finding, numbers[finding.rule.id]) for finding in findings]
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}


def _rules() -> Iterator[dict[str, Any]]:
    pages = shipped_root() / "docs" / "rules"
    entries = {
        rule: (name, entry) for name, page in read_pages().items() for rule, entry in split_entries(page).items()
    }
    for rule in RULES.values():
        page, entry = entries[rule.id]
        summary = entry.partition(" — ")[2].partition("\n")[0]
        yield {
            "id": rule.id,
            "shortDescription": {"text": summary},
            "help": {"text": entry, "markdown": entry},
            "helpUri": f"{(pages / f'{page}.md').as_uri()}#{rule.id}",
            "defaultConfiguration": {"level": _level(rule.severity)},
        }


def _level(severity: Severity) -> str:
    return "note" if severity == Severity.ADVICE else str(severity)


def _result(finding: Finding, number: int) -> dict[str, Any]:
    path = finding.place.path
    uri = quote(_relative(path)) if path.is_relative_to(Path.cwd()) else path.as_uri()
    location: dict[str, Any] = {"artifactLocation": {"uri": uri}}
    if finding.place.line:
        location["region"] = {"startLine": finding.place.line}
    return {
        "ruleId": finding.rule.id,
        "ruleIndex": number,
        "level": _level(finding.severity),
        "message": {"text": f"{finding.what} {finding.fix}"},
        "locations": [{"physicalLocation": location}],
    }
