"""The option ``--print`` of ``shoal serve``: the service in NVIDIA's container."""

from __future__ import annotations

from pathlib import Path

import typer

from shoal.cli.console import ERR, refuse_ignored
from shoal.cli.serve_files import find_options
from shoal.errors import InputError
from shoal.serving.gateway.container import FILES, Given, service_command, service_dockerfile
from shoal.serving.gateway.options import Options
from shoal.serving.server.container import container_command, find_container

_WRITTEN = ("audit", "log")  # options whose files the service writes
_OF_BARE = frozenset("host http_port grpc_port metrics_port is_open model_memory_mib cache_mib is_checked".split())


def refuse_printed(context: typer.Context) -> None:
    """Refuse an unknown form, and what Triton alone cannot obey.

    Raises:
        InputError: an option has no effect with ``--bare``.
    """
    given = context.params
    _refuse_form(context, given["thing"])
    if not given["is_bare"]:
        return
    refuse_ignored(context, "--audit", "with --bare: the container has no proxy of shoal's that could write it")
    if given["printed"] == "dockerfile":
        raise InputError("--bare has no Dockerfile: NVIDIA's image is the whole of it.", "Type: --print --bare")
    if given["tls_cert"]:
        raise InputError(
            "--tls-cert has no effect with --bare: Triton has no TLS over HTTP.",
            "Leave it out, and put a proxy with TLS in front of the container.",
        )


def show_container(context: typer.Context, repository: Path, options: Options) -> str:
    """Return the form that is asked for: the service of a repository in NVIDIA's container, or Triton alone.

    Raises:
        InputError: the repository cannot be served there, or a file that an option names does not exist.
    """
    given = context.params
    target = given["target"]
    if given["is_bare"]:
        _tell_left_out(context)
        ports = (options.http_port, options.grpc_port, options.metrics_port)
        memory = {"model_memory_mib": options.model_memory_mib, "cache_mib": options.cache_mib}
        return container_command(repository, target=target, host=options.host, ports=ports, **memory)
    show = service_dockerfile if given["printed"] == "dockerfile" else service_command
    return show(find_container(repository, target=target), _find_given(context), options)


def _refuse_form(context: typer.Context, thing: Path) -> None:
    """Refuse a form that was meant as the value of ``--print``, and was taken as the thing to serve."""
    if not thing.exists():
        from shoal.cli.habits import OPTIONS

        habit = f"--print {thing}"
        if habit in OPTIONS["serve"]:
            context.fail(f"No such option: {habit}. Type: {OPTIONS['serve'][habit]}")


def _tell_left_out(context: typer.Context) -> None:
    """Name the options that are given, and that the container has nothing for."""
    sources = {name: context.get_parameter_source(name) for name in context.params if name not in _OF_BARE}
    given = {name for name, source in sources.items() if source and source.name in ("COMMANDLINE", "DEFAULT_MAP")}
    if left_out := [f"--{name}" for name, parameter in find_options(context).items() if parameter.name in given]:
        ERR.print(f"Left out, since --bare has no proxy of shoal's: {', '.join(left_out)}", soft_wrap=True)


def _find_given(context: typer.Context) -> Given:
    """Return the options that are given, on the command line or in a file, for a service in a container.

    Raises:
        InputError: a file that an option names does not exist, or is in no folder.
    """
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
                what = "is in a folder that does not exist" if is_written else "is not a file"
                make = f" Or make it: shoal keys new NAME --file {value}" if name == "keys" else ""
                raise InputError(f"--{name} {value} {what}.", f"Name another one.{make}")
            folders[path.parent] = folders.get(path.parent, False) or is_written
            words += [f"--{name}", f"{FILES}{path}"]
        else:
            words += [word for each in (value if parameter.multiple else [value]) for word in (f"--{name}", str(each))]
    return Given(words, folders)
