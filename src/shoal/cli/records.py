"""Commands whose options are the fields of a dataclass."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import wraps
from typing import Any, TypeVar, get_type_hints

import typer

_Record = TypeVar("_Record")


def takes_record(record: type[_Record]) -> Callable[[Callable[[typer.Context, _Record], None]], Callable[..., None]]:
    """Give a command the fields of ``record``, whose types have typer's annotations, as its options."""
    hints = get_type_hints(record, include_extras=True)
    defaults = {
        entry.name: inspect.Parameter.empty if entry.default is MISSING else entry.default
        for entry in fields(record)  # type: ignore[arg-type]
    }
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
        for name, default in defaults.items()
    ]

    def decorate(command: Callable[[typer.Context, _Record], None]) -> Callable[..., None]:
        @wraps(command)
        def run(context: typer.Context, **given: Any) -> None:
            command(context, record(**given))

        first, _ = inspect.signature(command, eval_str=True).parameters.values()
        run.__signature__ = inspect.Signature([first, *added])  # type: ignore[attr-defined]
        return run

    return decorate
