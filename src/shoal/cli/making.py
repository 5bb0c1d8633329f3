"""``shoal serve MODEL``: the repository of a model that someone has, by the commands that make it by hand."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from shoal.authoring.repository.model_folders import find_repository
from shoal.cli.console import ERR
from shoal.cli.usage import Root
from shoal.errors import InputError, SetupError, ShoalError
from shoal.serving.gateway.options import Options
from shoal.system.apart import run_apart

_OTHER_OPTION = re.compile(r"(?<!\S)--(?!task|name)[a-z-]+")


def find_or_make(thing: Path, *, task: str = "", name: str = "", listening: Options | None = None) -> Path:
    """Return the repository ``thing``, the composed one in it, or one that is made now of the model ``thing``.

    A forked process makes it: what is loaded for this is not in the process that serves afterwards.

    Raises:
        InputError: there is no such thing, or it is none that can be served.
        SetupError: this machine lacks something, the folder cannot be made, or a port of ``listening`` is taken.
    """
    found = find_repository(thing)
    if found is None:
        try:
            return run_apart(_make, str(thing), task, name, listening)
        except BrokenProcessPool:
            what = f"The process that made a repository of {thing} was killed."
            raise SetupError(what, "Is there too little memory for the model? Remove what is in build, then.") from None
    if task or name:
        given = f"--task {task}" if task else f"--name {name}"
        raise InputError(f"{given} has no effect: {found} is a repository already.", "Leave it out.")
    return found


@contextlib.contextmanager
def _naming(command: Sequence[str], *rest: Sequence[str]) -> Iterator[None]:
    """Name the command that has the options which an error advises, where `shoal serve` does not have them.

    ``rest`` are the commands to type after it.
    """
    try:
        yield
    except ShoalError as error:
        own = Root().get_command(None, command[0])
        options = {option for each in own.params for option in each.opts}
        if not options & {*_OTHER_OPTION.findall(error.fix)} or "shoal " in error.fix:
            raise
        after = "; ".join(f"shoal {shlex.join(each)}" for each in rest)
        fix = f"{error.fix.rstrip('.')}. It is an option of: shoal {shlex.join(command)}; then type: {after}"
        raise type(error)(error.what, fix) from None


def _make(thing: str, task: str, name: str, listening: Options | None = None) -> Path:
    from shoal.authoring.project.recipes import RECORD, find_recipe
    from shoal.serving.server.launch import find_ports

    recipe = find_recipe(thing, task=task, name=name)
    if recipe.is_made():
        return recipe.repository
    if listening is not None:  # told before minutes of work
        find_ports(listening.http_port, listening.grpc_port, listening.metrics_port, host=listening.host)
    try:
        recipe.folder.mkdir(parents=True)
    except OSError as error:
        what = f"{recipe.folder} cannot be made: {error.strerror}."
        raise SetupError(what, "Type the command in a folder where you may write.") from None
    try:
        commands = (*recipe.commands, ("serve", str(recipe.repository)))
        for place, command in enumerate(recipe.commands, 1):
            with contextlib.redirect_stdout(io.StringIO()), _naming(command, *commands[place:]):  # what to type next
                Root().main([*command], standalone_mode=False)
        (recipe.folder / RECORD).write_text(json.dumps(recipe.record, indent=1), encoding="utf-8")
    except BaseException:
        shutil.rmtree(recipe.folder)
        raise
    ERR.print(f"{recipe.repository} was made by these commands:", soft_wrap=True, markup=False)
    for command in commands:
        ERR.print(f"  shoal {shlex.join(command)}", soft_wrap=True, markup=False)
    return recipe.repository
