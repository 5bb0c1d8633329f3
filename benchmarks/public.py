"""Do `shoal check` and Triton agree on other people's repositories?

    python benchmarks/public.py REPOSITORY... [--json FILE]

Each REPOSITORY is a model repository, such as a checkout of a public one holds. Most lack their models' files, and need
backends or libraries that are not here: in a copy, every model that is no ensemble is replaced by an empty Python model
with the same tensors, batch sizes and batching. Then the embedded Triton is asked to load each model and each ensemble,
and `shoal check --target embedded` reads the same copy. They agree where Triton refuses what has an error, itself or
in a model that it calls, and loads what has none.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from records import dumps

from shoal.authoring.check.families import check
from shoal.authoring.check.findings import Finding, Severity
from shoal.authoring.check.models import Model, Repository
from shoal.authoring.check.repositories import read_repository
from shoal.errors import ShoalError

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.explicit import explicit

EMPTY = "class TritonPythonModel:\n    def execute(self, requests):\n        raise NotImplementedError\n"
OURS = (  # what belongs to the engine and its files, not to the tensors
    "platform", "default_model_filename", "optimization", "model_warmup", "instance_group", "parameters",
    "version_policy", "cc_model_filenames", "runtime", "model_operations", "model_metrics",
)  # fmt: skip


def main(
    repositories: list[Path], json_file: Annotated[Path | None, typer.Option("--json", help="Write them here.")] = None
) -> None:
    """Compare, and print where they differ."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="shoal-") as name:
        (Path(name) / "served").mkdir()
        with explicit(Path(name) / "served") as server:
            for repository in repositories:
                copy = Path(name) / "copy"
                shutil.rmtree(copy, ignore_errors=True)
                try:
                    stand_in(read_repository(repository), copy)
                    errors = [f for f in check(copy, target="embedded") if f.severity == Severity.ERROR]
                except ShoalError as error:
                    typer.echo(f"passed over: {error}")
                    continue
                server.refill(copy)
                read = read_repository(copy)
                for model in read.models:
                    said = server.load(model.name)
                    if not said:
                        server.unload(model.name)
                    found = list(errors_of(model.name, read, errors))
                    rows.append(row(repository, model, said.replace(f"{server.repository}/", ""), found))
    for each in (each for each in rows if each["refused"] != bool(each["errors"])):
        typer.echo(dumps(each))
    agreed = sum(each["refused"] == bool(each["errors"]) for each in rows)
    ensembles, refused = (sum(each[key] for each in rows) for key in ("is_ensemble", "refused"))
    typer.echo(f"{len(rows)} models, {ensembles} of them ensembles; Triton refuses {refused}; they agree on {agreed}.")
    if json_file:
        counts = {"models": len(rows), "ensembles": ensembles, "refused": refused, "agreed": agreed}
        not_loaded = [each for each in rows if each["refused"] or each["errors"]]
        json_file.write_text(dumps({**counts, "not_loaded": not_loaded}) + "\n", encoding="utf-8")


def stand_in(repository: Repository, copy: Path) -> None:
    """Copy the ensembles, and an empty Python model for every other one."""
    from google.protobuf import text_format

    for model in repository.models:
        folder = copy / model.folder.name
        if model.message is None:
            shutil.copytree(model.folder, folder, ignore_dangling_symlinks=True)
            continue
        for version in model.versions or (1,):  # git keeps no empty folder, and the models' files are not in git
            (folder / str(version)).mkdir(parents=True)
            (folder / str(version) / (".gitkeep" if model.is_ensemble else "model.py")).write_text(
                "" if model.is_ensemble else EMPTY, encoding="utf-8"
            )
        text = model.text if model.is_ensemble else text_format.MessageToString(emptied(model), as_utf8=True)
        (folder / "config.pbtxt").write_text(text, encoding="utf-8")


def emptied(model: Model) -> Any:
    """The model's configuration for the Python backend, on the CPU."""
    message = type(model.message)()
    message.CopyFrom(model.message)
    for field in OURS:
        message.ClearField(field)
    message.backend = "python"
    group = message.instance_group.add()
    group.kind = group.KIND_CPU
    for tensor in (*message.input, *message.output):
        tensor.ClearField("is_shape_tensor")
        tensor.ClearField("is_non_linear_format_io")
    for tensor in message.output:
        tensor.ClearField("label_filename")  # such files are often fetched with the model
    return message


def errors_of(
    name: str, repository: Repository, errors: list[Finding], seen: tuple[str, ...] = ()
) -> Iterator[Finding]:
    """A model's own, and those of all that it calls."""
    model = repository.known.get(name)
    if model is None or name in seen:
        return
    yield from (error for error in errors if error.place.path.is_relative_to(model.folder))
    for step in model.message.ensemble_scheduling.step if model.message is not None else ():
        yield from errors_of(step.model_name, repository, errors, (*seen, name))


def row(repository: Path, model: Model, said: str, found: list[Finding]) -> dict[str, Any]:
    """What is kept of one model."""
    reasons = re.findall(r'"(?:Poll failed[^"]*|failed to load[^"]*|Invalid argument[^"]*)"', said)
    return {
        "repository": str(repository),
        "model": model.name,
        "is_ensemble": model.is_ensemble,
        "refused": bool(said),
        "triton": reasons[-1].strip('"') if reasons else said[:300],
        "errors": [f"{finding.rule.id}: {finding.what}" for finding in found],
    }


if __name__ == "__main__":
    typer.run(main)
