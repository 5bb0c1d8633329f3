"""Results of a check: rules, and the places where a repository breaks them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any


class Severity(StrEnum):
    """Severities, the gravest first.

    ``error``: it does not load, or answers wrongly. ``warning``: it loads, and costs time, memory or safety.
    ``advice``: it is right, and something else may serve better; ``--strict`` ignores it.
    """

    ERROR = "error"
    WARNING = "warning"
    ADVICE = "advice"


@dataclass(frozen=True)
class Place:
    """A line of a file, counted from 1; 0 for the whole file or folder."""

    path: Path
    line: int = 0

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" if self.line else str(self.path)


@dataclass(frozen=True)
class Finding:
    """One place that breaks one rule: ``what`` was found and expected, and the ``fix``."""

    rule: Rule
    place: Place
    what: str
    fix: str

    @property
    def severity(self) -> Severity:
        """Severity of the rule."""
        return self.rule.severity

    def as_dict(self) -> dict[str, Any]:
        """The finding as JSON values, with the whole path."""
        return {
            "rule": self.rule.id,
            "severity": str(self.severity),
            "file": str(self.place.path),
            "line": self.place.line,
            "what": self.what,
            "fix": self.fix,
        }


@dataclass(frozen=True)
class Rule:
    """A condition that a repository must meet; ``docs/rules`` describes it, with its reason, its source and an example.

    ``id`` never changes its meaning. ``is_core`` rules are Triton's own: it refuses to load what breaks them, in the
    words of the finding.
    """

    id: str
    severity: Severity
    is_core: bool = False

    def at(self, place: Place, what: str, fix: str) -> Finding:
        """A finding of this rule."""
        return Finding(self, place, what, fix)


Findings = Iterator[Finding]
