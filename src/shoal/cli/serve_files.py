"""Options of ``shoal serve`` in a file, and notes on files and variables that it does not read."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import typer

from shoal.cli.console import ERR, OUT
from shoal.clients.keys import VARIABLE
from shoal.errors import InputError, suggest
from shoal.system.files import read_text

_NOT_IN_FILES = ("thing", "task", "name", "config", "printed", "is_bare", "is_config_printed", "target", "help")
CONFIG = "shoal.toml"


def find_options(context: typer.Context) -> dict[str, Any]:
    """Return the options that a file may have, by their names on the command line, without dashes."""
    own = (parameter for parameter in context.command.params if parameter.name not in _NOT_IN_FILES)
    return {parameter.opts[0].lstrip("-"): parameter for parameter in own}


def read_config(context: typer.Context, path: Path) -> None:
    """Take the options in a TOML file as defaults, which those on the command line replace.

    Raises:
        InputError: the file cannot be read, or has an option that is not known or of another kind.
    """
    known = find_options(context)
    try:
        given = tomllib.loads(read_text(path))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} cannot be read: {error}.", "Write options as in --print-config: http-port = 8000"
        ) from None
    for name, value in given.items():
        if name not in known:
            if isinstance(value, dict):
                fix = f"Options stand without tables: leave out the line [{name}]."
                raise InputError(f"{path} has a table [{name:.60}].", fix)
            message = f"{path} has an option {name!r:.60}, which shoal serve does not have."
            raise InputError(message, suggest(name, known))
        kinds: tuple[type, ...] = (int, float, str)
        wanted = "one value"
        if known[name].multiple:
            kinds, wanted = (list,), "a list of texts"
        elif known[name].is_flag:
            kinds, wanted = (bool,), "true or false"
        if type(value) not in kinds:
            raise InputError(f"{path}: {name} = {value!r:.60} is of the wrong kind.", f"Give {wanted}.")
    context.default_map = {known[name].name: value for name, value in given.items()}


def print_config(context: typer.Context) -> None:
    """Print the TOML file that belongs to this command line."""
    for name, parameter in find_options(context).items():
        value = context.params[parameter.name]
        if value is not None:
            shown = json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)
            OUT.print(f"{name} = {shown}", soft_wrap=True, markup=False, highlight=False)


def print_notes(context: typer.Context) -> None:
    """Name the variables and the file that look like options of the service, and have no effect."""
    if os.environ.get(VARIABLE) and not (context.params["keys"] or context.params["printed"]):
        make = "--keys FILE (make one: shoal keys new NAME --file FILE)"
        _note(f"{VARIABLE} is the key of clients; this service asks for none: {make}")
    if context.params["config"] is None and Path(CONFIG).is_file():
        _note(f"{CONFIG} is not read: --config {CONFIG}")
    options = {}
    for parameter in context.command.params:
        variable = f"SHOAL_{parameter.opts[0].lstrip('-').replace('-', '_').upper()}"
        source = context.get_parameter_source(parameter.name or "")
        if variable in os.environ and parameter.opts[0].startswith("--") and source and source.name == "DEFAULT":
            options[variable] = parameter.opts[0]
    if options:
        has = "has" if len(options) == 1 else "have"
        _note(f"{', '.join(options)} {has} no effect: give {', '.join(options.values())}")


def _note(text: str) -> None:
    ERR.print(f"note: {text}", soft_wrap=True, markup=False)
