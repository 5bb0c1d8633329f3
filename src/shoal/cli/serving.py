"""Serving a repository, and looking after the machine."""

from __future__ import annotations

import signal
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import Json
from shoal.console import ERR, OUT, plain, print_copies, print_json
from shoal.errors import ServerError, ShoalError


def copies(
    folder: Annotated[Path, typer.Argument(help="An ensemble in the served repository: build/repository/ensemble_all")],
    url: Annotated[str, typer.Option(help="The server's metrics address.")] = "127.0.0.1:8002",
    as_json: Json = False,
) -> None:
    """Show what a running server's components copied between host and device, by edge; exit code 1 beyond the budget.

    The budget holds for placement gpu: the request up, the answer down, control scalars of at most 1 KiB a batch.
    """
    from shoal.repository.graph import Graph
    from shoal.repository.manifest import read_manifest
    from shoal.serving.copies import read_metrics

    read, drawn = read_metrics(url), Graph.load(folder)
    beyond = read.beyond(drawn) if read_manifest(folder.parent).get("placement") == "gpu" else []
    if as_json:
        rows = [{"model": c.model, **c.edge._asdict(), **asdict(c.traffic)} for c in read]
        print_json({"copies": rows, "events": read.events, "beyond_budget": beyond})
    else:
        print_copies(read)
    if beyond:
        raise ShoalError(f"Copied beyond the budget: {'; '.join(beyond)}.")


def serve(
    repository: Annotated[Path, typer.Argument(help="A model repository.")],
    http_port: Annotated[int, typer.Option(help="0 is any free one.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="0 is any free one.")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="0 is any free one.")] = 8002,
    log: Annotated[Path | None, typer.Option(help="Keep Triton's log in this file.")] = None,
    is_printed: Annotated[
        bool, typer.Option("--print", help="Print the command for NVIDIA's container instead.")
    ] = False,
) -> None:
    """Serve a repository with the embedded Triton until Ctrl-C; for development, on loopback."""
    from shoal.serving.runtime import container_command
    from shoal.serving.server import KEEP_LOG
    from shoal.serving.server import serve as start

    if is_printed:
        OUT.print(container_command(repository), soft_wrap=True)
        return
    ERR.print("Embedded Triton 24.10: for development and tests, on loopback. In production: --print", soft_wrap=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop in order, as on Ctrl-C
    ports = {"http_port": http_port, "grpc_port": grpc_port, "metrics_port": metrics_port}
    with start(repository, **ports, log=log and log.resolve()) as server:
        try:
            OUT.print(f"ready: http {server.http_url}  grpc {server.grpc_url}  metrics {server.metrics_url}")
            ERR.print(f"log: {server.log}  (Ctrl-C stops)", soft_wrap=True)
            code = server.wait()
        except KeyboardInterrupt:
            ERR.print("stopping ...")
        else:
            raise ServerError(f"Triton ended with exit code {code}: {server.cause()}", KEEP_LOG)


def doctor(as_json: Json = False) -> None:
    """Check whether this machine can serve; exit code 1 if it cannot."""
    from shoal.doctor import FAULT, OK, examine

    findings = examine()
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            colour = {"ok": "green", "warning": "yellow"}.get(finding.level, "red")
            OUT.print(f"[{colour}]{finding.level:8}[/] {finding.check}: {plain(finding.found)}", soft_wrap=True)
            if finding.level != OK:
                OUT.print(f"         {plain(finding.fix)}", soft_wrap=True)
    if any(finding.level == FAULT for finding in findings):
        raise typer.Exit(1)
