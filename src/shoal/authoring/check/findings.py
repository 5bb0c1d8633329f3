"""Results of a check: rules, and places where a repository breaks them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from shoal.errors import cut


class Severity(StrEnum):
    """Severities of rules, the gravest first.

    ``error``: a model does not load, or answers wrongly. ``warning``: models load, but time, memory or safety is lost.
    ``advice``: nothing is wrong, but another setting may be better; ``shoal check --strict`` does not fail on it.
    """

    ERROR = "error"
    WARNING = "warning"
    ADVICE = "advice"


@dataclass(frozen=True)
class Place:
    """Line of a file, counted from 1; line 0 means the whole file or folder."""

    path: Path
    line: int = 0

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" if self.line else str(self.path)


@dataclass(frozen=True)
class Finding:
    """Place that breaks a rule. ``what`` says what was found and expected, ``fix`` what to do."""

    rule: Rule
    place: Place
    what: str
    fix: str

    @property
    def severity(self) -> Severity:
        """Severity of the rule."""
        return self.rule.severity

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as JSON values, with the absolute path of the file."""
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
    """Condition that a repository must meet; ``docs/rules`` gives the reason, the source and an example of each rule.

    An ``id`` never changes its meaning. ``is_core`` marks a rule of Triton itself: Triton refuses to load a model that
    breaks the rule, and the finding repeats Triton's error message.
    """

    id: str
    severity: Severity
    is_core: bool = False

    def at(self, place: Place, what: str, fix: str) -> Finding:
        """Make a finding of this rule."""
        return Finding(self, place, cut(what), cut(fix))  # names and reasons in them come from files


Findings = Iterator[Finding]
