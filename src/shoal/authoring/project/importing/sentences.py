"""Settings and layers of an encoder that its files for sentence-transformers give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.kit.encoders.encoder import POOLINGS
from shoal.system.files import open_regular, read_json

_MODULES, _LENGTH, _PROMPTS = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
# modules.json gives each module's class with its import path, which has changed between releases.
_TRANSFORMER, _POOLING, _DENSE, _DROPOUT, _NORMALIZE = "Transformer", "Pooling", "Dense", "Dropout", "Normalize"
_MODES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
_ACTIVATIONS = {kind.__name__: kind for kind in (nn.Identity, nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid)}
_EMBEDDING = "sentence_embedding"  # what a Dense module reads and writes unless its configuration says otherwise
_MOST_PROMPTS = 3  # that are shown


@dataclass(frozen=True)
class Sentences:
    """Settings from an encoder's files for sentence-transformers.

    If ``pooling`` is not known, it is empty, and ``why`` is the reason. ``has_modules``: the files list what comes
    after the encoder. ``dense`` are the layers after the pooling, linear and activation in turns. ``foreign`` says why
    the encoder cannot be imported at all; empty if it can. ``max_length`` is in tokens, 0 if not given. ``size`` is the
    number of values to which embeddings are cut, None if they are not. ``notes`` are for the user.
    """

    pooling: str = ""
    why: str = f"it has no {_MODULES} of sentence-transformers"
    has_modules: bool = False
    dense: nn.Sequential = field(default_factory=nn.Sequential)
    is_normalised: bool = False
    foreign: str = ""
    max_length: int = 0
    size: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """Size of the output of ``dense``; 0 if there are no layers."""
        sizes = [layer.out_features for layer in self.dense if isinstance(layer, nn.Linear)]
        return sizes[-1] if sizes else 0


def read_sentences(place: str, revision: str | None) -> Sentences:
    """Read the settings for sentence-transformers from a folder or hub repository; any of the files may be missing."""
    modules = _read(place, _MODULES, revision)
    settings = _read(place, _LENGTH, revision) or {}
    length = settings.get("max_seq_length")
    max_length, notes = length if isinstance(length, int) else 0, tuple(_find_prompts(place, revision))
    size = (_read(place, _PROMPTS, revision) or {}).get("truncate_dim")
    if size is not None and (type(size) is not int or size < 1):
        return Sentences(foreign=f"its {_PROMPTS} has truncate_dim {size!r:.40}")
    if settings.get("do_lower_case") is True:
        notes += ("note: sentence-transformers puts texts into lower case for it: do so before",)
    if not isinstance(modules, list):
        return Sentences(max_length=max_length, size=size, notes=notes)
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    listed = f"its {_MODULES} lists {', '.join(kinds)}"
    if kinds == [_TRANSFORMER]:
        return Sentences(why=listed, max_length=max_length, size=size, notes=notes)
    is_normalised = kinds[-1:] == [_NORMALIZE]
    after = list(zip(kinds, modules, strict=True))[2 : len(modules) - is_normalised]
    if kinds[:2] != [_TRANSFORMER, _POOLING] or {kind for kind, _ in after} - {_DENSE, _DROPOUT}:
        return Sentences(foreign=listed)
    dense = nn.Sequential()
    for folder in [str(module.get("path", "")) for kind, module in after if kind == _DENSE]:
        layers = _read_dense(place, folder, revision)
        if layers is None:
            return Sentences(foreign=f"{listed}, and {folder} cannot be read")
        dense.extend(layers)
    config = _read(place, f"{modules[1].get('path', '')}/config.json", revision) or {}
    if notes and config.get("include_prompt") is False:
        notes += ("note: its pooling leaves out the tokens of prompts, and here it does not",)
    modes = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    chosen = config.get("pooling_mode") or (_MODES.get(modes[0], modes[0]) if len(modes) == 1 else ", ".join(modes))
    is_known = chosen in POOLINGS
    why = "" if is_known else f"its pooling is {chosen or 'not given'}, which is not known"
    found = Sentences(chosen if is_known else "", why, has_modules=True, max_length=max_length, size=size, notes=notes)
    return replace(found, dense=dense, is_normalised=is_normalised)


def _read_dense(place: str, folder: str, revision: str | None) -> list[Any] | None:
    """Return the layers of a Dense module, linear and activation; None if they cannot be read."""
    config = _read(place, f"{folder}/config.json", revision)
    if not isinstance(config, Mapping):
        return None
    activation = _ACTIVATIONS.get(str(config.get("activation_function", "Tanh")).rpartition(".")[2])
    places = {config.get(name) or _EMBEDDING for name in ("module_input_name", "module_output_name")}
    try:
        linear = nn.Linear(config["in_features"], config["out_features"], bias=config.get("bias", True))
        linear.load_state_dict(
            {name.removeprefix("linear."): value.float() for name, value in _read_weights(place, folder, revision)}
        )
    except (KeyError, OSError, RuntimeError, TypeError, ValueError):
        return None
    return None if activation is None or places != {_EMBEDDING} else [linear, activation()]


def _read_weights(place: str, folder: str, revision: str | None) -> Any:
    if path := _find(place, f"{folder}/model.safetensors", revision):
        from safetensors.torch import load_file

        return load_file(path).items()
    path = _find(place, f"{folder}/pytorch_model.bin", revision)
    return torch.load(path or "", map_location="cpu", weights_only=True).items()


def _find_prompts(place: str, revision: str | None) -> list[str]:
    """Return a note on the prompts with which the encoder was trained, if there are any."""
    config = _read(place, _PROMPTS, revision) or {}
    found = config.get("prompts") or {}
    prompts = {str(name): text for name, text in found.items() if text} if isinstance(found, Mapping) else {}
    shown = ", ".join(f"{name} {text!r:.80}" for name, text in [*prompts.items()][:_MOST_PROMPTS])
    if (default := config.get("default_prompt_name")) in prompts:
        return [
            f"note: sentence-transformers puts a default prompt before each text, {prompts[default]!r:.80}; here texts"
            " are taken as they are: begin them with it"
        ]
    return [f"note: it was trained with prompts, which texts should begin with: {shown}"] if prompts else []


def _read(place: str, name: str, revision: str | None) -> Any:
    """Load the JSON file ``name`` from a folder or a hub repository; return None if it is missing or invalid."""
    try:
        path = _find(place, name, revision)
        return None if path is None else read_json(path)
    except (OSError, ValueError):
        return None


def _find(place: str, name: str, revision: str | None) -> Path | None:
    from transformers.utils.hub import cached_file

    path = cached_file(place, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    if path is not None:
        open_regular(path).close()  # libraries would wait for a pipe
    return None if path is None else Path(path)
