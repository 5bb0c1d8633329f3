"""Rules for models that a server has tried to load and to ask, and the reader of what its log says of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from shoal.authoring.check.findings import Finding, Place, Rule, Severity
from shoal.authoring.check.models import Model

LOAD = Rule("load-failed", Severity.ERROR)
REQUEST = Rule("request-failed", Severity.ERROR)

# A line of a traceback: as Python prints it, the innermost last; and as pybind11 adds it to an exception's text, the
# innermost first. A syntax error names its place in the text.
_PRINTED = re.compile(r'(?m)^\s*File "([^"\n]+)", line (\d+)')
_ADDED = re.compile(r"(?m)^ +(/[^\n]+?)\((\d+)\): ")
_SYNTAX = re.compile(r"\(([\w.-]+\.py), line (\d+)\)")
_TRACE = re.compile(r"\n+(?:At:\n|Traceback \(most recent call last\):\n).*", re.DOTALL)
_PREFIX = re.compile(
    r"in ensemble '[^']*', |\[request id: [^\]]*\] |load failed for model '[^']*': |version \d+ is at \w+ state: "
    r"|Internal: |Failed to process the request\(s\) for model(?: instance)? '[^']*', message: "
    r"|failed to load '[^']*' version \d+: "
)
_STARTED = re.compile(r'(?m)Failed to initialize Python stub: (.+?)(?:\\n|"?$)')  # Triton may escape the text's lines
_STATUS = re.compile(r" \([A-Z_]+\)$")


def find_place(said: str, folder: Path) -> Place | None:
    """Find the innermost line of a model's own code in the tracebacks of a log; None if there is none.

    The copy of shoal that ``shoal compose`` puts beside ``model.py`` counts only if no other code is named.
    """
    lines = [*_ADDED.findall(said), *reversed(_PRINTED.findall(said))]
    places = [Place(Path(path), int(line)) for path, line in lines if Path(path).is_relative_to(folder)]
    own = [place for place in places if "shoal" not in place.path.relative_to(folder).parts[1:2]]
    if not places and (found := _SYNTAX.search(said)):
        own = [Place(path, int(found[2])) for path in sorted(folder.glob(f"*/{found[1]}"))]
    return next(iter([*own, *places]), None)


def find_reason(said: str) -> str:
    """Return what a server's error says, in one line, without Triton's prefixes and without the traceback."""
    text = _TRACE.sub("", _STATUS.sub("", said)).strip()
    while found := _PREFIX.match(text):
        text = text[found.end() :]
    lines = [line.strip() for line in text.rstrip(";. \n").splitlines() if line.strip()]
    return f"{' '.join(lines) or 'it said nothing'}."


def find_raised(log: str) -> str:
    """Return the last exception in a log, as one line: that Python printed, or that ended a process at its start.

    Empty if there is none. Triton does not say the exception if the process has ended before it asks.
    """
    found = re.findall(r"(?m)^Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)+(\S.*)$", log)
    found = found or _STARTED.findall(log)
    return f"{found[-1].rstrip('.')}." if found else ""


def report(rule: Rule, model: Model, what: str, fix: str, log: str, static: Sequence[Finding]) -> Finding:
    """Make a finding at the line of the model's code that the log names.

    If it names none, this is at the model's code if it was run, else at its configuration. If the static check has
    found something at the same line, the finding has its fix, which is more exact.
    """
    code = [path for path, _ in model.sources if model.is_python and (rule is REQUEST or "process" in what)]
    default = [*reversed(code), *(path for path in (model.path,) if path.is_file()), model.folder][0]
    place = find_place(log, model.folder) or Place(default)
    same = (found.fix for found in static if place.line and found.place == place)
    return rule.at(place, what, next(same, fix))
