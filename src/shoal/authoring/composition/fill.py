"""Filler of templates in the place of TensorRT-LLM's ``fill_template.py``: strict, and typed by the rules of ``check``.

A placeholder is ``${key}``, or ``$key`` for a key that gets a value. Two dollars stay two dollars, and comments stay as
they are. Strings, comments and other text are told apart as in ``check``; the result is parsed, and then written whole.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path

from shoal.authoring.check.config import fields, llmapi, scheduling, tensors, trtllm
from shoal.authoring.check.findings import Finding, Severity
from shoal.authoring.check.models import Repository
from shoal.authoring.check.repositories import parse_model
from shoal.authoring.repository.config import MAX_CONFIG
from shoal.errors import ArtifactError, InputError, suggest
from shoal.system.files import read_text, replace_file

# As in fill_template.py: keys that have a value without being given one.
DEFAULTS = {"max_queue_size": "0", "max_queue_delay_microseconds": "0"}
REMOVED = {
    "tokenizer_type": "TensorRT-LLM removed it, and fill_template.py fails at it: the files say it. Leave it out."
}
_PLACE = re.compile(r"\$\$(?!\{)|\$\{[^{}\n]*\}|\$[A-Za-z_][A-Za-z_0-9]*")
_IS_DTYPE = re.compile(r"data_?type$")
_MOST_NAMED = 4  # of the further placeholders without a value
_WORD = r"[\w./:@+-]*[\w./+-]"
_PLAIN = re.compile(rf"{_WORD}( *, *{_WORD})*", re.ASCII)  # outside of quotes: a word, a number, or a list of them
_ESCAPES = "Write \\, for a comma in a value, and four backslashes for one."


def parse_substitutions(text: str) -> dict[str, str]:
    r"""Parse ``key:value,key:value``; a value may have colons, and commas as ``\,``.

    As in ``fill_template.py``, escapes are read twice: first to find commas, then to find the first colon.

    Raises:
        InputError: an item has no colon, is empty, has a space at its edges, or names a key again.
    """
    values: dict[str, str] = {}
    for item in _split(text, ","):
        if not item.strip():
            what = f"There is an empty item in '{text[-80:]}': a comma ends the list, or follows another."
            raise InputError(what, "Remove that comma.")
        key, *rest = _split(item, ":", 1)
        if key != key.strip():
            raise InputError(f"A space stands beside the key '{key}'.", f"Write {key.strip()}: without the space.")
        if not rest or not key:
            raise InputError(f"'{item}' is not KEY:VALUE.", f"For example: triton_max_batch_size:8. {_ESCAPES}")
        value = rest[0]
        if key in values:
            raise InputError(f"{key} is given twice: '{values[key]}' and '{value}'.", "Give it once.")
        if value != value.strip() or not value.isprintable() or "${" in value:
            wrong = "a placeholder in it" if "${" in value else "a space at its edge, or a control character"
            raise InputError(f"{key} is given as '{value}', with {wrong}.", f"Give {key} its final value.")
        values[key] = value
    return values


def _split(text: str, delimiter: str, most: int = -1) -> list[str]:
    """Split at a delimiter, at most ``most`` times, and remove one level of backslashes."""
    parts, is_escaped = [""], False
    for char in text:
        if is_escaped and char not in ",:\\":
            break
        if char == "\\" and not is_escaped:
            is_escaped = True
        elif char == delimiter and not is_escaped and most:
            parts.append("")
            most -= 1
        else:
            parts[-1] += char
            is_escaped = False
    if is_escaped:
        raise InputError(f"A backslash in '{text[-80:]}' escapes no comma, colon or backslash.", _ESCAPES)
    return parts


def fill_template(path: Path, substitutions: str, *, keep_unset: bool = False) -> tuple[str, str]:
    """Return the text of a template, and the text with values in the place of its placeholders.

    ``keep_unset``: leave placeholders in quotes that get no value, which NVIDIA's models take for their defaults.

    Raises:
        InputError: the template has no such key, a placeholder gets no value, or a value is of a wrong type. The error
            names the file, the line and the key.
        ArtifactError: the template cannot be read.
    """
    given = parse_substitutions(substitutions)
    try:
        text = read_text(path, MAX_CONFIG)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ArtifactError(f"{path} cannot be read: {reason}.", "Name a template, such as config.pbtxt.") from None
    values, is_yaml = {**DEFAULTS, **given}, path.suffix in (".yaml", ".yml")
    used: dict[str, list[int]] = {}
    left: dict[str, tuple[bool, int]] = {}  # key: whether each place is in quotes, and the first line

    def fill_line(line: str, number: int) -> str:
        def fill_part(part: re.Match[str]) -> str:
            is_apart = not is_yaml or not part.start() or line[part.start() - 1].isspace()
            if part[0].startswith("#") and is_apart:  # a comment
                return part[0]
            quote = part[0][0] if part[0][0] in "\"'" else ""
            return _PLACE.sub(lambda found: fill_place(found[0], quote), part[0])

        def fill_place(place: str, quote: str) -> str:
            key = place.strip("${}")
            if place == "$$" or (place[1] != "{" and key not in values):
                return place
            if key not in values:
                is_quoted, first = left.get(key, (True, number))
                left[key] = (is_quoted and bool(quote), first)
                return place
            used.setdefault(key, []).append(number)
            value = values[key]
            is_fit = not {quote, "\\"} & {*value} if quote else _PLAIN.fullmatch(value)
            if not is_fit:
                wrong = "a quote or a backslash, within quotes" if quote else "no word or number, outside of quotes"
                raise InputError(f"{path}:{number}: {key} is given as '{value}': {wrong}.", f"Give another {key}.")
            return value

        return fields.PART.sub(fill_part, line)

    filled = "\n".join(fill_line(line, number) for number, line in enumerate(text.split("\n"), start=1))
    for key in (key for key in given if key not in used):
        known = [*used, *left]
        fix = suggest(key, known) if known else "It has no placeholder at all: was it filled before?"
        raise InputError(f"{path} has no placeholder ${{{key}}} outside of comments.", REMOVED.get(key, fix))
    _check_left(path, {key: at for key, at in left.items() if not (keep_unset and at[0])})
    for finding in _find(path, filled, is_yaml=is_yaml):
        line = finding.place.line
        causes = (f" {key} is given as '{values[key]}'." for key, lines in used.items() if line in lines)
        raise InputError(f"{path}{f':{line}' if line else ''}: {finding.what}{''.join(causes)}", finding.fix)
    return text, filled


def _check_left(path: Path, left: dict[str, tuple[bool, int]]) -> None:
    if not left:
        return
    (first, (_, line)), *others = sorted(left.items(), key=lambda entry: entry[1][0])  # outside of quotes first
    shown = [f"${{{key}}} (line {at})" for key, (_, at) in others[:_MOST_NAMED]]
    more = f", nor do {', '.join(shown)}" if shown else ""
    more += f" and {len(others) - len(shown)} more" if len(others) > len(shown) else ""
    bare = [key for key, (is_quoted, _) in left.items() if not is_quoted]
    given = ",".join(f"{key}:{'TYPE_FP32' if _IS_DTYPE.search(key) else 'VALUE'}" for key in bare)
    why = f" fill_template.py leaves {', '.join(bare)} outside of quotes, which Triton cannot read." if bare else ""
    quoted = next((key for key, (is_quoted, _) in left.items() if is_quoted), "")
    fixes = [f"Add {given}" if bare else "", f"Add --keep-unset, or an empty value ({quoted}:)" if quoted else ""]
    fix = "; ".join(filter(None, fixes)).replace("; Add", "; for those in quotes,")
    fix += ": NVIDIA's models then have their defaults." if quoted else "."
    raise InputError(f"{path}:{line}: ${{{first}}} gets no value{more}.{why}", fix)


def _find(path: Path, text: str, *, is_yaml: bool) -> Iterator[Finding]:
    """Find mistakes in a filled template for which it is not written."""
    if is_yaml:
        yield from (found for found in llmapi.find_yaml(path, text) if found.severity is Severity.ERROR)
        return
    model = parse_model(path.parent, text.encode())
    repository = Repository(path.parent, (model,), {model.name: model})
    for find in (fields.find, tensors.find, scheduling.find, trtllm.find_values):
        for found in find(model, repository):
            # The file that implies the backend may lie elsewhere.
            is_wrong = found.severity is Severity.ERROR and found.rule is not scheduling.BACKEND
            if is_wrong or found.rule is tensors.TWICE:
                yield found


def show_difference(path: Path, before: str, after: str) -> str:
    """Return what filling changes, as a unified diff; empty if nothing changes."""
    names = (str(path), f"{path} (filled)")
    return "\n".join(difflib.unified_diff(before.splitlines(), after.splitlines(), *names, lineterm=""))


def write_filled(path: Path, text: str) -> None:
    """Replace a template by its filled text, atomically; its mode stays, and a link to it stays a link.

    Raises:
        ArtifactError: the file cannot be written; the template is then as it was.
    """
    try:
        replace_file(path.resolve(), text.encode())
    except OSError as error:
        raise ArtifactError(
            f"{path.resolve()} cannot be written: {error.strerror}.", "Make room, or name another file."
        ) from None
