"""Check model folders with the rules of ``shoal check``, before the folders are written."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from shoal.authoring.check.families import check
from shoal.authoring.check.findings import Severity
from shoal.authoring.repository.call_graph import collect
from shoal.authoring.repository.config import CONFIG, ModelConfig, write_config
from shoal.errors import ArtifactError, InputError


def check_accepted(config: ModelConfig, models: Mapping[str, ModelConfig]) -> None:
    """Check an ensemble together with the models that it calls, as ``shoal check`` does.

    Raises:
        InputError: Triton would refuse the ensemble.
    """
    with tempfile.TemporaryDirectory() as folder:
        categories = Path(folder) / "ensembles"  # the files of the model folders are written later
        for each in collect(config.name, {**models, config.name: config}):
            (categories / each.name).mkdir(parents=True)
            write_config(each.message, categories / each.name / CONFIG, comment="")
        path = (categories / config.name / CONFIG).resolve()
        for finding in check(categories / config.name):
            if finding.severity == Severity.ERROR and Path(finding.place.path).resolve() == path:
                raise InputError(finding.what, finding.fix)


def check_made(repository: Path, what: str, target: str | None = None) -> None:
    """Check a repository that is still in a temporary folder; ``what`` names what will be written from it, in an error.

    Raises:
        ArtifactError: Triton would refuse a model of the repository.
    """
    errors = [finding for finding in check(repository, target=target) if finding.severity == Severity.ERROR]
    if errors:
        first = errors[0]
        where = str(first.place).removeprefix(f"{repository.resolve()}/")
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise ArtifactError(
            f"{what} is not written, since {where} has an error{more}: {first.what.rstrip('.')} [{first.rule.id}].",
            first.fix,
        )
