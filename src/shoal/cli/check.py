"""``shoal check``: find a repository's mistakes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shoal.cli.console import ERR, OUT, Json, check_target, plain, print_json, refuse_ignored
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.authoring.check.findings import Finding

CLEAN, FAILED, UNUSABLE = 0, 1, 2
_COLOURS = {"error": "red", "warning": "yellow", "advice": "cyan"}


def check(
    context: typer.Context,
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[PATH]...", help="Repositories of one server, models' folders, or model folders."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="The server for the repository: embedded, or a release of NVIDIA's container such as 26.06."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on warnings too, but not on advice.")] = False,
    is_loaded: Annotated[bool, typer.Option("--load", help="Also load each model here, and send it requests.")] = False,
    explain: Annotated[str, typer.Option(help="Explain a rule and its reason; `all` for every rule.")] = "",
    output: Annotated[
        Literal["text", "json", "github", "sarif"],
        typer.Option("--format", help="github: annotations of a workflow; sarif: SARIF 2.1.0, for code scanning."),
    ] = "text",
    as_json: Json = False,
) -> None:
    """Find the mistakes in model repositories before Triton does.

    Without --load, it needs no server, no GPU and none of the models' libraries, and runs no code of the repository.
    Exit code: 0 without errors, 1 with an error (with --strict also with a warning), 2 if there is nothing to check.
    """
    from shoal.authoring.check.reports import explain_rules, github, sarif
    from shoal.cli.check_load import find_all

    if as_json:
        refuse_ignored(context, "--format", "with --json")
    output = "json" if as_json else output
    try:
        if explain:
            others = "paths --target --strict --load --format --json"
            refuse_ignored(context, others, "with --explain, which checks nothing")
            typer.echo(explain_rules(explain), nl=False)
            return
        if not paths:
            raise typer.BadParameter("Name a repository, or --explain RULE.", param_hint="PATH")
        check_target(target)
        findings, untried = find_all(paths, target, is_loaded=is_loaded)
    except ShoalError as error:
        if output == "json":
            print_json({"error": error.what, "fix": error.fix})
        ERR.print(f"[red]error:[/] {plain(str(error))}", soft_wrap=True)
        raise typer.Exit(UNUSABLE) from None
    errors, warnings, advice = count_findings(findings)
    if output == "json":
        entries = [finding.as_dict() for finding in findings]
        print_json({"errors": errors, "warnings": warnings, "advice": advice, "findings": entries, **untried})
    elif output == "github":
        for finding in findings:
            typer.echo(github(finding))
    elif output == "sarif":
        print_json(sarif(findings))
    else:
        print_findings(findings)
    raise typer.Exit(FAILED if errors or (strict and warnings) else CLEAN)


def count_findings(findings: Sequence[Finding]) -> tuple[int, int, int]:
    """Count the errors, the warnings and the advice."""
    kinds = [str(finding.severity) for finding in findings]
    return kinds.count("error"), kinds.count("warning"), kinds.count("advice")


def print_findings(findings: Sequence[Finding]) -> None:
    """Print findings, their fixes, and how many there are."""
    for finding in findings:
        place = str(finding.place).removeprefix(f"{Path.cwd()}/")
        kind = str(finding.severity)
        OUT.print(
            f"{plain(place)}: [{_COLOURS[kind]}]{kind}:[/] {plain(finding.what)} [dim]({finding.rule.id})[/]",
            soft_wrap=True,
        )
        OUT.print(f"    {plain(finding.fix)}", soft_wrap=True)
    if not findings:
        OUT.print("No mistakes found.")
        return
    errors, warnings, advice = count_findings(findings)
    counts = f"{_count(errors, 'error')}, {_count(warnings, 'warning')}"
    counts += f", {_count(advice, 'piece')} of advice" * bool(advice)
    OUT.print(f"{counts}. shoal check --explain RULE describes one.", soft_wrap=True)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def find_mistakes(repository: Path, target: str = "") -> list[Finding]:
    """Return the errors that ``shoal check`` finds for a target, without those of hashes.

    The default is the server that ``shoal serve`` starts, which itself compares the files with the manifest.

    Raises:
        InputError: there is no repository.
        ArtifactError: it holds more models than are read.
    """
    from shoal.authoring.check.families import check as check_repository
    from shoal.authoring.environment.targets import EMBEDDED
    from shoal.serving.server.runtime import SERVER_VARIABLE

    here = None if os.environ.get(SERVER_VARIABLE) else EMBEDDED
    found = check_repository(repository, target=target or here, hashes=False)
    return [each for each in found if each.severity == "error"]
