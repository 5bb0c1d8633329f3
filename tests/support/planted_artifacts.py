"""Mistakes in the files beside a component's code."""

from __future__ import annotations

import json
from hashlib import sha256

from tests.support.once import ROOT
from tests.support.page_plants import page
from tests.support.planted import BATCHING, MODEL, Edit, Plant, config

FIRST = "first/config.pbtxt"
VOCABULARY = "first/1/vocab.txt"
SETTINGS = "first/1/settings.json"
WEIGHT = "first/1/postprocess.json"
COMPONENT = f'"""A component of shoal."""\n\n{MODEL}'
READS_WEIGHT = f'"""As shoal.readability does it."""\n\n{MODEL}'
TEXT = "[PAD]\n[UNK]\n"


def good(artifacts: str, code: str = COMPONENT, **files: str) -> dict[str, Edit]:
    parameter = f'parameters {{ key: "artifacts" value {{ string_value: "{artifacts}" }} }}\n'
    contents: dict[str, Edit] = {f"first/1/{name.replace('_', '.')}": text for name, text in files.items()}
    return {FIRST: config("first", batching=BATCHING + parameter), "first/1/model.py": code, **contents}


def composed(files: dict[str, Edit]) -> dict[str, Edit]:
    """Add the manifest that compose would write."""
    hashes = {path: sha256(str(text).encode()).hexdigest() for path, text in files.items() if path != FIRST}
    manifest = {"shoal": "0.1.0", "launch": {}, "files": {**hashes, FIRST: "of another one"}}
    return {**files, "manifest.json": json.dumps(manifest)}


JSON = good("settings.json", settings_json='{\n  "a": 1,\n  "b": 2\n}\n')
WEIGHED = good("postprocess.json?", READS_WEIGHT, postprocess_json='{"bert_weight": 0.5}\n')
WITH_MANIFEST = composed(good("vocab.txt merges.txt?", vocab_txt=TEXT, merges_txt="a b\n"))
NORMALISES = (ROOT / "postprocess" / "l2_normalise" / "1" / "model.py").read_text(encoding="utf-8")
COMPLETES = (ROOT / "postprocess" / "completion" / "1" / "model.py").read_text(encoding="utf-8")
WEIGHTS = 'parameters { key: "model" value { string_value: "/weights/lama" } }\n'
PLANTS = (
    Plant(
        "weights that are not here",
        "weights-missing",
        "alone/config.pbtxt",
        "lama",
        {"alone/1/model.py": COMPLETES},
        {"alone/config.pbtxt": config("alone", batching=BATCHING + WEIGHTS), "alone/1/model.py": MODEL},
    ),
    Plant(
        "tensors of another dtype",
        "component-refused",
        FIRST,
        "input",
        {
            FIRST: ('"Y" data_type: TYPE_FP32', '"Y" data_type: TYPE_FP64'),
            "left/config.pbtxt": ("FP32", "FP64"),
            "right/config.pbtxt": ("FP32", "FP64"),
        },
        {"first/1/model.py": NORMALISES},
    ),
    page(
        "artifact-missing",
        good=good("preprocess.json vocab.txt", preprocess_json="{}", vocab_txt=TEXT),
        line="artifacts",
    ),
    page("artifact-unreadable", good=WEIGHED, at=WEIGHT),
    Plant(
        "neither of two",
        "artifact-missing",
        FIRST,
        "artifacts",
        {VOCABULARY: None},
        good("vocab.txt|tokenizer.json extra.txt?", vocab_txt=TEXT),
    ),
    Plant("no vocabulary that was composed", "artifact-missing", FIRST, "artifacts", {VOCABULARY: None}, WITH_MANIFEST),
    Plant("settings cut off", "artifact-unreadable", SETTINGS, '"b"', {SETTINGS: '{\n  "a": 1,\n  "b": '}, JSON),
    Plant("settings that are a page", "artifact-unreadable", SETTINGS, "<html>", {SETTINGS: "<html></html>\n"}, JSON),
    Plant("settings without a number", "artifact-unreadable", SETTINGS, "", {SETTINGS: '{"a": NaN}\n'}, JSON),
    Plant("an empty file of settings", "artifact-unreadable", SETTINGS, "", {SETTINGS: ""}, JSON),
    Plant("a weight by another name", "artifact-unreadable", WEIGHT, "", {WEIGHT: '{"weight": 0.5}\n'}, WEIGHED),
    Plant("another vocabulary", "file-changed", VOCABULARY, "", {VOCABULARY: TEXT + "a\n"}, WITH_MANIFEST),
    Plant("another model.py", "file-changed", "first/1/model.py", "", {"first/1/model.py": MODEL}, WITH_MANIFEST),
    Plant(
        "code that is gone",
        "file-changed",
        "first/1/help.py",
        "",
        {"first/1/help.py": None},
        composed({**good("vocab.txt", vocab_txt=TEXT), "first/1/help.py": "A = 1\n"}),
    ),
)
