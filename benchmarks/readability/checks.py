"""Whether all systems give the same scores, and what the encoder's dtype changes in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal import load

ALLOWED_DIFFERENCE, ALLOWED_SPEARMAN = 0.02, 0.999  # of a reduced dtype's scores to FP32's


def compare_systems(scores: Mapping[str, Any]) -> dict[str, float]:
    """The greatest difference of each system's scores to the recipe's, which are FP32 throughout."""
    return {
        f"{name}_to_recipe": round(float(np.abs(np.asarray(values) - scores["recipe"]).max()), 7)
        for name, values in scores.items()
        if name != "recipe"
    }


def compare_dtypes(fp32: Path, served: Path, texts: Sequence[str]) -> dict[str, Any]:
    """Two repositories' scores of the same texts, in this process, the served one beside the one in FP32."""
    from scipy.stats import spearmanr

    found: dict[str, Any] = {"texts": len(texts)}
    answers = []
    for repository in (fp32, served):
        pipeline = load(repository / "ensemble_all")
        parts = [pipeline(excerpt=list(texts[i : i + 64])) for i in range(0, len(texts), 64)]
        answers.append({name: np.concatenate([part[name] for part in parts])[:, 0] for name in ("SCORE", "BERT_SCORE")})
        pipeline.close()
    for name in answers[0]:
        one, other = (answer[name] for answer in answers)
        found[f"{name}_greatest_difference_to_fp32"] = round(float(np.abs(one - other).max()), 7)
        found[f"{name}_spearman_to_fp32"] = round(float(spearmanr(one, other).statistic), 7)
    found["within_bounds"] = bool(
        found["SCORE_greatest_difference_to_fp32"] <= ALLOWED_DIFFERENCE
        and found["SCORE_spearman_to_fp32"] >= ALLOWED_SPEARMAN
    )
    return found
