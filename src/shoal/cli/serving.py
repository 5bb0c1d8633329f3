"""``shoal serve``."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from shoal.cli.console import OUT, check_target, plain, refuse_ignored
from shoal.cli.making import find_or_make
from shoal.cli.records import takes_record
from shoal.errors import InputError
from shoal.serving.gateway.options import Addresses, Options


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Take the options in a TOML file as defaults, which those on the command line replace."""
    if path is not None:
        from shoal.cli.serve_files import read_config

        read_config(context, path)
    return path


@dataclass(frozen=True)
class ServeAsked:
    """Options of one ``shoal serve``, as they were given."""

    thing: Annotated[
        Path,
        typer.Argument(help="A repository; a model's file, folder or name on the Hugging Face hub; or FILE.py:CLASS."),
    ]
    options: Options
    task: Annotated[
        Literal["embeddings", "classify", "rerank", "predict", "generate"] | None,
        typer.Option(help="What a model is for, if its files do not say it."),
    ] = None
    name: Annotated[str, typer.Option(help="A model's, for clients. Default: the name of its file or folder.")] = ""
    log: Annotated[Path | None, typer.Option(help="Also write the whole log to this file, as JSON lines.")] = None
    is_checked: Annotated[
        bool, typer.Option("--check/--no-check", help="Start nothing if `shoal check` finds an error.")
    ] = True
    printed: Annotated[
        Literal["docker", "dockerfile"] | None,
        typer.Option(
            "--print",
            metavar="[dockerfile]",
            help="Print this service in NVIDIA's container instead: as a docker run, or as a Dockerfile.",
        ),
    ] = None
    is_bare: Annotated[
        bool, typer.Option("--bare", help="With --print, the command of NVIDIA's Triton alone, without this service.")
    ] = False
    target: Annotated[
        str,
        typer.Option(
            metavar="RELEASE",
            help="With --print, the release for a repository that was not composed; by default the newest known.",
            callback=check_target,
        ),
    ] = ""
    config: Annotated[
        Path | None, typer.Option(help="A TOML file with options.", callback=_read_config, is_eager=True)
    ] = None
    is_config_printed: Annotated[
        bool, typer.Option("--print-config", help="Print all options as a file for --config instead.")
    ] = False


@takes_record(ServeAsked)
def serve(context: typer.Context, asked: ServeAsked) -> None:
    """Serve a repository, or one made of your model, until Ctrl-C. Triton is supervised and restarted.

    A model's repository is made in build/NAME, and found there the next time. The metrics port also has /health/live
    and /health/ready.
    """
    if Path("shoal.toml").is_file() or any(name.startswith("SHOAL_") for name in os.environ):
        from shoal.cli.serve_files import print_notes

        print_notes(context)
    for option, is_given in (("--target", asked.target), ("--bare", asked.is_bare)):
        if is_given and not asked.printed:
            raise InputError(f"{option} is for --print alone: shoal serve starts the server of this machine.")
    options = asked.options
    if len({options.http_port, options.grpc_port, options.metrics_port}) < 3:
        from shoal.cli.ports import move_ports

        options = move_ports(context, options)
    if asked.is_config_printed:
        from shoal.cli.serve_files import print_config

        refuse_ignored(context, "--print", "with --print-config")
        print_config(context)
        return
    if asked.printed:
        from shoal.cli.serve_printed import refuse_printed

        refuse_printed(context)
    listening = None if asked.printed else options
    repository = find_or_make(asked.thing, task=asked.task or "", name=asked.name, listening=listening)
    if asked.printed:
        _print_container(context, repository, asked, options)
        return
    _run(repository, options, asked.log, is_checked=asked.is_checked)


def _print_container(context: typer.Context, repository: Path, asked: ServeAsked, options: Options) -> None:
    from shoal.cli.serve_printed import show_container
    from shoal.serving.server.container import choose_target

    shown = show_container(context, repository, options)
    if asked.is_checked:
        _check(repository, choose_target(repository, asked.target), "printed")
    for line in shown.splitlines():
        OUT.print(line, soft_wrap=True, markup=False)


