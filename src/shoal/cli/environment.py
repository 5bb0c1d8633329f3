"""What a model's Python is: build, inspect, fit, unpack."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, help=__doc__)
