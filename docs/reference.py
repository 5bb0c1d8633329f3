"""Reference pages that are made from the code whenever the site is built: ``make docs``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from shoal.cli import app
from shoal.kit.component import ledger
from shoal.serving.gateway.v1.document import describe
from shoal.serving.gateway.v1.document_page import show_type

SOURCE = Path(__file__).parents[1] / "src" / "shoal"
VARIABLES = {
    "SHOAL_API_KEY": "The key of the commands and clients that ask a service with keys, unless one is given to them.",
    "SHOAL_BF16": "`1` or `0`: what the processor is taken to support, instead of what it reports.",
    "SHOAL_DATA_DIR": "The folder with `CLEAR_corpus_final.xlsx`, the corpus of `shoal train` and `shoal quickstart`.",
    "SHOAL_STUB": "A stub for Triton's Python backend, instead of the server's own: `shoal env build` makes one.",
    "SHOAL_TRITONSERVER": "The `tritonserver` that is started, instead of the one in the wheel `nvidia-pytriton`.",
    "SHOAL_BEACONS": "Set by `shoal serve` for its models' processes: the folder of their heartbeats.",
    "SHOAL_ENDS_WITH": "Set by `shoal serve` for all processes that it starts, which end with it.",
    "SHOAL_STUB_BRANCH": "Set for the program of `--stub-builder`: the branch of Triton's Python backend to compile.",
    "SHOAL_STUB_GPU": "Set for the program of `--stub-builder`: `ON` or `OFF`, whether the stub is for GPUs.",
    "SHOAL_STUB_OUT": "Set for the program of `--stub-builder`: the file to write.",
    "SHOAL_STUB_PYBIND11": "Set for the program of `--stub-builder`: the oldest version of pybind11.",
    "SHOAL_STUB_PYTHON": "Set for the program of `--stub-builder`: the environment's Python.",
}
_NOT_OURS = ("--help", "--install-completion", "--show-completion")  # typer's own
_SAMPLES = {"gauge": "{}", "counter": "{}_total", "summary": "{0}_count`, `{0}_sum"}


def make_pages() -> dict[str, str]:
    """Return the pages' texts, by their names."""
    return {
        "commands": "# Commands\n\n" + "\n".join(_write_commands(typer.main.get_command(app), "shoal")),
        "metrics": "# Metrics\n\n## The service\n\n"
        "`shoal serve` answers `/metrics` of its metrics port with these, and with Triton's own (`nv_...`). The values "
        "of labels, a board for Grafana and alerts are in [Health and metrics](../serving.md#health-and-metrics).\n\n"
        + _table("metric", "labels", "meaning", rows=_find_metrics())
        + "\n## Components\n\nThese are among Triton's own. All have the labels `model` and `instance`; those by edge "
        "also have `edge` and `direction`.\n\n" + _table("metric", "meaning", rows=_find_metrics_of_components()),
        "variables": "# Environment variables\n\nNo option is read from a variable of its name.\n\n"
        + _table("variable", "meaning", rows=((f"`{name}`", says) for name, says in VARIABLES.items())),
        "routes": "# Routes of `/v1` and its neighbours\n\n"
        "From the document that a service answers `GET /v1/openapi.json` with; `GET /v1/docs` shows its types. The "
        "fields of requests are in the [reference of OpenAI's API](../openai-reference.md#fields).\n\n"
        + _table("route", "what it is for", "request", "answer", "events of a stream", rows=_find_routes()),
    }


def _table(*head: str, rows: Any) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _write_commands(command: Any, path: str) -> Iterator[str]:
    """Yield a section for a command and for each of those below it."""
    context = typer.Context(command, info_name=path)
    usage = command.get_usage(context).removeprefix("Usage: ")
    records = [parameter.get_help_record(context) for parameter in command.get_params(context)]
    ours = [record for record in records if record and record[0] not in _NOT_OURS]
    rows = [(f"`{name}`", says.replace("  [", " [")) for name, says in ours]
    table = _table("argument or option", "meaning", rows=rows) if rows else ""
    yield f"## {path}\n\n    {usage}\n\n{command.help}\n\n{table}"
    for name in command.list_commands(None) if hasattr(command, "commands") else ():
        yield from _write_commands(command.get_command(None, name), f"{path} {name}")


def _find_metrics() -> Iterator[tuple[str, str, str]]:
    """Yield each metric of the service's code as it is in answers, its labels and its meaning."""
    code = (SOURCE / "serving" / "gateway" / "control" / "health.py").read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple):
            kind, name, says, labels = map(ast.literal_eval, node.value.elts[:4])
            shown = ", ".join(f"`{label}`" for label in labels.split())
            yield f"`{_SAMPLES[kind].format(f'shoal_{name}')}`", shown, says


def _find_metrics_of_components() -> Iterator[tuple[str, str]]:
    for name, says in ledger._DESCRIPTIONS.items():
        yield f"`{name}`", says
    code = (SOURCE / "kit" / "generation" / "engines" / "vllm.py").read_text(encoding="utf-8")
    for kind, name in re.findall(r'ledger\.(count|levels)[(\[]"(vllm:\w+)"', code):
        yield f"`{name}{'_total' if kind == 'count' else ''}`", ledger._THEIRS


def _find_routes() -> Iterator[tuple[str, ...]]:
    for path, methods in describe()["paths"].items():
        ((method, operation),) = methods.items()
        answered = operation["responses"]["200"]["content"]
        contents = (operation.get("requestBody", {}).get("content", {}).get("application/json"), *answered.values())
        types = [show_type(content["schema"]) if content else "" for content in contents]
        yield f"`{method.upper()} {path}`", operation["summary"], *types, *[""] * (3 - len(types))
