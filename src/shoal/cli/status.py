"""``shoal status`` and ``copies``: what a running server does."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.console import COMMON, OUT, ApiKey, CaCert, ClientCert, Json, plain, print_copies, print_json
from shoal.errors import ShoalError

_METRICS = "127.0.0.1:8002"


def copies(
    folder: Annotated[Path, typer.Argument(help="An ensemble in the served repository, such as build/repository/NAME")],
    url: Annotated[str, typer.Option(help="The server's metrics address.", rich_help_panel=COMMON)] = _METRICS,
    api_key: ApiKey = "",
    ca_cert: CaCert = "",
    client_cert: ClientCert = "",
    as_json: Json = False,
) -> None:
    """Show what a running server's components copied between host and device, by tensor.

    For placement gpu, the copies have a budget: the request to the device, the answer to the host, and up to 1 KiB per
    batch of scalars that decide sizes on the host. The exit code is 1 if the copies exceed it.
    """
    from shoal.authoring.repository.graph import Graph
    from shoal.authoring.repository.manifest import read_manifest
    from shoal.clients.client.copies import read_metrics

    read, drawn = read_metrics(url, api_key, ca_cert, client_cert), Graph.load(folder)
    beyond = read.beyond(drawn) if read_manifest(folder.parent).get("placement") == "gpu" else []
    if as_json:
        rows = [{"model": c.model, **c.edge._asdict(), **asdict(c.traffic)} for c in read]
        print_json({"copies": rows, "events": read.events, "beyond_budget": beyond})
    else:
        print_copies(read)
    if beyond:
        raise ShoalError(f"Copied beyond the budget: {'; '.join(beyond)}.")


def status(
    url: Annotated[str, typer.Argument(help="The metrics address of a running service.")] = _METRICS,
    api_key: ApiKey = "",
    ca_cert: CaCert = "",
    client_cert: ClientCert = "",
    as_json: Json = False,
) -> None:
    """Show the models of a running `shoal serve`: ready, or why not, and their requests in flight.

    The exit code is 1 if a model is not ready.
    """
    from rich.table import Column, Table

    from shoal.clients.client.operators import read_states

    states = read_states(url, api_key, ca_cert, client_cert)
    if as_json:
        print_json([state._asdict() for state in states])
    else:
        table = Table("model", "state", Column("in flight", justify="right"))
        for each in states:
            table.add_row(plain(each.model), plain(each.state), str(each.in_flight))
        OUT.print(table)
    if any(each.state != "ready" for each in states):
        raise typer.Exit(1)
