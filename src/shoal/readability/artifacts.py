"""Checks of an artifact folder before it is composed: each file is valid, and the files belong together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from shoal.component.artifact_files import MAKE_AGAIN
from shoal.composition.artifacts import read_sizes
from shoal.errors import ArtifactError
from shoal.readability.preprocess_config import Bundle, read_weight
from shoal.text.tokens import read_vocabulary

_READERS: Mapping[str, Callable[[Path], object]] = {
    "preprocess.json": Bundle.load,
    "vocab.txt": read_vocabulary,
    "postprocess.json": read_weight,
}


def check_artifacts(ours: Mapping[str, Path], encoders: Iterable[Path]) -> None:
    """Check the files of shoal's own model folders, by name, and the TorchScript encoders beside them.

    Raises:
        ArtifactError: a file is damaged, or does not fit another.
    """
    for name, path in ours.items():
        if name in _READERS:
            _READERS[name](path)
    if "preprocess.json" in ours:
        bundle = Bundle.load(ours["preprocess.json"])
        if "vocab.txt" in ours:
            bundle.check_vocabulary(ours["vocab.txt"])
        for path in encoders:
            _check_sizes(path, bundle, ours)


def _check_sizes(encoder: Path, bundle: Bundle, ours: Mapping[str, Path]) -> None:
    """Check that a BERT-family encoder has enough positions for ``max_length`` and tokens for the vocabulary."""
    rows = {name.rpartition(".")[2]: size[0] for name, size in read_sizes(encoder).items() if size}
    most = rows.get("position_embeddings", bundle.max_length)
    if bundle.max_length > most:
        raise ArtifactError(
            f"{ours['preprocess.json']} has max_length {bundle.max_length:,}; {encoder} knows {most:,} positions.",
            f"Take both from one artifact folder. {MAKE_AGAIN}",
        )
    num_tokens = len(read_vocabulary(ours["vocab.txt"])) if "vocab.txt" in ours else 0
    known = rows.get("word_embeddings", num_tokens)
    if num_tokens > known:
        raise ArtifactError(
            f"{ours['vocab.txt']} has {num_tokens:,} tokens; {encoder} knows {known:,}.",
            f"Take both from one artifact folder. {MAKE_AGAIN}",
        )
