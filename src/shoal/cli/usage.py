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

from shoal.system.machine import find_gpus

# Commands of other tools, and what to type here, by meaning: spelling leads elsewhere, or nowhere.
_WITHOUT = "shoal compose OTHER_ENSEMBLES REPOSITORY, which leaves the model out, and start shoal serve again"
_HABITS = {
    "add": "shoal add-model FILE NAME, or at once: shoal serve FILE",
    "benchmark": "shoal bench REPOSITORY",
    "compare": "shoal bench REPOSITORY OTHER_REPOSITORY",
    "convert": "shoal add-model FILE NAME",
    "delete": _WITHOUT,
    "deploy": "shoal serve REPOSITORY",
    "docker": "shoal serve REPOSITORY --print, which prints the command for docker",
    "draw": "shoal graph REPOSITORY",
    "embed": "shoal infer --model NAME TEXT",
    "explain": "shoal describe REPOSITORY, for a pipeline; shoal check --explain RULE, for a rule",
    "export": "shoal add-model FILE NAME",
    "help": "shoal --help, or shoal COMMAND --help",
    "import": "shoal add-model FILE NAME",
    "init": "shoal new pipeline NAME",
    "list": "shoal status, of what is served",
    "load": "shoal serve MODEL",
    "logs": "shoal serve REPOSITORY --log FILE",
    "ls": "shoal status, of what is served",
    "models": "shoal status, of what is served",
    "plot": "shoal graph REPOSITORY",
    "predict": "shoal infer --model NAME VALUE",
    "ps": "shoal status",
    "remove": _WITHOUT,
    "rm": _WITHOUT,
    "run": "shoal serve MODEL; then shoal infer, or shoal chat for a language model",
    "start": "shoal serve REPOSITORY",
    "stop": "Ctrl-C in the terminal of shoal serve, or send its process SIGTERM",
    "test": "shoal check PROJECT, and pytest, which runs the tests that shoal new wrote",
    "unload": _WITHOUT,
    "up": "shoal serve REPOSITORY",
    "update": "pip install --upgrade shoal",
    "upgrade": "pip install --upgrade shoal",
    "validate": "shoal check REPOSITORY",
    "version": "shoal --version",
}
# The same of the commands of groups.
_NESTED = {
    "new": dict.fromkeys(("preprocess", "postprocess", "preprocessing", "postprocessing"), "shoal new component NAME"),
    "keys": {
        **dict.fromkeys(("add", "create", "generate", "make"), "shoal keys new NAME"),
        **dict.fromkeys(("delete", "remove", "rm"), "shoal keys revoke NAME"),
        **dict.fromkeys(("ls", "show"), "shoal keys list"),
    },
}
# The same of options, by command; an option with a value is of those that have none here.
_URL = dict.fromkeys(("--grpc-port", "--http-port", "--port", "--host"), "--url HOST:PORT, of gRPC")
_GPU = dict.fromkeys(("--gpu", "--device"), "shoal compose ENSEMBLE REPOSITORY --placement gpu, and serve that")
_TLS = dict.fromkeys(
    ("--ssl-certfile", "--ssl-keyfile", "--ssl-cert", "--ssl-key"), "--tls-cert FILE --tls-key FILE, both of them"
)
_PRINT = "--print, without a value: it prints the command for docker"
_UNIT = f"{_PRINT}. A unit of systemd is in docs/serving.md, under systemd"
_PROBES = f"{_PRINT}. Probes of Kubernetes are in docs/serving.md, under Containers"
_PROXY = f"{_PRINT}. Settings of nginx and Caddy are in docs/keys.md, under Behind nginx or Caddy"
_FORMS = {
    **dict.fromkeys(("--print docker", "--print compose"), _PRINT),
    **dict.fromkeys(("--print systemd", "--systemd"), _UNIT),
    **dict.fromkeys(("--print k8s", "--print kubernetes", "--k8s", "--kubernetes"), _PROBES),
    **dict.fromkeys(("--print nginx", "--print caddy", "--nginx", "--caddy"), _PROXY),
}
_OPTIONS = {
    "add-model": {"--repository": "--project FOLDER, of your project; then shoal compose NAME REPOSITORY"},
    "chat": {"--url": "shoal chat HOST:PORT"},
    "infer": {"--explain": "--full, which prints all numbers of the answer", **_URL},
    "status": {"--url": "shoal status HOST:PORT, of the metrics port"},
    "generate": {"--chat": "shoal chat", "--system": "shoal chat --system TEXT", **_URL},
    "tokens": _URL,
    "serve": {
        **_GPU,
        **_TLS,
        **_FORMS,
        "--workers": "shoal compose ENSEMBLE REPOSITORY --instances MODEL=COUNT, and serve that",
        "--instances": "shoal compose ENSEMBLE REPOSITORY --instances MODEL=COUNT, and serve that",
        "--batch-delay": "shoal compose ENSEMBLE REPOSITORY --queue-delay MODEL=MICROSECONDS, and serve that",
        "--queue-delay": "shoal compose ENSEMBLE REPOSITORY --queue-delay MODEL=MICROSECONDS, and serve that",
        "--max-batch-size": "max_batch_size: ROWS in the config.pbtxt of the model, compose again, and serve that",
        "--llm": "shoal serve FOLDER_WITH_WEIGHTS",
        "--model": "shoal serve MODEL, without --model",
        "--served-model-name": "--name NAME",
        "--docker": "--print, which prints the command of the container",
        "--port": "--http-port PORT, of Triton's HTTP and OpenAI's API",
        "--api-key": "shoal keys new NAME --file keys.json, then: --keys keys.json",
    },
}
# Arguments of an example, by command.
_EXAMPLES = {
    "add-model": "model.onnx scorer",
    "compose": "ensemble_all build/repository",
    "copies": "build/repository/ensemble_all",
    "describe": "build/repository",
    "env fit": "build/env",
    "env inspect": "build/env",
    "env unpack": "build/env build/unpacked",
    "fill": "config.pbtxt max_batch_size:8",
    "graph": "build/repository --out ensemble.svg",
    "keys new": "team-a",
    "keys revoke": "team-a",
    "keys rotate": "team-a",
    "new component": "cleaner",
    "new model": "scorer --features 4",
    "new pipeline": "scoring --step cleaner --step scorer",
    "plan": "ensemble_all",
    "serve": "build/repository",
    "shards merge": "build/out --output build/merged.jsonl",
    "shards status": "build/out",
    "shards verify": "build/out",
    "tokens": "1,2,3",
}
_USAGE_ERROR: Any = BadParameter.__base__  # of what typer raises for arguments; typer does not export it
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

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; options of other tools, and arguments that are missing, are refused with what to type.

        A habit of two words is only refused where the second is not an argument that the command could have.
        """
        habits, typed = _OPTIONS.get(str(self.name), {}), " ".join(args).replace("=", " ")
        given = [each.partition("=")[0] for each in args]
        if habit := next((each for each in given if each in habits), None):
            if habit in _GPU and not find_gpus():
                ctx.fail(f"No such option: {habit}. This machine has no GPU: leave it out, to serve on the CPU.")
            ctx.fail(f"No such option: {habit}. Type: {habits[habit]}")
        try:
            return super().parse_args(ctx, args)
        except _USAGE_ERROR as error:
            if habit := next((each for each in habits if " " in each and f"{each} " in f"{typed} "), None):
                ctx.fail(f"No such option: {habit}. Type: {habits[habit]}")
            if hasattr(error, "param_type"):  # an argument is missing
                if error.param.nargs == -1:  # the one after it took its only value
                    error.param = next(each for each in reversed(self.params) if each.param_type_name == "argument")
                examples = (
                    f"shoal {name} {_EXAMPLES[name]}" for name in _EXAMPLES if ctx.command_path.endswith(f" {name}")
                )
                error.message = f"For example: {next(examples, f'shoal {self.name} --help')}"
            raise


class Group(TyperGroup):
    """Group of commands whose help names kinds of values."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, with the kinds of their values."""
        return _name_kinds(super().get_params(ctx), ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that is asked for; one of other tools is refused with what to type instead."""
        habits = _NESTED.get(str(self.name), _HABITS if ctx.parent is None else {})
        if args and args[0] in habits and self.get_command(ctx, args[0]) is None:
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
