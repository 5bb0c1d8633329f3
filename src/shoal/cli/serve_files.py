"""Options of ``shoal serve`` in a file, and notes on files and variables that it does not read."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shoal.cli.console import ERR, OUT
from shoal.clients.keys import VARIABLE
from shoal.errors import InputError, suggest

if TYPE_CHECKING:
    from shoal.serving.server.service_container import Given
from shoal.system.files import read_text

_NOT_IN_FILES = ("thing", "task", "name", "config", "printed", "is_bare", "is_config_printed", "target", "help")
_WRITTEN = ("audit", "log")  # options whose files the service writes
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


def find_given(context: typer.Context) -> Given:
    """Return the options that are given, on the command line or in a file, for a service in a container.

    Raises:
        InputError: a file that an option names does not exist, or is in no folder.
    """
    from shoal.serving.server.service_container import FILES, Given

    words, folders = list[str](), dict[Path, bool]()
    for name, parameter in find_options(context).items():
        source, value = context.get_parameter_source(parameter.name), context.params[parameter.name]
        if not source or source.name not in ("COMMANDLINE", "DEFAULT_MAP"):
            continue
        if isinstance(value, bool):
            words += parameter.opts[:1] if value else parameter.secondary_opts[:1]
        elif isinstance(value, Path):
            path, is_written = value.resolve(), name in _WRITTEN
            if not (path.parent.is_dir() if is_written else path.is_file()):
                raise InputError(
                    f"--{name} {value}: there is no {'folder of that file' if is_written else 'such file'}."
                )
            folders[path.parent] = folders.get(path.parent, False) or is_written
            words += [f"--{name}", f"{FILES}{path}"]
        else:
            words += [word for each in (value if parameter.multiple else [value]) for word in (f"--{name}", str(each))]
    return Given(words, folders)


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


def refuse_form(context: typer.Context, thing: Path) -> None:
    """Refuse a form that was meant as the value of ``--print``, and was taken as the thing to serve."""
    if not thing.exists():
        from shoal.cli.habits import OPTIONS

        habit = f"--print {thing}"
        if habit in OPTIONS["serve"]:
            context.fail(f"No such option: {habit}. Type: {OPTIONS['serve'][habit]}")


def _note(text: str) -> None:
    ERR.print(f"note: {text}", soft_wrap=True, markup=False)
