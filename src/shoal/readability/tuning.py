"""``shoal tune`` for an artifact folder: INT8 is calibrated on training texts, and measured on others."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from shoal.authoring.composition.compose import compose
from shoal.errors import InputError
from shoal.kit.encoders.quantize import NUM_CALIBRATED
from shoal.lab.tune import SECONDS, tune
from shoal.readability.corpus import Corpus
from shoal.readability.evaluate import ENSEMBLE, MIN_RESAMPLED, OUTPUTS, find_trained, read_report
from shoal.readability.evaluation import BLEND
from shoal.system.progress import OnProgress


def tune_artifacts(
    artifacts: Path | str,
    corpus: Corpus,
    out: Path | str,
    *,
    seconds: float = SECONDS,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Choose the precision for an artifact folder's encoder, as `shoal.lab.tune.tune` does; return the plan.

    The plan's ``seen`` is True if ``corpus`` has too few texts that are new to the models: then errors are those of
    texts that they were trained on, but not those of the calibration.

    Raises:
        InputError: the corpus has too few texts.
        ArtifactError: ``artifacts`` is not an artifact folder of shoal, or one of its files was changed.
    """
    artifacts, out = Path(artifacts), Path(out)
    read_report(artifacts)
    known = find_trained(artifacts, corpus)
    order = np.random.default_rng(0).permutation(known)
    number = min(NUM_CALIBRATED, len(order) // 2)
    calibration, rest = order[:number], order[number:]
    unseen = np.setdiff1d(np.arange(len(corpus)), known)
    is_seen = len(unseen) < MIN_RESAMPLED
    rows = np.random.default_rng(0).permutation(rest if is_seen else unseen)
    if len(rows) < MIN_RESAMPLED:
        raise InputError(f"{corpus.name} has {len(corpus)} texts, too few to measure with.", "Add texts.")
    chosen = {corpus.texts[row] for row in calibration}
    rows = np.array([row for row in rows if corpus.texts[row] not in chosen])
    out.resolve().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="shoal-", dir=out.resolve().parent) as folder:
        repository = compose(ENSEMBLE, Path(folder) / "repository", artifacts=artifacts, is_warmed_up=False)
        return tune(
            repository,
            out,
            [corpus.texts[row] for row in rows],
            targets=corpus.targets[rows].tolist(),
            calibration=sorted(chosen),
            output=OUTPUTS[BLEND],
            seen=is_seen,
            seconds=seconds,
            on_progress=on_progress,
        )
