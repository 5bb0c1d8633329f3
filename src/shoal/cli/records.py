"""Commands whose options are the fields of a dataclass."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import typer

from shoal.errors import InputError

_Record = TypeVar("_Record")


def takes_record(record: type[_Record]) -> Callable[[Callable[[typer.Context, _Record], None]], Callable[..., None]]:
    """Give a command the fields of ``record`` as its options.

    A field has typer's annotations in its type, or is an ``option`` of the service; or it is a record of such fields,
    which are in a panel of their own if its metadata name one.
    """
    added = list(_make_parameters(record))

    def decorate(command: Callable[[typer.Context, _Record], None]) -> Callable[..., None]:
        @wraps(command)
        def run(context: typer.Context, **given: Any) -> None:
            command(context, _make_record(record, given))

        first, _ = inspect.signature(command, eval_str=True).parameters.values()
        run.__signature__ = inspect.Signature([first, *added])  # type: ignore[attr-defined]
        return run

    return decorate


def _make_parameters(record: type[Any], panel: str | None = None) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(record, include_extras=True)
    for entry in fields(record):
        kind, says = hints[entry.name], entry.metadata
        if isinstance(kind, type) and is_dataclass(kind):
            yield from _make_parameters(kind, says.get("panel"))
            continue
        default = inspect.Parameter.empty if entry.default is MISSING else entry.default
        if says:
            if get_origin(kind) in (tuple, Mapping):
                kind, default = list[str] | None, None
            shown = typer.Option(*says["names"], help=says["help"], metavar=says["metavar"], rich_help_panel=panel)
            kind = Annotated[kind, shown]
        yield inspect.Parameter(entry.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _make_record(record: type[_Record], given: Mapping[str, Any]) -> _Record:
    """Return the record of the options that a command was given."""
    values = dict[str, Any]()
    for name, kind in get_type_hints(record).items():
        if isinstance(kind, type) and is_dataclass(kind):
            values[name] = _make_record(kind, given)
        elif get_origin(kind) is Mapping:
            values[name] = _read_aliases(given[name] or ())
        else:
            values[name] = tuple(given[name] or ()) if get_origin(kind) is tuple else given[name]
    return record(**values)


def _read_aliases(given: Iterable[str]) -> dict[str, str]:
    """Return models by their further names, from texts ``NAME=MODEL``."""
    found = dict[str, str]()
    for each in given:
        name, _, model = each.partition("=")
        if not re.fullmatch(r"[\w.@+:/-]{1,256}", name, re.ASCII) or not model or name in found:
            raise InputError(
                f"--alias {each!r:.80} is not NAME=MODEL with a new name.",
                "Give one of letters, digits, and any of . _ @ + : / -: gpt-4o=llm",
            )
        found[name] = model
    return found
