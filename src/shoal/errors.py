"""Exception hierarchy.

ShoalError
├── InputError      a value that a caller gave cannot be used
├── ArtifactError   a file is missing, damaged, or does not match another file
├── SetupError      this machine or Python environment lacks something
└── ServerError     Triton did not start, went away, or refused
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

_UNPRINTABLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    r"\U000e0000-\U000e0fff]"
)


class ShoalError(Exception):
    """Base class of all errors: what happened, with the value, then what to do.

    ``what`` is one sentence that names the value; ``fix`` is what to do or type. Both are one line, shortened where
    they are long, since names and reasons in them may come from files. In a served component, the messages of
    ArtifactError and SetupError stay in the server's log, since they name paths on the server; the messages of other
    errors reach clients.
    """

    def __init__(self, what: str, fix: str = "") -> None:
        what, fix = cut(printable(what)), cut(printable(fix))
        super().__init__(f"{what} {fix}" if fix else what)
        self.what = what
        self.fix = fix

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.what, self.fix)  # for the process that waits for another one's work


class InputError(ShoalError):
    """A value that a caller gave cannot be used; only that caller's request fails."""


class ArtifactError(ShoalError):
    """A file is missing, damaged, or does not match another file."""


class SetupError(ShoalError):
    """This machine or Python environment lacks something."""


class ServerError(ShoalError):
    """Triton did not start, went away, or refused the request."""


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error and of those that led to it, before the error is kept or becomes an answer.

    The frames of a traceback hold their variables, such as the arrays of a request. One that also holds the error, or
    the list that it is put in, would stay in memory until Python's garbage collector runs.
    """
    errors = [error]
    while errors:
        each = errors.pop()
        errors += filter(None, (each.__cause__, each.__context__))
        each.__traceback__ = each.__cause__ = each.__context__ = None


def printable(text: str) -> str:
    r"""Escape control characters, line ends, invisible and bidirectional controls, and lone surrogates: ``\x1b``."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def cut(text: str, most: int = 2000) -> str:
    """Cut the middle out of a text of more than ``most`` characters."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def suggest(name: str, known: Iterable[str], label: str = "Known") -> str:
    """Return the advice for an unknown name: the most similar of the known names, or all of them, after ``label``."""
    names = list(known)[:1000]  # the comparison with each takes a while
    close = [other for other in names if other.lower() == name.lower()] or get_close_matches(name, names, 1)
    return f"Did you mean {close[0]}?" if close else f"{label}: {', '.join(names) or 'none'}."


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Turn a ``ModuleNotFoundError`` in the ``with`` block into a ``SetupError`` with the extra of shoal to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise SetupError(f"{error.name} is not installed.", f"Type: pip install 'shoal[{extra}]'") from None