def _run(repository: Path, options: Options, log: Path | None, *, is_checked: bool) -> None:
    from shoal.serving.gateway.logs import configure
    from shoal.serving.gateway.logs import log as told
    from shoal.serving.server.runtime import SERVER_VARIABLE

    os.umask(0o077)  # texts of clients are in shared memory and logs
    configure(log)
    if not os.environ.get(SERVER_VARIABLE):
        told.info("Embedded Triton 24.10: for development and tests. In production: --print")
    if is_checked:
        _check(repository)
    from shoal.serving.gateway.run import run_service  # after the check, whose process would have a copy

    def tell(at: Addresses, folder: Path) -> None:
        OUT.print(f"ready: http {at.http}  grpc {at.grpc}  metrics {at.metrics}")
        _print_pipelines(folder, options, at)

    if code := run_service(repository, options, tell):
        raise typer.Exit(code)


def _check(repository: Path, target: str = "", verb: str = "started") -> None:
    """Print the mistakes that would keep models from loading, with file and line, which Triton's messages lack.

    A forked process finds them: what it loads for this is not in the process that serves afterwards.

    Raises:
        InputError: there are such mistakes.
    """
    from shoal.cli.check import find_mistakes, print_findings
    from shoal.system.apart import run_apart

    try:
        errors = run_apart(find_mistakes, repository, target)
    except InputError:
        return  # not a repository: the start reports this itself
    if errors:
        print_findings(errors)
        again = f"shoal serve {repository}{' --print' * bool(target)}"
        raise InputError(
            f"{repository} has {len(errors)} mistake{'s' if len(errors) > 1 else ''} and was not {verb}.",
            f"Correct them, or {verb.removesuffix('ed')} it as it is: {again} --no-check",
        )


def _print_pipelines(repository: Path, options: Options, at: Addresses) -> None:
    """Print the signature of each pipeline that clients may ask, and commands that send it a request."""
    from shoal.authoring.repository.apis import Api, find_served, make_body
    from shoal.authoring.repository.call_graph import mark_decoupled
    from shoal.authoring.repository.manifest import read_composed
    from shoal.authoring.repository.model_folders import read_configs
    from shoal.clients.bulk.rows import show_example
    from shoal.kit.component.spec import DTYPES, STRING
    from shoal.serving.gateway.core.models import find_exposed

    configs = read_configs(repository)
    configs = mark_decoupled(configs, configs.get)
    server = f" --url {'grpcs://' if options.tls_cert else ''}{at.grpc}"
    server = "" if server == " --url 127.0.0.1:8001" else server
    key = " --api-key-file FILE" if options.keys else ""
    head = f"curl {'https' if options.tls_cert else 'http'}://{at.http}"
    bearer = " -H 'Authorization: Bearer KEY'" if options.keys else ""
    for name in sorted(find_exposed(configs, [*options.exposed, *read_composed(repository)])):
        spec = configs[name].spec
        required = [tensor for tensor in spec.inputs if not tensor.is_optional]
        is_text = len(required) == 1 and required[0].dtype == STRING
        shown = required or spec.inputs[:1]
        values = '"A text."' if is_text else " ".join(map(show_example, shown))
        served = find_served(configs[name], configs)
        verb = f"infer{' --stream' if spec.is_decoupled else ''}"
        if served.api is Api.LANGUAGE:
            needs_length = any(tensor.name == "max_tokens" for tensor in required)
            verb, values = "generate", '"Hello!"' + " --max-tokens 20" * needs_length
        OUT.print(f"  {plain(spec.signature)}", soft_wrap=True, highlight=False)
        if all(tensor.dtype in DTYPES for tensor in shown):  # the client has no BF16
            command = f"shoal {verb} --model {name}{server}{key} {plain(values)}"
            if served.takes_chats:
                command = f"shoal chat{server.removeprefix(' --url')} --model {name}{key}"
            OUT.print(f"    {command}", soft_wrap=True, highlight=False)
        if paths := served.paths:
            body = json.dumps(make_body(paths[0], name, spec))
            command = f"{head}{paths[0]} -H 'Content-Type: application/json'{bearer} -d '{body}'"
            OUT.print(f"    {command}", soft_wrap=True, highlight=False, markup=False)
            if paths[1:]:
                OUT.print(f"    also: POST {' '.join(paths[1:])}", soft_wrap=True, highlight=False)
