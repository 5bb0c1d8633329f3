"""``shoal infer`` with an output folder: a plan, shards, and workers."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

import typer

from shoal.cli.console import ERR, plain, show_progress
from shoal.errors import ArtifactError, InputError, printable

if TYPE_CHECKING:
    from shoal.cli.infer_options import Asked
    from shoal.clients.bulk.shards.scheduler import Outcome


def score_folder(asked: Asked) -> None:
    """Score files into a folder; the same command does what is missing."""
    from shoal.clients.bulk.shards.folders import open_folder
    from shoal.clients.bulk.shards.on_ray import make_ray_workers
    from shoal.clients.bulk.shards.plan import make_plan
    from shoal.clients.bulk.shards.scheduler import Scheduler
    from shoal.clients.bulk.shards.workers import make_processes

    job = asked.make_job()
    index, count = _read_worker(asked.worker)
    if asked.fresh and count > 1:
        raise InputError("--fresh and --worker exclude each other: others may be at work.", "Start over with one.")
    if asked.ray and count > 1:
        raise InputError("--ray and --worker exclude each other.", "The workers of a cluster: --workers N")
    if asked.source in (None, "-"):
        fix = "Leave --output out to have the answers printed; or, with files: --input 'in/*.parquet'"
        raise InputError("A folder of outputs needs --input with files.", fix)
    output, kind = str(asked.output), "" if asked.form == "table" else f".{asked.form}"
    spec, folder = job.describe(), open_folder(output)
    options = asked.describe(spec, job.max_rows, text_column=job.text_column)
    check, rows = partial(job.feed, spec), asked.shard_rows
    plan = make_plan(folder, str(asked.source), rows, options, output_kind=kind, check=check, is_fresh=asked.fresh)
    make = partial(make_ray_workers, asked.ray) if asked.ray else make_processes
    scheduler = Scheduler(folder, make(folder, job, asked.workers), index=index, count=count)
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
        ERR.print(f"{outcome.missing:,} parts are left to other workers. See: shoal shards status {plain(output)}")
    if outcome.errors:
        said = f"{outcome.errors:,} of {outcome.rows:,} rows have an error. It is in the column error of the files."
        ERR.print(said, style="red", soft_wrap=True)
    if not (outcome.failed or outcome.missing):
        if not outcome.rows:
            raise ArtifactError("The files of --input have no rows.", "Name files with rows.")
        ERR.print(plain(f"{outcome.rows:,} rows are in {output}."), soft_wrap=True)
    if outcome.failed or (outcome.errors and is_alone):  # a worker among many that exits with 1 would be started again
        raise typer.Exit(1)
