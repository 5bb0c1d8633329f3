"""A pipeline of all pieces, by shoal's names and as copies under others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from shoal.authoring.composition.compose import compose
from shoal.authoring.composition.ensemble import Ensemble
from shoal.authoring.repository.config import write_config
from tests.support.pieces import leaf, vocabulary


def copy(piece: str, name: str, root: Path, *, names: dict[str, str], **parameters: str) -> Path:
    """A piece under another name, with other ``names`` of tensors and parameters; its version folder."""
    source = leaf(piece).folder
    folder, message = root / source.parent.name / name, type(leaf(piece).message)()
    message.CopyFrom(leaf(piece).message)
    message.name = name
    for tensor in (*message.input, *message.output):
        tensor.name = names.get(tensor.name, tensor.name)
    for key, value in parameters.items():
        message.parameters[key].string_value = value
    shutil.copytree(source / "1", folder / "1", ignore=shutil.ignore_patterns("__pycache__"))
    write_config(message, folder / "config.pbtxt", comment=f"A copy of {piece}.")
    return folder / "1"


def define(root: Path) -> Ensemble:
    chain = Ensemble("chain", projects=[root])
    text, a, b = chain.input("TEXT", "STRING", [1]), chain.input("A", "FP32", [3]), chain.input("B", "FP32", [3])
    picture = chain.input("PICTURE", "STRING", [1])
    checked = chain.step("checked_text", TEXT=text)["CHECKED"]
    tokens = chain.step("tokenizer", TEXT=checked)
    pairs = chain.step("my_pairs", QUERY=checked, DOCUMENT=text)
    features = chain.step("my_counts", WORDS=checked)["FEATURES"]
    unit = chain.step("l2_normalise", EMBEDDING=chain.step("zscore", X=features)["Z"])
    first, second = (chain.step("softmax", LOGITS=logits)["PROBABILITIES"] for logits in (a, b))
    votes = chain.step("blend", FIRST=first, SECOND=second)["BLEND"]
    mine, plain = chain.step("my_label", VOTES=votes), chain.step("label", SCORES=votes)
    best = chain.step("top_k", SCORES=votes)
    outputs = {
        "IDS": tokens["input_ids"],
        "MASK": tokens["attention_mask"],
        "PAIR_IDS": pairs["input_ids"],
        "PAIR_MASK": pairs["attention_mask"],
        "SEGMENTS": pairs["token_type_ids"],
        "UNIT": unit["UNIT"],
        "MINE": mine["LABEL"],
        "LABEL": plain["LABEL"],
        "SCORE": plain["SCORE"],
        "LABELS": best["LABELS"],
        "TOP_SCORES": best["TOP_SCORES"],
        "PIXELS": chain.step("image", IMAGE=picture)["PIXELS"],
        "ABOVE": chain.step("threshold", SCORE=votes)["ABOVE"],
    }
    for name, tensor in outputs.items():
        chain.output(name, tensor)
    return chain


def compose_chain(root: Path) -> Path:
    """Write the pieces and their ensemble into the project ``root``, and compose them."""
    (root / "given").mkdir()
    shutil.copyfile(vocabulary(), root / "given" / "vocab.txt")
    scales = {"mean": [0, 1, 0.5, 1], "std": [1, 2, 1, 1]}
    (root / "given" / "zscore.json").write_text(json.dumps(scales), encoding="utf-8")
    counts = copy("word_counts", "my_counts", root, names={"TEXT": "WORDS", "COUNTS": "FEATURES"}, value="share")
    (counts / "words.txt").write_text("the\ncat\nno\n.\n", encoding="utf-8")
    pairs = copy("pair_tokenizer", "my_pairs", root, names={}, max_length="16")
    shutil.copyfile(vocabulary().with_name("tokenizer.json"), pairs / "tokenizer.json")
    copy("label", "my_label", root, names={"SCORES": "VOTES"}, labels='["low", "mid", "high"]', least="0.75")
    define(root).write(root / "ensembles" / "chain")
    return compose("chain", root / "repository", artifacts=root / "given", projects=[root])
