"""Commands whose help shows kinds of values, ``TEXT`` or ``PATH``, and not Python's types."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand, TyperGroup

_KINDS = {"str": "TEXT", "int": "INTEGER", "float": "NUMBER"}


def _name_kinds(params: list[Any], context: Any) -> list[Any]:
    for param in params:
        if param.param_type_name == "argument":
            param.display_type_rich = lambda ctx: ""  # beside its name
        elif param.is_flag:
            param.metavar = ""  # typer shows <bool>
        elif param.metavar is None and (kind := re.fullmatch(r"<(?:list\[)?(\w+)\]?>", param.display_type(context))):
            param.metavar = _KINDS.get(kind[1], kind[1].upper())
    return params


class Command(TyperCommand):
    """Command whose help names kinds of values."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, with the kinds of their values."""
        return _name_kinds(super().get_params(ctx), ctx)


class Group(TyperGroup):
    """Group of commands whose help names kinds of values."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, with the kinds of their values."""
        return _name_kinds(super().get_params(ctx), ctx)


class Root(Group):
    """Group of shoal's own commands and those of applications, which are imported when they are needed."""

    def _add_applications(self) -> None:
        from shoal.cli.applications import find_commands

        for command in find_commands():
            self.commands.setdefault(command.name, command)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        self._add_applications()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by its name."""
        if cmd_name not in self.commands:
            self._add_applications()
        return super().get_command(ctx, cmd_name)
