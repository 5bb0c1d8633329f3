"""``shoal infer`` with an output folder: a plan, shards, and workers."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from shoal.cli.console import ERR, OUT, plain, print_json, refuse_ignored, show_progress
from shoal.errors import InputError, printable

if TYPE_CHECKING:
    from shoal.clients.bulk.shards.scheduler import Outcome
    from shoal.clients.bulk.shards.shard_task import ScoringJob


def is_folder(output: str) -> bool:
    """Whether an output is a folder, by its name: it has no ending."""
    return not (Path(output).suffix or Path(output).is_file())


def check_no_urls(*files: str | None) -> None:
    """Refuse object storage where there is no output folder.

    Raises:
        InputError: a file is in object storage.
    """
    from shoal.clients.bulk.shards.folders import is_url

    for file in files:
        if is_url(file or ""):
            raise InputError(
                f"{file} is in object storage, which needs an output folder.", "Its name has no ending: --output FOLDER"
            )


def score_folder(
    output: str, source: str | None, job: ScoringJob, scored_by: str, output_format: str, shard_rows: int, workers: int,
    worker: str, ray: str, *, is_fresh: bool,
) -> None:  # fmt: skip
    """Score files into a folder; the same command does what is missing."""
    from shoal.clients.bulk.shards.folders import open_folder
    from shoal.clients.bulk.shards.on_ray import make_ray_workers
    from shoal.clients.bulk.shards.plan import make_plan
    from shoal.clients.bulk.shards.scheduler import Scheduler
    from shoal.clients.bulk.shards.workers import make_processes

    index, count = _read_worker(worker)
    if is_fresh and count > 1:
        raise InputError("--fresh and --worker exclude each other: others may be at work.", "Start over with one.")
    if ray and count > 1:
        raise InputError("--ray and --worker exclude each other.", "The workers of a cluster: --workers N")
    if source in (None, "-"):
        raise InputError("A folder of outputs needs --input with files.", "For example: --input 'in/*.parquet'")
    spec, folder = job.describe(), open_folder(output)
    options = {
        "model": spec.name, "place": job.where, "server" if job.where == "server" else "repository": scored_by,
        "batch_size": job.max_rows, "answers": {tensor.name: [tensor.dtype, *tensor.dims] for tensor in spec.outputs},
        "text_column": job.text_column, "set": dict(job.constants), "column": dict(job.columns),
    }  # fmt: skip
    plan = make_plan(
        folder, str(source), shard_rows, options,
        output_kind=output_format and f".{output_format}", check=lambda plan: job.feed(spec, plan), is_fresh=is_fresh,
    )  # fmt: skip
    make = partial(make_ray_workers, ray) if ray else make_processes
    scheduler = Scheduler(folder, make(folder, job, workers), index=index, count=count)
    try:
        with show_progress() as show:
            outcome = scheduler.run(lambda rows: show("rows", rows, plan.rows or 0 if count == 1 else 0))
    except KeyboardInterrupt:
        ERR.print("Interrupted. Run the same command (without --fresh) to resume.")
        raise typer.Exit(130) from None
    _tell(outcome, output, is_alone=count == 1)


def _read_worker(worker: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", worker)
    index, count = map(int, found.groups()) if found else (0, 0)
    if index >= count:
        raise InputError(f"--worker {worker} is not I/N with I from 0 to N-1.", "For example: --worker 0/4")
    return index, count


def _tell(outcome: Outcome, output: str, *, is_alone: bool) -> None:
    for number, why in outcome.failed.items():
        ERR.print(printable(f"part {number}: {why}"), style="red", soft_wrap=True, markup=False)
    if outcome.failed:
        said = f"{len(outcome.failed)} parts failed; the same command tries them again."
        ERR.print(said, style="red")
    elif outcome.missing:
        ERR.print(f"{outcome.missing:,} parts are left to other workers. See: shoal infer --status {plain(output)}")
    if outcome.errors:
        ERR.print(f"{outcome.errors:,} of {outcome.rows:,} rows have an error.", style="red")
    if outcome.failed or (outcome.errors and is_alone):  # a worker among many that exits with 1 would be started again
        raise typer.Exit(1)


def look_at_folder(
    context: typer.Context,
    status: str | None,
    verify: str | None,
    merge: str | None,
    output: str | None,
    *,
    as_json: bool,
) -> None:
    """Print how far a folder is, check it, or join its files."""
    from shoal.clients.bulk.shards import report
    from shoal.clients.bulk.shards.folders import is_url, open_folder

    options = {"--status": status, "--verify": verify, "--merge": merge}
    given = [option for option, value in options.items() if value is not None]
    if len(given) > 1:
        raise InputError(f"{given[0]} and {given[1]} exclude each other.", "Give one.")
    used = {"--status": {"--json"}, "--verify": set(), "--merge": {"--output"}}[given[0]] | {given[0]}
    names = [parameter.opts[0] for parameter in context.command.params]
    refuse_ignored(context, " ".join({*names} - used), f"with {given[0]}")
    if status is not None:
        found = report.read_status(open_folder(status))
        if as_json:
            print_json(found)
        else:
            for name, value in found.items():
                OUT.print(f"{name.replace('_', ' ')}: {plain(str(value))}", soft_wrap=True)
    elif verify is not None:
        faults = list(report.find_faults(open_folder(verify)))
        for fault in faults:
            ERR.print(printable(fault), style="red", soft_wrap=True, markup=False)
        if faults:
            ERR.print("Outputs and records that you remove are made again by the same command; all, with --fresh.")
            raise typer.Exit(1)
        OUT.print("All rows are there once, in order.")
    elif merge is not None:
        if not output or is_url(output):
            raise InputError("--merge needs a file of this machine to write.", "Add --output FILE")
        rows = report.merge(open_folder(merge), Path(output))
        OUT.print(f"{rows:,} rows: {plain(output)}", soft_wrap=True)
