"""Program that renders one chat template, with limits on time and memory; ``templates.ChatTemplate`` runs it.

It reads JSON lines from standard input and answers each with a JSON line on standard output. The first line has the
template and its limits, and the answer the names of the template's variables; each later line has the messages of a
chat. If a rendering exceeds a limit, the process ends: by SIGALRM (time), or with the exit code ``MEMORY``.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

MEMORY = 77  # exit code: no memory left
_MAX_REASON = 300  # characters of an error


def main() -> None:
    """Answer requests until standard input ends, which also happens when the parent process ends for any reason."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the thread that started this process may have blocked some
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, even within one call into C
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    settings = json.loads(requests.readline())
    sys.path[:] = settings["path"]
    for name in ("jinja2.ext", "jinja2.meta", "jinja2.sandbox"):  # before memory is limited
        importlib.import_module(name)
    limit_memory(settings["memory"])
    template = _answer(answers, settings["seconds"], partial(_compile, settings["source"]))
    if template is not None:
        for line in requests:
            render = partial(_render, template, json.loads(line), settings["max_chars"])
            _answer(answers, settings["seconds"], render)


def _render(template: Any, request: dict[str, Any], max_chars: int) -> tuple[None, str]:
    parts, size = [], 0
    for part in template.generate(**request):
        size += len(part)
        if size > max_chars:
            raise ValueError(f"the text has more than {max_chars:,} characters")
        parts.append(part)
    return None, "".join(parts)


def limit_memory(num_bytes: int) -> None:
    """Limit this process's address space to ``num_bytes`` above its present size."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _answer(answers: BinaryIO, seconds: float, work: Callable[[], tuple[Any, str]]) -> Any:
    """Send the text that ``work`` returns beside its result, or the error that it raises.

    Returns the result of ``work``; None after an error.
    """
    found = None
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        found, text = work()
        reply = {"text": text}
        encoded = json.dumps(reply, ensure_ascii=False).encode()  # fails for half a surrogate pair
    except MemoryError:
        os._exit(MEMORY)
    except Exception as error:
        found = None
        kind = type(error).__name__
        reason = str(error) if kind == "TemplateError" else f"{kind}: {error}"
        if getattr(error, "translated", False):  # an error of Jinja whose text leaves out the line
            reason = f"{reason.rstrip('.')}, line {getattr(error, 'lineno', 1)}"
        reply = {"error": " ".join(reason.split())[:_MAX_REASON].rstrip(".")}
        encoded = json.dumps(reply).encode()
    signal.setitimer(signal.ITIMER_REAL, 0)
    answers.write(encoded + b"\n")
    answers.flush()
    return found


class _Dict:
    """The function ``dict``, without the attributes that it has as a class."""

    def __call__(self, *args: Any, **names: Any) -> dict[Any, Any]:
        return dict(*args, **names)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _dump_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:  # Jinja's own escapes for HTML
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _compile(source: str) -> tuple[Any, str]:
    """Compile a template in a sandbox, with the extensions that transformers gives to chat templates.

    Beside the template, return the names of its variables, separated by spaces.
    """
    import jinja2
    from jinja2.ext import Extension
    from jinja2.meta import find_undeclared_variables
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Tag ``generation``, which marks the assistant's words for training; the marked text is rendered as it is."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Namespace(jinja2.utils.Namespace):
        """Namespace that refuses names with a leading underscore, by which a template could reach Python's objects."""

        def __init__(*args: Any, **names: Any) -> None:  # a template may name one `self`
            for name in dict(*args[1:], **names):
                _check(name)
            jinja2.utils.Namespace.__init__(*args, **names)

        def __setitem__(self, name: str, value: Any) -> None:
            _check(name)
            jinja2.utils.Namespace.__setitem__(self, name, value)

    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _dump_json
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": Namespace,
    }
    variables = find_undeclared_variables(environment.parse(source)) - environment.globals.keys()
    return environment.from_string(source), " ".join(sorted(variables))


if __name__ == "__main__":
    main()
