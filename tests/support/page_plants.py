"""The mistakes of the pages under docs/rules: each rule's diff, applied to a repository.

A diff's lines are of the file that the row names, or of the one that a line ``# folder/file`` before them does. Lines
that are paths alone are files that are there or not, and ``path -> path`` is a link.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import TypeAlias

from shoal.authoring.check.reports import read_pages, split_entries
from tests.support.planted import BASE, MODEL, Edit, Link, Plant, config, edited

FIRST, CODE, ALONE = "first/config.pbtxt", "first/1/model.py", "alone/config.pbtxt"
# Of each line its sign and its text.
Diff: TypeAlias = "list[tuple[str, str]]"
Files: TypeAlias = "dict[str, Edit]"
PATH = re.compile(r"((?:\.\./)?[\w.-]+(?:/[\w.-]+)+)(?: -> (\S+))?")
TENSORS = ("input", "output")


def page(
    rule: str,
    file: str = FIRST,
    good: Mapping[str, Edit] | None = None,
    *,
    at: str = "",
    line: str | None = None,
    bad: Mapping[str, Edit] | None = None,
    core: str = "",
    model: str = "",
    target: str | None = None,
) -> Plant:
    """Plant what the page of a rule shows.

    ``good`` are edits of the base before the diff is applied, which the corrected twin has too, and ``bad`` are those
    that the diff leaves unsaid. The finding is in ``at`` on ``line``: by default on the first wrong line of ``file``.
    """
    files: Files = {**BASE, **{path: edited(BASE.get(path), edit, path) for path, edit in (good or {}).items()}}
    folder = file.partition("/")[0]
    if file.endswith("/config.pbtxt") and file not in files:
        files |= {file: config(folder), f"{folder}/1/model.py": MODEL}
    parts = split_files(read_diff(rule), file)
    right: Files = {}
    wrong: Files = {}
    for path, diff in parts.items():
        right[path], wrong[path] = apply(diff, files.get(path), path)
    paths = [(sign, *match.groups()) for sign, text in read_diff(rule) if (match := PATH.fullmatch(text))]
    right |= {path: fill(path, files) for sign, path, _ in paths if sign == "+"}
    moved = next(iter(right.values()), "") if paths and not parts else ""
    wrong |= {path: None for sign, path, _ in paths if sign == "+"}
    wrong |= {path: Link(to) if to else moved or fill(path, files) for sign, path, to in paths if sign == "-"}
    if line is None:
        line = next((text.strip() for sign, text in parts.get(file, ()) if sign == "-"), "")
    return Plant(
        f"{rule}, as its page shows it",
        rule,
        at or file,
        line,
        {**wrong, **(bad or {})},
        {**files, **right},
        core,
        model or ("all" if f"{folder}/config.pbtxt" in BASE else folder),
        target,
        is_page=True,
    )


@cache
def read_entries() -> dict[str, str]:
    return dict(split_entries("\n".join(read_pages().values())))


def read_diff(rule: str) -> Diff:
    """Return the lines of a rule's diff, without the remarks behind them."""
    lines = read_entries()[rule].partition("```diff\n")[2].partition("```")[0].splitlines()
    return [(line[:1], re.sub(r"  # .*", "", line[2:])) for line in lines if line.strip()]


def split_files(diff: Diff, file: str) -> dict[str, Diff]:
    parts: dict[str, Diff] = {}
    for sign, text in diff:
        if text.startswith("# "):
            named = PATH.match(text[2:])
            file = named[1] if named else file
        elif not PATH.fullmatch(text):
            parts.setdefault(file, []).append((sign, text))
    return parts


def fill(path: str, files: Files) -> Edit:
    """Return a file's content where only its path is shown."""
    if files.get(path) is not None:
        return files[path]
    return {"py": MODEL, "pbtxt": config(path.split("/")[0])}.get(path.rpartition(".")[2], "")


def apply(diff: Diff, content: Edit, path: str) -> tuple[str, str]:
    """Return a file as the diff corrects it, and with the mistake.

    Where the file has the corrected lines, in their order, the wrong ones take their place. Otherwise both sides take
    the place of the lines that set the same fields, or are the whole file, if it is JSON.
    """
    assert isinstance(content, str), path
    found = find(diff, content.split("\n"))
    if found is not None:
        return content, found
    sides = ["\n".join(text for sign, text in diff if sign in kept) for kept in (" +", " -")]
    if path.endswith(".json"):
        return sides[0], sides[1]
    rest = drop_fields(content, [text for _, text in diff if text[:1].strip()])
    return f"{rest}{sides[0]}\n", f"{rest}{sides[1]}\n"


def find(diff: Diff, lines: list[str]) -> str | None:
    """Undo a correction in these lines; None if they do not have its lines."""
    result: list[str] = []
    waiting: list[str] = []
    start, indent, has_right = 0, "", False
    for sign, text in diff:
        if sign == "-":
            waiting.append(text.strip())
            continue
        position = next((n for n in range(start, len(lines)) if lines[n].strip() == text.strip()), None)
        if position is None:
            return None
        has_right = True
        spaces = lines[position][: len(lines[position]) - len(lines[position].lstrip())]
        if sign == "+":
            result += [*lines[start:position], *(spaces + each for each in waiting)]
        else:
            result += [*(indent + each for each in waiting), *lines[start : position + 1]]
        waiting, start, indent = [], position + 1, spaces
    return "\n".join((*result, *(indent + each for each in waiting), *lines[start:])) if has_right else None


def drop_fields(content: str, lines: list[str]) -> str:
    """Leave out the lines of a configuration that set what these do."""
    fields = set().union(*map(read_fields, lines))
    here = set().union(*map(read_fields, content.splitlines()))
    fields |= {
        field
        for field in here
        if field[0] in TENSORS
        and not {f for f in fields & here if f[0] == field[0]}
        and any(f[0] == field[0] for f in fields)
    }
    return "".join(line for line in content.splitlines(keepends=True) if not read_fields(line) & fields)


def read_fields(line: str) -> set[tuple[str, str]]:
    """Return the field that a line sets, with the name of each parameter or tensor in it."""
    match = re.match(r"\w+", line)
    if match is None:
        return set()
    names = re.findall(r'key: "([^"]+)"' if match[0] == "parameters" else r'name: "([^"]+)"', line)
    return {(match[0], name) for name in names} if match[0] in (*TENSORS, "parameters") and names else {(match[0], "")}
