"""Texts and artifacts for the benchmark: what every system reads, made once."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from shoal.component.artifact_files import sha256
from shoal.errors import InputError
from shoal.readability.corpus import Corpus
from shoal.readability.fit import EncoderSettings
from shoal.readability.forest import train_forest
from shoal.readability.preprocess_config import Bundle
from shoal.readability.train import PRESETS, Preset, split, train
from shoal.text.tokens import read_vocabulary

LARGE, SMALL = "large", "small"
MARKER = "benchmark.json"  # what the folder was made for
# BERT-large-uncased's geometry by default; its weights are random: scores mean nothing, times do.
HIDDEN = 1024
_FOREST_ONLY = Preset(encoder=EncoderSettings(max_steps=1))


def shuffle(corpus: Corpus) -> list[str]:
    """The corpus's texts in an order of no meaning, always the same."""
    return [corpus.texts[i] for i in np.random.default_rng(0).permutation(len(corpus))]


def make_artifacts(corpus: Corpus, out: Path, *, encoder: str, layers: int) -> dict[str, int]:
    """Train, or find what was trained there before for the same settings; returns ``layers`` and ``hidden``.

    ``small`` is the quick preset's encoder, with the weights it trained. ``large`` has ``layers`` layers of 1,024.

    Raises:
        InputError: the folder holds something else, or there is no such encoder.
    """
    if encoder not in (LARGE, SMALL):
        raise InputError(f"There is no encoder {encoder!r}.", f"Known: {LARGE}, {SMALL}.")
    wanted: dict[str, Any] = {
        "encoder": encoder,
        "layers": layers if encoder == LARGE else None,
        "corpus": corpus.sha256,
    }
    marker = out / MARKER
    found = json.loads(marker.read_text(encoding="utf-8")) if marker.is_file() else None
    if found is None:
        train(corpus, out, preset=PRESETS["quick"] if encoder == SMALL else _FOREST_ONLY, is_fresh=True)
        geometry = _small_geometry() if encoder == SMALL else _make_large(out, layers)
        found = {"wanted": wanted, "geometry": geometry}
        marker.write_text(json.dumps(found) + "\n", encoding="utf-8")
    if found["wanted"] != wanted:
        raise InputError(f"{out} was made for {found['wanted']}, not for {wanted}.", "Name another --artifacts.")
    geometry = found["geometry"]
    return {"layers": geometry["layers"], "hidden": geometry["hidden"]}


def _small_geometry() -> dict[str, int]:
    from shoal.encoders.packaged import SMALL_ENCODER
    from shoal.readability.encoder import load_encoder

    config: Any = load_encoder(SMALL_ENCODER, seed=0).candidates.trunk.config
    return {"layers": config.num_hidden_layers, "hidden": config.hidden_size}


def _make_large(out: Path, layers: int) -> dict[str, int]:
    """Put an encoder of the wanted size in the place of the one that was trained."""
    import torch
    from transformers import BertConfig, BertModel

    from shoal.encoders.export import export_encoder
    from shoal.readability.encoder import Encoder

    config = BertConfig(
        vocab_size=len(read_vocabulary(out / "vocab.txt")), hidden_size=HIDDEN, num_hidden_layers=layers,
        num_attention_heads=HIDDEN // 64, intermediate_size=4 * HIDDEN, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    encoder = Encoder(BertModel(config, add_pooling_layer=False), torch.nn.Linear(HIDDEN, 1)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export_encoder(encoder, out / "model.pt", ties={"vocab.txt": sha256(out / "vocab.txt")})
    return {"layers": layers, "hidden": HIDDEN}


def grow_forest(corpus: Corpus, artifacts: Path) -> Any:
    """scikit-learn's own forest, the one that ``checkpoint.tl`` was made from: the same texts, the same seed."""
    known = corpus.take(split(corpus, PRESETS["quick"], 0)[0])
    return train_forest(Bundle.load(artifacts / "preprocess.json"), known.texts, known.targets, seed=0)


def say(what: str) -> None:
    """Tell what is done now."""
    print(time.strftime("%H:%M:%S"), what, flush=True)
