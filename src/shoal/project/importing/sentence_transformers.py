"""Reader of sentence-transformers files: pooling, normalisation and maximum length of an encoder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.encoders.encoder import POOLINGS

_MODULES, _LENGTH = "modules.json", "sentence_bert_config.json"
# modules.json gives each module's class with its import path, which has changed between releases.
_TRANSFORMER, _POOLING, _NORMALIZE = "Transformer", "Pooling", "Normalize"
_MODES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}


@dataclass(frozen=True)
class Sentences:
    """Settings of an encoder. ``pooling`` is empty if unknown, ``why`` is the reason. ``max_length`` 0: not given."""

    pooling: str = ""
    why: str = f"it has no {_MODULES} of sentence-transformers"
    is_normalised: bool = False
    max_length: int = 0


def read_sentences(place: str, revision: str | None) -> Sentences:
    """Read the settings from a folder or a hub repository; every file is optional."""
    modules = _read(place, _MODULES, revision)
    length = (_read(place, _LENGTH, revision) or {}).get("max_seq_length")
    max_length = length if isinstance(length, int) else 0
    if not isinstance(modules, list):
        return Sentences(max_length=max_length)
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if kinds not in ([_TRANSFORMER, _POOLING], [_TRANSFORMER, _POOLING, _NORMALIZE]):
        return Sentences(why=f"its {_MODULES} lists {', '.join(kinds)}", max_length=max_length)
    config = _read(place, f"{modules[1].get('path', '')}/config.json", revision) or {}
    modes = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    chosen = config.get("pooling_mode") or (_MODES.get(modes[0], modes[0]) if len(modes) == 1 else ", ".join(modes))
    if chosen not in POOLINGS:
        return Sentences(why=f"its pooling is {chosen or 'not given'}, which is not known", max_length=max_length)
    return Sentences(chosen, "", kinds[-1] == _NORMALIZE, max_length)


def _read(place: str, name: str, revision: str | None) -> Any:
    """Load a published JSON file; None if it is not available."""
    from transformers.utils.hub import cached_file

    try:
        path = cached_file(place, name, revision=revision, _raise_exceptions_for_missing_entries=False)
        return None if path is None else json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
