"""Checks of an artifact folder before it is composed: files are valid, and ``vocab.txt`` fits ``preprocess.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from shoal.kit.text.tokens import read_vocabulary
from shoal.readability.preprocess_config import Bundle, read_weight

_READERS: Mapping[str, Callable[[Path], object]] = {
    "preprocess.json": Bundle.load,
    "vocab.txt": read_vocabulary,
    "postprocess.json": read_weight,
}


def check_artifacts(ours: Mapping[str, Path]) -> str:
    """Check the artifacts of shoal's own models, given as paths by file name.

    Return the reason, as a clause, why the model with these artifacts computes on the host only; empty if it can
    compute on a GPU.

    Raises:
        ArtifactError: a file is damaged, or ``vocab.txt`` is not the vocabulary of ``preprocess.json``.
    """
    for name, path in ours.items():
        if name in _READERS:
            _READERS[name](path)
    if "preprocess.json" in ours:
        bundle = Bundle.load(ours["preprocess.json"])
        if "vocab.txt" in ours:
            bundle.check_vocabulary(ours["vocab.txt"])
        return bundle.host_reason
    return ""
