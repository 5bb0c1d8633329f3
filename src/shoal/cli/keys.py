"""``shoal keys``: the keys of a service's clients."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from shoal.cli.console import ERR, OUT, Json, plain, print_json
from shoal.cli.usage import Command, Group
from shoal.serving.gateway.callers.key_file import ACTS, DEFAULT_ACTS, Key, KeyFile, default_file, read_span, show_time

app = typer.Typer(cls=Group, no_args_is_help=True, help="Make, list, revoke and rotate keys of a service's clients.")
Name = Annotated[str, typer.Argument(help="The key's name, such as team-a.")]
File = Annotated[
    Path | None, typer.Option("--file", metavar="FILE", help="The file of keys. Default: ~/.config/shoal/keys.json")
]


def _limit(help_text: str) -> Any:
    return typer.Option(metavar="N", help=f"{help_text} Default: no limit.")


@app.command(cls=Command)
def new(
    name: Name,
    models: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="Models that the key may use: 'ensemble_*'; may be repeated. Default: all."
        ),
    ] = None,
    may: Annotated[str, typer.Option(metavar="ACTS", help=f"What the key may do, of {', '.join(ACTS)}.")] = ",".join(
        DEFAULT_ACTS
    ),
    expires: Annotated[
        str, typer.Option(metavar="TIME", help="Time after which it is invalid: 90d. Default: none.")
    ] = "",
    requests_per_minute: Annotated[int | None, _limit("Requests for inference in any minute.")] = None,
    tokens_per_minute: Annotated[int | None, _limit("Tokens of prompts and answers in any minute.")] = None,
    at_once: Annotated[int | None, _limit("Requests for inference in flight.")] = None,
    file: File = None,
    as_json: Json = False,
) -> None:
    """Make a key and show it, once: the file has only its digest."""
    keys = KeyFile(file or default_file())
    acts = [act.strip() for act in may.split(",")]
    rates = {"requests_per_minute": requests_per_minute, "tokens_per_minute": tokens_per_minute}
    limits = {**rates, "at_once": at_once}
    text = keys.new(name, models or ("*",), acts, read_span("--expires", expires) if expires else None, limits)
    _show(keys, name, text, as_json=as_json)


@app.command("list", cls=Command)
def list_keys(file: File = None, as_json: Json = False) -> None:
    """List the keys: names, models, what they may do, their limits, and until when."""
    rows = [_describe(key) for key in KeyFile(file or default_file()).read()]
    if as_json:
        print_json(rows)
        return
    table = Table("name", "id", "models", "may", "limits", "expires")
    for row in rows:
        limits = ", ".join(f"{limit} {name.replace('_', ' ')}" for name, limit in row["limits"].items()) or "none"
        rights = (", ".join(row["models"]), ", ".join(row["may"]), limits)
        shown = (row["name"], row["id"], *rights, row["expires"] or "never")
        table.add_row(*map(plain, shown))
    OUT.print(table if rows else "There are no keys.")


@app.command(cls=Command)
def revoke(name: Name, file: File = None, as_json: Json = False) -> None:
    """Remove a key: a running service refuses it within 2 s, and ends its streams."""
    KeyFile(file or default_file()).revoke(name)
    if as_json:
        print_json({"revoked": name})
    else:
        OUT.print(f"revoked: {plain(name)}")


@app.command(cls=Command)
def rotate(
    name: Name,
    overlap: Annotated[
        str, typer.Option(metavar="TIME", help="Time that the old key stays valid: 24h; 0s: none.")
    ] = "24h",
    file: File = None,
    as_json: Json = False,
) -> None:
    """Replace a key by another of the same name and rights, and show it, once."""
    keys = KeyFile(file or default_file())
    _show(keys, name, keys.rotate(name, read_span("--overlap", overlap)), as_json=as_json)


def _show(keys: KeyFile, name: str, text: str, *, as_json: bool) -> None:
    key = next(key for key in keys.read() if key.name == name)
    if as_json:
        print_json({**_describe(key), "key": text})
        return
    typer.echo(text)
    ERR.print(
        f"It is not shown again. Serve with it: shoal serve REPOSITORY --keys {plain(str(keys.path))}", soft_wrap=True
    )


def _describe(key: Key) -> dict[str, Any]:
    now = datetime.now(UTC)
    expires = key.secrets[-1].expires
    rights = {"name": key.name, "id": key.id, "models": [*key.models], "may": [*key.may]}
    limits = {name: limit for name, limit in key.limits._asdict().items() if limit}
    valid = sum(secret.is_valid(now) for secret in key.secrets)
    return {**rights, "limits": limits, "expires": show_time(expires), "valid": valid}
