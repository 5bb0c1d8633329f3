"""Whether Triton would take an ensemble beside the models it calls."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from shoal.check import Severity, check
from shoal.errors import InputError
from shoal.repository.config import CONFIG, ModelConfig, write_config


def check_accepted(config: ModelConfig, models: Mapping[str, ModelConfig]) -> None:
    """Check an ensemble beside the models it calls as ``shoal check`` does.

    Raises:
        InputError: Triton would refuse it.
    """
    with tempfile.TemporaryDirectory() as folder:
        categories = Path(folder) / "ensembles"  # as model folders, whose files come later
        for each in [*(models[name] for name in sorted(_called(config, models))), config]:
            (categories / each.name).mkdir(parents=True)
            write_config(each.message, categories / each.name / CONFIG, comment="")
        path = (categories / config.name / CONFIG).resolve()
        for finding in check(categories / config.name):
            if finding.severity == Severity.ERROR and Path(finding.place.path).resolve() == path:
                raise InputError(finding.what, finding.fix)


def _called(config: ModelConfig, models: Mapping[str, ModelConfig]) -> set[str]:
    """Return the models that an ensemble calls, directly or through others."""
    found: set[str] = set()
    waiting = [config]
    while waiting:
        new = {step.model for step in waiting.pop().steps} - found - {config.name}
        found |= new & models.keys()
        waiting += [models[name] for name in sorted(new & models.keys())]
    return found
