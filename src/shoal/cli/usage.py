"""Commands whose help shows kinds of values, ``TEXT`` or ``PATH``, and not Python's types."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any, ClassVar

from typer import BadParameter, Typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

_USAGE_ERROR: Any = BadParameter.__base__  # of what typer raises for arguments; typer does not export it
_KINDS = {"str": "TEXT", "int": "INTEGER", "float": "NUMBER"}
_OPTIONAL = {"--print": ("docker", "dockerfile")}  # values of options that may be left out, the first by default


def _name_kinds(params: list[Any], context: Any) -> list[Any]:
    for param in params:
        if param.param_type_name == "argument":
            param.display_type_rich = lambda ctx: ""  # beside its name
        elif param.is_flag:
            param.metavar = ""  # typer shows <bool>
        elif param.metavar is None and (kind := re.fullmatch(r"<(?:list\[)?(\w+)\]?>", param.display_type(context))):
            param.metavar = _KINDS.get(kind[1], kind[1].upper())
    return params


def _complete(args: Sequence[str]) -> list[str]:
    """Return the arguments with the value of an option whose value was left out, which typer does not support."""
    found = list[str]()
    for place, word in enumerate(args):
        values = _OPTIONAL.get(word, ())
        found += [word, *(() if {*args[place + 1 : place + 2]} & {*values} else values[:1])]
    return found


class Command(TyperCommand):
    """Command whose help names kinds of values."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, with the kinds of their values."""
        return _name_kinds(super().get_params(ctx), ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; options of other tools, and missing arguments, are refused with what to type."""
        ctx.allow_extra_args = True  # they are refused here
        try:
            extra = super().parse_args(ctx, _complete(args))
        except _USAGE_ERROR as error:
            from shoal.cli.habits import advise

            advise(self, ctx, args, error)
            raise
        if extra and not ctx.resilient_parsing:
            from shoal.cli.habits import refuse_extra

            refuse_extra(self, ctx, args, extra)
        return extra


class Group(TyperGroup):
    """Group of commands whose help names kinds of values."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, with the kinds of their values."""
        return _name_kinds(super().get_params(ctx), ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that is asked for; one of other tools is refused with what to type instead."""
        if args and self.get_command(ctx, args[0]) is None:
            from shoal.cli.habits import HABITS, NESTED

            habits = NESTED.get(str(self.name), HABITS if ctx.parent is None else {})
            if args[0] in habits:
                ctx.fail(f"No such command {args[0]!r}. Type: {habits[args[0]]}")
        return super().resolve_command(ctx, args)


@dataclass(frozen=True)
class Waiting:
    """Command that is made of its function, or of the app of a group, when it is asked for.

    ``place`` is one of these, or a text ``module:name`` with the module to import for it. ``help`` is the beginning of
    its help, for the list of commands.
    """

    name: str
    place: Callable[..., None] | Typer | str
    help: str | None
    panel: str

    @property
    def source(self) -> Callable[..., None] | Typer:
        """The function, or the app."""
        found: Callable[..., None] | Typer = resolve_name(self.place) if isinstance(self.place, str) else self.place
        return found

    def make(self) -> Any:
        """Return the command, with all its options."""
        source = self.source
        if isinstance(source, Typer):
            command = get_command(source)
        else:
            alone = Typer(add_completion=False, pretty_exceptions_enable=False)
            alone.command(self.name, cls=Command)(source)
            command = get_command(alone)
        command.name, command.rich_help_panel = self.name, self.panel  # type: ignore[attr-defined]
        return command

    def sketch(self) -> Any:
        """Return what the list of commands shows."""
        return TyperCommand(self.name, help=self.help, rich_help_panel=self.panel)


class _OnDemand(dict[str, Any]):
    def get(self, key: str, default: Any = None) -> Any:
        found = super().get(key, default)
        if isinstance(found, Waiting):
            found = self[key] = found.make()
        return found


class Root(Group):
    """Group of shoal's own commands and those of applications, which are imported when they are needed.

    To make all commands takes longer than to run one. So each is made when it is asked for, and the help makes none.
    """

    own: ClassVar[Sequence[Waiting]] = ()

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = _OnDemand({each.name: each for each in self.own})

    def _add_applications(self) -> None:
        """Add the applications' commands, each under its application's help."""
        for entry in entry_points(group="shoal.commands"):
            app: Typer = entry.load()
            for each in app.registered_commands:
                if each.callback is not None:
                    name = each.name or each.callback.__name__.replace("_", "-")
                    made = Waiting(name, each.callback, inspect.getdoc(each.callback), str(app.info.help))
                    self.commands.setdefault(name, made)  # type: ignore[arg-type]

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        self._add_applications()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by its name."""
        if cmd_name not in self.commands:
            self._add_applications()
        return super().get_command(ctx, cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        self._add_applications()
        whole: Any = self.commands
        self.commands = {name: each.sketch() if isinstance(each, Waiting) else each for name, each in whole.items()}
        try:
            super().format_help(ctx, formatter)
        finally:
            self.commands = whole
