"""Options of ``shoal serve``, made from the fields of the dataclass that holds them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import typer

from shoal.errors import InputError

_Record = TypeVar("_Record")
_Command = TypeVar("_Command", bound=Callable[..., None])


def takes_options(record: type[Any]) -> Callable[[_Command], _Command]:
    """Give a command the options that are fields of ``record``, in place of its ``**given``."""
    return partial(_add_options, record)


def _add_options(record: type[Any], command: _Command) -> _Command:
    own = inspect.signature(command, eval_str=True)
    context, repository, *others, _ = own.parameters.values()
    named = [each.replace(kind=each.KEYWORD_ONLY) for each in others]
    command.__signature__ = own.replace(parameters=[context, repository, *_make_parameters(record), *named])  # type: ignore[attr-defined]
    return command


def _is_record(kind: Any) -> bool:
    return is_dataclass(kind)


def _make_parameters(record: type[Any], panel: str | None = None) -> Iterator[inspect.Parameter]:
    """Yield the parameter of each option; those of a dataclass within ``record`` are in a panel of their own."""
    hints = get_type_hints(record)
    for entry in fields(record):
        kind, says = hints[entry.name], entry.metadata
        if _is_record(kind):
            yield from _make_parameters(kind, says["panel"])
            continue
        default = entry.default
        if get_origin(kind) in (tuple, Mapping):
            kind, default = list[str] | None, None
        shown = typer.Option(*says["names"], help=says["help"], metavar=says["metavar"], rich_help_panel=panel)
        annotation = Annotated[kind, shown]  # type: ignore[valid-type]
        yield inspect.Parameter(entry.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def read_options(record: type[_Record], given: Mapping[str, Any]) -> _Record:
    """Return the record of the options that a command was given."""
    values = dict[str, Any]()
    for name, kind in get_type_hints(record).items():
        if _is_record(kind):
            values[name] = read_options(kind, given)
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
        if not re.fullmatch(r"[\w.@+-]{1,256}", name, re.ASCII) or not model or name in found:
            raise InputError(
                f"--alias {each!r:.80} is not NAME=MODEL with a new name.",
                "Give one of letters, digits, and any of . _ @ + -: gpt-4o=llm",
            )
        found[name] = model
    return found
